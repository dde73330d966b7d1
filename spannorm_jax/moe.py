"""Mixture of experts: the router of DeepSeek-V3 and the older softmax router, and the routed and shared experts.

Axes as in layers.py; E experts, K experts per token, F hidden units of one expert, G groups of experts.
"""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from spannorm_jax import dispatch
from spannorm_jax.initializers import Init, make, matrix_init
from spannorm_jax.layers import ACTIVATIONS, Mlp, accumulator, standardize
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.sharding import spec


class Choice(NamedTuple):
    """What the router says of each token."""

    expert_BTK: Int[Array, 'B T K']
    weight_BTK: Float[Array, 'B T K']
    share_BTE: Float[Array, 'B T E']  # scores over their sum


def choose(cfg: ModelConfig, logits_BTE: Float[Array, 'B T E'], bias_E: Float[Array, ' E'] | None) -> Choice:
    """s = sigmoid(logits) or softmax(logits); experts = the K largest of s + bias within the best groups; weights = scale * s[experts].

    A group counts by the sum of its two largest s + bias, without a bias by its largest. Weights are divided by their sum where the
    config says so. Equal scores: the lower index wins. The bias has no gradient.  Source: DeepSeek-V3, arXiv:2412.19437, eqs. 12-16.
    """
    E, G, K = cfg.experts, cfg.expert_groups, cfg.experts_per_token
    score = jax.nn.sigmoid(logits_BTE) if cfg.router == 'sigmoid' else jax.nn.softmax(logits_BTE, axis=-1)
    ranked = jax.lax.stop_gradient(score if bias_E is None else score + bias_E)
    if G > 1:
        inside = ranked.reshape(*ranked.shape[:2], G, E // G)
        group = inside.max(-1) if bias_E is None else jax.lax.top_k(inside, 2)[0].sum(-1)
        _, best = jax.lax.top_k(group, cfg.groups_per_token)
        kept = (best[..., None] == jnp.arange(G)).any(-2)
        ranked = jnp.where(kept[..., None], inside, -jnp.inf).reshape(ranked.shape)
    _, expert = jax.lax.top_k(ranked, K)
    weight = jnp.take_along_axis(score, expert, axis=-1)
    if cfg.normalizes_router:
        weight /= total(weight)
    return Choice(expert, weight * cfg.router_scale, score / total(score))


def total(x: Array) -> Array:
    """The sum, kept from 0: where every sigmoid has underflown, weights are 0 and their gradient is finite."""
    return jnp.maximum(x.sum(-1, keepdims=True), 1e-18)


def load(cfg: ModelConfig, choice: Choice, logits_BTE: Float[Array, 'B T E'], real_BT: Bool[Array, 'B T']) -> dict[str, Array]:
    """Load and losses of the real tokens: count (E,), balance, z, entropy; means weigh every token alike.

    balance = sum_e f_e P_e, f_e = E / (K n) * count_e, P_e = mean share of e, over each row of n tokens or over all of them; 1 in balance.
    Source: DeepSeek-V3, eqs. 17-20; over the whole batch: arXiv:2101.03961, eqs. 4-6.
    """
    real = real_BT.astype(logits_BTE.dtype)
    n_B = real.sum(1)
    count_BE = ((choice.expert_BTK[..., None] == jnp.arange(cfg.experts)) & real_BT[..., None, None]).sum((1, 2)).astype(real.dtype)
    share_BE = jnp.einsum('BTE,BT->BE', choice.share_BTE, real)
    per = lambda x: x if cfg.balance == 'sequence' else x.sum(0, keepdims=True)  # noqa: E731
    f_BE = cfg.experts / cfg.experts_per_token * per(count_BE) / jnp.maximum(per(n_B), 1)[:, None]
    tokens = jnp.maximum(n_B.sum(), 1)
    mean = lambda x_BT: (x_BT * real).sum() / tokens  # noqa: E731
    return {
        'count': count_BE.sum(0),
        'balance': (f_BE * per(share_BE)).sum() / tokens,  # the mean share of a row times its tokens is share_BE
        'z': mean(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))),
        'entropy': mean(-jax.scipy.special.xlogy(choice.share_BTE, choice.share_BTE).sum(-1)),
    }


