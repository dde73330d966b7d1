"""Sublayers shared by every topology: norms, RoPE, attention (MHA, GQA) and the dense FFN.

Axes: B batch, T query positions, S key positions, D width, N query heads, K kv heads, G query heads per kv head, H head dim,
h half of it, F FFN hidden units, V vocabulary. Params float32; matrix products in cfg.dtype; statistics and softmax in float32 or wider.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spannorm_jax.errors import UserError
from spannorm_jax.initializers import Init, make, matrix_init
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.sharding import constrain, pieces

PART_SCORES = 2**24  # 64 MiB in float32
MASKED = -1e30  # finite, so that a row of masked scores gives a uniform softmax and no NaN


class Context(NamedTuple):
    """What every block sees besides the stream; computed once, outside the scan over layers."""

    segments_BT: Array | None  # positions of different segments do not see each other; 0 is padding; None: one segment
    rope_BTh: tuple[Array, Array] | None  # cos and sin
    dropout_key: Array | None = None  # None: no dropout


def accumulator(cfg: ModelConfig) -> jnp.dtype:
    """Dtype of sums and statistics: float32, or float64 where the products are. Raises UserError for float64 without jax_enable_x64."""
    if cfg.dtype == 'float64' and not jax.config.read('jax_enable_x64'):
        raise UserError("model.dtype = 'float64' needs jax.config.update('jax_enable_x64', True); without it JAX computes in float32")
    return jnp.promote_types(cfg.dtype, jnp.float32)


def context(
    cfg: ModelConfig,
    positions_BT: Int[Array, 'B T'],
    segments_BT: Int[Array, 'B T'] | None = None,
    dropout_key: Array | None = None,
) -> Context:
    """Segments and rotary angles of packed rows."""
    rope = None if cfg.positions == 'none' else rope_angles(positions_BT, cfg.rotated_dim, cfg.rope_theta)
    return Context(segments_BT, rope, dropout_key)


def may_see(T: int, segments_BT: Int[Array, 'B T'] | None, causal: bool) -> Bool[Array, '#B T S']:
    """Whether position t may look at position s: not at later ones (causal), nor at those of another segment."""
    t = jnp.arange(T)
    mask_BTS = (t[:, None] >= t[None, :])[None] if causal else jnp.ones((1, T, T), bool)
    return mask_BTS if segments_BT is None else mask_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])


def rope_angles(positions_BT: Int[Array, 'B T'], head_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin of angle(t, i) = t * theta^(-2i / head_dim), i = 0..head_dim/2 - 1: float32 (B, T, h).  Source: arXiv:2104.09864."""
    freq_h = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_BTh = positions_BT[..., None].astype(jnp.float32) * freq_h
    return jnp.cos(angle_BTh), jnp.sin(angle_BTh)


def rope(x_BTNH: Float[Array, 'B T N H'], cos_BTh: Array, sin_BTh: Array, interleaved: bool) -> Float[Array, 'B T N H']:
    """Rotate the last 2h of H dimensions: the pairs (i, i + h), or (2i, 2i + 1) when interleaved, by their angle."""
    still, x = jnp.split(x_BTNH, [x_BTNH.shape[-1] - 2 * cos_BTh.shape[-1]], axis=-1)
    x = x.astype(cos_BTh.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    cos, sin = cos_BTh[:, :, None], sin_BTh[:, :, None]
    pair = a * cos - b * sin, b * cos + a * sin
    out = jnp.stack(pair, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([still, out.astype(x_BTNH.dtype)], axis=-1)


class Norm(nn.Module):
    """RMSNorm x / sqrt(mean(x^2) + eps) * g, or LayerNorm (x - mean) / sqrt(var + eps) * g + b, over the last axis.

    Statistics and result are float32 (float64 where the products are). Gains start at 1 (w = 0 where the gain is 1 + w).
    Source: arXiv:1910.07467, arXiv:1607.06450.
    """

    cfg: ModelConfig
    eps: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, '... D']) -> Float[Array, '... D']:
        cfg, eps = self.cfg, self.cfg.norm_eps if self.eps is None else self.eps
        x = x.astype(accumulator(cfg))
        if cfg.norm_input_guard:
            largest = jax.lax.stop_gradient(jnp.abs(x).max())
            x /= jnp.where(largest > 0, largest / 8, 1)
        x = standardize(x, cfg.norm, eps)
        one = Init(const=0.0 if cfg.norm_unit_offset else 1.0)
        gain_D = make(self, 'gain', x.shape[-1:], ('norm',), 'gain', one)
        x *= gain_D + 1 if cfg.norm_unit_offset else gain_D
        return x + make(self, 'bias', x.shape[-1:], ('norm',), 'bias', Init()) if cfg.norm_bias else x


def standardize(x: Array, kind: str, eps: float, split: str | None = None) -> Array:
    """A norm without its gain. `split`: the mesh axis that holds the parts of the last axis, under shard_map."""

    def mean(z):
        z = z.mean(-1, keepdims=True)
        return z if split is None else jax.lax.pmean(z, split)

    if kind == 'layernorm':
        x -= mean(x)
    return x * jax.lax.rsqrt(mean(jnp.square(x)) + eps)


