"""Table 4: width scaling or none, at the largest width of figure 12, on grids of factor 2 and of factor sqrt 2.

Cost at nano: for each of the two the rates between those of figure 12, more where the best lies at an end, then three seeds at the best.
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import against, finish, panels
from spannorm_jax.stats import wanted

s, fig12 = sibling('_shared'), sibling('fig12')
QUESTION = 'Is a wide model better without width scaling, and is that the doing of a coarse grid of learning rates?'
CLAIM = 'Better without width scaling; the paper blames its coarse grid.'
CHIPS = 'v5e:16x16'
CURVES = ()


def fine(coarse):
    """The grid with the geometric means of its neighbours between them."""
    return tuple(sorted({*coarse, *(float(f'{(a * b) ** 0.5:.3g}') for a, b in zip(coarse, coarse[1:], strict=False))}))


def both(scale):
    cfg = fig12.sized(scale, fig12.widths(scale)[-1])
    return {'standard': cfg, 'mup': fig12.mup(scale, cfg)}


def of(scale, kind, rates, seeds):
    return product(both(scale)[kind], {fig12.KIND: (kind,), s.RATE: rates, 'run.seed': seeds})


def runs(scale):
    found = s.control(fig12.sized(scale, fig12.widths(scale)[0]), scale)
    for kind in both(scale):
        found |= of(scale, kind, fine(s.rates(scale)), (0,))
    return found


def more(scale, rows):
    """Both grids grow while the best rate of the coarse one lies at an end; then all seeds at the best rate of each."""
    found, doubled = {}, {float(f'{rate * 2.0**k:.3g}') for rate in s.rates(scale) for k in range(-9, 10)}
    for kind, own in s.group(s.without_control(rows), fig12.KIND).items():
        first = [row for row in own if row['run.seed'] == 0]
        coarse = [row for row in first if row[s.RATE] in doubled]
        grid = sorted({rate for rate, _ in wanted(coarse, s.rates(scale), (0,))})
        found |= of(scale, kind, fine(grid), (0,))
        if set(fine(grid)) <= {row[s.RATE] for row in first}:
            found |= of(scale, kind, tuple(sorted({s.best_rate(first), s.best_rate(coarse)} - {None})), s.seeds(scale))
    return found


def chosen(rows):
    """grid -> parametrization -> rows at its best rate on that grid, chosen with one seed."""
    found = {}
    for grid, every in (('factor 2', 2), ('factor sqrt 2', 1)):
        found[grid] = {}
        for kind, own in s.group(s.without_control(rows), fig12.KIND).items():
            rates = sorted({row[s.RATE] for row in own})[::every]
            best = s.best_rate([row for row in own if row['run.seed'] == 0 and row[s.RATE] in rates])
            found[grid][kind] = [row for row in own if row[s.RATE] == best]
    return found


def figure(rows):
    fig, axes = panels('the largest width', width=6)
    for i, (kind, own) in enumerate(s.group(s.without_control(rows), fig12.KIND).items()):
        against(axes[0], own, s.RATE, 'eval/loss', kind, f'C{i}')
    axes[0].set_xscale('log')
    finish(axes, 'peak learning rate', 'validation loss (nats per token)')
    return fig


def table(rows):
    return [
        {
            'grid': grid,
            'width scaling': kind,
            'best rate': own[0][s.RATE] if own else None,
            'test/loss': s.interval(own, 'test/loss') if own else None,
        }
        for grid, arms in chosen(rows).items()
        for kind, own in arms.items()
    ]


def verdict(rows):
    """Reproduced: on the coarse grid the model without width scaling is better, and on the fine one it is not."""
    if not s.control_failed(rows):
        return s.UNSEPARATED
    coarse, fine = (s.lower(arms['standard'], arms['mup'], ('without width scaling', 'with')) for arms in chosen(rows).values())
    text = f'factor 2: {coarse.reason}; factor sqrt 2: {fine.reason}'
    if coarse.status == 'reproduced' and fine.status == 'not reproduced':
        return s.Verdict('reproduced', text)
    return s.Verdict('not reproduced' if coarse.status == 'not reproduced' or fine.status == 'reproduced' else 'cannot tell', text)
