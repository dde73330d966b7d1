"""Pictures of diagnostics: panels of lines over depth with bands over seeds, and heat maps. Reads and writes no file."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from spannorm_jax.diagnostics import Panel
from spannorm_jax.plot import in_legend

MOST_HEATS = 6  # heat maps of one panel, one for each group of runs


class Theme(NamedTuple):
    """Colours of a picture: paper, text, faint lines, and the runs' own in turn."""

    paper: str
    ink: str
    faint: str
    runs: tuple[str, ...]


LIGHT = Theme('#ffffff', '#22272e', '#d7dce1', ('#1f5fa8', '#d9701a', '#2f8f5b', '#a33b6f', '#6b5bb0', '#7a6a3a'))
DARK = Theme('#171b21', '#dfe4ea', '#3a424d', ('#6aa9f0', '#f2a054', '#63c48c', '#e07fb0', '#a99cf0', '#c9b573'))


class Size(NamedTuple):
    """Of one panel, in inches and dots per inch, and whether it names itself and its lines (a page has text for that)."""

    width: float
    height: float
    dpi: int
    words: bool


SHEET = Size(4.3, 3.1, 120, True)
TILE = Size(3.4, 2.4, 200, False)  # for a page, where a panel is about as wide as a phone and must be legible there


class Group(NamedTuple):
    """Runs that differ in their seed alone: a label, and what one diagnostic measured of each."""

    label: str
    runs: tuple[dict[str, Any], ...]


def drawable(panel: Panel, groups: Sequence[Group]) -> list[Group]:
    """The groups that have something to show on a panel."""
    have = lambda g: any(np.isfinite(values(run, key)).any() for run in g.runs for key in panel.keys)  # noqa: E731
    return [g for g in groups if have(g)]


class Ticks(LogFormatter):
    """Labels where LogFormatter has some, with as many digits as tell them apart on a short axis."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f'{x:.3g}' if super().__call__(x, pos) else ''


def values(run: dict[str, Any], key: str) -> np.ndarray:
    return np.asarray(run.get(key, np.zeros(0)), np.float64)


def figure(panels: Sequence[Panel], groups: Sequence[Group], title: str = '', theme: Theme = LIGHT, size: Size = SHEET) -> Figure | None:
    """All panels that have something to show, three in a row; None where none has."""
    cells = [(panel, each) for panel in panels if (shown := drawable(panel, groups)) for each in _cells(panel, shown)]
    if not cells:
        return None
    rows = -(-len(cells) // 3)
    columns = min(len(cells), 3)
    inches = size.width * columns, size.height * rows + (0.35 if title else 0)
    fig = Figure(figsize=inches, dpi=size.dpi, layout='constrained', facecolor=theme.paper)
    FigureCanvasAgg(fig)
    for i, (panel, shown) in enumerate(cells):
        draw(fig.add_subplot(rows, columns, i + 1), panel, shown, [groups.index(g) for g in shown], theme, size.words)
    if title:
        fig.suptitle(title, x=0.01, ha='left', fontsize=11, color=theme.ink)
    return fig


def _cells(panel: Panel, shown: list[Group]) -> list[list[Group]]:
    """Lines of all groups share one picture; a heat map is one group's."""
    return [[g] for g in shown[:MOST_HEATS]] if panel.heat else [shown]


def caption(panel: Panel, groups: Sequence[Group]) -> str:
    """What a panel shows; a heat map, of whom."""
    return f'{panel.title}: {groups[0].label}' if panel.heat and groups[0].label else panel.title


def draw(ax: Axes, panel: Panel, groups: Sequence[Group], places: Sequence[int], theme: Theme, words: bool) -> None:
    """One panel on given axes; `places` says which of the theme's colours each group has."""
    ax.set_facecolor(theme.paper)
    for spine in ax.spines.values():
        spine.set_color(theme.faint)
    ax.tick_params(colors=theme.ink, labelsize=7, which='both')
    if words:
        ax.set_title(caption(panel, groups), loc='left', fontsize=8.5, color=theme.ink, parse_math=False)
    if panel.heat:
        heat(ax, panel, groups[0], theme)
        return
    for group, place in zip(groups, places, strict=True):
        color, style = theme.runs[place % len(theme.runs)], ('-', '-.', ':')[place // len(theme.runs) % 3]
        line(ax, panel, group, panel.keys[0], color, style)
        for key in panel.keys[1:]:
            line(ax, panel, group, key, color, '--', beside=True)
    if panel.log:
        ax.set_yscale('log')
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis(Ticks(minor_thresholds=(1, 0.4)))
    ax.set_xlabel(panel.over, fontsize=7.5, color=theme.ink)
    ax.grid(axis='y', color=theme.faint, lw=0.6)
    ax.spines[['top', 'right']].set_visible(False)
    ax.set_axisbelow(True)
    if words and len(groups) > 1:
        for text in ax.legend(frameon=False, fontsize=6.5, labelcolor=theme.ink).get_texts():
            text.set_parse_math(False)  # a label holds whatever a field does, and two dollar signs are no formula


def line(ax: Axes, panel: Panel, group: Group, key: str, color: str, style: str, beside: bool = False) -> None:
    """The mean over seeds, and a band from the lowest to the highest; `beside` another line: thin, without a band or a name."""
    found = [v for run in group.runs if (v := values(run, key)).ndim == 1 and len(v)]
    if not found:
        return
    y = np.array([v for v in found if len(v) == len(found[0])])
    if panel.log:
        y = np.where(y > 0, y, np.nan)
    known = np.isfinite(y).any(0)
    x, y = panel.first + np.flatnonzero(known), y[:, known]
    if beside:
        ax.plot(x, np.nanmean(y, 0), style, color=color, lw=0.8)
        return
    ax.plot(x, np.nanmean(y, 0), style, color=color, lw=1.5, label=in_legend(group.label), marker='o' if len(x) <= 12 else None, ms=3)
    if len(y) > 1:
        ax.fill_between(x, np.nanmin(y, 0), np.nanmax(y, 0), color=color, alpha=0.18, lw=0)


def heat(ax: Axes, panel: Panel, group: Group, theme: Theme) -> None:
    """The matrix of the first seed that has numbers, first row at the bottom; columns lie at their `steps` where there are some."""
    run = next(run for run in group.runs if np.isfinite(values(run, panel.keys[0])).any())
    z, steps = values(run, panel.keys[0]), values(run, 'steps')
    rows, columns = (panel.first - 0.5 + np.arange(n + 1) for n in z.shape)
    if len(steps):  # each reaches half way to the next
        middle = (steps[1:] + steps[:-1]) / 2
        columns = np.array([steps[0], *middle, steps[-1] + (len(steps) == 1)])
    image = ax.pcolormesh(columns, rows, z, cmap='viridis')
    ax.set_xlabel(panel.over, fontsize=7.5, color=theme.ink)
    ax.set_ylabel('block', fontsize=7.5, color=theme.ink)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.9)
    bar.ax.tick_params(colors=theme.ink, labelsize=6.5)
    bar.outline.set_edgecolor(theme.faint)  # pyright: ignore[reportCallIssue]


def png(fig: Figure) -> bytes:
    out = io.BytesIO()
    fig.savefig(out, format='png', facecolor=fig.get_facecolor())
    return out.getvalue()
