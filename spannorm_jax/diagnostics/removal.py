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


def rises(cfg: ModelConfig, params: Params, batch: Batch, kept_KL: ArrayLike) -> dict[str, Float[Array, ' K']]:
    """`skipped` and `silenced`: loss with only those blocks left that a row of kept_KL has 1 for - loss, for each of K rows.

    Both removals go through one loop over 2 K + 1 sets of gates, so that the model is compiled once.
    """
    kept_KL = jnp.asarray(kept_KL, jnp.float32)
    K, whole_KL, whole_1L = len(kept_KL), jnp.ones_like(kept_KL), jnp.ones((1, cfg.layers))
    gates = Gates(jnp.concatenate([whole_1L, kept_KL, whole_KL]), jnp.concatenate([whole_1L, whole_KL, kept_KL]))
    found = jax.lax.map(lambda g: mean_over(batch, loss(cfg, params, batch, g)), gates)
    return {'skipped': found[1 : K + 1] - found[0], 'silenced': found[K + 1 :] - found[0]}


def one_by_one(cfg: ModelConfig, params: Params, batch: Batch) -> dict[str, Float[Array, ' L']]:
    """`skipped` and `silenced`: loss without block l - loss, for every l."""
    return rises(cfg, params, batch, 1 - jnp.eye(cfg.layers))


def groups(angular_LL: ArrayLike) -> np.ndarray:
    """For n = 1..L-1 the first of the n neighbouring blocks that turn the stream least, from angular distances of L + 1 states."""
    away = np.asarray(angular_LL)
    return np.array([int(np.diagonal(away, n).argmin()) for n in range(1, len(away) - 1)], int)


def without_groups(first_K: ArrayLike, layers: int) -> Float[Array, 'K L']:
    """0 for the n = 1..K neighbouring blocks that begin at first_K[n - 1], 1 for all others."""
    first_K1, l_L = jnp.asarray(first_K)[:, None], jnp.arange(layers)
    n_K1 = jnp.arange(1, len(first_K1) + 1)[:, None]
    return 1.0 - ((l_L >= first_K1) & (l_L < first_K1 + n_K1))


def in_groups(cfg: ModelConfig, params: Params, batch: Batch, first_K: ArrayLike) -> dict[str, Float[Array, ' K']]:
    """Loss without n = 1..K neighbouring blocks that begin at first_K[n - 1] (see `groups`) - loss, under both removals."""
    return rises(cfg, params, batch, without_groups(first_K, cfg.layers))


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
