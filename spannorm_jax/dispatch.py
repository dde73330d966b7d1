"""Tokens to their experts and back, on one device or over the `expert` axis of the mesh; with static shapes, and without scatters.

Axes: N tokens, K experts per token, E experts (of this device), D width, M slots, S copies of a token, P devices along `expert`.
The number E in the place of an expert means none.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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


def by_expert(expert_NK: Int[Array, 'N K'], E: int, slots: int | None = None) -> tuple[Routes, Int[Array, ' E'], Int[Array, ' M']]:
    """Routes that put the choices of an expert side by side, in order of tokens; how many each has; the choice in each slot.

    slots: how many slots are enough; None is one for each choice.
    """
    N, K = expert_NK.shape
    M = N * K if slots is None else min(slots, N * K)
    flat = expert_NK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    slot = jnp.argsort(order).reshape(N, K)
    sizes_E = (flat[:, None] == jnp.arange(E)).sum(0, dtype=jnp.int32)
    choice_M = order[:M]
    return Routes(choice_M // K, flat[choice_M] < E, slot, (expert_NK < E) & (slot < M)), sizes_E, choice_M


Experts = Callable[[Float[Array, 'M D'], Int[Array, ' E'], Int[Array, ' M']], Float[Array, 'M D']]


def local(
    experts: Experts,
    x_ND: Float[Array, 'N D'],
    expert_NK: Int[Array, 'N K'],
    weight_NK: Float[Array, 'N K'],
    E: int,
    slots: int | None = None,
) -> Float[Array, 'N D']:
    """y = sum_k weight_k Expert_{expert_k}(x), every choice computed. `experts(x, sizes, expert)` works on rows sorted by expert."""
    routes, sizes_E, choice_M = by_expert(expert_NK, E, slots)
    y_MD = experts(spread(x_ND, routes), sizes_E, expert_NK.reshape(-1)[choice_M])
    weighted_MD = y_MD * weight_NK.reshape(-1)[choice_M][:, None]  # in float32, rounded once
    return collect(weighted_MD.astype(y_MD.dtype), routes)


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
) -> Float[Array, 'N D']:
    """The same under shard_map, where device p along `axis` holds experts p E .. (p + 1) E - 1; `expert_NK` counts over all of them.

    A token travels once to each device that holds any of its experts; what these give is summed there and travels back. Every device
    has `room` places for the tokens of every other one; None is a place for each of them, so that none is ever left behind.
    """
    N, D = x_ND.shape
    K, C = expert_NK.shape[1], N if room is None else min(room, N)
    device_NK = expert_NK // E
    wanted_NP = (device_NK[..., None] == jnp.arange(P)).any(1)
    place_NP = jnp.cumsum(wanted_NP, axis=0) - 1
    source_PC = jnp.argsort(~wanted_NP.T, axis=1, stable=True)[:, :C]
    taken_PC = jnp.arange(C) < wanted_NP.sum(0)[:, None]
    routes = Routes(source_PC.reshape(-1), taken_PC.reshape(-1), jnp.arange(P) * C + place_NP, wanted_NP & (place_NP < C))

    travel = lambda a: jax.lax.all_to_all(a.reshape(P, C, -1), axis, 0, 0).reshape(P * C, -1)  # noqa: E731
    theirs_PCK = expert_NK[source_PC] - E * jnp.arange(P)[:, None, None]
    here_PCK = (theirs_PCK >= 0) & (theirs_PCK < E) & taken_PC[..., None]
    arrived = travel(jnp.where(here_PCK, theirs_PCK, E))
    y_MD = local(experts, travel(spread(x_ND, routes)), arrived, travel(spread(weight_NK, routes)), E, slots or P * C * min(K, E))
    return collect(travel(y_MD.astype(x_ND.dtype)), routes)


def within_capacity(expert_BTK: Int[Array, 'B T K'], E: int, capacity: int) -> Bool[Array, 'B T K']:
    """Whether a choice is among the first `capacity` of its expert in its row, in order of tokens. Rows do not see each other."""

    def row(expert_TK):
        flat = expert_TK.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        ranked = flat[order]
        rank = jnp.arange(flat.size) - jnp.searchsorted(ranked, ranked, side='left')
        return (rank[jnp.argsort(order)] < capacity).reshape(expert_TK.shape)

    return jax.vmap(row)(expert_BTK) & (expert_BTK < E)


def grouped_dot(x_MD: Float[Array, 'M D'], w_EDF: Float[Array, 'E D F'], sizes_E: Int[Array, ' E']) -> Float[Array, 'M F']:
    """x of group e times w[e]; groups lie one after another and sizes_E long. What lies beyond the last group is not meant to be read."""
    return jax.lax.ragged_dot(x_MD, w_EDF, sizes_E)
