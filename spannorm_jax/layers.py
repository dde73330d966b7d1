"""Sublayers shared by every topology: norms, RoPE, attention (MHA, GQA) and the dense FFN.

Axes: B batch, T query positions, S key positions, D width, N query heads, K kv heads, G query heads per kv head, H head dim,
h half of it, F FFN hidden units, V vocabulary. Params float32; matrix products in cfg.dtype; statistics and softmax in float32 or wider.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from spannorm_jax.attention import attention, masked_attention
from spannorm_jax.cache import Past, extend
from spannorm_jax.errors import UserError
from spannorm_jax.initializers import Init, make, matrix_init
from spannorm_jax.model_config import KEPT, ModelConfig
from spannorm_jax.sharding import constrain, pieces, target


class Context(NamedTuple):
    """What every block sees besides the stream; computed once, outside the scan over layers."""

    segments_BT: Array | None  # positions of different segments do not see each other; None: all are one
    real_BT: Array | None  # False for padding; None: there is none
    rope_BTh: tuple[Array, Array] | None  # cos and sin
    dropout_key: Array | None = None  # None: no dropout
    past: Past | None = None  # None: these positions are all there are
    embed_norm: tuple[Array, ...] | None = None  # weights of the norm that the first block applies; None: `enter` did, or there is none


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
    past: Past | None = None,
) -> Context:
    """Segments and rotary angles of packed rows; segment 0 is padding. Without document_mask a row is one document."""
    real_BT = None if segments_BT is None else segments_BT > 0
    if not cfg.document_mask and past is None:
        positions_BT, segments_BT = jnp.broadcast_to(jnp.arange(positions_BT.shape[1]), positions_BT.shape), None
    rope = None if cfg.positions == 'none' else rope_angles(positions_BT, cfg.rotated_dim, cfg.rope_theta)
    return Context(segments_BT, real_BT, rope, dropout_key, past)


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

    def __call__(self, x: Float[Array, '... D']) -> Float[Array, '... D']:
        return apply_norm(self.cfg, x, self.weights(x.shape[-1]), self.eps)

    @nn.compact
    def weights(self, D: int) -> tuple[Float[Array, ' D'], ...]:
        """Gain, and bias where there is one."""
        gain_D = make(self, 'gain', (D,), ('norm',), 'gain', Init(const=0.0 if self.cfg.norm_unit_offset else 1.0))
        return (gain_D, make(self, 'bias', (D,), ('norm',), 'bias', Init())) if self.cfg.norm_bias else (gain_D,)


def apply_norm(cfg: ModelConfig, x: Float[Array, '... D'], weights: tuple[Float[Array, ' D'], ...], eps: float | None = None) -> Array:
    """What `Norm` computes."""
    x = x.astype(accumulator(cfg))
    if cfg.norm_input_guard:
        largest = jax.lax.stop_gradient(jnp.abs(x).max())
        x /= jnp.where(largest > 0, largest / 8, 1)
    x = standardize(x, cfg.norm, cfg.norm_eps if eps is None else eps)
    x *= weights[0] + 1 if cfg.norm_unit_offset else weights[0]
    return x + weights[1] if cfg.norm_bias else x


def standardize(x: Array, kind: str, eps: float, split: str | None = None) -> Array:
    """A norm without its gain. `split`: the mesh axis that holds the parts of the last axis, under shard_map."""

    def mean(z):
        z = z.mean(-1, keepdims=True)
        return z if split is None else jax.lax.pmean(z, split)

    if kind == 'layernorm':
        x -= mean(x)
    return x * jax.lax.rsqrt(mean(jnp.square(x)) + eps)


def product(x: Float[Array, '... F'], w: Float[Array, 'F D'], wide: Any = None) -> Float[Array, '... D']:
    """x w in the dtype of x, or in `wide`, for sums in the residual stream and for logits.

    On a CPU rows and positions become one axis first: of a product over two, XLA computes the weight's gradient three times as slowly,
    from a transposed copy of the larger operand. Where positions are split over the mesh the two cannot be one; and compiled for a TPU,
    the weights of attention would be gathered in a layout of ten times their bytes.
    """
    rows = x.reshape(-1, x.shape[-1]) if target()[0] == 'cpu' and pieces('positions') == 1 else x
    out = rows @ w if wide is None else checkpoint_name(_wide_product(rows, w, wide), KEPT)
    return out.reshape(*x.shape[:-1], w.shape[-1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _wide_product(x: Array, w: Array, wide: Any) -> Array:
    """The products of its gradient are in the dtype of x and w, as everywhere else: of a wide one they would be several times slower,
    and the weight's the largest array of a step."""
    return jnp.matmul(x, w, preferred_element_type=wide)


