"""Several runs in one figure: what differs between their configurations is the legend."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spannorm_jax.config import Config, to_dict
from spannorm_jax.load import find_run, read_config
from spannorm_jax.plot import SMOOTHING, column, in_legend, trailing_mean
from spannorm_jax.resume import flat
from spannorm_jax.track import read_rows

COLORS = ('#1f5fa8', '#d9701a', '#2f8f5b', '#a33b6f', '#6b5bb0', '#7a6a3a')


def read_run(folder: str | Path) -> dict[str, Any]:
    """{'config': Config, 'metrics': rows of metrics.jsonl} of a run. Raises MissingInput where there is none."""
    run = find_run(str(folder))
    return {'config': read_config(run), 'metrics': read_rows(run / 'metrics.jsonl')}


def compare_figure(runs: Sequence[dict[str, Any]], title: str = '', baselines: dict[str, float] | None = None) -> Figure:
    """Training loss (mean of the last 20 rows) and validation points of runs as `read_run` returns them, over the step.

    baselines: name -> nats per token, drawn as horizontal lines.
    """
    fig = Figure(figsize=(7.2, 4.2), dpi=150, layout='constrained')
    FigureCanvasAgg(fig)
    ax, seen = fig.add_subplot(), []
    for i, (run, label) in enumerate(zip(runs, labels([run['config'] for run in runs]), strict=True)):
        color = COLORS[i % len(COLORS)]
        step, loss = column(run['metrics'], 'train/loss')
        smooth = trailing_mean(loss, SMOOTHING)
        at, held_out = column(run['metrics'], 'eval/loss')
        ax.plot(step, smooth, color=color, lw=1.6, label=in_legend(label))
        ax.plot(at, held_out, 'o', color=color, ms=5, mec='white', mew=0.8)
        seen += [smooth[min(2 * SMOOTHING, len(smooth) // 2) :], held_out]
    for name, value in (baselines or {}).items():
        ax.axhline(value, color='#9aa5b1', lw=1, ls=(0, (4, 3)), zorder=1)
        ax.annotate(
            name, (1, value), xycoords=('axes fraction', 'data'), xytext=(-4, 3), textcoords='offset points', ha='right', fontsize=8
        )
    values = np.concatenate([*seen, [*(baselines or {}).values()]]) if seen else np.zeros(0)
    if np.isfinite(values).any():
        lo, hi = np.nanmin(values), np.nanmax(values)
        ax.set_ylim(lo - 0.06 * (hi - lo + 0.1), hi + 0.1 * (hi - lo + 0.1))
    ax.set_xlabel('step')
    ax.set_ylabel(f'loss (nats per token): mean of {SMOOTHING} steps, and validation (points)', fontsize=8)
    ax.set_title(title, loc='left', fontsize=10)
    ax.spines[['top', 'right']].set_visible(False)
    ax.grid(axis='y', color='#e8ebee', lw=0.8)
    if runs:
        ax.legend(frameon=False, fontsize=8)
    return fig


def labels(configs: Sequence[Config]) -> list[str]:
    """For each configuration the fields in which it differs from the others; its name where there are none."""
    fields = [flat(to_dict(cfg)) for cfg in configs]
    differing = [
        key for key in (fields[0] if fields else ()) if key not in ('name', 'run.dir') and len({json.dumps(f[key]) for f in fields}) > 1
    ]
    return [', '.join(f'{key.split(".")[-1]} {f[key]}' for key in differing) or f['name'] for f in fields]