def attend(
    q_BTNH: Float[Array, 'B T N H'],
    k_BSKH: Float[Array, 'B S K H'],
    v_BSKJ: Float[Array, 'B S K J'],
    mask_BTS: Bool[Array, '#B T S'],
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Float[Array, 'B T N J'], Float[Array, 'B K G T S']]:
    """softmax(cap(scale q k) + mask) v; query head n reads kv head n // (N/K). Returns the result and the probabilities (float32)."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    score_BKGTS = jnp.einsum('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH, preferred_element_type=wide) * scale
    if soft_cap is not None:
        score_BKGTS = soft_cap * jnp.tanh(score_BKGTS / soft_cap)
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, MASKED)
    p_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1)
    out = jnp.einsum('BKGTS,BSKJ->BTKGJ', p_BKGTS.astype(v_BSKJ.dtype), v_BSKJ)
    return out.reshape(B, T, N, -1), p_BKGTS


def attend_in_parts(q_BTNH: Array, k_BSKH: Array, v_BSKJ: Array, mask_BTS: Array, scale: float, soft_cap: float | None = None) -> Array:
    """The result of `attend`, some queries after the others, so that at most PART_SCORES scores per device exist at a time.

    Scores are computed again in the backward pass. A part takes every P-th query, so that every shard of the positions has some.
    """
    B, T, N = q_BTNH.shape[:3]
    scores = B * N * T * k_BSKH.shape[1] / (pieces('rows') * pieces('positions') * pieces('heads'))
    P = next((p for p in range(1, T + 1) if T % p == 0 and scores / p <= PART_SCORES and T // p % pieces('positions') == 0), 1)
    if P == 1:
        return attend(q_BTNH, k_BSKH, v_BSKJ, mask_BTS, scale, soft_cap)[0]
    one = jax.checkpoint(lambda q, k, v, mask: attend(q, k, v, mask, scale, soft_cap)[0], prevent_cse=False)

    def split(x):  # (B, T, ...) -> (P, B, T / P, ...)
        return jnp.moveaxis(x.reshape(x.shape[0], T // P, P, *x.shape[2:]), 2, 0)

    q_PBtNH = constrain(split(q_BTNH), None, 'rows', 'positions', 'heads', None)
    _, o_PBtNJ = jax.lax.scan(lambda _, qm: (None, one(qm[0], k_BSKH, v_BSKJ, qm[1])), None, (q_PBtNH, split(mask_BTS)))
    return jnp.moveaxis(o_PBtNJ, 0, 2).reshape(B, T, N, -1)


class Attention(nn.Module):
    """Multi-head or grouped-query attention with its output projection: (B, T, D) -> (B, T, D) and statistics.

    `norms`: 'qkv' norms q, k and v over each head before RoPE; 'inner' norms the concatenated heads before the output projection.
    """

    cfg: ModelConfig
    causal: bool = True

    @nn.compact
    def __call__(self, x_BTD: Float[Array, 'B T D'], ctx: Context, norms: str = '', stats: bool = False):
        cfg, dtype, (_, T, D) = self.cfg, jnp.dtype(self.cfg.dtype), x_BTD.shape
        q_BTNH, k_BSKH, v_BSKJ = self.project(x_BTD.astype(dtype))
        kind = 'head' if norms == 'qkv' and cfg.qk_norm == 'none' else cfg.qk_norm
        q_BTNH, k_BSKH = self.head_norm('q', q_BTNH, kind), self.head_norm('k', k_BSKH, kind)
        v_BSKJ = self.head_norm('v', v_BSKJ, 'head' if norms == 'qkv' or cfg.v_norm else 'none')
        if ctx.rope_BTh is not None:
            q_BTNH, k_BSKH = (rope(z, *ctx.rope_BTh, cfg.positions == 'rope_interleaved') for z in (q_BTNH, k_BSKH))
        # Where rows are split along their positions, queries stay where they are and keys and values are gathered.
        q_BTNH = constrain(q_BTNH, 'rows', 'positions', 'heads', None)
        k_BSKH, v_BSKJ = (constrain(z, 'rows', None, 'kv', None) for z in (k_BSKH, v_BSKJ))
        scale = cfg.resolved_head_dim**-0.5 if cfg.attn_scale is None else cfg.attn_scale
        mask_BTS = may_see(T, ctx.segments_BT, self.causal)
        operands = q_BTNH, k_BSKH, v_BSKJ, mask_BTS, scale, cfg.attn_soft_cap
        o_BTNJ, p_BKGTS = attend(*operands) if stats else (attend_in_parts(*operands), None)

        N, J = o_BTNJ.shape[2:]
        if norms == 'inner':
            o_BTNJ = Norm(cfg, name='norm_inner')(o_BTNJ.reshape(*o_BTNJ.shape[:2], N * J)).reshape(o_BTNJ.shape)
        w_NJD = make(self, 'o', (N, J, D), ('heads', 'head_dim', 'width'), 'write', matrix_init(cfg, 'o', N * J, D), N * J)
        out_BTD = jnp.einsum('BTNJ,NJD->BTD', o_BTNJ.astype(dtype), w_NJD.astype(dtype), preferred_element_type=accumulator(cfg))
        if cfg.attn_bias:
            out_BTD += make(self, 'o_bias', (D,), ('width',), 'bias', Init())
        return out_BTD, {} if p_BKGTS is None else attention_stats(p_BKGTS, mask_BTS)

    def project(self, x_BTD: Float[Array, 'B T D']) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B S K H'], Float[Array, 'B S K J']]:
        """Queries, keys and values before their norms and RoPE."""
        cfg, D, H = self.cfg, x_BTD.shape[-1], self.cfg.resolved_head_dim

        def one(name, heads, axis):
            w_DNH = make(self, name, (D, heads, H), ('width', axis, 'head_dim'), 'read', matrix_init(cfg, name, D, heads * H), D)
            out_BTNH = jnp.einsum('BTD,DNH->BTNH', x_BTD, w_DNH.astype(x_BTD.dtype))
            if not cfg.attn_bias:
                return out_BTNH
            return out_BTNH + make(self, f'{name}_bias', (heads, H), (axis, 'head_dim'), 'bias', Init()).astype(x_BTD.dtype)

        return one('q', cfg.heads, 'heads'), one('k', cfg.resolved_kv_heads, 'kv'), one('v', cfg.resolved_kv_heads, 'kv')

    def head_norm(self, name, x_BTNH, kind):
        if kind == 'none':
            return x_BTNH
        flat = x_BTNH.reshape(*x_BTNH.shape[:2], -1) if kind == 'whole' else x_BTNH
        return Norm(self.cfg, name=f'norm_{name}')(flat).reshape(x_BTNH.shape).astype(x_BTNH.dtype)


def attention_stats(p_BKGTS: Float[Array, 'B K G T S'], mask_BTS: Bool[Array, '#B T S']) -> dict[str, Float[Array, '']]:
    """Mean entropy of the attention rows over the log of the positions each may see (rows that see one position are left out)."""
    visible_BT = mask_BTS.sum(-1)
    row_BKGT = -jax.scipy.special.xlogy(p_BKGTS, p_BKGTS).sum(-1)
    several = jnp.broadcast_to((visible_BT > 1)[:, None, None], row_BKGT.shape)
    share = row_BKGT / jnp.log(jnp.maximum(visible_BT, 2))[:, None, None]
    return {'attn_entropy': jnp.where(several, share, 0).sum() / jnp.maximum(several.sum(), 1)}


ACTIVATIONS = {
    'swiglu': jax.nn.silu,
    'geglu': lambda x: jax.nn.gelu(x, approximate=False),
    'geglu_tanh': jax.nn.gelu,
    'gelu': lambda x: jax.nn.gelu(x, approximate=False),
    'gelu_tanh': jax.nn.gelu,
    'relu': jax.nn.relu,
}


class Mlp(nn.Module):
    """Dense FFN, (B, T, D) -> (B, T, D): down(act(gate x) * up x) when gated, else down(act(up x)).  Source: arXiv:2002.05202.

    `norms='inner'` norms the hidden activation before the down projection. `ffn`: hidden width; None means the config's.
    """

    cfg: ModelConfig
    ffn: int | None = None

    @nn.compact
    def __call__(self, x_BTD: Float[Array, 'B T D'], norms: str = ''):
        cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
        D, F = x_BTD.shape[-1], self.ffn or cfg.resolved_ffn
        x_BTD = x_BTD.astype(dtype)

        def project(name):
            w_DF = make(self, name, (D, F), ('width', 'ffn'), 'read', matrix_init(cfg, name, D, F), D)
            h_BTF = jnp.einsum('BTD,DF->BTF', x_BTD, w_DF.astype(dtype))
            return h_BTF + make(self, f'{name}_bias', (F,), ('ffn',), 'bias', Init()).astype(dtype) if cfg.mlp_bias else h_BTF

        act = ACTIVATIONS[cfg.activation]
        h_BTF = act(project('gate')) * project('up') if cfg.gated else act(project('up'))
        if norms == 'inner':
            h_BTF = Norm(cfg, name='norm_inner')(h_BTF)
        w_FD = make(self, 'down', (F, D), ('ffn', 'width'), 'write', matrix_init(cfg, 'down', F, D), F)
        out_BTD = jnp.einsum('BTF,FD->BTD', h_BTF.astype(dtype), w_FD.astype(dtype), preferred_element_type=accumulator(cfg))
        return out_BTD + make(self, 'down_bias', (D,), ('width',), 'bias', Init()) if cfg.mlp_bias else out_BTD


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate); the identity without a key."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / max(1 - rate, 1e-9), 0)
