"""A language model of spannorm_jax for transformers (trust_remote_code). The functions at the end are the equations of its blocks.

Forward passes and losses; `generate` works without a cache, by recomputation. Axes: B rows, T queries, S keys, D width, N heads,
K kv heads, G heads per kv head, H dimensions of a key, J of a value, F hidden units, n streams.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput


class SpanNormConfig(PretrainedConfig):
    model_type = 'spannorm_jax'


class Weights(nn.Module):
    """Parameters by dotted name."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split('.')
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(leaf, nn.Parameter(torch.empty(shape)))


def get(module, name) -> Any:
    """A parameter, or None where there is none of that name."""
    *path, leaf = name.split('.')
    for part in path:
        module = module._modules.get(part)
        if module is None:
            return None
    return module._parameters.get(leaf)


def linear(w, name, x):
    weight = get(w, f'{name}.weight')
    return F.linear(x.to(weight.dtype), weight, get(w, f'{name}.bias'))


def normalize(cfg, x, gain, bias, eps):
    x = x.float()
    if cfg.norm_input_guard:
        largest = x.detach().abs().max()
        x = x / torch.where(largest > 0, largest / 8, torch.ones_like(largest))
    if cfg.norm == 'layernorm':
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x * (gain + 1 if cfg.norm_unit_offset else gain)
    return x if bias is None else x + bias


def norm_at(cfg, w, name, x, eps):
    gain = get(w, f'{name}.weight')
    return x if gain is None else normalize(cfg, x, gain, get(w, f'{name}.bias'), eps)


def head_norm(cfg, w, site, x):
    gain = get(w, f'norms.{site}.weight')
    if gain is None:
        return x
    # Over each head, or over all of them at once: its gain says which.
    flat = x.reshape(*x.shape[:2], -1, gain.shape[0])
    return norm_at(cfg, w, f'norms.{site}', flat, cfg.norm_eps).reshape(x.shape).to(x.dtype)


def rope(cfg, x, cos, sin):
    still, x = x.split([x.shape[-1] - cfg.rotated_dim, cfg.rotated_dim], dim=-1)
    dtype, x = x.dtype, x.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if cfg.positions == 'rope_interleaved' else x.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    x = torch.stack(pair, -1).flatten(-2) if cfg.positions == 'rope_interleaved' else torch.cat(pair, -1)
    return torch.cat([still, x.to(dtype)], -1)


