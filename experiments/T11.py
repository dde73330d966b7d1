"""T11: the paper's other assumptions, one row each with a measured number, at initialisation.

Cost at nano: minutes; nothing is trained.
"""

import textwrap

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import LINES, color, finish, panels

s = sibling('_shared')
QUESTION = (
    'Do the assumptions hold: sigma above 1 and alike in all blocks, the norms of the Jacobians, the bound of eq. 18 and its O(1/L) term?'
)
CLAIM = 'All of them are used in the proofs.'
CHIPS = 'v5e:16x16'
CURVES = ()
measure = s.theory_of('T11')


def runs(scale):
    return s.at_init(scale, 128)


def figure(rows):
    table = [row for row in s.tables(rows)['assumptions'] if 'layers' in row]
    names = list(dict.fromkeys(row['assumption'] for row in table))
    fig, axes = panels(*(textwrap.fill(name, 44) for name in names), height=2.8)
    for ax, name in zip(axes, names, strict=True):
        for (topology, scaled), own in s.group([row for row in table if row['assumption'] == name], 'topology', 'scale_init').items():
            points = [(row['layers'], row['value']['mean']) for row in own]
            label = topology + (' with Scale Init' if scaled != 'none' else ' without')
            ax.plot(*zip(*points, strict=True), 'o', ls=LINES[scaled == 'none'], ms=3, color=color(topology, []), label=label)
        ax.set_xscale('log')
    finish(axes, 'layers', 'measured')
    return fig


def table(rows):
    return s.lines(s.tables(rows)['assumptions'])


def verdict(rows):
    own = [r for r in s.tables(rows)['assumptions'] if r['topology'] == 'span' and r['scale_init'] != 'none' and r['verdict']]
    words = [r['verdict'] for r in own]
    broken = list(dict.fromkeys(r['assumption'] for r in own if r['verdict'] == 'fails'))
    text = f'Span with Scale Init: {words.count("holds")} of {len(words)} checks hold, {words.count("fails")} fail'
    if broken:
        return s.judged(False, f'{text}: {"; ".join(broken)}')
    return s.Verdict('cannot tell' if 'cannot tell' in words else 'reproduced', text)
