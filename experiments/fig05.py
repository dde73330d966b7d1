"""Figure 5: cosine similarity of the outputs of all pairs of layers, Pre and Span, mixture of experts.

Cost at nano: six runs, most of them table 3's.
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import heat, panels

s, table3 = sibling('_shared'), sibling('table3')
QUESTION = 'Are the layers of a Pre model alike, and those of a Span model not?'
CLAIM = 'Pre stays above 0.5; Span falls to about 0.25.'
CHIPS = 'v5p:4x4x4'
CURVES = ()
PRE, SPAN = 0.5, 0.4  # mean over pairs: Pre above the one; Span "about 0.25", so below the other
measure = s.similarity


def runs(scale):
    cfg = table3.moe(scale)
    axes = table3.ARMS | {s.RATE: s.rates(scale)[1:2], 'run.seed': s.seeds(scale)}
    return product(cfg, axes) | s.control(cfg, scale)


def figure(rows):
    first = [row for row in s.without_control(rows) if row['run.seed'] == 0]
    fig, axes = panels(*(row['model.topology'] for row in first))
    for ax, row in zip(axes, first, strict=True):
        blocks = range(len(row['cosine']))
        heat(ax, [[x if x is not None else float('nan') for x in line] for line in row['cosine']], blocks, blocks, 'cosine', vmin=0, vmax=1)
        ax.set(xlabel='block (0: the embedding)', ylabel='block')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = {t: s.interval(own, 'mean') for t, own in s.group(s.without_control(rows), 'model.topology').items()}
    text = f'mean cosine over all pairs: Pre {at["pre"]}, Span {at["span"]} (claimed: above {PRE}, below {SPAN})'
    return s.judged(at['pre'].mean > PRE and at['span'].mean < SPAN, text)