@_wide_product.defjvp
def _narrow_gradient(wide, operands, tangents):
    (x, w), (dx, dw) = operands, tangents
    # Transposed, the casts come before the products.
    parts = ((a @ b).astype(wide) for a, b in ((dx, w), (x, dw)))
    return _wide_product(x, w, wide), sum(parts)


def as_matrix(w: Array, axes: tuple[str, ...]) -> Array:
    """A weight with heads, (D, N, H) or (N, H, D), as the matrix of its product, split over the mesh as the weight is.

    Without it the compiler gathers the array of three axes; for a TPU it lays that out with D innermost, where the few rows that
    each of many devices holds cost ten times their bytes, an all-reduce in place of the gather, and minutes of compilation.
    """
    N = w.shape[axes.index('head_dim') - 1]
    kept = [None if a in ('heads', 'kv') and N % pieces(a) else a for a in axes if a != 'head_dim']
    shape = (w.shape[0], -1) if axes[-1] == 'head_dim' else (-1, w.shape[-1])
    return constrain(w.reshape(shape), *kept)


def to_heads(x_BTD: Float[Array, 'B T D'], w_DNH: Float[Array, 'D N H'], axes: tuple[str, ...]) -> Float[Array, 'B T N H']:
    """x W in the dtype of x."""
    return product(x_BTD, as_matrix(w_DNH.astype(x_BTD.dtype), axes)).reshape(*x_BTD.shape[:2], *w_DNH.shape[1:])


