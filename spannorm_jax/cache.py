"""What decoding remembers of earlier positions. Axes as in layers.py; S slots of a row, filled from the first one on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spannorm_jax.model_config import ModelConfig


class Cache(NamedTuple):
    """B rows of S slots. `runs` holds, per run of blocks, what their attention remembers, each (blocks, B, S, ...): keys and values, or
    the latent vector of mla. All rows fill the same slots, so that a shorter prompt begins with padding (segment 0)."""

    used: Int[Array, '']  # slots filled
    next_B: Int[Array, ' B']  # position of each row's next token
    segments_BS: Int[Array, 'B S']
    runs: list[Any]


class Past(NamedTuple):
    """What every block needs to use its part of the cache."""

    start: Int[Array, '']  # slot of the first new token
    mask_BTS: Bool[Array, 'B T S']  # which slots each new token sees


def empty(rows: int, slots: int, runs: list[Any]) -> Cache:
    """A cache in which nothing is remembered yet; `runs` are the shapes of what a row of one token leaves."""
    room = lambda s: jnp.zeros((*s.shape[:2], slots, *s.shape[3:]), s.dtype)  # noqa: E731
    return Cache(jnp.int32(0), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, slots), jnp.int32), jax.tree.map(room, runs))


def advance(
    cfg: ModelConfig, cache: Cache, T: int, segments_BT: Int[Array, 'B T'] | None, positions_BT: Int[Array, 'B T'] | None
) -> tuple[Int[Array, 'B T'], Int[Array, 'B T'], Past, Cache]:
    """Segments and positions of T new tokens, which go on where the row stands unless given; who sees whom; the cache after them.

    Without document_mask a row is one document, but for its padding.
    """
    B, S = cache.segments_BS.shape
    t_T = jnp.arange(T)
    if segments_BT is None:
        last_B = jax.lax.dynamic_index_in_dim(cache.segments_BS, jnp.maximum(cache.used - 1, 0), 1, keepdims=False)
        segments_BT = jnp.broadcast_to(jnp.where(cache.used > 0, last_B, 1)[:, None], (B, T))
    if positions_BT is None:
        positions_BT = cache.next_B[:, None] + t_T
    if not cfg.document_mask:
        segments_BT, positions_BT = jnp.sign(segments_BT), jnp.broadcast_to(cache.used + t_T, (B, T))
    segments_BS = jax.lax.dynamic_update_slice(cache.segments_BS, segments_BT.astype(jnp.int32), (0, cache.used))
    earlier_TS = jnp.arange(S) <= (cache.used + t_T)[:, None]
    past = Past(cache.used, earlier_TS & (segments_BS[:, None] == segments_BT[:, :, None]))
    return segments_BT, positions_BT, past, cache._replace(used=cache.used + T, next_B=positions_BT[:, -1] + 1, segments_BS=segments_BS)


def extend(held: dict[str, Array] | None, new: dict[str, Array], start: Int[Array, '']) -> dict[str, Array]:
    """What one block remembers, (B, S, ...) each, with what T new tokens leave, (B, T, ...), from slot `start` on."""
    if held is None:
        return new
    return {k: jax.lax.dynamic_update_slice_in_dim(held[k], new[k], start, axis=1) for k in new}


def remember(runs: list[Any], new: list[Any], start: Int[Array, '']) -> list[Any]:
    """The same for all blocks of all runs at once: one write in place."""
    write = lambda held, x: jax.lax.dynamic_update_slice_in_dim(held, x, start, axis=2)  # noqa: E731
    return [n if h is None else jax.tree.map(write, h, n) for h, n in zip(runs, new, strict=True)]
