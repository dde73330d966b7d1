"""Figure 4: loss curves of deep models, Pre, Post, Hybrid and Span at 64 and 128 layers.

Cost at nano: 17 runs, most of it the four at 128 layers. Paper: 5B at 64 layers for 200B tokens, 6.5B at 128 layers for 400B (width, heads
and ffn of the latter counted to fit; rates and batch unknown).
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import color, finish, over_steps, panels

s = sibling('_shared')
TOPOLOGIES = ('pre', 'post', 'hybrid', 'span')
QUESTION = 'Which topology has the lowest loss at 64 and 128 layers, and which diverge?'
CLAIM = 'Span is best; Post and Hybrid diverge early at 128 layers.'
CHIPS = 'v5e:16x16'
CURVES = ('train/loss',)


def runs(scale):
    shallow, deep = s.by(scale, (2, 3), (64, 128), (128, 512), (64, 128))
    cfg = s.base(scale)
    most = s.base(scale, 'dense_6b5_l128') if scale == 'paper' else s.edit(cfg, {'model.layers': deep})
    first = product(
        s.edit(cfg, {'model.layers': shallow}), {'model.topology': TOPOLOGIES, 'model.layers': (shallow,), 'run.seed': s.seeds(scale)}
    )
    return first | product(most, {'model.topology': TOPOLOGIES, 'model.layers': (deep,), 'run.seed': (0,)}) | s.control(cfg, scale)


def figure(rows):
    rows = s.without_control(rows)
    depths = sorted({row['model.layers'] for row in rows})
    fig, axes = panels(*(f'{L} layers' for L in depths), width=5)
    for (topology, L), own in s.group(rows, 'model.topology', 'model.layers').items():
        over_steps(axes[depths.index(L)], own, 'train/loss', topology, color(topology, []))
    finish(axes, 'step', 'training loss (nats per token)')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    rows = s.without_control(rows)
    shallow, deep = (
        s.group([r for r in rows if r['model.layers'] == L], 'model.topology') for L in sorted({r['model.layers'] for r in rows})
    )
    lost = [t for t in ('post', 'hybrid') if all(row['status'] == 'diverged' for row in deep[t])]
    return s.all_of(
        *(s.lower(shallow['span'], shallow[t], ('Span', t)) for t in ('pre', 'post', 'hybrid')),
        s.judged(len(lost) == 2, f'diverged at the largest depth: {", ".join(lost) or "neither post nor hybrid"}'),
    )
