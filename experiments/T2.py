"""T2: is O(1/sqrt(L)) necessary? Span at 512 layers with Scale Init none, sqrt_L and sqrt_2L.

Cost at nano: 10 runs of 512 layers, 100 steps each.
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import LINES, color, finish, over_steps, panels

s = sibling('_shared')
QUESTION = 'Does Span at 512 layers collapse without Scale Init, and does the factor 2 in it matter?'
CLAIM = 'The output projections must start at O(1/sqrt(L)): without it 512 layers collapse.'
CHIPS = 'v5e:16x16'
CURVES = ('train/loss',)


def runs(scale):
    cfg = s.edit(s.narrow(scale), {'model.layers': s.by(scale, 4, 512, 512, 512), 'run.steps': s.by(scale, 12, 100, 1000, 5000)})
    return product(cfg, {'model.scale_init': ('none', 'sqrt_L', 'sqrt_2L'), 'run.seed': s.seeds(scale)}) | s.control(cfg, scale)


def figure(rows):
    fig, axes = panels('Span', width=6)
    for style, (init, own) in zip(LINES, s.group(s.without_control(rows), 'model.scale_init').items(), strict=False):
        over_steps(axes[0], own, 'train/loss', f'scale_init {init}', color('span', []), style)
    finish(axes, 'step', 'training loss (nats per token)')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    rows = s.without_control(rows)
    best = min(s.value(row, 'eval/loss') for row in rows)
    lost = {init: [s.fails(row, best) for row in own] for init, own in s.group(rows, 'model.scale_init').items()}
    text = ', '.join(f'{init}: {sum(v)} of {len(v)} seeds collapse' for init, v in lost.items())
    if any(lost['sqrt_L'] + lost['sqrt_2L']) and any(lost['none']):
        return s.Verdict('cannot tell', text)
    return s.judged(all(lost['none']), text)
