"""T12: does the spanning skip help elsewhere? A deep denoiser that is not causal, and one block applied again and again, Post and Span.

Cost at nano: `measure` trains both models of each run, for ten times the warm-up; the run itself has no steps.
"""

from spannorm_jax.data import open_data
from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import against, color, finish, panels

s, elsewhere = sibling('_shared'), sibling('_elsewhere')
TASKS = elsewhere.TASKS
QUESTION = 'Does the skip that spans the block help in models that are no language model of untied blocks?'
CLAIM = "The review's inference: it should help a deep denoiser and a recurrent stack as well."
CHIPS = 'v5e:16x16'
CURVES = ()


def runs(scale):
    cfg = s.edit(s.base(scale), {'run.steps': 0, 'optim.accumulate': 1})
    return product(cfg, {'model.topology': ('post', 'span'), s.RATE: s.rates(scale), 'run.seed': s.seeds(scale)}) | s.control(cfg, scale)


def measure(cfg, folder):
    """Per task: held-out losses after training, null where they are not finite, and the gradient's norm in the first step."""
    corpus = open_data(cfg.data)
    return {f'{task}/{k}': v for task in TASKS for k, v in elsewhere.train(cfg, task, corpus).items()}


def of_task(rows, task):
    """The rows as those of one task: diverged where its loss is not finite."""
    new = [row | {f'{g}/loss': row.get(f'{task}/{g}/loss') for g in ('eval', 'test')} for row in rows]
    return [row if row['test/loss'] is not None else row | {'status': 'diverged'} for row in new]


def figure(rows):
    fig, axes = panels(*TASKS.values(), width=5)
    for ax, task in zip(axes, TASKS, strict=True):
        for t, own in s.group(s.without_control(of_task(rows, task)), 'model.topology').items():
            against(ax, own, s.RATE, 'test/loss', t, color(t, []))
        ax.set_xscale('log')
    finish(axes, 'peak learning rate', 'test loss (nats per byte that counts)')
    return fig


def table(rows):
    lines = []
    for task in TASKS:
        for t, own in s.group(s.without_control(of_task(rows, task)), 'model.topology').items():
            best, lost = s.at_best(own), sum(row['status'] == 'diverged' for row in own)
            found = (
                {'best rate': best[0][s.RATE], 'test loss': s.interval(best, 'test/loss')}
                if best
                else {'best rate': None, 'test loss': None}
            )
            lines.append({'model': task, 'topology': t} | found | {'runs': len(own), 'diverged': lost})
    return lines


def verdict(rows):
    found = []
    for task in TASKS:
        own = of_task(rows, task)
        if not s.control_failed(own):
            return s.UNSEPARATED
        best = {t: s.at_best(arm) for t, arm in s.group(s.without_control(own), 'model.topology').items()}
        found.append(s.lower(best['span'], best['post'], (f'Span ({task})', f'Post ({task})')))
    return s.all_of(*found)
