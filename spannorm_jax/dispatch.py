"""Tokens to their experts and back, on one device or over the `expert` axis of the mesh; with static shapes, and without scatters.

Axes: N tokens, K experts per token, E experts (of this device), D width, M slots, S copies of a token, P devices along `expert`.
The number E in the place of an expert means none.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from spannorm_jax.model_config import KEPT
from spannorm_jax.sharding import target


class Routes(NamedTuple):
    """Which token goes to which slot, seen from both ends, so that each direction, and its gradient, is a gather."""

    source_M: Int[Array, ' M']  # token of each slot
    taken_M: Bool[Array, ' M']
    slot_NS: Int[Array, 'N S']  # slot of each copy of a token
    sent_NS: Bool[Array, 'N S']


@jax.custom_vjp
def spread(x_ND: Float[Array, 'N D'], routes: Routes) -> Float[Array, 'M D']:
    """The token of each slot; zeros where a slot is empty. Its transpose is `collect`."""
    return jnp.where(routes.taken_M[:, None], x_ND[routes.source_M], 0)


@jax.custom_vjp
def collect(y_MD: Float[Array, 'M D'], routes: Routes) -> Float[Array, 'N D']:
    """The sum over each token's copies, in float32 or wider. Its transpose is `spread`."""
    copies_NSD = jnp.where(routes.sent_NS[..., None], y_MD[jnp.where(routes.sent_NS, routes.slot_NS, 0)], 0)
    return copies_NSD.sum(1, dtype=jnp.promote_types(y_MD.dtype, jnp.float32))


# The empty array remembers a dtype.
spread.defvjp(lambda x, r: (spread(x, r), r), lambda r, g: (collect(g, r).astype(g.dtype), None))
collect.defvjp(lambda y, r: (collect(y, r), (r, jnp.zeros(0, y.dtype))), lambda res, g: (spread(g.astype(res[1].dtype), res[0]), None))


class Groups(NamedTuple):
    """Rows that belong to the experts one after another; the rows of each begin at a multiple of `tile`."""

    size_E: Int[Array, ' E']  # multiples of tile
    expert_M: Int[Array, ' M']  # expert of each row; of those behind the last group, any
    tile: int


