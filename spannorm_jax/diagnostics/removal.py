"""What the loss says of each block: taken out, silenced, in groups, swapped. Differences are in nats per real token, above 0 = worse.

Two removals, which agree for PreNorm and not where norms act on sums: `skipped` puts the stream past the block; `silenced` sets what
its sublayers add to zero and keeps its norms and skips.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from spannorm_jax import topology
from spannorm_jax.diagnostics.anatomy import Batch, Gates, Params, loss, mean_over
from spannorm_jax.model_config import ModelConfig


def losses(cfg: ModelConfig, params: Params, batch: Batch, gates: Gates) -> Float[Array, ' K']:
    """Mean loss under each of K sets of gates, (K, L) each."""
    return jax.lax.map(lambda g: mean_over(batch, loss(cfg, params, batch, g)), gates)


def one_by_one(cfg: ModelConfig, params: Params, batch: Batch) -> dict[str, Float[Array, ' L']]:
    """`skipped` and `silenced`: loss without block l - loss, for every l."""
    L = cfg.layers
    all_KL, without_KL = jnp.ones((L + 1, L)), jnp.concatenate([jnp.ones((1, L)), 1 - jnp.eye(L)])
    found = {name: losses(cfg, params, batch, g) for name, g in
             (('skipped', Gates(without_KL, all_KL)), ('silenced', Gates(all_KL, without_KL)))}  # fmt: skip
    return {name: x[1:] - x[0] for name, x in found.items()}


def groups(angular_LL: ArrayLike) -> np.ndarray:
    """For n = 1..L-1 the first of the n neighbouring blocks that turn the stream least, from angular distances of L + 1 states."""
    away = np.asarray(angular_LL)
    return np.array([int(np.diagonal(away, n).argmin()) for n in range(1, len(away) - 1)], int)


def in_groups(cfg: ModelConfig, params: Params, batch: Batch, first_K: ArrayLike) -> dict[str, Float[Array, ' K']]:
    """Loss without n = 1..K neighbouring blocks that begin at first_K[n - 1] (see `groups`) - loss, under both removals."""
    first, L = jnp.asarray(first_K)[:, None], cfg.layers
    l, n = jnp.arange(L), jnp.arange(1, len(first) + 1)[:, None]
    kept_KL = jnp.concatenate([jnp.ones((1, L)), 1.0 - ((l >= first) & (l < first + n))])
    found = {name: losses(cfg, params, batch, g) for name, g in
             (('skipped', Gates(kept_KL, jnp.ones_like(kept_KL))), ('silenced', Gates(jnp.ones_like(kept_KL), kept_KL)))}  # fmt: skip
    return {name: x[1:] - x[0] for name, x in found.items()}


def swaps(cfg: ModelConfig, params: Params, batch: Batch) -> Float[Array, ' L-1']:
    """Loss with the weights of blocks l and l + 1 in each other's place - loss; constants of the topology stay where they are.

    NaN where the two are of different kinds (where PostNorm blocks meet PreNorm ones, a dense block beside one of experts).
    """
    kinds = [i for i, (*_, n) in enumerate(topology.runs(cfg)) for _ in range(n)]
    orders = np.tile(np.arange(cfg.layers), (cfg.layers, 1))  # row 0 is as it was
    for l in range(cfg.layers - 1):
        if kinds[l] == kinds[l + 1]:
            orders[l + 1, [l, l + 1]] = l + 1, l

    def swapped(order_L):
        stack, lo = dict(params['stack']), 0
        for i, (*_, n) in enumerate(topology.runs(cfg)):
            stack[f'blocks_{i}'] = jax.tree.map(lambda x, lo=lo, n=n: x[order_L[lo : lo + n] - lo], stack[f'blocks_{i}'])
            lo += n
        return mean_over(batch, loss(cfg, params | {'stack': stack}, batch))

    found = jax.lax.map(swapped, jnp.asarray(orders))
    return jnp.where(jnp.asarray(np.diff(kinds) == 0), found[1:] - found[0], jnp.nan)
