"""T4: sensitivity to the learning rate, every topology, each compared at its own best rate.

Cost at nano: the largest grid; table2, T7, T10, fig07 and table1 share its runs. Divergence is an outcome and stays in the table.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import finish, panels, sensitivity
from spannorm_jax.topology import TOPOLOGIES

s = sibling('_shared')
QUESTION = 'How far can the learning rate be raised under each topology, and which is best at its own best rate?'
CLAIM = 'An independent paper: Span diverges at a rate at which Pre trains, and only ties Pre at its best rate (1.3B).'
CHIPS = 'v5e:16x16'
CURVES = ()


def topologies(scale):
    return s.by(scale, ('pre', 'post', 'span'), tuple(TOPOLOGIES), s.PAPER, s.PAPER)


def runs(scale):
    cfg = s.base(scale)
    return s.arms(cfg, scale, {'model.topology': topologies(scale)}) | s.control(cfg, scale)


def more(scale, rows):
    return s.grow(s.base(scale), rows, scale, to_edge=True)


def figure(rows):
    fig, (left, right) = panels("the paper's topologies", 'the others', width=5)
    arms = s.group(s.without_control(rows), 'model.topology')
    sensitivity(left, {t: own for t, own in arms.items() if t in s.PAPER})
    sensitivity(right, {t: own for t, own in arms.items() if t not in s.PAPER})
    finish([left], 'peak learning rate', 'validation loss (nats per token)')
    finish([right], 'peak learning rate', '')
    return fig


def table(rows):
    return s.grid_table(rows)


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    arms = s.group(s.without_control(rows), 'model.topology')
    (span, span_bad), (pre, pre_bad) = s.edge(arms['span']), s.edge(arms['pre'])
    better = s.lower(s.at_best(arms['span']), s.at_best(arms['pre']), ('Span', 'Pre'))
    text = (
        f'highest stable rate: Span {span} (diverges at {span_bad}), Pre {pre} (diverges at {pre_bad}); at their best rates {better.reason}'
    )
    breaks_first = (span or 0.0) < (pre or 0.0)
    if breaks_first and better.status != 'reproduced':
        return s.Verdict('reproduced', text)
    return s.Verdict('cannot tell' if breaks_first or better.status != 'reproduced' else 'not reproduced', text)
