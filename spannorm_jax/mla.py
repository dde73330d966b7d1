"""Multi-head latent attention. Axes as in layers.py; C width of a compressed vector."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from spannorm_jax.initializers import make, matrix_init
from spannorm_jax.layers import Attention, Norm, to_heads


class LatentAttention(Attention):
    """Attention whose keys and values come from one compressed vector c per token:

      q = W_q x, or W_q N(W_qa x) with q_latent            heads of nope + rope dimensions
      c = N(W_kva x);  k = [W_k c | W_kr x];  v = W_v c    the rope dimensions of k are one for all heads

    RoPE turns the rope dimensions alone; scores are scaled by (nope + rope)^-1/2. (B, T, D) -> (B, T, D).
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    def project(self, x_BTD: Float[Array, 'B T D']) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B S N H'], Float[Array, 'B S N J']]:
        cfg, D, N = self.cfg, x_BTD.shape[-1], self.cfg.heads

        def linear(name, x, shape, axes, like=None):
            fan_in, fan_out = shape[0], math.prod(shape[1:])
            w = make(self, name, shape, axes, 'read', matrix_init(cfg, like or name, fan_in, fan_out), fan_in)
            return to_heads(x, w, axes) if len(shape) == 3 else jnp.einsum('BTC,CD->BTD', x, w.astype(x.dtype))

        def compress(name, width):
            c_BTC = linear(f'{name}_a', x_BTD, (D, width), ('width', 'latent'))
            return Norm(cfg, cfg.latent_norm_eps, name=f'norm_{name}_a')(c_BTC).astype(x_BTD.dtype)

        def heads(name, x_BTC, dim):
            axis = 'width' if x_BTC is x_BTD else 'latent'
            return linear(name, x_BTC, (x_BTC.shape[-1], N, dim), (axis, 'heads', 'head_dim'))

        q_BTNH = heads('q', x_BTD if cfg.q_latent is None else compress('q', cfg.q_latent), cfg.resolved_head_dim)
        c_BSC = compress('kv', cfg.kv_latent)
        turned_BS1H = linear('k_rope', x_BTD, (D, cfg.rope_dim), ('width', 'head_dim'), like='k')[:, :, None]
        still_BSNH = heads('k', c_BSC, cfg.nope_dim)
        k_BSNH = jnp.concatenate([still_BSNH, jnp.broadcast_to(turned_BS1H, (*still_BSNH.shape[:3], cfg.rope_dim))], axis=-1)
        return q_BTNH, k_BSNH, heads('v', c_BSC, cfg.v_dim)
