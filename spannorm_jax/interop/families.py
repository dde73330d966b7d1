"""The model types of transformers that we read and write: what their config.json says in our terms, and the other way.

`read` refuses by name whatever would make their model compute something else than ours. Whether a model of ours can be written as a
family needs no rule: it can where reading what was written gives the same model back.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from spannorm_jax import parametrization
from spannorm_jax.errors import UserError
from spannorm_jax.interop import names
from spannorm_jax.model import has_norm
from spannorm_jax.model_config import ModelConfig

ACTIVATIONS = {'silu': 'swiglu', 'swish': 'swiglu', 'gelu': 'geglu', 'gelu_pytorch_tanh': 'geglu_tanh'}
BACK = {'swiglu': 'silu', 'geglu': 'gelu', 'geglu_tanh': 'gelu_pytorch_tanh'}
# Keys that change nothing of a forward pass over a whole text: bookkeeping, training, generation, limits and hints.
IDLE = {
    '_name_or_path', 'architectures', 'attention_dropout', 'auto_map', 'aux_loss_alpha', 'bos_token_id', 'cache_implementation', 'dtype',
    'eos_token_id', 'ep_size', 'hidden_dropout', 'initializer_range', 'max_position_embeddings', 'model_type', 'output_router_logits',
    'pad_token_id', 'pretraining_tp', 'seq_aux', 'torch_dtype', 'transformers_version', 'use_cache', 'router_aux_loss_coef',
    'is_decoder', 'is_llama_config', 'rope_interleaved', 'unk_token_id', 'sep_token_id', 'num_mtp_layers',
}  # fmt: skip
# Fields that say how a model begins, trains or is computed; two models that differ in them alone are the same function.
NOT_THE_FUNCTION = (
    'init', 'init_std', 'embed_std', 'scale_init', 'beta', 'branch_gain_init', 'dropout', 'dtype', 'residual_dtype', 'remat', 'scan_unroll',
    'attn_kernel', 'document_mask', 'capacity_factor', 'expert_exchange', 'balance',
)  # fmt: skip


class Facts(dict):
    """A config.json over the defaults of its family, null meaning the default; it remembers what was read."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any]):
        super().__init__(defaults | {k: v for k, v in config.items() if v is not None or k not in defaults})
        self.seen, self.family = set(), config.get('model_type')

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        if key not in self:
            raise UserError(f'config.json of model_type {self.family!r} lacks {key!r}')
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = super().get(key)
        return default if value is None else value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any other value (null is one of the allowed, always)."""
        if self.get(key) not in (None, *allowed):
            raise self.refusal(key, self.get(key))

    def refusal(self, key: str, value: Any) -> UserError:
        return UserError(
            f'{key} = {str(value)[:80]!r} of model_type {self.family!r} is not implemented; the model would compute other numbers'
        )

    def check_all_seen(self) -> None:
        for key in sorted(set(self) - self.seen - IDLE):
            if super().get(key) not in (None, False):
                raise self.refusal(key, super().get(key))


class Family(NamedTuple):
    """One model_type."""

    architecture: str
    norms: dict[str, str]
    read: Callable[[Facts], dict[str, Any]]  # fields of ModelConfig
    write: Callable[[ModelConfig], dict[str, Any]]  # keys of config.json
    defaults: dict[str, Any]  # what transformers assumes of keys that are not there

    def layout(self) -> names.Layout:
        block = names.BLOCK | self.norms
        return names.Layout('model.layers.', names.MODEL.__getitem__, lambda l, module: block[module])


def theta(facts: Facts) -> float:
    given = facts.get('rope_parameters') or facts.get('rope_scaling') or {}
    facts.seen.update(('rope_parameters', 'rope_scaling'))
    kind = given.get('rope_type', given.get('type', 'default'))
    if kind != 'default':
        raise facts.refusal('rope_scaling', kind)
    for key in set(given) - {'rope_type', 'type', 'rope_theta'}:
        if given[key] not in (None, 1, 1.0):
            raise facts.refusal(f'rope_parameters.{key}', given[key])
    facts.only('partial_rotary_factor', 1.0)
    return float(given.get('rope_theta', facts['rope_theta']))


def common(facts: Facts, act: str = 'hidden_act') -> dict[str, Any]:
    """What every family says in the same words."""
    if facts[act] not in ACTIVATIONS:
        raise facts.refusal(act, facts[act])
    facts.only('quantization_config')
    return dict(
        layers=facts['num_hidden_layers'], width=facts['hidden_size'], heads=facts['num_attention_heads'], ffn=facts['intermediate_size'],
        vocab=facts['vocab_size'], norm_eps=float(facts['rms_norm_eps']), rope_theta=theta(facts), activation=ACTIVATIONS[facts[act]],
        tie_embeddings=facts['tie_word_embeddings'],
    )  # fmt: skip


def grouped(facts: Facts) -> dict[str, Any]:
    """MHA or GQA."""
    N = facts['num_attention_heads']
    return dict(
        kv_heads=facts.get('num_key_value_heads', N),
        head_dim=facts.get('head_dim') or facts['hidden_size'] // N,
        attn_bias=facts.get('attention_bias', False),
    )


def common_keys(cfg: ModelConfig, act: str = 'hidden_act') -> dict[str, Any]:
    return {
        'vocab_size': cfg.vocab, 'hidden_size': cfg.width, 'intermediate_size': cfg.resolved_ffn, 'num_hidden_layers': cfg.layers,
        'num_attention_heads': cfg.heads, 'num_key_value_heads': cfg.resolved_kv_heads, act: BACK.get(cfg.activation, cfg.activation),
        'rms_norm_eps': cfg.norm_eps, 'rope_theta': cfg.rope_theta, 'tie_word_embeddings': cfg.tie_embeddings, 'attention_dropout': 0.0,
    }  # fmt: skip


def grouped_keys(cfg: ModelConfig) -> dict[str, Any]:
    return {'head_dim': cfg.resolved_head_dim, 'attention_bias': cfg.attn_bias}


def llama(facts: Facts) -> dict[str, Any]:
    return common(facts) | grouped(facts) | dict(topology='pre', mlp_bias=facts['mlp_bias'])


def gemma2(facts: Facts) -> dict[str, Any]:
    for cap in ('final_logit_softcapping', 'attn_logit_softcapping'):
        facts.only(cap)
    facts.only('use_bidirectional_attention', False)
    facts.seen.add('hidden_act')  # transformers reads hidden_activation alone
    types, window = set(facts.get('layer_types', ['sliding_attention'])), facts.get('sliding_window')
    if types != {'full_attention'} and window is not None:
        raise facts.refusal('sliding_window', window)
    scale = facts['query_pre_attn_scalar'] ** -0.5
    own = dict(topology='sandwich', norm_unit_offset=True, embed_scale=facts['hidden_size'] ** 0.5, attn_scale=scale)
    return common(facts, 'hidden_activation') | grouped(facts) | own


def gemma2_keys(cfg: ModelConfig) -> dict[str, Any]:
    scalar = (cfg.attn_scale or cfg.resolved_head_dim**-0.5) ** -2
    whole = round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar
    return common_keys(cfg, 'hidden_activation') | grouped_keys(cfg) | {
        # transformers makes the mask of a window even where no layer has one.
        'query_pre_attn_scalar': whole, 'sliding_window': 4096, 'layer_types': ['full_attention'] * cfg.layers,
        'final_logit_softcapping': None, 'attn_logit_softcapping': None,
    }  # fmt: skip


def olmo2(facts: Facts) -> dict[str, Any]:
    facts.only('clip_qkv')
    return common(facts) | grouped(facts) | dict(topology='reordered', qk_norm='whole')


def hyperclovax(facts: Facts) -> dict[str, Any]:
    scale = facts.get('attention_multiplier')
    fields = common(facts) | grouped(facts) | dict(
        mlp_bias=facts['mlp_bias'], attn_scale=scale, embed_scale=float(facts['embedding_multiplier']),
        branch_scale=float(facts['residual_multiplier']), logit_scale=float(facts['logits_scaling']),
    )  # fmt: skip
    return fields | (dict(topology='peri', embed_norm=False) if facts['use_post_norm'] else dict(topology='pre'))


def hyperclovax_keys(cfg: ModelConfig) -> dict[str, Any]:
    return common_keys(cfg) | grouped_keys(cfg) | {
        'mlp_bias': cfg.mlp_bias, 'use_post_norm': cfg.topology != 'pre', 'embedding_multiplier': cfg.embed_scale,
        'residual_multiplier': cfg.branch_scale, 'logits_scaling': cfg.logit_scale,
        'attention_multiplier': cfg.attn_scale or cfg.resolved_head_dim**-0.5,
    }  # fmt: skip


def deepseek(facts: Facts) -> dict[str, Any]:
    """What DeepSeek-V2 and V3 share: latent attention, first dense blocks, routed and shared experts."""
    facts.only('attention_bias', False)
    facts.only('moe_layer_freq', 1)
    facts.only('mlp_bias', False)
    if not facts.get('n_shared_experts'):
        raise facts.refusal('n_shared_experts', facts.get('n_shared_experts', 0))
    N = facts['num_attention_heads']
    facts.only('num_key_value_heads', N)
    facts.seen.update(('head_dim', 'qk_head_dim', 'n_group', 'topk_group'))  # the first two follow from others
    return common(facts) | dict(
        topology='pre', attention='mla', q_latent=facts.get('q_lora_rank'), kv_latent=facts['kv_lora_rank'],
        nope_dim=facts['qk_nope_head_dim'], rope_dim=facts['qk_rope_head_dim'], v_dim=facts['v_head_dim'],
        experts=facts['n_routed_experts'], experts_per_token=facts['num_experts_per_tok'], expert_ffn=facts['moe_intermediate_size'],
        shared_experts=facts['n_shared_experts'], first_dense=min(facts['first_k_dense_replace'], facts['num_hidden_layers']),
        router_scale=float(facts['routed_scaling_factor']), positions='rope_interleaved',
    )  # fmt: skip


def deepseek_v2(facts: Facts) -> dict[str, Any]:
    facts.only('norm_topk_prob', False)
    facts.only('scoring_func', 'softmax')
    facts.only('topk_method', 'greedy', 'group_limited_greedy')
    limited = facts['topk_method'] == 'group_limited_greedy'
    groups = (facts['n_group'], facts['topk_group']) if limited else (1, 1)
    return deepseek(facts) | dict(
        router='softmax', router_bias=False, router_normalize=False, expert_groups=groups[0], groups_per_token=groups[1]
    )  # fmt: skip


def deepseek_v3(facts: Facts) -> dict[str, Any]:
    facts.only('scoring_func', 'sigmoid')
    facts.only('topk_method', 'noaux_tc')
    facts.seen.add('num_nextn_predict_layers')  # modules beside the model, whose weights are left out
    fields = deepseek(facts) | dict(
        router='sigmoid', router_bias=True, router_normalize=facts['norm_topk_prob'], expert_groups=facts['n_group'],
        groups_per_token=facts['topk_group'],
    )  # fmt: skip
    return fields | ({} if facts.get('rope_interleave', True) else {'positions': 'rope_half'})


def deepseek_keys(cfg: ModelConfig) -> dict[str, Any]:
    return common_keys(cfg) | {
        'num_key_value_heads': cfg.heads, 'attention_bias': False, 'q_lora_rank': cfg.q_latent, 'kv_lora_rank': cfg.kv_latent,
        'qk_nope_head_dim': cfg.nope_dim, 'qk_rope_head_dim': cfg.rope_dim, 'v_head_dim': cfg.v_dim, 'n_routed_experts': cfg.experts,
        'num_experts_per_tok': cfg.experts_per_token, 'moe_intermediate_size': cfg.resolved_expert_ffn,
        'n_shared_experts': cfg.shared_experts, 'first_k_dense_replace': cfg.first_dense, 'routed_scaling_factor': cfg.router_scale,
        'n_group': cfg.expert_groups, 'topk_group': cfg.groups_per_token, 'norm_topk_prob': cfg.normalizes_router,
    }  # fmt: skip


def deepseek_v2_keys(cfg: ModelConfig) -> dict[str, Any]:
    return deepseek_keys(cfg) | {'topk_method': 'greedy' if cfg.expert_groups == 1 else 'group_limited_greedy', 'norm_topk_prob': False}


def deepseek_v3_keys(cfg: ModelConfig) -> dict[str, Any]:
    return deepseek_keys(cfg) | {'rope_interleave': cfg.positions == 'rope_interleaved', 'num_nextn_predict_layers': 0}


LLAMA = {
    'hidden_act': 'silu', 'rms_norm_eps': 1e-6, 'rope_theta': 10_000.0, 'tie_word_embeddings': False, 'mlp_bias': False,
    'attention_bias': False,
}  # fmt: skip
V2 = LLAMA | {
    'q_lora_rank': 1536, 'kv_lora_rank': 512, 'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64, 'v_head_dim': 128, 'n_routed_experts': 64,
    'n_shared_experts': 2, 'moe_intermediate_size': 1407, 'first_k_dense_replace': 0, 'routed_scaling_factor': 1.0, 'topk_method': 'greedy',
}  # fmt: skip
V3 = V2 | {
    'n_routed_experts': 256, 'n_shared_experts': 1, 'moe_intermediate_size': 2048, 'first_k_dense_replace': 3, 'num_experts_per_tok': 8,
    'routed_scaling_factor': 2.5, 'topk_method': 'noaux_tc', 'n_group': 8, 'topk_group': 4, 'norm_topk_prob': True,
}  # fmt: skip
GEMMA2 = LLAMA | {
    'hidden_activation': 'gelu_pytorch_tanh', 'tie_word_embeddings': True, 'head_dim': 256, 'query_pre_attn_scalar': 256,
}  # fmt: skip
# Where null means that a feature is off, a key that is not there means that it is on.
GEMMA2_ON = {'final_logit_softcapping': 30.0, 'attn_logit_softcapping': 50.0, 'sliding_window': 4096}
CLOVA = LLAMA | {'embedding_multiplier': 1.0, 'residual_multiplier': 1.0, 'logits_scaling': 1.0, 'use_post_norm': True}

FAMILIES = {
    'llama': Family('LlamaForCausalLM', names.PRE, llama, lambda c: common_keys(c) | grouped_keys(c) | {'mlp_bias': c.mlp_bias}, LLAMA),
    'gemma2': Family('Gemma2ForCausalLM', names.SANDWICH, gemma2, gemma2_keys, GEMMA2),
    'olmo2': Family(
        'Olmo2ForCausalLM', names.BRANCHES, olmo2, lambda c: common_keys(c) | {'attention_bias': c.attn_bias},
        LLAMA | {'rms_norm_eps': 1e-5}),
    'hyperclovax': Family('HyperCLOVAXForCausalLM', names.PERI, hyperclovax, hyperclovax_keys, CLOVA),
    'deepseek_v2': Family('DeepseekV2ForCausalLM', names.PRE, deepseek_v2, deepseek_v2_keys, V2),
    'deepseek_v3': Family('DeepseekV3ForCausalLM', names.PRE, deepseek_v3, deepseek_v3_keys, V3),
}  # fmt: skip


def read_config(config: dict[str, Any]) -> ModelConfig:
    """Raises: UserError for a model_type or a feature that is not implemented."""
    kind = str(config.get('model_type'))
    family = FAMILIES[kind]
    given = (GEMMA2_ON if kind == 'gemma2' else {}) | config
    facts = Facts(given, family.defaults)
    # q_lora_rank: null is a value there, and not the default.
    facts.update({k: None for k in ('q_lora_rank',) if k in config and config[k] is None})
    fields = family.read(facts)
    facts.check_all_seen()
    return ModelConfig(**fields)


def as_function(cfg: ModelConfig) -> ModelConfig:
    """The same function with every default worked out and every field that does not matter at its default."""
    plain = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.name in NOT_THE_FUNCTION}
    if cfg.attention == 'gqa':
        plain |= {'kv_heads': cfg.resolved_kv_heads, 'head_dim': cfg.resolved_head_dim}
    if cfg.experts:
        plain |= {
            'expert_ffn': cfg.resolved_expert_ffn, 'router_bias': cfg.has_router_bias, 'router_normalize': cfg.normalizes_router,
        }  # fmt: skip
    plain |= {'attn_scale': parametrization.attn_scale(cfg)} | parametrization.settled(cfg)
    eps = cfg.norm_eps if cfg.final_norm_eps is None else cfg.final_norm_eps
    return dataclasses.replace(
        cfg, **plain, ffn=cfg.resolved_ffn, final_norm_eps=eps, final_norm=has_norm(cfg, 'final'),
        embed_norm=has_norm(cfg, 'embed'),
    )  # fmt: skip


def differences(cfg: ModelConfig, kind: str) -> list[str]:
    """Fields in which a model differs from what its config.json as `kind` would be read as; none where it can be written so."""
    try:
        told = as_function(read_config({'model_type': kind} | FAMILIES[kind].write(cfg)))
    except UserError as e:
        return [str(e)]
    ours = as_function(cfg)
    return [
        f.name for f in dataclasses.fields(cfg) if not same(getattr(ours, f.name), getattr(told, f.name))
    ]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Powers, and numbers that JSON wrote, agree to rounding."""
    return abs(a - b) <= 1e-12 * abs(a) if isinstance(a, float) and isinstance(b, float) else a == b
