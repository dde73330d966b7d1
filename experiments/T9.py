"""T9: does a learned scale and offset do in place of the norm that ends a block? Span at 8 to 1024 layers, either way.

Cost at nano: 12 runs beside those of figure 11; two of them have 1024 layers, half the steps and one seed. What leaves the last block
unnormed is normed before the head, as in PreNorm.
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import LINES, against, color, finish, over_steps, panels

s, fig11 = sibling('_shared'), sibling('fig11')
END, DEPTH = 'model.block_end', 'model.layers'
QUESTION = 'Does Span need the norm at the end of a block, or do a learned scale and offset do; and does it train at 1024 layers?'
CLAIM = 'Ours, to a question of the review: the norm is needed, since without it the stream grows with depth, and 1024 layers train.'
CHIPS = 'v5e:16x16'
CURVES = ('train/loss',)


def runs(scale):
    deep = s.edit(s.narrow(scale), {DEPTH: s.by(scale, 4, 1024, 1024, 1024), 'run.steps': s.by(scale, 12, 100, 1000, 5000)})
    found = {name: cfg for name, cfg in fig11.runs(scale).items() if cfg.model.topology == 'span'}
    found |= product(deep, {'model.topology': ('span',), DEPTH: (deep.model.layers,), 'run.seed': s.seeds(scale)[:1]})
    found |= {f'block_end=affine {name}': s.edit(cfg, {END: 'affine', 'model.final_norm': True}) for name, cfg in found.items()}
    return found | s.control(s.narrow(scale), scale)


def figure(rows):
    fig, (left, right) = panels('test loss', 'the deepest pair', width=5)
    rows = s.without_control(rows)
    deepest = max(row[DEPTH] for row in rows)
    for style, (end, own) in zip(LINES, s.group(rows, END).items(), strict=False):
        against(left, [row for row in own if row[DEPTH] < deepest], DEPTH, 'test/loss', f'ends in {end}', color('span', []), style)
        over_steps(right, [row for row in own if row[DEPTH] == deepest], 'train/loss', f'{deepest} layers, {end}', color('span', []), style)
    left.set_xscale('log', base=2)
    finish([left], 'layers', 'nats per token, 95% interval')
    finish([right], 'step', 'training loss (nats per token)')
    return fig


def verdict(rows):
    """The norm is needed where, at some depth, the model without it fails or is worse by the whole interval, and nowhere better; and
    SpanNorm trains at the largest depth."""
    if not s.control_failed(rows):
        return s.UNSEPARATED
    found, parts = s.group(s.without_control(rows), DEPTH, END), []
    depths = sorted({depth for depth, _ in found})
    for depth in depths[:-1]:
        with_norm, without = found[depth, 'norm'], found[depth, 'affine']
        if len(with_norm) > 1:
            parts.append(s.lower(with_norm, without, (f'{depth} layers: norm', 'affine')))
    ends = {end: found[depths[-1], end][0] for end in ('norm', 'affine')}
    best = min(s.value(row, 'eval/loss') for row in ends.values())
    fails = {end: row['status'] == 'diverged' or s.fails(row, best) for end, row in ends.items()}
    text = '; '.join(
        [*(v.reason for v in parts), *(f'{depths[-1]} layers: {end} {"fails" if bad else "trains"}' for end, bad in fails.items())]
    )
    states = {v.status for v in parts} | ({'reproduced'} if fails['affine'] else set())
    if fails['norm'] or 'not reproduced' in states:
        return s.judged(False, text)
    return s.Verdict('reproduced' if 'reproduced' in states else 'cannot tell', text)
