"""Figure 11: final loss against depth at one fixed learning rate, Span and Pre.

Cost at nano: 21 runs; the two of 512 layers have one seed. Paper: width 384, 32 to 512 layers (heads, ffn, tokens and rate unknown).
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import against, color, finish, panels

s = sibling('_shared')
QUESTION = 'Does the loss of Span fall with every doubling of depth, at one learning rate?'
CLAIM = 'Strictly falling for Span from 32 to 512 layers.'
CHIPS = 'v5e:16x16'
CURVES = ('layer/branch_var/ffn', 'layer/branch_skip_corr/ffn', 'layer/branch_skip_corr/attn')


def runs(scale):
    *shallow, deepest = s.by(scale, (1, 2, 3), (8, 32, 128, 512), (32, 64, 128, 256, 512), (32, 64, 128, 256, 512))
    cfg, two = s.narrow(scale), {'model.topology': ('span', 'pre')}
    found = product(cfg, two | {'model.layers': tuple(shallow), 'run.seed': s.seeds(scale)})
    return found | product(cfg, two | {'model.layers': (deepest,), 'run.seed': s.seeds(scale)[:1]}) | s.control(cfg, scale)


def figure(rows):
    fig, axes = panels('one learning rate', width=6)
    for topology, own in s.group(s.without_control(rows), 'model.topology').items():
        against(axes[0], own, 'model.layers', 'test/loss', topology, color(topology, []))
    axes[0].set_xscale('log', base=2)
    finish(axes, 'layers', 'test loss (nats per token), 95% interval')
    return fig


def steps_down(own):
    """(deeper, shallower, difference) of neighbours in depth, paired by seed."""
    at = s.group(own, 'model.layers')
    depths = sorted(at)
    return [(b, a, s.paired(at[b], at[a], 'test/loss')) for a, b in zip(depths, depths[1:], strict=False)]


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    found = steps_down([row for row in s.without_control(rows) if row['model.topology'] == 'span'])
    text = ', '.join(
        f'{b} - {a} layers: {d.mean:+.4f}' + (f' [{d.low:+.4f}, {d.high:+.4f}]' if d.n > 1 else ' (one seed)') for b, a, d in found
    )
    if any(d.low > 0 or d.mean > 0 and d.n == 1 for *_, d in found):
        return s.judged(False, text)
    sure = all(d.high < 0 if d.n > 1 else d.mean < 0 for *_, d in found)
    return s.Verdict('reproduced' if sure else 'cannot tell', text)
