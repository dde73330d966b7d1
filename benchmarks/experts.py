"""Forward and backward of the routed experts on this device: `jax.lax.ragged_dot` against equal dense products of tiles, in turn.

python benchmarks/experts.py [--experts 8] [--repeats 5]
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

from spannorm_jax import ModelConfig, dispatch
from spannorm_jax.moe import expert_ffn


def step(cfg, tile, tokens=1024):
    """A compiled gradient over `tokens` tokens that choose at random."""
    E, K, D, F = cfg.experts, cfg.experts_per_token, cfg.width, cfg.resolved_expert_ffn
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (tokens, D))
    expert = jax.random.uniform(keys[1], (tokens, E)).argsort(-1)[:, :K].astype(jnp.int32)
    shapes = {'gate': (E, D, F), 'up': (E, D, F), 'down': (E, F, D)}
    w = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys[2:], shapes.items(), strict=True)}
    own = dispatch.tile_for
    dispatch.tile_for = (lambda rows, E: tile) if tile else own

    def loss(x, w):
        return jnp.square(dispatch.local(functools.partial(expert_ffn, cfg, w, None), x, expert, jnp.ones((tokens, K)), E)).sum()

    run = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile()
    dispatch.tile_for = own
    return lambda: jax.block_until_ready(run(x, w))


def main():
    args = argparse.ArgumentParser()
    args.add_argument('--experts', type=int, default=8)
    args.add_argument('--repeats', type=int, default=5)
    args = args.parse_args()
    cfg = ModelConfig(width=128, heads=4, experts=args.experts, experts_per_token=2, expert_ffn=176)
    dense = ModelConfig(width=128, heads=4, experts=2, experts_per_token=2, expert_ffn=176)
    cases = {'ragged_dot': step(cfg, 1), 'tiles': step(cfg, None), 'tiles, 2 experts that see every token': step(dense, None)}
    seconds = {name: [] for name in cases}
    for _ in range(args.repeats + 1):
        for name, run in cases.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    for name, s in seconds.items():
        print(f'{name:40} {1000 * statistics.median(s[1:]):8.1f} ms  ({1000 * min(s[1:]):.1f} to {1000 * max(s[1:]):.1f})')


if __name__ == '__main__':
    main()
