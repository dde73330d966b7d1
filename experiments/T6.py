"""T6: the assumptions that Var(F) = O(1/L), and that a branch and its skip are uncorrelated.

Cost at nano: nothing beside figure 11, whose runs these are: Span with Scale Init, early and at the end of training.
"""

import math

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, finish, over_layers, panels
from spannorm_jax.stats import slope

s, fig11 = sibling('_shared'), sibling('fig11')
VARIANCE, CORRELATION = 'layer/branch_var/ffn', 'layer/branch_skip_corr/ffn'
QUESTION = 'Does the variance of the FFN branch fall as 1/L, and is the branch uncorrelated with its skip?'
CLAIM = 'Var(F) = O(1/L), the slope of ln Var(F) over ln L is -1; branch and skip are uncorrelated.'
CHIPS = 'v5e:16x16'
CURVES = (VARIANCE, CORRELATION)
NEAR, SMALL = 0.2, 0.1  # of the slope to -1, of a correlation to 0


def runs(scale):
    return {name: cfg for name, cfg in fig11.runs(scale).items() if cfg.model.topology == 'span'}


def mean(v):
    """Without the first block, whose skip is the embedding."""
    known = [x for x in v[1:] or v if x is not None]
    return sum(known) / len(known)


def points(rows, at):
    """(depth, mean variance) of each run, early (0) or at the end (-1)."""
    return sorted((row['model.layers'], mean(row['curves'][VARIANCE][at][1])) for row in rows if row['curves'][VARIANCE])


def slopes(rows):
    """(slope, R^2) of ln of the mean variance over ln of the depth, early and at the end."""
    return [slope([math.log(L) for L, _ in points(rows, at)], [math.log(v) for _, v in points(rows, at)])[::2] for at in (0, -1)]


def figure(rows):
    fig, (left, *rest) = panels('variance of the FFN branch', 'correlation with the skip, early', 'at the end')
    for at, label in ((0, 'early'), (-1, 'at the end')):
        if points(rows, at):
            left.loglog(
                *zip(*points(rows, at), strict=True), 'o' if at else 's', ms=4, label=label, color=color('pre' if at else 'span', [])
            )
    for ax, at in zip(rest, (0, -1), strict=True):
        for i, (L, own) in enumerate(sorted(s.group(rows, 'model.layers').items())):
            over_layers(ax, own, CORRELATION, f'{L} layers', f'C{i}', at=at)
    finish([left], 'layers', 'Var F')
    finish(rest, 'block', 'correlation')
    return fig


def verdict(rows):
    if len({L for L, _ in points(rows, 0)}) < 2:
        return s.Verdict('cannot tell', 'fewer than 2 depths have a run that went on long enough')
    (early, r2), (late, _) = slopes(rows)
    high = max(abs(mean(v)) for row in rows for _, v in row['curves'][CORRELATION])
    text = f'slope {early:.2f} early (R^2 {r2:.2f}), {late:.2f} at the end; largest mean correlation with the skip {high:.2f}'
    return s.judged(abs(early + 1) < NEAR and abs(late + 1) < NEAR and high < SMALL, text)