def by_expert(expert_NK: Int[Array, 'N K'], E: int, slots: int | None = None) -> tuple[Routes, Groups, Int[Array, ' M']]:
    """Routes that put the choices of an expert side by side, in order of tokens; these groups; and the choice in each slot.

    slots: how many places for choices are enough; None is one for each choice.
    """
    N, K = expert_NK.shape
    room = N * K if slots is None else min(slots, N * K)
    tile = tile_for(room, E)
    M = room if tile == 1 else (room // tile + E) * tile
    flat = expert_NK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    count_E = (flat[:, None] == jnp.arange(E)).sum(0, dtype=jnp.int32)
    size_E = -(-count_E // tile) * tile
    first_E, start_E = jnp.cumsum(count_E) - count_E, jnp.cumsum(size_E) - size_E  # in order, and in slots

    expert_M = jnp.minimum(jnp.searchsorted(jnp.cumsum(size_E), jnp.arange(M), side='right'), E - 1)
    rank_M = jnp.arange(M) - start_E[expert_M]
    taken_M = rank_M < count_E[expert_M]
    choice_M = order[jnp.where(taken_M, first_E[expert_M] + rank_M, 0)]
    own = jnp.minimum(flat, E - 1)
    slot = (start_E[own] + jnp.argsort(order) - first_E[own]).reshape(N, K)
    routes = Routes(choice_M // K, taken_M, slot, (expert_NK < E) & (slot < M))
    return routes, Groups(size_E, expert_M, tile), choice_M


def tile_for(rows: int, E: int) -> int:
    """Rows of one product. XLA:CPU would multiply every row with every expert; there a group is a number of equal dense products."""
    if target()[0] != 'cpu':
        return 1
    return min(128, max(8, 2 ** (rows // (2 * E)).bit_length() // 2))


def grouped_dot(x_MD: Float[Array, 'M D'], w_EDF: Float[Array, 'E D F'], groups: Groups) -> Float[Array, 'M F']:
    """Each row times the matrix of its expert. Rows behind the last group are not meant to be read."""
    if groups.tile == 1:
        return checkpoint_name(jax.lax.ragged_dot(x_MD, w_EDF, groups.size_E), KEPT)
    x_GtD = x_MD.reshape(-1, groups.tile, x_MD.shape[-1])
    y_GtF = jnp.einsum('GtD,GDF->GtF', x_GtD, w_EDF[groups.expert_M[:: groups.tile]])
    return checkpoint_name(y_GtF.reshape(len(x_MD), -1), KEPT)


Experts = Callable[[Float[Array, 'M D'], Groups], Float[Array, 'M D']]


def local(
    experts: Experts,
    x_ND: Float[Array, 'N D'],
    expert_NK: Int[Array, 'N K'],
    weight_NK: Float[Array, 'N K'],
    E: int,
    slots: int | None = None,
) -> Float[Array, 'N D']:
    """y = sum_k weight_k Expert_{expert_k}(x), every choice computed. `experts(x, groups)` gives one row for each row of x."""
    routes, groups, choice_M = by_expert(expert_NK, E, slots)
    weighted_MD = experts(spread(x_ND, routes), groups)
    # In float32, rounded once.
    weighted_MD = (weighted_MD * weight_NK.reshape(-1)[choice_M][:, None]).astype(weighted_MD.dtype)
    return collect(weighted_MD, routes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def travel_ragged(axis: str, x_MD: Float[Array, 'M D'], send_P: Int[Array, ' P'], come_P: Int[Array, ' P']) -> Float[Array, 'M D']:
    """The first send_P[p] of the p-th M / P rows go to device p, which has as many places for those of each other one; the rest is 0."""
    C = len(x_MD) // len(send_P)
    here = jnp.arange(len(send_P)) * C
    there = jnp.full(len(send_P), jax.lax.axis_index(axis) * C)
    return jax.lax.ragged_all_to_all(x_MD, jnp.zeros_like(x_MD), here, send_P, there, come_P, axis_name=axis)


travel_ragged.defvjp(
    lambda axis, x, send, come: (travel_ragged(axis, x, send, come), (send, come)),
    lambda axis, sizes, g: (travel_ragged(axis, g, *reversed(sizes)), None, None),
)


def over_devices(
    experts: Experts,
    x_ND: Float[Array, 'N D'],
    expert_NK: Int[Array, 'N K'],
    weight_NK: Float[Array, 'N K'],
    E: int,
    P: int,
    axis: str,
    room: int | None = None,
    slots: int | None = None,
    ragged: bool = False,
) -> Float[Array, 'N D']:
    """The same under shard_map, where device p along `axis` holds experts p E .. (p + 1) E - 1; `expert_NK` counts over all of them.

    A token travels once to each device that holds any of its experts; what these give is summed there and travels back. Every device
    has `room` places for the tokens of every other one; None is a place for each of them, so that none is ever left behind. Empty places
    travel too, unless `ragged`, which not every platform has.
    """
    N, D = x_ND.shape
    K, C = expert_NK.shape[1], N if room is None else min(room, N)
    device_NK = expert_NK // E
    wanted_NP = (device_NK[..., None] == jnp.arange(P)).any(1)
    place_NP = jnp.cumsum(wanted_NP, axis=0) - 1
    source_PC = jnp.argsort(~wanted_NP.T, axis=1, stable=True)[:, :C]
    taken_PC = jnp.arange(C) < wanted_NP.sum(0)[:, None]
    routes = Routes(source_PC.reshape(-1), taken_PC.reshape(-1), jnp.arange(P) * C + place_NP, wanted_NP & (place_NP < C))

    sent_P = jnp.minimum(wanted_NP.sum(0), C)
    come_P = jax.lax.all_to_all(sent_P, axis, 0, 0, tiled=True) if ragged else sent_P

    def travel(a: Array, back: bool = False) -> Any:
        if ragged:
            return travel_ragged(axis, a, *((come_P, sent_P) if back else (sent_P, come_P)))
        return jax.lax.all_to_all(a.reshape(P, C, -1), axis, 0, 0).reshape(P * C, -1)

    theirs_PCK = expert_NK[source_PC] - E * jnp.arange(P)[:, None, None]
    here_PCK = (theirs_PCK >= 0) & (theirs_PCK < E) & taken_PC[..., None]
    # What does not arrive reads as 0, so that none must be 0 while it travels.
    arrived = travel((jnp.where(here_PCK, theirs_PCK, E) - E).reshape(P * C, -1)) + E
    y_MD = local(experts, travel(spread(x_ND, routes)), arrived, travel(spread(weight_NK, routes)), E, slots or P * C * min(K, E))
    return collect(travel(y_MD.astype(x_ND.dtype), back=True), routes)


def within_capacity(expert_BTK: Int[Array, 'B T K'], E: int, capacity: int) -> Bool[Array, 'B T K']:
    """Whether a choice is among the first `capacity` of its expert in its row, in order of tokens. Rows do not see each other."""

    def row(expert_TK):
        flat = expert_TK.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        ranked = flat[order]
        rank = jnp.arange(flat.size) - jnp.searchsorted(ranked, ranked, side='left')
        return (rank[jnp.argsort(order)] < capacity).reshape(expert_TK.shape)

    return jax.vmap(row)(expert_BTK) & (expert_BTK < E)