class Moe(nn.Module):
    """y = sum_k w_k Expert_k(x) + Shared(x), (B, T, D) -> (B, T, D), `moe/*` statistics and what the router said of each token.

    Padding (real_BT False) goes to no routed expert and counts nowhere.

    Experts are gated FFNs as in `Mlp`; `norms='inner'` norms the hidden activation, each expert with its own gain. The router works in
    float32. Without capacity_factor no choice is dropped.  Source: DeepSeekMoE, arXiv:2401.06066; DeepSeek-V3, arXiv:2412.19437.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, 'B T D'], real_BT: Bool[Array, 'B T'] | None = None, norms: str = ''):
        cfg, (B, T, D), dtype, wide = self.cfg, x_BTD.shape, jnp.dtype(self.cfg.dtype), accumulator(self.cfg)
        E, F, K = cfg.experts, cfg.resolved_expert_ffn, cfg.experts_per_token
        real_BT = jnp.ones((B, T), bool) if real_BT is None else real_BT
        router_DE = make(self, 'router', (D, E), ('width', None), 'router', matrix_init(cfg, 'router', D, E), D)
        bias_E = make(self, 'router_bias', (E,), (None,), 'router_bias', Init()) if cfg.has_router_bias else None
        logits_BTE = jnp.einsum('BTD,DE->BTE', x_BTD.astype(wide), router_DE, precision='highest')
        choice = choose(cfg, logits_BTE, bias_E)
        stats = load(cfg, choice, logits_BTE, real_BT)

        expert_BTK, capacity = jnp.where(real_BT[..., None], choice.expert_BTK, E), None
        if cfg.capacity_factor is not None:
            capacity = min(T, math.ceil(cfg.capacity_factor * T * K / E))
            kept_BTK = dispatch.within_capacity(expert_BTK, E, capacity)
            expert_BTK = jnp.where(kept_BTK, expert_BTK, E)
        stats['dropped'] = 1 - (expert_BTK < E).sum() / jnp.maximum(stats['count'].sum(), 1)

        axes: dict[str, tuple[str, ...]] = {'up': ('experts', 'width', 'ffn'), 'down': ('experts', 'ffn', 'width')}
        if cfg.gated:
            axes['gate'] = axes['up']
        shapes = {name: (E, F, D) if name == 'down' else (E, D, F) for name in axes}
        weights = {}
        for name, shape in shapes.items():
            role, std = 'write' if name == 'down' else 'read', matrix_init(cfg, name, shape[1], shape[2])
            weights[name] = make(self, name, shape, axes[name], role, std, shape[1]).astype(dtype)
        if norms == 'inner':
            axes['gain'] = ('experts', 'ffn')
            one = Init(const=0.0 if cfg.norm_unit_offset else 1.0)
            weights['gain'] = make(self, 'norm_inner_gain', (E, F), axes['gain'], 'gain', one) + (1 if cfg.norm_unit_offset else 0)
            if cfg.norm_bias:
                axes['bias'] = ('experts', 'ffn')
                weights['bias'] = make(self, 'norm_inner_bias', (E, F), axes['bias'], 'bias', Init())
        x_BTD = x_BTD.astype(dtype)
        out_BTD = routed(cfg, x_BTD, expert_BTK, choice.weight_BTK, weights, axes, capacity).astype(wide)
        if cfg.shared_experts:
            out_BTD += Mlp(cfg, cfg.shared_experts * F, name='shared')(x_BTD, norms)
        tensors = {'router_logits': logits_BTE, 'router_experts': choice.expert_BTK}
        return out_BTD, {f'moe/{k}': v for k, v in stats.items()} | tensors


def expert_ffn(
    cfg: ModelConfig, w: dict[str, Array], split: str | None, x_MD: Float[Array, 'M D'], groups: dispatch.Groups
) -> Float[Array, 'M D']:
    """down(act(gate x) * up x) of each row's expert; a partial sum where the mesh axis `split` holds parts of the hidden units."""
    act, dot = ACTIVATIONS[cfg.activation], functools.partial(dispatch.grouped_dot, groups=groups)
    h_MF = act(dot(x_MD, w['gate'])) * dot(x_MD, w['up']) if cfg.gated else act(dot(x_MD, w['up']))
    if 'gain' in w:
        h_MF = standardize(h_MF.astype(accumulator(cfg)), cfg.norm, cfg.norm_eps, split) * w['gain'][groups.expert_M]
        h_MF = h_MF + w['bias'][groups.expert_M] if 'bias' in w else h_MF
    return dot(h_MF.astype(x_MD.dtype), w['down'])


