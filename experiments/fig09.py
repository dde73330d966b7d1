"""Figure 9: sorted eigenvalues of the embeddings over their median.

Cost at nano: nothing beside figure 8, whose runs these are.
"""

import math

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, finish, panels

s, fig08 = sibling('_shared'), sibling('fig08')
QUESTION = "Is the spectrum of Span's embeddings the flattest, and does Mix-LN's tail decay fast?"
CLAIM = "Span is flattest; Mix-LN's tail decays fast."
CHIPS = 'v5e:16x16'
CURVES = ()
runs, measure = fig08.runs, s.spectra


def spread(row):
    """ln of the ratio of the eigenvalue at 5 per cent of the order to that at 95 per cent: 0 for a flat spectrum."""
    v = row['embedding']
    lo, hi = (v[min(round(q * len(v)), len(v) - 1)] for q in (0.95, 0.05))
    return math.log(hi / lo) if lo else math.inf


def figure(rows):
    fig, axes = panels('embeddings', width=6)
    for topology, own in s.group(s.without_control(rows), 'model.topology').items():
        for row in own:
            axes[0].semilogy(row['embedding'], color=color(topology, []), lw=1, label=topology)
    finish(axes, 'index', 'eigenvalue over the median')
    return fig


def table(rows):
    arms = s.group(s.without_control(rows), 'model.topology')
    return [{'topology': t, 'ln(eigenvalue at 5% / at 95%)': s.t_interval(map(spread, own))} for t, own in arms.items()]


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = {t: s.t_interval(map(spread, own)) for t, own in s.group(s.without_control(rows), 'model.topology').items()}
    order = sorted(at, key=lambda t: at[t].mean)
    text = 'flattest first: ' + ', '.join(f'{t} {at[t].mean:.2f}' for t in order)
    rivals = [t for t in at if t != 'span']
    if any(at[t].high < at['span'].low for t in rivals):
        return s.judged(False, text)
    sure = all(at['span'].high < at[t].low for t in rivals)
    return s.Verdict('reproduced' if sure else 'cannot tell', text)
