"""T7: are topology and Scale Init confounded? Topology x (Scale Init, none, the topology's own recipe), each at its own best rate.

Cost at nano: two grids more beside that of table 2. LNS's authors advise against scaled init; HybridNorm's paper used each method's best.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, finish, panels
from spannorm_jax.stats import t_interval, value

s = sibling('_shared')
TOPOLOGIES = ('pre', 'post', 'span', 'lns', 'hybrid')
RECIPES = {'Scale Init': ('common', 'sqrt_2L'), 'none': ('common', 'none'), 'own': ('own', 'sqrt_2L')}
ARM = ('model.topology', 'model.init', 'model.scale_init')
QUESTION = "Does Span's lead over Pre depend on the initialisation that all models are given?"
CLAIM = 'The paper gives Scale Init to all and never separates the two; its reviewers suspect that they are confounded.'
CHIPS = 'v5e:16x16'
CURVES = ()


def runs(scale):
    # A published recipe sets the standard deviations itself: the paper's sigma would have no effect on it.
    cfg = s.edit(s.base(scale), {'model.init_std': None})
    found = s.control(cfg, scale)
    for init, scaled in RECIPES.values():
        found |= s.arms(cfg, scale, {ARM[0]: TOPOLOGIES, ARM[1]: (init,), ARM[2]: (scaled,)})
    return found


def more(scale, rows):
    return s.grow(s.edit(s.base(scale), {'model.init_std': None}), rows, scale, ARM)


def best(rows):
    """(topology, recipe) -> rows at its best rate."""
    name = {v: k for k, v in RECIPES.items()}
    return {(t, name[init, scaled]): s.at_best(own) for (t, init, scaled), own in s.group(s.without_control(rows), *ARM).items()}


def figure(rows):
    fig, axes = panels('each at its own best rate; a cross: diverged at every rate', width=6)
    at = best(rows)
    for i, topology in enumerate(TOPOLOGIES):
        for j, recipe in enumerate(RECIPES):
            own, place, c = at.get((topology, recipe)), j + (i - 2) * 0.08, color(topology, [])
            if own:
                found = s.interval(own, 'test/loss')
                half = (found.high - found.low) / 2 if found.n > 1 else 0.0
                axes[0].errorbar([place], [found.mean], half, fmt='o', color=c, capsize=2, label=topology)
            elif own is not None:
                axes[0].plot([place], [1.0], 'X', ms=6, color=c, mec='white', transform=axes[0].get_xaxis_transform(), clip_on=False)
    axes[0].set_xticks(range(len(RECIPES)), list(RECIPES))
    finish(axes, 'initialisation', 'test loss (nats per token), 95% interval')
    return fig


def table(rows):
    return s.grid_table(rows, ARM)


def interaction(at):
    """(Span - Pre with Scale Init) - (Span - Pre without), seed by seed."""
    loss = {key: {row['run.seed']: value(row, 'test/loss') for row in own} for key, own in at.items()}
    cells = [loss[t, recipe] for recipe in ('Scale Init', 'none') for t in ('span', 'pre')]
    shared = sorted(set.intersection(*(set(c) for c in cells)))
    return t_interval((cells[0][k] - cells[1][k]) - (cells[2][k] - cells[3][k]) for k in shared) if shared else None


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    d = interaction(best(rows))
    if d is None:
        return s.Verdict('cannot tell', 'one of the four cells diverged at every rate')
    text = f'(Span - Pre) with Scale Init less (Span - Pre) without: {d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}] nats, {d.n} seeds'
    return s.Verdict('cannot tell' if d.low <= 0 <= d.high or d.n < 2 else 'reproduced', text)
