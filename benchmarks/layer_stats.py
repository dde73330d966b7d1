"""Cost of the per-layer statistics of a training step.

    python benchmarks/layer_stats.py [--topology span] [--layers 24] [--width 64] [--seq 128] [--batch 8] [--every 10] [--rounds 12]
        [--clock cpu]

Compiles the step with and without them, runs the two in turn on one device, and prints one JSON line: medians in ms, the overhead of a
run that collects them every `--every` steps, with the lowest and highest of the rounds, and whether the step without them is, text for
text, the program that is compiled when run.stats_every is 0. `--clock cpu` counts the process's own processor time, which other
programs on the machine do not stretch; on one core (`taskset -c 0`) it is what an idle machine would take.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from spannorm_jax import sharding
from spannorm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, RunConfig, edit
from spannorm_jax.program import Program, program
from spannorm_jax.step import init_state

CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--topology', default='span')
    for name, default in (('layers', 24), ('width', 64), ('seq', 128), ('batch', 8), ('every', 10), ('rounds', 12)):
        p.add_argument(f'--{name}', type=int, default=default)
    p.add_argument('--clock', choices=CLOCKS, default='wall')
    a = p.parse_args()
    cfg = Config(
        model=ModelConfig(topology=a.topology, layers=a.layers, width=a.width, heads=4),
        data=DataConfig(seq=a.seq, batch=a.batch),
        mesh=MeshConfig(devices=1),
        run=RunConfig(stats_every=a.every),
    )
    mesh = sharding.make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        made = program(cfg, mesh)
        lowered = {stats: made.step(stats).lower(made.abstract, made.batch, made.peaks) for stats in (False, True)}
        off = program(edit(cfg, {'run.stats_every': 0}), mesh)
        same = off.step().lower(off.abstract, off.batch, off.peaks).as_text() == lowered[False].as_text()
        ms = measure({stats: low.compile() for stats, low in lowered.items()}, made, a.rounds, CLOCKS[a.clock])
    plain, with_stats = (np.array(ms[stats]) for stats in (False, True))
    share = (with_stats - plain) / (a.every * plain + with_stats - plain)
    print(
        json.dumps(
            {
                'topology': a.topology, 'layers': a.layers, 'width': a.width, 'tokens': a.seq * a.batch,
                'clock': a.clock,
                'plain_ms': round(statistics.median(plain), 2), 'with_stats_ms': round(statistics.median(with_stats), 2),
                'overhead_percent': round(100 * float(np.median(share)), 2),
                'range_percent': [round(100 * float(v), 2) for v in (share.min(), share.max())], 'off_is_the_same_program': same,
            }
        )
    )  # fmt: skip


def measure(steps: dict[bool, jax.stages.Compiled], made: Program, rounds: int, clock: Callable[[], float], repeats: int = 3):
    """Milliseconds of each step in every round, the mean of `repeats`; which goes first changes from round to round."""
    rng, shape = np.random.default_rng(0), (made.cfg.data.batch, made.cfg.data.seq)
    tokens = rng.integers(0, made.cfg.model.vocab, (2, *shape), dtype=np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = {'tokens': tokens[0], 'targets': tokens[1], 'segments': np.ones(shape, np.int32), 'positions': positions}
    placed = sharding.put_batch(batch, made.mesh)
    rates = made.rates()
    state = init_state(made.cfg, made.lm, made.optimizer, made.places)
    ms: dict[bool, list[float]] = {False: [], True: []}
    for i in range(rounds + 1):
        for stats in (False, True) if i % 2 else (True, False):
            begun = clock()
            for _ in range(repeats):
                state, metrics = steps[stats](state, placed, rates)
                jax.device_get(metrics)  # as the training loop does
            if i:  # the first round warms up
                ms[stats].append(1000 * (clock() - begun) / repeats)
    return ms


if __name__ == '__main__':
    main()
