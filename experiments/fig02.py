"""Figure 2: loss in the first steps, Post, Pre and Span, with and without Scale Init, at three depths.

Cost at nano: 54 runs. Paper: width 1536, 5000 steps (740M at 24 layers; heads, ffn, batch and rate unknown).
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import LINES, color, finish, over_steps, panels

s = sibling('_shared')
QUESTION = 'Does PostNorm need Scale Init, does it fail with depth all the same, and does Span with Scale Init train like Pre?'
CLAIM = 'Post needs Scale Init and still fails deep; Span with Scale Init trains like Pre.'
CHIPS = 'v5e:16x16'
CURVES = ('train/loss',)


def runs(scale):
    cfg = s.base(scale, 'dense_740m')
    if scale == 'paper':
        cfg = s.edit(cfg, {'run.steps': 5000})
    depths = s.by(scale, (2,), (12, 24, 48), (24, 64, 128), (12, 24, 48))
    axes = {'model.topology': ('post', 'pre', 'span'), 'model.scale_init': ('sqrt_2L', 'none'), 'model.layers': depths}
    return product(cfg, axes | {'run.seed': s.seeds(scale)}) | s.control(cfg, scale)


def figure(rows):
    rows = s.without_control(rows)
    depths = sorted({row['model.layers'] for row in rows})
    fig, axes = panels(*(f'{L} layers' for L in depths))
    for (topology, init, L), own in s.group(rows, 'model.topology', 'model.scale_init', 'model.layers').items():
        label = topology + (' with Scale Init' if init != 'none' else ' without')
        over_steps(axes[depths.index(L)], own, 'train/loss', label, color(topology, []), LINES[init == 'none'])
    finish(axes, 'step', 'training loss (nats per token)')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    rows = s.without_control(rows)
    deep = max(row['model.layers'] for row in rows)
    at = s.group([row for row in rows if row['model.layers'] == deep], 'model.topology', 'model.scale_init')
    span, pre, post, bare = at['span', 'sqrt_2L'], at['pre', 'sqrt_2L'], at['post', 'sqrt_2L'], at['post', 'none']
    like_pre = s.paired(span, pre, 'train/final')
    return s.all_of(
        s.judged(like_pre.mean < 0.1, f'at {deep} layers Span ends {like_pre.mean:+.3f} nats from Pre (alike: within 0.1)'),
        s.lower(post, bare, ('Post with Scale Init', 'Post without'), 'train/final'),
        s.lower(span, post, ('Span', 'Post'), 'train/final'),
    )