def attention(cfg, w, x, ctx):
    B, T, _ = x.shape
    N, K, H, J = cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.value_dim
    if cfg.attention == 'mla':
        inner = lambda site, z: norm_at(cfg, w, f'self_attn.{site}_a_layernorm', z, cfg.latent_norm_eps)  # noqa: E731
        direct = cfg.q_latent is None
        q = linear(w, 'self_attn.q_proj', x) if direct else linear(w, 'self_attn.q_b_proj', inner('q', linear(w, 'self_attn.q_a_proj', x)))
        c, turned = linear(w, 'self_attn.kv_a_proj_with_mqa', x).split([cfg.kv_latent, cfg.rope_dim], -1)
        still, v = linear(w, 'self_attn.kv_b_proj', inner('kv', c)).view(B, T, N, -1).split([cfg.nope_dim, J], -1)
        q, k = q.view(B, T, N, H), torch.cat([still, turned[:, :, None].expand(-1, -1, N, -1)], -1)
    else:
        q, k, v = (linear(w, f'self_attn.{name}_proj', x).view(B, T, -1, H) for name in 'qkv')
    q, k, v = (head_norm(cfg, w, site, z) for site, z in (('q', q), ('k', k), ('v', v)))
    if ctx.cos is not None:
        q, k = rope(cfg, q, ctx.cos, ctx.sin), rope(cfg, k, ctx.cos, ctx.sin)
    scores = torch.einsum('btkgh,bskh->bkgts', q.reshape(B, T, K, N // K, H).float(), k.float()) * cfg.attn_scale
    if cfg.attn_soft_cap is not None:
        scores = cfg.attn_soft_cap * torch.tanh(scores / cfg.attn_soft_cap)
    p = scores.masked_fill(~ctx.mask[:, None, None], -1e30).softmax(-1)
    o = torch.einsum('bkgts,bskj->btkgj', p.to(v.dtype), v).reshape(B, T, N * J)
    return linear(w, 'self_attn.o_proj', norm_at(cfg, w, 'norms.attn_inner', o, cfg.norm_eps)).float()


ACTIVATIONS = {
    'swiglu': F.silu,
    'geglu': F.gelu,
    'geglu_tanh': lambda x: F.gelu(x, approximate='tanh'),
    'gelu': F.gelu,
    'gelu_tanh': lambda x: F.gelu(x, approximate='tanh'),
    'relu': F.relu,
}


def mlp(cfg, w, stem, x, inner):
    act = ACTIVATIONS[cfg.activation]
    up = linear(w, f'{stem}.up_proj', x)
    h = act(linear(w, f'{stem}.gate_proj', x)) * up if cfg.gated else act(up)
    return linear(w, f'{stem}.down_proj', inner(h)).float()


def moe(cfg, w, x):
    """Every expert takes the tokens that chose it; none is dropped."""
    B, T, D = x.shape
    x = x.reshape(-1, D)
    logits = F.linear(x.float(), get(w, 'mlp.gate.weight').float())
    score = logits.sigmoid() if cfg.router == 'sigmoid' else logits.softmax(-1)
    bias = get(w, 'mlp.gate.e_score_correction_bias')
    ranked = score if bias is None else score + bias
    if cfg.expert_groups > 1:
        groups = ranked.view(len(x), cfg.expert_groups, -1)
        best = groups.max(-1).values if bias is None else groups.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(cfg.groups_per_token, dim=-1).indices, True)
        ranked = groups.masked_fill(~kept[..., None], -math.inf).view_as(score)
    chosen = ranked.topk(cfg.experts_per_token, dim=-1).indices
    weight = score.gather(1, chosen)
    if cfg.router_normalize:
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-18)
    weight, out = weight * cfg.router_scale, torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    gains, biases = get(w, 'norms.ffn_inner.weight'), get(w, 'norms.ffn_inner.bias')
    for e in range(cfg.experts):
        token, place = torch.where(chosen == e)
        if len(token):
            own = lambda h, e=e: h if gains is None else normalize(cfg, h, gains[e], None if biases is None else biases[e], cfg.norm_eps)  # noqa: E731
            out.index_add_(0, token, mlp(cfg, w, f'mlp.experts.{e}', x[token], own) * weight[token, place, None])
    if cfg.shared_experts:
        out = out + mlp(cfg, w, 'mlp.shared_experts', x, lambda h: norm_at(cfg, w, 'norms.ffn_inner_shared', h, cfg.norm_eps))
    return out.view(B, T, D)


class SpanNormForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SpanNormConfig
    _supports_cache_class = False

    def __init__(self, config):
        super().__init__(config)
        weights = config.weights
        self.model = Weights({k.removeprefix('model.'): v for k, v in weights.items() if k.startswith('model.')})
        self.model.layers = nn.ModuleList(Weights(run['weights']) for run in config.runs for _ in range(run['layers']))
        self.lm_head = Weights({k.removeprefix('lm_head.'): v for k, v in weights.items() if k.startswith('lm_head.')})
        self.post_init()

    def _init_weights(self, module):
        """Models are begun in spannorm_jax, and only loaded here."""

    def get_input_embeddings(self):
        return None

    def get_output_embeddings(self):
        return None

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {'input_ids': input_ids, 'attention_mask': attention_mask}

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, **kwargs):
        cfg, run = SimpleNamespace(**self.config.facts), globals()
        T, device = input_ids.shape[1], input_ids.device
        mask = torch.ones(T, T, dtype=torch.bool, device=device).tril()[None]
        if attention_mask is not None:
            real = attention_mask.bool()
            mask = mask & (real[:, None, :] | torch.eye(T, dtype=torch.bool, device=device))
            position_ids = (real.cumsum(-1) - 1).clamp(min=0) if position_ids is None else position_ids
        if position_ids is None:
            position_ids = torch.arange(T, device=device)[None]
        ctx = SimpleNamespace(mask=mask, cos=None, sin=None)
        if cfg.positions != 'none':
            rate = cfg.rope_theta ** (-torch.arange(0, cfg.rotated_dim, 2, device=device, dtype=torch.float32) / cfg.rotated_dim)
            angle = (position_ids[..., None].float() * rate)[:, :, None]
            ctx.cos, ctx.sin = angle.cos(), angle.sin()

        def outer(site, x):
            return norm_at(cfg, self.model, f'norms.{site}', x, cfg.final_norm_eps if site == 'final' else cfg.norm_eps)

        c = SimpleNamespace(cfg=cfg, param=lambda name, *args, **kwargs: get(self.model, name))
        embed = get(self.model, 'embed_tokens.weight')
        stream, lo = run[self.config.enter](F.embedding(input_ids, embed).float() * cfg.embed_scale, outer, c), 0
        for blocks in self.config.runs:
            for i in range(blocks['layers']):
                coef = {k: v[i] for k, v in blocks['coef'].items()}
                first = self.config.embed_norm_inside and lo + i == 0
                coef['embedded'] = (lambda x: outer('embed', x)) if first else (lambda x: x)
                stream = self.block(cfg, run[blocks['rule']], blocks['moe'], coef, self.model.layers[lo + i], stream, ctx)
            lo += blocks['layers']
        x = run[self.config.leave](stream, outer, c)
        head = embed if cfg.tie_embeddings else get(self.lm_head, 'weight')
        logits = F.linear(x.to(head.dtype), head).float() * cfg.logit_scale
        if cfg.logit_soft_cap is not None:
            logits = cfg.logit_soft_cap * torch.tanh(logits / cfg.logit_soft_cap)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def block(self, cfg, rule, is_moe, coef, w, stream, ctx):
        def norm(site, x):
            return norm_at(cfg, w, f'norms.{site}', x, cfg.norm_eps)

        def param(name, *args, **kwargs):
            return get(w, name)

        def add(site, skip, o):
            gain = get(w, f'{site}_gain') if cfg.branch_gain != 'none' else None
            return skip + (o if gain is None else o * gain) * cfg.branch_scale

        def attn(x, norms=''):
            return attention(cfg, w, x, ctx)

        def ffn(x, norms=''):
            return moe(cfg, w, x) if is_moe else mlp(cfg, w, 'mlp', x, lambda h: norm_at(cfg, w, 'norms.ffn_inner', h, cfg.norm_eps))

        return rule(stream, attn, ffn, norm, SimpleNamespace(cfg=cfg, param=param, add=add, **coef))


def copies(x, norm, c):
    return norm('embed', x)[..., None, :].expand(*x.shape[:-1], c.cfg.streams, x.shape[-1])


class streams:
    """The algebra of Hyper-Connections (arXiv:2409.19606) and mHC (arXiv:2512.24880) over streams (B, T, n, D)."""

    read_onehot = one_stream = identity_mix = None  # initial values, which are not drawn here

    @staticmethod
    def hc_weights(H, alpha, beta, w_alpha, w_beta, s_alpha, s_beta, tanh=True):
        act = torch.tanh if tanh else lambda x: x
        return alpha + s_alpha * act(H @ w_alpha), beta + s_beta * act(H @ w_beta)

    @staticmethod
    def hc_sublayer(H, sub, alpha, beta):
        mixed = torch.einsum('...sd,...st->...td', H, alpha)
        return mixed[..., 1:, :], beta[..., None] * sub(mixed[..., 0, :])[..., None, :]

    @staticmethod
    def unit_rms(H, eps):
        return H * torch.rsqrt(H.square().mean((-2, -1), keepdim=True) + eps)

    @staticmethod
    def mhc_weights(H, P, b, a, rounds, eps):
        u = streams.unit_rms(H, eps)
        pre, post = (a[i] * torch.einsum('...nd,ndm->...m', u, P[i]) + b[i] for i in (0, 1))
        log_R = a[2] * torch.einsum('...nd,ndts->...ts', u, P[2]) + b[2]
        for _ in range(rounds):
            log_R = log_R.log_softmax(-2).log_softmax(-1)
        return pre.sigmoid(), 2 * post.sigmoid(), log_R.exp()

    @staticmethod
    def mhc_sublayer(H, sub, weights):
        pre, post, R = weights
        o = sub(torch.einsum('...s,...sd->...d', pre, H))
        return torch.einsum('...ts,...sd->...td', R, H), post[..., None] * o[..., None, :]

    @staticmethod
    def mhc_exit(H, P, b, a, eps):
        gate = (a * torch.einsum('...nd,ndm->...m', streams.unit_rms(H, eps), P) + b).sigmoid()
        return torch.einsum('...s,...sd->...d', gate, H)
