"""The loss curve of a run as a figure. Reads no file but the one it writes; touches no global state of Matplotlib."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT, BLUE, ORANGE = '#222222', '#9aa5b1', '#1f5fa8', '#d9701a'
ONE_AT_A_TIME = threading.Lock()  # Matplotlib's fonts are no thread's own
SMOOTHING = 20  # steps, as in the rule of divergence


def in_legend(label: str) -> str:
    """A label that Matplotlib shows: it leaves out those that begin with an underscore."""
    return f' {label}' if label.startswith('_') else label


def loss_figure(rows: Sequence[dict[str, Any]], title: str = '', baselines: dict[str, float] | None = None) -> Figure:
    """Training loss (each step, and the mean of the last 20 rows), held-out points and horizontal baselines over the step.

    rows: as in metrics.jsonl. baselines: name -> nats per token. The axis follows the smoothed curve and what is held out, so a
    spike or the first steps do not flatten it.
    """
    fig = Figure(figsize=(7.2, 4.2), dpi=150, layout='constrained')
    FigureCanvasAgg(fig)
    ax = fig.add_subplot()
    step, loss = column(rows, 'train/loss')
    smooth = trailing_mean(loss, SMOOTHING)
    if len(step):
        ax.plot(step, loss, color=BLUE, alpha=0.25, lw=0.8, label='train')
        ax.plot(step, smooth, color=BLUE, lw=1.8, label=f'train, mean of {SMOOTHING}')
    held = {name: column(rows, key) for name, key in (('validation', 'eval/loss'), ('test', 'test/loss'))}
    for (name, (at, value)), marker in zip(held.items(), 'os', strict=True):
        if len(at):
            ax.plot(at, value, marker, color=ORANGE if name == 'validation' else INK, ms=5, mec='white', mew=0.8, label=name, zorder=3)
    seen = np.concatenate([smooth[min(SMOOTHING, len(smooth) // 2) :], *(v for _, v in held.values())])
    seen = seen[np.isfinite(seen)]
    for name, value in (baselines or {}).items():
        ax.axhline(value, color=FAINT, lw=1, ls=(0, (4, 3)), zorder=1)
        ax.annotate(name, (1, value), xycoords=('axes fraction', 'data'), xytext=(-4, 3), textcoords='offset points', ha='right',
                    fontsize=8, color='#66707a', annotation_clip=True)  # fmt: skip
    if len(seen):
        lo, hi = seen.min(), max(seen.max(), *(baselines or {'': seen.max()}).values())
        height = max(hi - lo + 0.1, 1e-3 * abs(hi))  # 0.1 is lost in the rounding of a huge loss
        ax.set_ylim(lo - 0.06 * height, hi + 0.1 * height)
    ax.set(xlabel='step', ylabel='loss (nats per token)')
    ax.set_title(title, loc='left', fontsize=10, color=INK)
    ax.spines[['top', 'right']].set_visible(False)
    ax.grid(axis='y', color='#e8ebee', lw=0.8)
    ax.set_axisbelow(True)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)
    return fig


def save_loss_figure(path: Path, rows: Sequence[dict[str, Any]], title: str = '', baselines: dict[str, float] | None = None) -> None:
    with ONE_AT_A_TIME:
        loss_figure(rows, title, baselines).savefig(path)


def column(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, where it has a value; at most 1e38, with which Matplotlib can still compute."""
    pairs = [(row['step'], row[key]) for row in rows if row.get(key) is not None]
    return np.array([s for s, _ in pairs]), np.clip(np.array([v for _, v in pairs], float), -1e38, 1e38)


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each place, of all so far at the start."""
    if not len(values):
        return values
    # not from a running total, whose rounding a huge loss would leave in all that follows
    total = np.convolve(values, np.ones(window))[: len(values)]
    return total / np.minimum(np.arange(1, len(values) + 1), window)