class Attention(nn.Module):
    """Multi-head or grouped-query attention with its output projection: (B, T, D) -> (B, T, D) and statistics.

    `norms`: 'qkv' norms q, k and v over each head before RoPE; 'inner' norms the concatenated heads before the output projection.
    `held`: what the positions before these left, where `ctx.past` is set; the statistics then have what these leave, as `cache`.
    """

    cfg: ModelConfig
    causal: bool = True

    @nn.compact
    def __call__(self, x_BTD: Float[Array, 'B T D'], ctx: Context, norms: str = '', stats: bool = False, held: Any = None):
        cfg, dtype, D = self.cfg, jnp.dtype(self.cfg.dtype), x_BTD.shape[-1]
        o_BTNJ, found = self.mix(x_BTD.astype(dtype), ctx, norms, stats, held)
        N, J = o_BTNJ.shape[2:]
        if norms == 'inner':
            o_BTNJ = Norm(cfg, name='norm_inner')(o_BTNJ.reshape(*o_BTNJ.shape[:2], N * J)).reshape(o_BTNJ.shape)
        axes = 'heads', 'head_dim', 'width'
        w_NJD = make(self, 'o', (N, J, D), axes, 'write', matrix_init(cfg, 'o', N * J, D), N * J)
        o_BTF, w_FD = o_BTNJ.astype(dtype).reshape(*o_BTNJ.shape[:2], N * J), as_matrix(w_NJD.astype(dtype), axes)
        out_BTD = product(o_BTF, w_FD, accumulator(cfg))
        if cfg.attn_bias:
            out_BTD += make(self, 'o_bias', (D,), ('width',), 'bias', Init())
        return out_BTD, found

    def mix(self, x_BTD: Float[Array, 'B T D'], ctx: Context, norms: str, stats: bool, held: Any) -> tuple[Array, dict[str, Any]]:
        """What each head gathers, (B, T, N, J), and statistics."""
        cfg = self.cfg
        q_BTNH, k_BSKH, v_BSKJ = self.project(x_BTD)
        kind = 'head' if norms == 'qkv' and cfg.qk_norm == 'none' else cfg.qk_norm
        q_BTNH, k_BSKH = self.head_norm('q', q_BTNH, kind), self.head_norm('k', k_BSKH, kind)
        v_BSKJ = self.head_norm('v', v_BSKJ, 'head' if norms == 'qkv' or cfg.v_norm else 'none')
        q_BTNH, k_BSKH = self.turn(q_BTNH, ctx), self.turn(k_BSKH, ctx)
        # Where rows are split along their positions, queries stay where they are and keys and values are gathered.
        q_BTNH = constrain(q_BTNH, 'rows', 'positions', 'heads', None)
        k_BSKH, v_BSKJ = (constrain(z, 'rows', None, 'kv', None) for z in (k_BSKH, v_BSKJ))
        if ctx.past is None:
            return attention(cfg, q_BTNH, k_BSKH, v_BSKJ, ctx.segments_BT, self.causal, stats)
        new = {'k': k_BSKH, 'v': v_BSKJ}
        known = extend(held, new, ctx.past.start)
        o_BTNJ, found = masked_attention(cfg, q_BTNH, known['k'], known['v'], ctx.past.mask_BTS, stats)
        return o_BTNJ, found | {'cache': new}

    def turn(self, x_BTNH: Float[Array, 'B T N H'], ctx: Context) -> Float[Array, 'B T N H']:
        return x_BTNH if ctx.rope_BTh is None else rope(x_BTNH, *ctx.rope_BTh, self.cfg.positions == 'rope_interleaved')

    def project(self, x_BTD: Float[Array, 'B T D']) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B S K H'], Float[Array, 'B S K J']]:
        """Queries, keys and values before their norms and RoPE."""
        cfg, D, H = self.cfg, x_BTD.shape[-1], self.cfg.resolved_head_dim

        def one(name, heads, axis):
            axes = 'width', axis, 'head_dim'
            out_BTNH = to_heads(x_BTD, make(self, name, (D, heads, H), axes, 'read', matrix_init(cfg, name, D, heads * H), D), axes)
            if not cfg.attn_bias:
                return out_BTNH
            return out_BTNH + make(self, f'{name}_bias', (heads, H), (axis, 'head_dim'), 'bias', Init()).astype(x_BTD.dtype)

        return one('q', cfg.heads, 'heads'), one('k', cfg.resolved_kv_heads, 'kv'), one('v', cfg.resolved_kv_heads, 'kv')

    def head_norm(self, name, x_BTNH, kind):
        if kind == 'none':
            return x_BTNH
        flat = x_BTNH.reshape(*x_BTNH.shape[:2], -1) if kind == 'whole' else x_BTNH
        return Norm(self.cfg, name=f'norm_{name}')(flat).reshape(x_BTNH.shape).astype(x_BTNH.dtype)


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
        cfg, dtype, D = self.cfg, jnp.dtype(self.cfg.dtype), x_BTD.shape[-1]
        h_BTF = self.hidden(x_BTD.astype(dtype), norms)
        F = h_BTF.shape[-1]
        w_FD = make(self, 'down', (F, D), ('ffn', 'width'), 'write', matrix_init(cfg, 'down', F, D), F)
        out_BTD = product(h_BTF.astype(dtype), w_FD.astype(dtype), accumulator(cfg))
        return out_BTD + make(self, 'down_bias', (D,), ('width',), 'bias', Init()) if cfg.mlp_bias else out_BTD

    def hidden(self, x_BTD: Float[Array, 'B T D'], norms: str) -> Float[Array, 'B T F']:
        """What the down projection reads."""
        cfg, D, F = self.cfg, x_BTD.shape[-1], self.ffn or self.cfg.resolved_ffn

        def project(name):
            w_DF = make(self, name, (D, F), ('width', 'ffn'), 'read', matrix_init(cfg, name, D, F), D)
            h_BTF = product(x_BTD, w_DF.astype(x_BTD.dtype))
            return h_BTF + make(self, f'{name}_bias', (F,), ('ffn',), 'bias', Init()).astype(x_BTD.dtype) if cfg.mlp_bias else h_BTF

        act = ACTIVATIONS[cfg.activation]
        h_BTF = act(project('gate')) * project('up') if cfg.gated else act(project('up'))
        return Norm(cfg, name='norm_inner')(h_BTF) if norms == 'inner' else h_BTF


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate); the identity without a key."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / max(1 - rate, 1e-9), 0)
