"""Attention for the CPU, block by block, with a gradient of its own.

Axes: B rows, T query and S key positions, K kv heads, G query heads per kv head, H dimensions of a key, J of a value. A block of
queries sees no later block of keys, so causal attention skips almost half of the work; the forward pass keeps, of the scores, one
number per query,

    lse_t = log sum_s exp(z_ts),   z = cap(scale q k) where s may be seen,   o_t = sum_s exp(z_ts - lse_t) v_s,

and the backward pass computes them again, transposed, which is the layout that most of its products read:

    dv_s = sum_t p_ts do_t,   dz_ts = p_ts (do_t v_s - do_t o_t),   dk_s = scale sum_t dz_ts q_t,   dq_t = scale sum_s dz_ts k_s.

Source: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4. The gradient is of reverse mode alone; `attention.attend` has every mode.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from spannorm_jax.model_config import KEPT

BLOCK = 64  # queries in a block, at least (docs/performance.md)
BLOCKS = 8  # at most: each is written out in the program
MASKED = -1e30  # finite, so that a row of masked scores gives a uniform softmax and no NaN


class Rule(NamedTuple):
    """What is the same for all heads."""

    causal: bool
    scale: float
    soft_cap: float | None


def blocked(
    q_BTNH: Float[Array, 'B T N H'],
    k_BSKH: Float[Array, 'B S K H'],
    v_BSKJ: Float[Array, 'B S K J'],
    segments_BT: Int[Array, 'B T'] | None,
    rule: Rule,
) -> Float[Array, 'B T N J']:
    """softmax(cap(scale q k) + mask) v; query head n reads kv head n // (N/K), and t sees s of its segment, not later if causal."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BKGTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    o_BKGTJ: Any = _blocked(q_BKGTH, jnp.moveaxis(k_BSKH, 1, 2), jnp.moveaxis(v_BSKJ, 1, 2), segments_BT, rule)
    return jnp.moveaxis(o_BKGTJ, 3, 1).reshape(B, T, N, -1)


def block_length(T: int) -> int:
    """The shortest block, of BLOCK positions or more, that divides T into at most BLOCKS; T where there is none."""
    return next((T // n for n in range(BLOCKS, 0, -1) if T % n == 0 and T // n >= BLOCK), T)


def blocks(T: int, causal: bool) -> list[tuple[int, int]]:
    """First and last + 1 position of each block; without a causal mask there is nothing to skip, and one block."""
    step = block_length(T) if causal else T
    return [(lo, lo + step) for lo in range(0, T, step)]


def masked(z: Array, rule: Rule, segments_BT: Array | None, queries: slice, keys: slice, keys_first: bool = False) -> Array:
    """Scores (B, K, G, T, S), or (B, K, G, S, T) with `keys_first`: capped, and MASKED where a position may not be seen."""
    if rule.soft_cap is not None:
        z = rule.soft_cap * jnp.tanh(z / rule.soft_cap)
    t, s = jnp.arange(queries.start, queries.stop), jnp.arange(keys.start, keys.stop)
    across = (lambda a, b: (a[..., None, :], b[..., :, None])) if keys_first else (lambda a, b: (a[..., :, None], b[..., None, :]))
    if rule.causal and queries.start < keys.stop - 1:
        late, early = across(t, s)
        z = jnp.where(late >= early, z, MASKED)
    if segments_BT is not None:
        mine, other = across(segments_BT[:, queries], segments_BT[:, keys])
        z = jnp.where((mine == other)[:, None, None], z, MASKED)
    return z


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(q_BKGTH: Array, k_BKSH: Array, v_BKSJ: Array, segments_BT: Array | None, rule: Rule) -> Array:
    return _forward(q_BKGTH, k_BKSH, v_BKSJ, segments_BT, rule)[0]


def _forward(q_BKGTH, k_BKSH, v_BKSJ, segments_BT, rule):
    T, dtype = q_BKGTH.shape[3], q_BKGTH.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    outs, lses = [], []
    for lo, hi in blocks(T, rule.causal):
        keys = slice(0, hi if rule.causal else T)
        z = jnp.einsum('BKGTH,BKSH->BKGTS', q_BKGTH[..., lo:hi, :], k_BKSH[:, :, keys], preferred_element_type=wide) * rule.scale
        z = masked(z, rule, segments_BT, slice(lo, hi), keys)
        top = z.max(-1, keepdims=True)
        p = jnp.exp(z - top)
        total = p.sum(-1, keepdims=True)
        o = jnp.einsum('BKGTS,BKSJ->BKGTJ', p.astype(dtype), v_BKSJ[:, :, keys], preferred_element_type=wide)
        outs.append((o / total).astype(dtype))
        lses.append((top + jnp.log(total))[..., 0])
    o_BKGTJ = checkpoint_name(jnp.concatenate(outs, 3), KEPT)
    lse_BKGT = checkpoint_name(jnp.concatenate(lses, 3), KEPT)
    return o_BKGTJ, (q_BKGTH, k_BKSH, v_BKSJ, segments_BT, o_BKGTJ, lse_BKGT)


def _backward(rule, kept, do_BKGTJ):
    q_BKGTH, k_BKSH, v_BKSJ, segments_BT, o_BKGTJ, lse_BKGT = kept
    T, dtype = q_BKGTH.shape[3], q_BKGTH.dtype
    wide = lse_BKGT.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    # Of an elementwise product and its sum XLA:CPU makes a reduction that takes six times as long.
    dot_BKGT = product('BKGTJ,BKGTJ->BKGT', do_BKGTJ.astype(wide), o_BKGTJ.astype(wide))
    dq_BKGTH, dks, dvs = jnp.zeros(q_BKGTH.shape, wide), [], []
    for lo, hi in blocks(T, rule.causal):
        after = slice(lo if rule.causal else 0, T)  # the queries that see this block of keys
        q, do = q_BKGTH[..., after, :], do_BKGTJ[..., after, :]
        z = product('BKSH,BKGTH->BKGST', k_BKSH[:, :, lo:hi], q) * rule.scale
        z = masked(z, rule, segments_BT, after, slice(lo, hi), keys_first=True)
        p = jnp.exp(z - lse_BKGT[..., None, after])
        dz = p * (product('BKSJ,BKGTJ->BKGST', v_BKSJ[:, :, lo:hi], do) - dot_BKGT[..., None, after])
        if rule.soft_cap is not None:
            dz *= 1 - jnp.square(jnp.where(z > MASKED, z, 0) / rule.soft_cap)
        p, dz = p.astype(dtype), dz.astype(dtype)
        dvs.append(product('BKGST,BKGTJ->BKSJ', p, do))
        dks.append(product('BKGST,BKGTH->BKSH', dz, q))
        dq = product('BKGST,BKSH->BKGTH', dz, k_BKSH[:, :, lo:hi])
        dq_BKGTH = dq_BKGTH.at[..., after, :].add(dq)
    dk_BKSH, dv_BKSJ = jnp.concatenate(dks, 2), jnp.concatenate(dvs, 2)
    return (dq_BKGTH * rule.scale).astype(dtype), (dk_BKSH * rule.scale).astype(dtype), dv_BKSJ.astype(dtype), None


_blocked.defvjp(_forward, _backward)
