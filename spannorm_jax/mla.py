"""Multi-head latent attention. Axes as in layers.py; C width of a compressed vector."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from spannorm_jax.attention import masked_attention
from spannorm_jax.cache import extend
from spannorm_jax.initializers import make, matrix_init
from spannorm_jax.layers import Attention, Context, Norm, product, to_heads
from spannorm_jax.sharding import constrain


class LatentAttention(Attention):
    """Attention whose keys and values come from one compressed vector c per token:

      q = W_q x, or W_q N(W_qa x) with q_latent            heads of nope + rope dimensions
      c = N(W_kva x);  k = [W_k c | W_kr x];  v = W_v c    the rope dimensions of k are one for all heads

    RoPE turns the rope dimensions alone; scores are scaled by (nope + rope)^-1/2. (B, T, D) -> (B, T, D).
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    def project(self, x_BTD: Float[Array, 'B T D']) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B S N H'], Float[Array, 'B S N J']]:
        q_BTNH, c_BSC, turned_BS1H = self.compressed(x_BTD)
        still_BSNH = to_heads(c_BSC, *self.heads('k'))
        k_BSNH = jnp.concatenate([still_BSNH, jnp.broadcast_to(turned_BS1H, (*still_BSNH.shape[:3], self.cfg.rope_dim))], axis=-1)
        return q_BTNH, k_BSNH, to_heads(c_BSC, *self.heads('v'))

    def mix(self, x_BTD: Float[Array, 'B T D'], ctx: Context, norms: str, stats: bool, held: Any) -> tuple[Array, dict[str, Any]]:
        """With a cache, attention among compressed vectors, which are all that is remembered:

          q . k = (W_k^T q) . c + the rope part;  sum_s p_s v_s = W_v sum_s p_s c_s    (section 2.1.2 of the source)

        A norm of k or v per head stands in the way of that; keys and values themselves are then remembered.
        """
        cfg = self.cfg
        if ctx.past is None or norms == 'qkv' or cfg.qk_norm != 'none' or cfg.v_norm:
            return super().mix(x_BTD, ctx, norms, stats, held)
        q_BTNH, c_BTC, k_BT1H = self.compressed(x_BTD)
        still_BTNH, turned_BTNH = jnp.split(self.turn(q_BTNH, ctx), [cfg.nope_dim], axis=-1)
        q_BTNC = jnp.einsum('BTNH,CNH->BTNC', still_BTNH, self.heads('k')[0].astype(x_BTD.dtype))
        q_BTNC = constrain(jnp.concatenate([q_BTNC, turned_BTNH], axis=-1), 'rows', 'positions', 'heads', None)
        new = {'latent': jnp.concatenate([c_BTC, self.turn(k_BT1H, ctx)[:, :, 0]], axis=-1)}
        known_BS1C = extend(held, new, ctx.past.start)['latent'][:, :, None]
        o_BTNC, found = masked_attention(cfg, q_BTNC, known_BS1C, known_BS1C[..., : cfg.kv_latent], ctx.past.mask_BTS, stats)
        return jnp.einsum('BTNC,CNJ->BTNJ', o_BTNC, self.heads('v')[0].astype(x_BTD.dtype)), found | {'cache': new}

    def compressed(self, x_BTD: Float[Array, 'B T D']) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B S C'], Float[Array, 'B S 1 H']]:
        """Queries, c, and the rope dimensions of the key, before RoPE."""
        cfg, D, dtype = self.cfg, x_BTD.shape[-1], x_BTD.dtype

        def compress(name, width):
            c_BTC = product(x_BTD, self.matrix(f'{name}_a', (D, width), ('width', 'latent')).astype(dtype))
            return Norm(cfg, cfg.latent_norm_eps, name=f'norm_{name}_a')(c_BTC).astype(dtype)

        q_BTNH = to_heads(x_BTD if cfg.q_latent is None else compress('q', cfg.q_latent), *self.heads('q'))
        w_DH = self.matrix('k_rope', (D, cfg.rope_dim), ('width', 'head_dim'), like='k')
        turned_BSH = product(x_BTD, w_DH.astype(dtype))
        return q_BTNH, compress('kv', cfg.kv_latent), turned_BSH[:, :, None]

    def heads(self, name: str) -> tuple[Float[Array, 'C N H'], tuple[str, ...]]:
        """The weight that makes the heads of q, k or v, and its logical axes."""
        cfg = self.cfg
        direct = name == 'q' and cfg.q_latent is None
        fan_in = (cfg.q_latent or cfg.width) if name == 'q' else cfg.kv_latent
        dim = {'q': cfg.resolved_head_dim, 'k': cfg.nope_dim, 'v': cfg.v_dim}[name]
        axes = 'width' if direct else 'latent', 'heads', 'head_dim'
        return self.matrix(name, (fan_in, cfg.heads, dim), axes), axes

    def matrix(self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], like: str | None = None) -> Array:
        init = matrix_init(self.cfg, like or name, shape[0], math.prod(shape[1:]))
        return make(self, name, shape, axes, 'read', init, shape[0])
