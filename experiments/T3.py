"""T3: deeper is better? Two ladders of depth: at a fixed width, and at a fixed number of parameters.

Cost at nano: 27 runs beside those of figure 11. Fixed parameters: width halves where depth is four times larger.
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import against, color, finish, panels

s, fig11 = sibling('_shared'), sibling('fig11')
TOPOLOGIES = ('pre', 'post', 'span')
QUESTION = 'Does depth help at a fixed width, and does it help where the parameters it costs are taken from the width?'
CLAIM = 'Deeper is better (shown at a fixed width alone; an independent benchmark finds the contrary at fixed parameters for others).'
CHIPS = 'v5e:16x16'
CURVES = ()


def ladder(scale):
    """(layers, width, heads) with the same layers * width^2."""
    return s.by(scale, ((1, 32, 2), (4, 16, 2)), ((4, 128, 4), (16, 64, 4), (64, 32, 2)), ((16, 512, 8), (64, 256, 4), (256, 128, 2)),
                ((16, 2560, 20), (64, 1280, 10), (256, 640, 5)))  # fmt: skip


def runs(scale):
    found = dict(fig11.runs(scale))
    for layers, width, heads in ladder(scale):
        cfg = s.edit(s.base(scale), {'model.width': width, 'model.heads': heads, 'model.ffn': None})
        axes = {'model.topology': TOPOLOGIES, 'model.layers': (layers,), 'model.width': (width,), 'run.seed': s.seeds(scale)}
        found |= {name: cfg for name, cfg in product(cfg, axes).items() if cfg not in found.values()}
    return found


def ladders(rows):
    """(rows of one width, rows of one parameter count). The rungs are told by their sizes."""
    rows = s.without_control(rows)
    size = lambda row: row['model.layers'] * row['model.width'] ** 2  # noqa: E731
    narrow = min(row['model.width'] for row in rows)
    square = {size(row) for row in rows if row['model.width'] != narrow}
    return [row for row in rows if row['model.width'] == narrow], [row for row in rows if size(row) in square]


def figure(rows):
    fig, axes = panels('fixed width', 'fixed parameters', width=5)
    for ax, rungs in zip(axes, ladders(rows), strict=True):
        for topology, own in s.group(rungs, 'model.topology').items():
            against(ax, own, 'model.layers', 'test/loss', topology, color(topology, []))
        ax.set_xscale('log', base=2)
    finish(axes, 'layers', 'test loss (nats per token), 95% interval')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    parts = []
    for what, rungs in zip(('fixed width', 'fixed parameters'), ladders(rows), strict=True):
        at = s.group([row for row in rungs if row['model.topology'] == 'span'], 'model.layers')
        most = max(map(len, at.values()))
        depths = [L for L in sorted(at) if len(at[L]) == most]
        parts.append(s.lower(at[depths[-1]], at[depths[0]], (f'{what}, Span at {depths[-1]} layers', f'at {depths[0]}')))
    return s.all_of(*parts)
