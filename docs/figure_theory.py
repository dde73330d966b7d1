"""Draw docs/theory.png from results/theory.json (`spannorm theory --json`): ln(g_1 / g_L) over depth, measured and predicted.

python docs/figure_theory.py
"""

import json
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parent.parent
COLOURS = {'pre': '#66707a', 'post': '#d9701a', 'span': '#1f5fa8'}


def figure(cells) -> Figure:
    """One panel per Scale Init and FFN kind; points with 95% intervals are measured, lines are predictions: the paper's (dashed) and with
    what the branches pass back (thin)."""
    kinds, scales = (list(dict.fromkeys(c[k] for c in cells)) for k in ('activation', 'scale_init'))
    fig = Figure(figsize=(3.3 * len(kinds), 2.7 * len(scales)), dpi=120, layout='constrained')
    FigureCanvasAgg(fig)
    for i, (scale, row) in enumerate(zip(scales, fig.subplots(len(scales), len(kinds), squeeze=False, sharex=True), strict=True)):
        for kind, ax in zip(kinds, row, strict=True):
            for topology, colour in COLOURS.items():
                mine = [c for c in cells if (c['topology'], c['activation'], c['scale_init']) == (topology, kind, scale)]
                L, g = [c['layers'] for c in mine], [c['ln_g1_over_gL'] for c in mine]
                ax.errorbar(L, [v['mean'] for v in g], [v['high'] - v['mean'] for v in g], fmt='o', ms=4, color=colour, label=topology)
                ax.plot(L, [c['paper']['predicted']['mean'] for c in mine], '--', lw=1, color=colour)
                ax.plot(L, [c['branches']['predicted']['mean'] for c in mine], '-', lw=0.8, color=colour, alpha=0.7)
            ax.axhline(0, color='#9aa5b1', lw=0.8, zorder=0)
            ax.set_xscale('log', base=2)
            ax.set_xticks(L, [str(n) for n in L])
            if scale == 'none':
                ax.set_yscale('symlog', linthresh=1)
            ax.set_title(f'{kind}, scale_init {scale}', loc='left', fontsize=9)
            ax.spines[['top', 'right']].set_visible(False)
            if i == len(scales) - 1:
                ax.set_xlabel('layers L')
        row[0].set_ylabel('ln(|g_1| / |g_L|)')
    fig.axes[0].legend(frameon=False, fontsize=8)
    return fig


if __name__ == '__main__':
    kept = json.loads((ROOT / 'results/theory.json').read_text())
    figure(kept['T1']['cells']).savefig(ROOT / 'docs/theory.png')
