"""Cross-entropy of real tokens as sums and counts, so that any split of a batch adds up to the same average.

Axes: B rows, T positions, D width, V vocabulary; C chunks of t positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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

    one = jax.checkpoint(lambda x, targets, segments: _sums(head, x, targets, segments))

    def add(total, piece):
        return jax.tree.map(jnp.add, total, one(*piece)), None

    chunks = tuple(split(a, t) for a in (x_BTD, targets_BT, segments_BT))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, *(p[0] for p in chunks)))
    return jax.lax.scan(add, zero, chunks)[0]


def token_scores(
    head: Head, x_BTD: Float[Array, 'B T D'], targets_BT: Int[Array, 'B T'], chunk: int | None = None
) -> tuple[Float[Array, 'B T'], Bool[Array, 'B T']]:
    """Of each target its cross-entropy lse(z) - z[target] in nats, z = head(x), and whether no token is more likely. chunk: as above."""
    B, T = targets_BT.shape
    t = positions_per_chunk(max(1, B // pieces('rows')), T, jax.eval_shape(head, x_BTD).shape[-1], chunk)

    def one(x_BtD, targets_Bt):
        logits_BtV = head(x_BtD)
        nats_Bt, _ = _nats(logits_BtV, targets_Bt)
        return nats_Bt, logits_BtV.argmax(-1) == targets_Bt

    if t >= T:
        return one(x_BTD, targets_BT)
    found = jax.lax.map(lambda piece: one(*piece), (split(x_BTD, t), split(targets_BT, t)))
    return jax.tree.map(lambda a_CBt: jnp.moveaxis(a_CBt, 0, 2).reshape(B, -1)[:, :T], found)


def split(a_BT: Array, t: int) -> Array:
    """(B, T, ...) -> (C, B, t, ...), padded. Along T, because B is what a mesh splits."""
    B, T, *rest = a_BT.shape
    C = -(-T // t)
    a = jnp.pad(a_BT, [(0, 0), (0, C * t - T)] + [(0, 0)] * len(rest))
    a = jnp.moveaxis(a.reshape(B, t, C, *rest), 2, 0)  # chunk c: positions c, C + c, ..., some of every shard of T
    return constrain(a, None, 'rows', 'positions', *[None] * len(rest))


def positions_per_chunk(rows: int, length: int, vocab: int, chunk: int | None) -> int:
    """Positions of every row in one chunk; `length` where nothing is split."""
    if chunk == 0 or (chunk is None and rows * length * vocab <= CHUNK_LOGITS):
        return length
    tokens = CHUNK_LOGITS // vocab if chunk is None else chunk
    return min(length, max(1, tokens // rows))


def _sums(head: Head, x_BTD: Array, targets_BT: Array, segments_BT: Array) -> Sums:
    logits_BTV, real_BT = head(x_BTD), segments_BT > 0
    nats_BT, lse_BT = _nats(logits_BTV, targets_BT)
    return Sums(jnp.where(real_BT, nats_BT, 0).sum(), jnp.where(real_BT, jnp.square(lse_BT), 0).sum(), real_BT.sum(dtype=jnp.float32))


def _nats(logits_BTV: Array, targets_BT: Array) -> tuple[Array, Array]:
    """lse(z) - z[target], and lse(z)."""
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    return lse_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0], lse_BT