def routed(
    cfg: ModelConfig,
    x_BTD: Float[Array, 'B T D'],
    expert_BTK: Int[Array, 'B T K'],
    weight_BTK: Float[Array, 'B T K'],
    weights: dict[str, Array],
    axes: dict[str, tuple[str, ...]],
    capacity: int | None,
) -> Float[Array, 'B T D']:
    """The routed experts' part of the output: on this device, or over the mesh that is set (`jax.set_mesh`)."""
    mesh, E = jax.sharding.get_abstract_mesh(), cfg.experts
    flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    if cfg.expert_exchange == 'dense':
        x_ND = flat(x_BTD)
        N = len(x_ND)
        groups = dispatch.Groups(jnp.full(E, N), jnp.repeat(jnp.arange(E), N), N)
        out_END = expert_ffn(cfg, weights, None, jnp.tile(x_ND, (E, 1)), groups).reshape(E, N, -1)
        weight_NE = (jax.nn.one_hot(flat(expert_BTK), E) * flat(weight_BTK)[..., None]).sum(1)  # a dropped choice is no expert
        return jnp.einsum('END,NE->ND', out_END, weight_NE).reshape(x_BTD.shape)
    if mesh.empty or mesh.size == 1:
        slots = None if capacity is None else len(x_BTD) * capacity * E
        experts = functools.partial(expert_ffn, cfg, weights, None)
        out_ND = dispatch.local(experts, flat(x_BTD), flat(expert_BTK), flat(weight_BTK), E, slots)
        return out_ND.reshape(x_BTD.shape)

    tokens = spec(('rows', 'positions', None), x_BTD.shape, mesh)[0]
    places = {name: spec(axes[name], w.shape, mesh)[0] for name, w in weights.items()}
    over = 'expert' if places['up'][0] else None
    split = 'tensor' if places['up'][2] else None
    P = mesh.shape['expert'] if over else 1

    def whole(name, w):
        """A weight with the parts of its width, which other devices hold, and no more."""
        i = axes[name].index('width') if 'width' in axes[name] else None
        return w if i is None or places[name][i] is None else jax.lax.all_gather(w, places[name][i], axis=i, tiled=True)

    def body(x_BTD, expert_BTK, weight_BTK, weights):
        experts = functools.partial(expert_ffn, cfg, {name: whole(name, w) for name, w in weights.items()}, split)
        x_ND, expert_NK, weight_NK = map(flat, (x_BTD, expert_BTK, weight_BTK))
        room = slots = None
        if capacity is not None:
            # A row split over `sequence` has its places on every part of it.
            room = len(x_BTD) * capacity * (E // P)
            slots = P * room
        if over:
            out_ND = dispatch.over_devices(
                experts, x_ND, expert_NK, weight_NK, E // P, P, over, room, slots, cfg.expert_exchange == 'ragged'
            )
        else:
            out_ND = dispatch.local(experts, x_ND, expert_NK, weight_NK, E, slots)
        if split:
            out_ND = jax.lax.psum(out_ND, split)
        return out_ND.reshape(x_BTD.shape)

    specs = tokens, PartitionSpec(*tokens[:2], None), PartitionSpec(*tokens[:2], None), places
    # Replication is not tracked: neither grouped products nor our own gradients can tell it.
    return jax.shard_map(body, in_specs=specs, out_specs=tokens, check_vma=False)(x_BTD, expert_BTK, weight_BTK, weights)
