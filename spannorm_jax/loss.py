"""Cross-entropy of real tokens as sums and counts, so that any split of a batch adds up to the same average.

Axes: B rows, T positions, D width, V vocabulary; C chunks of t positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spannorm_jax.sharding import constrain, pieces

CHUNK_LOGITS = 2**24  # above this many logits on a device (64 MiB in float32) a batch is worked off in chunks of at most as many

Head = Callable[[Float[Array, 'B T D']], Float[Array, 'B T V']]


class Sums(NamedTuple):
    """Sums over real tokens (segment > 0): cross-entropy in nats, squared log-partition, and how many tokens there are."""

    nats: Array
    z: Array
    tokens: Array


def loss_sums(
    head: Head, x_BTD: Float[Array, 'B T D'], targets_BT: Int[Array, 'B T'], segments_BT: Int[Array, 'B T'], chunk: int | None = None
) -> Sums:
    """sum of lse(z) - z[target] and of lse(z)^2, z = head(x), over the tokens with segment > 0.

    chunk: tokens whose logits exist at a time on a device; None decides by the number of logits, 0 never splits. The logits of a chunk are
    computed again in the backward pass, so that those of the whole batch never exist.
    """
    B, T = targets_BT.shape
    t = positions_per_chunk(max(1, B // pieces('rows')), T, jax.eval_shape(head, x_BTD).shape[-1], chunk)
    if t >= T:
        return _sums(head, x_BTD, targets_BT, segments_BT)
    C = -(-T // t)

    def split(a):  # along T, because B is what a mesh splits
        a = jnp.pad(a, [(0, 0), (0, C * t - T)] + [(0, 0)] * (a.ndim - 2))
        a = jnp.moveaxis(a.reshape(B, t, C, *a.shape[2:]), 2, 0)  # chunk c: positions c, C + c, ..., some of every shard of T
        return constrain(a, None, 'rows', 'positions', *[None] * (a.ndim - 3))

    one = jax.checkpoint(lambda x, targets, segments: _sums(head, x, targets, segments))

    def add(total, piece):
        return jax.tree.map(jnp.add, total, one(*piece)), None

    chunks = tuple(split(a) for a in (x_BTD, targets_BT, segments_BT))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, *(p[0] for p in chunks)))
    return jax.lax.scan(add, zero, chunks)[0]


def positions_per_chunk(rows: int, length: int, vocab: int, chunk: int | None) -> int:
    """Positions of every row in one chunk; `length` where nothing is split."""
    if chunk == 0 or (chunk is None and rows * length * vocab <= CHUNK_LOGITS):
        return length
    tokens = CHUNK_LOGITS // vocab if chunk is None else chunk
    return min(length, max(1, tokens // rows))


def _sums(head: Head, x_BTD: Array, targets_BT: Array, segments_BT: Array) -> Sums:
    logits_BTV, real_BT = head(x_BTD), segments_BT > 0
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    nats_BT = lse_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return Sums(jnp.where(real_BT, nats_BT, 0).sum(), jnp.where(real_BT, jnp.square(lse_BT), 0).sum(), real_BT.sum(dtype=jnp.float32))
