"""Figure 7: gradient of each block at three learning rates around PostNorm's edge, Post against Span.

Cost at nano: part of T4's grid. Paper: 740M (layers, width, heads, ffn counted to fit), 8e-5 and above.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import LINES, color, finish, over_layers, panels

s, T4 = sibling('_shared'), sibling('T4')
KEY = 'layer/grad_rms/write'
ARMS = {'model.topology': ('post', 'span')}
QUESTION = 'Above its edge, does Post keep a gradient in its last layer alone, while Span stays stable?'
CLAIM = 'Post collapses above its edge (8e-5 at 740M): only the last layer keeps gradient. Span is stable at the same rates.'
CHIPS = 'v5e:16x16'
CURVES = (KEY,)
COLLAPSED = 0.1  # median over the blocks, as a share of the last block's


def runs(scale):
    cfg = s.base(scale, 'dense_740m')
    return s.arms(cfg, scale, ARMS) | s.control(cfg, scale)


def more(scale, rows):
    return s.grow(s.base(scale, 'dense_740m'), rows, scale, to_edge=True)


def around(rows):
    """Three rates: Post's highest stable one, the one below, and the first at which it diverged (or the highest tried)."""
    post = [row for row in s.without_control(rows) if row['model.topology'] == 'post']
    rates = sorted({row[s.RATE] for row in post})
    stable, bad = s.edge(post)
    top = bad or rates[-1]
    i = rates.index(top)
    return rates[max(0, i - 2) : i + 1], stable, bad


def figure(rows):
    rates, _, _ = around(rows)
    fig, axes = panels(*(f'learning rate {rate:g}' for rate in rates))
    for ax, rate in zip(axes, rates, strict=True):
        ax.set_yscale('log')
        for topology, own in s.group(s.without_control(rows), 'model.topology').items():
            at = [row for row in own if row[s.RATE] == rate]
            over_layers(ax, at, KEY, f'{topology}, last step', color(topology, []))
            over_layers(ax, at, KEY, f'{topology}, early', color(topology, []), LINES[1], at=0)
    finish(axes, 'block', 'rms of the gradient of W_O and W_2')
    return fig


def share(row):
    """Median over the blocks of the last kept gradient, as a share of the last block's."""
    last = [v or 0.0 for v in row['curves'][KEY][-1][1]] if row['curves'][KEY] else [0.0]
    return sorted(last)[len(last) // 2] / last[-1] if last[-1] else 0.0


def verdict(rows):
    rates, stable, bad = around(rows)
    if not s.control_failed(rows):
        return s.UNSEPARATED
    if bad is None:
        return s.Verdict('cannot tell', f'Post did not diverge up to the highest rate tried, {rates[-1]:g}')
    at = {t: [r for r in own if r[s.RATE] == bad] for t, own in s.group(s.without_control(rows), 'model.topology').items()}
    if not at['span']:
        return s.judged(False, f'Span was not tried at {bad:g}, where Post diverges: its own grid ended below')
    lost, post = [r for r in at['span'] if r['status'] == 'diverged'], max(map(share, at['post']))
    text = f'at {bad:g}, where Post diverges (stable to {stable}): Post keeps {post:.2g} of the last block in the median block'
    return s.judged(post < COLLAPSED and not lost, f'{text}; Span {"diverges too" if lost else "is stable"}')
