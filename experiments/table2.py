"""Table 2: the paper's topologies, each at its own best learning rate, held-out bits per byte.

Cost at nano: part of T4's grid. Paper: 5B (heads, ffn, batch and most of the optimizer unknown; 2e-4 for some, 1e-4 for others, tuned
or not is unknown). Here every topology has the same grid, the same rule and the same budget.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import finish, panels, sensitivity

s = sibling('_shared')
QUESTION = 'Is Span better than Pre, Mix-LN, LNS, HybridNorm and Peri-LN when all are tuned alike?'
CLAIM = 'Span is ahead of all of them (by 1 to 4 points of average accuracy at 5B).'
CHIPS = 'v5e:16x16'
CURVES = ()


def runs(scale):
    cfg = s.base(scale)
    return s.arms(cfg, scale, {'model.topology': s.PAPER}) | s.control(cfg, scale)


def more(scale, rows):
    return s.grow(s.base(scale), rows, scale)


def figure(rows):
    fig, (left, right) = panels('over the learning rate', "at each one's own best rate", width=5)
    arms = s.group(s.without_control(rows), 'model.topology')
    sensitivity(left, arms)
    finish([left], 'peak learning rate', 'validation loss (nats per token)')
    best = {t: s.interval(s.at_best(own), 'test/bits_per_byte') for t, own in arms.items() if s.at_best(own)}
    order = sorted(best, key=lambda t: best[t].mean)
    half = [(best[t].high - best[t].low) / 2 if best[t].n > 1 else 0.0 for t in order]
    right.errorbar([best[t].mean for t in order], range(len(order)), xerr=half, fmt='o', color='#1f5fa8', capsize=3)
    right.set(yticks=range(len(order)), yticklabels=order, xlabel='test bits per byte, 95% interval over seeds')
    return fig


def table(rows):
    return s.grid_table(rows)


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    best = {t: s.at_best(own) for t, own in s.group(s.without_control(rows), 'model.topology').items()}
    rivals = [t for t in best if t not in ('span', 'post')]
    return s.all_of(*(s.lower(best['span'], best[t], ('Span', t)) for t in rivals))
