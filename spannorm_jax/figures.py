"""What the experiments' figures are made of. Everything is drawn from rows; a colour belongs to a topology, in every figure."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spannorm_jax.plot import BLUE, FAINT, INK, ORANGE
from spannorm_jax.stats import RATE, Row, group, interval, value

OF = {'span': BLUE, 'pre': ORANGE, 'post': '#a33b6f', 'hybrid': '#2f8f5b', 'peri': '#6b5bb0', 'lns': '#7a6a3a', 'mixln': '#c9a400'}
OTHERS = ('#3aa6a0', '#c4574a', '#5b6b7a', '#8f5fbf', '#4a7fb5', '#b58a4a', '#6f9f3f', '#b04a8f', '#7f4a2f', '#2f6f6f')
LINES = ('-', (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def panels(*titles: str, height: float = 3.6, width: float = 4.2, columns: int = 4) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title."""
    n = min(len(titles), columns)
    rows = -(-len(titles) // n)
    fig = Figure(figsize=(max(width * n, 6.0), height * rows), dpi=150, layout='constrained')
    FigureCanvasAgg(fig)
    axes = [fig.add_subplot(rows, n, i + 1) for i in range(len(titles))]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, loc='left', fontsize=10, color=INK)
        ax.spines[['top', 'right']].set_visible(False)
        ax.grid(axis='y', color='#e8ebee', lw=0.8)
        ax.set_axisbelow(True)
    return fig, axes


def color(topology: str, seen: list[str]) -> str:
    """Of the topology; one without a colour of its own takes the next of the others, in the order `seen`."""
    if topology not in OF and topology not in seen:
        seen.append(topology)
    return OF.get(topology) or OTHERS[seen.index(topology) % len(OTHERS)]


def finish(axes: Sequence[Axes], x: str, y: str) -> None:
    """Axis labels, and a legend in the first panel that has something to say."""
    for ax in axes:
        ax.set_xlabel(x)
    axes[0].set_ylabel(y)
    for ax in axes:
        handles, names = ax.get_legend_handles_labels()
        if handles:
            unique = dict(zip(names, handles, strict=True))
            ax.legend(unique.values(), unique, frameon=False, fontsize=7)
            break


def against(ax: Axes, rows: Sequence[Row], x: str, metric: str, label: str, c: str, style: Any = '-') -> None:
    """Mean over seeds of a metric over a field, with 95% intervals; a crossed circle at the top where any seed diverged."""
    at = {k: interval(rs, metric) for k, rs in sorted(group(rows, x).items())}
    good = {k: i for k, i in at.items() if np.isfinite(i.mean)}
    if good:
        mean = [i.mean for i in good.values()]
        half = [(i.high - i.low) / 2 if i.n > 1 else 0.0 for i in good.values()]
        ax.errorbar(list(good), mean, half, color=c, ls=style, marker='o', ms=3.5, lw=1.4, capsize=2, label=label)
    for k in at.keys() - good.keys():
        ax.plot([k], [1.0], marker='X', ms=6, color=c, mec='white', transform=ax.get_xaxis_transform(), clip_on=False, ls='', label=label)


def over_steps(ax: Axes, rows: Sequence[Row], key: str, label: str, c: str, style: Any = '-') -> None:
    """A curve per seed, thin, and their mean where all have a value; a cross where a run diverged."""
    curves = [row['curves'][key] for row in rows if row['curves'].get(key)]
    for row in rows:
        points = row['curves'].get(key)
        if points:
            ax.plot(*zip(*points, strict=True), color=c, ls=style, lw=0.7, alpha=0.4)
            if row['status'] == 'diverged':
                ax.plot(*points[-1], marker='X', ms=6, color=c, mec='white')
    shared = sorted(set.intersection(*({p[0] for p in curve} for curve in curves))) if curves else []
    if shared:
        mean = np.mean([[dict(map(tuple, curve))[s] for s in shared] for curve in curves], 0)
        ax.plot(shared, mean, color=c, ls=style, lw=1.7, label=label)


def over_layers(ax: Axes, rows: Sequence[Row], key: str, label: str, c: str, style: Any = '-', at: int = -1) -> None:
    """A list of length L at the `at`-th kept step, mean over seeds, over the place in the stack."""
    lists = [row['curves'][key][at][1] for row in rows if row['curves'].get(key)]
    lists = [np.array([np.nan if v is None else v for v in one], float) for one in lists]
    if lists:
        mean_L = np.nanmean(np.stack(lists), 0)
        ax.plot(np.arange(1, len(mean_L) + 1), mean_L, color=c, ls=style, lw=1.5, label=label)


def heat(
    ax: Axes, matrix: Any, x: Sequence[Any], y: Sequence[Any], label: str, vmin: float | None = None, vmax: float | None = None
) -> None:
    """matrix (len(y), len(x)) with its own scale; cells without a number stay grey."""
    ax.set_facecolor('#d5d9dd')
    if not x or not y:  # a run that stopped before it had anything to show
        return
    image = ax.imshow(np.ma.masked_invalid(np.asarray(matrix, float)), aspect='auto', origin='lower', vmin=vmin, vmax=vmax)
    for axis, names in ((ax.xaxis, x), (ax.yaxis, y)):
        every = -(-len(names) // 10)
        axis.set_ticks(range(0, len(names), every), [str(n) for n in names[::every]], fontsize=7)
    ax.grid(False)
    assert ax.figure is not None
    ax.figure.colorbar(image, ax=ax, label=label, fraction=0.05)


def sensitivity(ax: Axes, arms: dict[str, Sequence[Row]], metric: str = 'eval/loss', key: Callable[[str], str] = str) -> None:
    """The metric over the learning rate, one line per arm; a band of grey where nothing is shown is off the scale, not missing."""
    seen: list[str] = []
    best = [value(row, metric) for rows in arms.values() for row in rows]
    finite = [v for v in best if np.isfinite(v)]
    for label, rows in arms.items():
        against(ax, rows, RATE, metric, label, color(key(label), seen))
    ax.set_xscale('log')
    rates = sorted({row[RATE] for rows in arms.values() for row in rows})
    ax.set_xticks(rates, [f'{rate:g}' for rate in rates], fontsize=7)
    ax.minorticks_off()
    if finite:
        low, typical = min(finite), float(np.median(finite))
        ax.set_ylim(low - 0.1 * (typical - low + 0.05), low + 3 * (typical - low + 0.05))


__all__ = ['FAINT', 'INK', 'LINES', 'against', 'color', 'finish', 'heat', 'over_layers', 'over_steps', 'panels', 'sensitivity']
