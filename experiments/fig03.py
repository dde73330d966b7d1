"""Figure 3: gradient of each block over the steps, in the middle model of figure 2.

Cost at nano: nothing beside figure 2, whose runs these are.
"""

import math

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import heat, panels

s, fig02 = sibling('_shared'), sibling('fig02')
KEY = 'layer/grad_rms/write'
QUESTION = "Do PostNorm's gradients vanish toward the bottom, and Span's not?"
CLAIM = "Post's gradients vanish toward the bottom; Span's do not."
CHIPS = 'v5e:16x16'
CURVES = (KEY,)
VANISHED = 0.1  # the first block's gradient is below a tenth of the last one's


def runs(scale):
    found = fig02.runs(scale)
    middle = s.by(scale, 2, 24, 64, 24)
    return {name: cfg for name, cfg in found.items() if cfg.model.layers == middle or name == 'control'}


def figure(rows):
    arms = s.group(s.without_control(rows), 'model.topology', 'model.scale_init')
    fig, axes = panels(*(f'{t}, ' + ('Scale Init' if init != 'none' else 'no Scale Init') for t, init in arms), columns=2)
    for ax, own in zip(axes, arms.values(), strict=True):
        curve = own[0]['curves'][KEY]
        log = [[math.log10(v[l]) if v[l] else math.nan for _, v in curve] for l in range(own[0]['model.layers'])]
        heat(ax, log, [step for step, _ in curve], range(1, len(log) + 1), 'log10 rms of the gradient of W_O and W_2')
        ax.set(xlabel='step', ylabel='block')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = s.group([row for row in s.without_control(rows) if row['model.scale_init'] != 'none'], 'model.topology')
    post, span = (max(map(s.bottom_over_top, at[t])) if t == 'post' else min(map(s.bottom_over_top, at[t])) for t in ('post', 'span'))
    text = (
        f'gradient of the first block over the last, with Scale Init, worst seed: Post {post:.2g}, Span {span:.2g} (vanished: < {VANISHED})'
    )
    return s.judged(post < VANISHED <= span, text)
