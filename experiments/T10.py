"""T10: were all topologies tuned alike? A check of table 2's own rows.

Cost at nano: nothing beside table 2, whose runs these are.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, panels

s, table2 = sibling('_shared'), sibling('table2')
QUESTION = 'Does every topology have the same grid, the same budget per run, and at least three seeds at its best rate?'
CLAIM = 'Asked for by the review: the same tuning for all baselines, and several seeds.'
CHIPS = 'v5e:16x16'
CURVES = ()
BUDGET = ('run.steps', 'data.batch', 'data.seq', 'optim.schedule', 'optim.warmup_steps', 'optim.weight_decay', 'optim.clip')
runs, more = table2.runs, table2.more


def figure(rows):
    fig, (ax,) = panels('rates tried, and seeds at each', width=7)
    arms = s.group(s.without_control(rows), 'model.topology')
    for i, (topology, own) in enumerate(arms.items()):
        for rate, at in s.group(own, s.RATE).items():
            ax.scatter([rate], [i], s=40 * len(at), color=color(topology, []), marker='o' if rate != s.best_rate(own) else 's')
    ax.set(xscale='log', xlabel='peak learning rate (a square: the best on validation)', yticks=range(len(arms)), yticklabels=list(arms))
    return fig


def table(rows):
    return s.grid_table(rows)


def verdict(rows):
    arms = s.group(s.without_control(rows), 'model.topology')
    shared = set.intersection(*({row[s.RATE] for row in own} for own in arms.values()))
    budgets = {tuple(row[f] for f in BUDGET) for row in s.without_control(rows)}
    few = [t for t, own in arms.items() if s.best_rate(own) is not None and len(s.at_best(own)) < len(s.SEEDS)]
    counts = [len(own) for own in arms.values()]
    text = f'{len(shared)} rates were tried for all; {len(budgets)} budget; {min(counts)} to {max(counts)} runs each'
    return s.judged(
        len(shared) >= 2 and len(budgets) == 1 and not few, text + (f'; fewer seeds at the best rate of {", ".join(few)}' if few else '')
    )
