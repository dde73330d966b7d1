"""Table 1: Span against Pre, dense, held-out bits per byte, each at its own best learning rate.

Cost at nano: beside table 2, whose runs these are, a fraction of a minute a run for the tasks. Paper: 5B and 6.5B, with published tasks,
which models of this size cannot do; here tasks of the same forms, out of held-out text (_tasks.py), where the extra `eval` is installed.
The verdict rests on the loss.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import finish, panels, sensitivity

s = sibling('_shared')
ARMS = {'model.topology': ('pre', 'span')}
QUESTION = 'Is a dense Span model better than its Pre twin?'
CLAIM = 'Span is better at 5B (Wikitext perplexity 11.8, average accuracy 66.6) and at 6.5B.'
CHIPS = 'v5e:16x16'
CURVES = ()
tasks = sibling('_tasks')
measure = tasks.harness_columns


def runs(scale):
    cfg = s.base(scale)
    found = s.arms(cfg, scale, ARMS) | s.control(cfg, scale)
    if scale == 'paper':
        found |= s.product(s.base(scale, 'dense_6b5_l128'), ARMS | {'model.layers': (128,)})
    return found


def more(scale, rows):
    cfg = s.base(scale)
    return s.grow(cfg, [row for row in rows if row['model.layers'] == cfg.model.layers], scale)


def figure(rows):
    fig, axes = panels('Span against Pre', width=6)
    sensitivity(axes[0], s.group(s.without_control(rows), 'model.topology'), 'test/bits_per_byte')
    finish(axes, 'peak learning rate', 'test bits per byte')
    return fig


def table(rows):
    lines, arms = s.grid_table(rows, ('model.layers', 'model.topology')), s.group(s.without_control(rows), 'model.layers', 'model.topology')
    for line in lines:
        best = s.at_best(arms[line['layers'], line['topology']])
        line |= {name: s.interval(best, f'harness/{name}') for name in tasks.COLUMNS if best and f'harness/{name}' in best[0]}
    return lines


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = s.group(s.without_control(rows), 'model.layers', 'model.topology')
    depths = sorted({L for L, _ in at})
    return s.all_of(*(s.lower(s.at_best(at[L, 'span']), s.at_best(at[L, 'pre']), ('Span', 'Pre')) for L in depths))
