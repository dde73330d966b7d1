"""Figure 13: speed of Span against Pre, in one process, their steps taken in turn.

Cost at nano: a minute. Paper: 5B, tokens per second identical.
"""

import time

import jax
import numpy as np

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, panels
from spannorm_jax.program import program
from spannorm_jax.sharding import make_mesh
from spannorm_jax.stats import t_interval
from spannorm_jax.step import init_state

s = sibling('_shared')
TWO = ('span', 'pre')
QUESTION = 'Does Span cost more time per step than Pre?'
CLAIM = 'Tokens per second are identical.'
HERE = True
CHIPS = 'v5e:16x16'
CURVES = ()
NEAR = 0.03  # of the ratio to 1
ROUNDS = {'smoke': 6, 'nano': 40, 'gpu': 100, 'paper': 100}


def runs(scale):
    return {'pair': s.edit(s.base(scale), {'run.steps': 0, 'optim.accumulate': 1, 'run.seed': ROUNDS[scale]})}


def measure(cfg, folder):
    """ms of each step of both, taken in turn in an order that changes, after two that are not counted."""
    mesh, ms = make_mesh(cfg.mesh), {t: [] for t in TWO}
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab - 1, (cfg.data.batch, cfg.data.seq), dtype=np.int32)
    ones = np.ones_like(tokens)
    batch = {'tokens': tokens, 'targets': tokens, 'segments': ones, 'positions': np.cumsum(ones, 1, dtype=np.int32) - 1}
    with jax.set_mesh(mesh):
        made = {t: program(s.edit(cfg, {'model.topology': t, 'run.steps': 1000}), mesh) for t in TWO}
        batch = jax.device_put(batch, {k: v.sharding for k, v in made['pre'].batch.items()})
        step = {t: p.step().lower(p.abstract, p.batch, p.peaks).compile() for t, p in made.items()}
        rates = made['pre'].rates()
        state = {t: init_state(p.cfg, p.lm, p.optimizer, p.places) for t, p in made.items()}
        for i in range(2 + cfg.run.seed):
            for t in TWO[:: 1 if i % 2 else -1]:
                begun = time.perf_counter()
                state[t], metrics = step[t](state[t], batch, rates)
                jax.block_until_ready(metrics)
                ms[t].append(1000 * (time.perf_counter() - begun))
    return {f'step_ms/{t}': ms[t][2:] for t in TWO}


def ratio(rows):
    """Interval of the ratio of the times of neighbouring steps, Span over Pre; the logarithm is averaged."""
    (row,) = rows
    return t_interval(np.log(np.array(row['step_ms/span']) / np.array(row['step_ms/pre'])))


def figure(rows):
    fig, (ax,) = panels('one step after the other', width=6)
    for t in TWO:
        ax.plot(rows[0][f'step_ms/{t}'], 'o-', ms=3, lw=0.8, color=color(t, []), label=t)
    ax.legend(frameon=False, fontsize=8)
    ax.set(xlabel='round', ylabel='ms per step')
    return fig


def verdict(rows):
    found = ratio(rows)
    mean, low, high = (float(np.exp(v)) for v in found[:3])
    text = f'time per step, Span over Pre: {mean:.3f} [{low:.3f}, {high:.3f}], {found.n} pairs (identical: within {NEAR:.0%})'
    inside = 1 - NEAR < low and high < 1 + NEAR
    return s.Verdict('reproduced' if inside else 'not reproduced' if low > 1 + NEAR or high < 1 - NEAR else 'cannot tell', text)
