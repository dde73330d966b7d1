"""Compile time of a training step against depth, and against scan or no scan.

    python benchmarks/depth.py [--topology span] [--layers 8 64 512] [--repeats 3] [--unrolled 8 24]

Times tracing, lowering and XLA's compilation of the whole step (loss, gradient, AdamW) without a compilation cache, depths in turn,
and prints one JSON line: medians in seconds and the ratio of the deepest to the shallowest.
"""

import argparse
import json
import statistics
import time

import jax

from spannorm_jax import sharding
from spannorm_jax.config import Config, ModelConfig
from spannorm_jax.model import LM, infos
from spannorm_jax.optim import make_optimizer
from spannorm_jax.step import abstract_state, make_step


def compile_seconds(cfg: Config) -> float:
    jax.clear_caches()
    begun = time.perf_counter()
    lm, tree = LM(cfg.model), infos(cfg.model)
    optimizer = make_optimizer(cfg, tree)
    batch = sharding.abstract_batch((cfg.data.batch, cfg.data.seq), sharding.make_mesh(cfg.mesh))
    jax.jit(make_step(cfg, lm, optimizer, tree), donate_argnums=0).lower(abstract_state(tree, optimizer), batch).compile()
    return time.perf_counter() - begun


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--topology', default='span')
    p.add_argument('--width', type=int, default=64)
    p.add_argument('--layers', type=int, nargs='+', default=[8, 64, 512])
    p.add_argument('--unrolled', type=int, nargs='*', default=[])
    p.add_argument('--repeats', type=int, default=3)
    a = p.parse_args()
    cases = [(n, 1) for n in a.layers] + [(n, 0) for n in a.unrolled]
    seconds = {case: [] for case in cases}
    compile_seconds(config(a, 1, 1))  # the first compilation of a process also loads the compiler
    for _ in range(a.repeats):
        for case in cases:
            seconds[case].append(compile_seconds(config(a, *case)))
    median = {f'{n} {"scanned" if unroll else "unrolled"}': round(statistics.median(s), 2) for (n, unroll), s in seconds.items()}
    ratio = statistics.median(seconds[a.layers[-1], 1]) / statistics.median(seconds[a.layers[0], 1])
    print(json.dumps({'topology': a.topology, 'width': a.width, 'compile_s': median, 'deepest_over_shallowest': round(ratio, 3)}))


def config(a: argparse.Namespace, layers: int, unroll: int) -> Config:
    return Config(model=ModelConfig(topology=a.topology, layers=layers, width=a.width, heads=4, scan_unroll=unroll))


if __name__ == '__main__':
    main()
