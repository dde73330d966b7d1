"""Figure 10: condition number of the FFN's up and down projections, by block.

Cost at nano: nothing beside figure 8, whose runs these are.
"""

import math

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, finish, panels

s, fig08 = sibling('_shared'), sibling('fig08')
QUESTION = 'Are the weights of Span better conditioned, most of all in deep layers?'
CLAIM = 'Span lower, most in deep layers.'
CHIPS = 'v5e:16x16'
CURVES = ()
runs, measure = fig08.runs, s.spectra


def conditions(row, name):
    """By block; the key of the matrix ends in its name."""
    return next((v for k, v in row.items() if k.endswith(f'ffn.{name}/condition')), [])


def deep(row, name):
    """Mean of ln condition over the deeper half."""
    values = [math.log(v) for v in conditions(row, name)[row['model.layers'] // 2 :] if v]
    return sum(values) / len(values)


def figure(rows):
    fig, axes = panels('up', 'down', width=5)
    for topology, own in s.group(s.without_control(rows), 'model.topology').items():
        for ax, name in zip(axes, ('up', 'down'), strict=True):
            for row in own:
                values = conditions(row, name)
                ax.semilogy(range(1, len(values) + 1), values, color=color(topology, []), lw=1, label=topology)
    finish(axes, 'block', 'condition number')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at, found = s.group(s.without_control(rows), 'model.topology'), []
    for name in ('up', 'down'):
        pre = {row['run.seed']: deep(row, name) for row in at['pre']}
        d = s.t_interval(deep(row, name) - pre[row['run.seed']] for row in at['span'])
        text = f'ln condition of {name} in the deeper half, Span - Pre: {d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]'
        found.append(s.Verdict('reproduced' if d.high < 0 else 'not reproduced' if d.low > 0 else 'cannot tell', text))
    return s.all_of(*found)
