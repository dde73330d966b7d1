"""The map of stability: topology x learning rate x depth, with the frontier of divergence drawn.

Cost at nano: 54 runs, one seed each.
"""

import math

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import heat, panels
from spannorm_jax.stats import value

s = sibling('_shared')
TOPOLOGIES = ('pre', 'post', 'span')
QUESTION = 'At which rates does each topology diverge, and how does that move with depth?'
CLAIM = "Span keeps Pre's stable rates as depth grows; Post's fall."
CHIPS = 'v5e:16x16'
CURVES = ()


def runs(scale):
    depths = s.by(scale, (1, 2), (4, 16, 32), (16, 64, 256), (16, 64, 256))
    rates = s.by(scale, (2e-3, 8e-3), (*s.GRID, 1.6e-2, s.HOT), (*s.GRID, 1.6e-2, s.HOT), (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3))
    cfg = s.base(scale)
    axes = {'model.topology': TOPOLOGIES, 'model.layers': depths, s.RATE: rates, 'run.seed': (0,)}
    return product(cfg, axes) | s.control(cfg, scale)


def figure(rows):
    rows = s.without_control(rows)
    fig, axes = panels(*TOPOLOGIES)
    depths, rates = (sorted({row[f] for row in rows}) for f in ('model.layers', s.RATE))
    seen = [v for row in rows if math.isfinite(v := value(row, 'eval/loss'))]
    limits = {'vmin': min(seen), 'vmax': min(max(seen), min(seen) + 1.0)} if seen else {}
    for ax, topology in zip(axes, TOPOLOGIES, strict=True):
        at = {(r['model.layers'], r[s.RATE]): value(r, 'eval/loss') for r in rows if r['model.topology'] == topology}
        matrix = [[v if math.isfinite(v := at[L, rate]) else math.nan for L in depths] for rate in rates]
        heat(ax, matrix, depths, [f'{rate:g}' for rate in rates], 'validation loss; grey: diverged', **limits)
        stable = [s.edge([r for r in rows if r['model.topology'] == topology and r['model.layers'] == L])[0] for L in depths]
        ax.step(
            range(-1, len(depths) + 1), padded([rates.index(e) + 0.5 if e else -0.5 for e in stable]), where='mid', color='#d9301a', lw=2
        )
        ax.set(xlabel='layers', ylabel='peak learning rate', xlim=(-0.5, len(depths) - 0.5), ylim=(-0.5, len(rates) - 0.5))
    return fig


def padded(y):
    return [y[0], *y, y[-1]]


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = s.group(s.without_control(rows), 'model.topology', 'model.layers')
    shallow, deep = (pick(L for _, L in at) for pick in (min, max))
    edges = {t: [s.edge(at[t, L])[0] or 0.0 for L in (shallow, deep)] for t in TOPOLOGIES}
    text = ', '.join(f'{t}: {a:g} at {shallow} layers, {b:g} at {deep}' for t, (a, b) in edges.items())
    if edges['post'][1] >= edges['pre'][1]:
        return s.Verdict(
            'cannot tell', f'Post is as stable as Pre at {deep} layers, so that nothing separates them; highest stable rates: {text}'
        )
    return s.judged(edges['span'][1] >= edges['pre'][1], f'highest stable rates: {text}')
