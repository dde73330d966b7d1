"""T1: the gradient law, eq. 11. Is Span's gradient the square root of Post's, at initialisation and in training?

Cost at nano: the theory at initialisation (5 seeds, to 512 layers), 12 training runs to 64 layers, and a pair of 128.
"""

import math

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import color, heat, panels

s = sibling('_shared')
A, Z, KEY = 'layer/sigma_attn', 'layer/sigma_ffn', 'layer/grad_rms/write'
QUESTION = "Is Span's gradient over depth the square root of Post's, and 500 times larger at 128 layers?"
CLAIM = 'sigma^-L for Span against sigma^-2L for Post: 1.05^128, about 500 times. (If Var(F) = c/L, the ratio tends to e^(c/2) instead.)'
CHIPS = 'v5e:16x16'
CURVES = (A, Z, KEY)
measure = s.theory_of('T1')


def runs(scale):
    *some, deep = s.by(scale, (2, 3), (16, 64, 128), (16, 64, 128), (16, 64, 128))
    cfg, two = s.base(scale), {'model.topology': ('post', 'span')}
    found = s.at_init(scale) | product(cfg, two | {'model.layers': tuple(some), 'run.seed': s.seeds(scale)})
    return found | product(cfg, two | {'model.layers': (deep,), 'run.seed': (0,)})


def in_training(rows):
    """(layers, step) -> ln(g_1 / g_L) of Span and of Post, a pair for each seed."""
    found = {}
    trained = [row for row in rows if row['name'] != 'theory']
    for (L, _), pair in s.group(trained, 'model.layers', 'run.seed').items():
        by_topology = {row['model.topology']: dict(map(tuple, row['curves'][KEY])) for row in pair}
        for step in sorted(set(by_topology['span']) & set(by_topology['post'])):
            ends = [(by_topology[t][step][0], by_topology[t][step][-1]) for t in ('span', 'post')]
            if all(a and b for a, b in ends):
                found.setdefault((L, step), []).append(tuple(math.log(a / b) for a, b in ends))
    return found


def figure(rows):
    deep = max(row['model.layers'] for row in rows if row['name'] != 'theory')
    shown = [(t, key) for t in ('post', 'span') for key in (A, Z)]
    fig, (init, tracked, *maps) = panels(
        'at initialisation',
        'in training, each step and seed',
        *(f'{t}, {key.split("_")[-1]} sums, {deep} layers' for t, key in shown),
        columns=3,
    )
    cells = [c for c in s.tables(rows)['cells'] if c['activation'] == 'swiglu']
    for (t, scaled), own in s.group(cells, 'topology', 'scale_init').items():
        style = '-' if scaled != 'none' else ':'
        own = [(c['layers'], c['ln_g1_over_gL']['mean']) for c in own]
        init.plot(*zip(*own, strict=True), 'o', ls=style, ms=3, color=color(t, []), label=t + (', Scale Init' if style == '-' else ''))
    init.set(xscale='log', xlabel='layers', ylabel='ln(g_1 / g_L)')
    init.set_yscale('symlog', linthresh=1)
    init.legend(frameon=False, fontsize=7)
    pairs = [pair for own in in_training(rows).values() for pair in own]
    if pairs:
        tracked.plot([p / 2 for _, p in pairs], [a for a, _ in pairs], '.', color='#1f5fa8')
        ends = [min(p / 2 for _, p in pairs), max(p / 2 for _, p in pairs)]
        tracked.plot(ends, ends, color='#9aa5b1', lw=1)
    tracked.set(xlabel='half of ln(g_1 / g_L) of Post', ylabel='ln(g_1 / g_L) of Span')
    for ax, (t, key) in zip(maps, shown, strict=True):
        curve = next(row for row in rows if row['name'] != 'theory' and (row['model.topology'], row['model.layers']) == (t, deep))[
            'curves'
        ][key]
        matrix = [[v[l] if v[l] is not None else math.nan for _, v in curve] for l in range(deep)]
        heat(ax, matrix, [step for step, _ in curve], range(1, deep + 1), 'sigma')
        ax.set(xlabel='step', ylabel='block')
    return fig


def table(rows):
    return s.lines(s.tables(rows)['root'])


def verdict(rows):
    root = [row for row in s.tables(rows)['root'] if row['activation'] == 'swiglu']
    said = {word: sum(row['root'] == word for row in root) for word in ('holds', 'fails', 'cannot tell')}
    large = [row for row in root if row['layers'] == max(r['layers'] for r in root)]
    text = f'at initialisation the root law holds in {said["holds"]} of {len(root)} cells, fails in {said["fails"]}'
    text += ''.join(f'; {r["layers"]} layers, {r["scale_init"]}: ln of the gain {s.text(r["ln_gain_measured"])}' for r in large)
    five = [row['factor_500'] for row in root if row['factor_500']]
    apart = [abs(a - p / 2) for own in in_training(rows).values() for a, p in own]
    if apart:
        text += f'; in training Span is {sum(apart) / len(apart):.2f} nats from half of Post, mean over {len(apart)} steps and seeds'
    if said['fails'] or 'fails' in five:
        return s.judged(False, text + (f'; factor 500 at 128 layers: {", ".join(five)}' if five else ''))
    return s.Verdict('cannot tell' if said['cannot tell'] else 'reproduced', text)
