"""How each golden reads in this project: config.json and weights -> ModelConfig and parameters by canonical name.

Keyed by golden name. A map holds names and the few facts of its own; shapes and switches come from config.json and from the weights
that are there. How entries move is the package's own (interop/names.py); `back` follows the same moves the other way for gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from spannorm_jax import ModelConfig, streams
from spannorm_jax.interop.names import BLOCK, BRANCHES, MODEL, PERI, PRE, QKV, SANDWICH, Layout, Named, Place, places, split
from spannorm_jax.layers import Norm

# Prose and bookkeeping in config.json; every other key has to be read by somebody.
PROSE = {
    'batch', 'env', 'fp32_vs_fp64_logits_max_abs_diff', 'logits_abs_max', 'loss_value', 'name', 'norm_names', 'note',
    'qk_norm', 'routing_margin', 'seed', 'seq_len', 'source', 'stream_axes', 'topology', 'versions', 'wiring',
}  # fmt: skip


class Facts(dict):
    """config.json over the documented defaults (its `options` unpacked; null means the default); remembers what was read."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any]):
        super().__init__({**defaults, **config.get('options', {}), **{k: v for k, v in config.items() if k != 'options'}})
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.read.add(key)
        value = super().get(key)
        return default if value is None else value

    def unread(self) -> list[str]:
        return sorted(set(self) - self.read - PROSE)


class Map(NamedTuple):
    """One golden: names are {canonical: golden} of modules, whose `.weight` and `.bias` are looked for, or of bare parameters."""

    topology: str
    prefix: str  # what stands before the layer number
    model: dict[str, str]
    layer: Callable[[Facts, int], dict[str, str]]
    fields: Callable[[Facts], dict[str, Any]] = lambda facts: {}  # fields of ModelConfig that only this golden sets
    defaults: dict[str, Any] = {}  # documented values of keys that config.json may leave out
    scaled: bool = False  # the embedding is times sqrt(d), and hidden/0 is taken after that, unless config.json says otherwise
    fused: dict[str, tuple[str, ...]] = {}  # golden module -> canonical parts of its rows, in order


def canonical(cfg: ModelConfig, where: dict[str, Place], weights: dict[str, Any]) -> dict[str, Any]:
    """Parameters by canonical name from weights by golden name. Moves entries and does not change them."""
    return dict(Named(cfg, where, weights.__getitem__))


def back(cfg: ModelConfig, where: dict[str, Place], weights: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
    """Gradients by golden name from gradients by canonical name: `canonical` of the positions of a weight says where each entry went."""
    starts = dict(zip(weights, np.cumsum([0, *(w.size for w in weights.values())]).tolist(), strict=False))
    source = canonical(cfg, where, {k: starts[k] + np.arange(w.size).reshape(w.shape) for k, w in weights.items()})
    flat = np.full(sum(w.size for w in weights.values()), np.nan, np.float32)
    for name in where:
        flat[source[name]] = grads[name]
    return {k: flat[starts[k] : starts[k] + w.size].reshape(w.shape) for k, w in weights.items()}


def activation(text: str) -> str:
    kind, tanh = text.split(':')[0].split()[0].strip(','), 'tanh' in text
    known = {'swiglu': 'swiglu', 'glu': 'swiglu' if 'silu' in text else '', 'relu': 'relu'}
    known |= {k: f'{k}_tanh' if tanh else k for k in ('gelu', 'geglu')}
    if not known.get(kind):
        raise ValueError(f'unknown FFN in config.json: {text!r}')
    return known[kind]


def positions(facts: Facts) -> str:
    layout = facts.get('rope_layout', 'half')
    return 'none' if facts.get('positions') == 'none' else 'rope_interleaved' if layout.startswith('interleaved') else 'rope_half'


def read(golden: Map, config: dict[str, Any], weights: dict[str, Any]) -> tuple[ModelConfig, dict[str, Place], Facts]:
    """The ModelConfig of a golden, where each of its parameters comes from, and its facts."""
    facts = Facts(config, golden.defaults)
    N, D = facts['n_heads'], facts['d_model']
    mla, moe = facts.get('attention') == 'mla', facts.get('n_routed_experts', 0)
    K, H = (None, None) if mla else (facts.get('n_kv_heads') or N, facts.get('head_dim') or D // N)
    block = golden.layer(facts, 0)

    def found(name):
        """The weight of a parameter, outside the blocks or of the first one, where there is one."""
        module, suffix = split(name)
        theirs = golden.model[module] if module in golden.model else f'{golden.prefix}0.{block.get(module)}'
        return weights.get(theirs + suffix)

    has = {'final_norm': found('norm_final.gain') is not None, 'embedding_norm': found('norm_embed.gain') is not None}
    has['embed_norm'] = has['embedding_norm']
    for key, there in has.items():
        if facts.get(key, there) != there:
            raise ValueError(f'config.json says {key} = {facts[key]}, the weights say {there}')
    for key in ('softcap', 'sliding_window'):
        if facts.get(key):
            raise ValueError(f'config.json sets {key} = {facts[key]}, which no map reads')
    norm = facts.get('norm', 'rms')
    q_norm = None if found('attn.norm_v.gain') is not None else found('attn.norm_q.gain')  # norms of q, k and v are the topology's
    cfg = dict(
        topology=golden.topology, layers=facts['n_layers'], width=D, heads=N, kv_heads=K, head_dim=H, ffn=facts['d_ff'],
        vocab=facts['vocab_size'], activation=activation(facts.get('ffn', 'swiglu')),
        norm='layernorm' if norm.startswith('LayerNorm') else 'rmsnorm', norm_unit_offset='1 + ' in norm, norm_eps=facts['norm_eps'],
        norm_bias=any(found(f'{m}.bias') is not None for m in block if 'norm_' in m),
        final_norm_eps=facts.get('final_norm_eps'), final_norm=has['final_norm'], embed_norm=has['embed_norm'],
        positions=positions(facts), rope_theta=facts.get('rope_theta', 10_000.0), attn_scale=facts.get('attn_scale'),
        qk_norm='none' if q_norm is None else 'head' if q_norm.shape == (H,) else 'whole',
        branch_gain='scalar' if found('attn_gain') is not None else 'none', resid_gain=found('resid_gain') is not None,
        attn_bias=found('attn.q_bias') is not None, mlp_bias=found('ffn.up_bias') is not None,
        tie_embeddings=facts.get('tie_embeddings', found('head') is None),
        embed_scale=facts.get('embed_scale', D**0.5 if golden.scaled else 1.0) * facts.get('embedding_multiplier', 1.0),
        logit_scale=facts.get('logits_multiplier', 1.0),
    )  # fmt: skip
    cfg |= latent_fields(facts) if mla else {}
    cfg |= expert_fields(facts) if moe else {}
    cfg = ModelConfig(**cfg | golden.fields(facts))
    layout = Layout(golden.prefix, golden.model.__getitem__, lambda l, module: golden.layer(facts, l)[module], golden.fused)
    return cfg, places(cfg, layout), facts


def latent_fields(facts: Facts) -> dict[str, Any]:
    return dict(
        attention='mla', q_latent=facts['q_lora_rank'], kv_latent=facts['kv_lora_rank'], nope_dim=facts['qk_nope_head_dim'],
        rope_dim=facts['qk_rope_head_dim'], v_dim=facts['v_head_dim'], latent_norm_eps=facts.get('mla_inner_norm_eps', 1e-6),
    )  # fmt: skip


def expert_fields(facts: Facts) -> dict[str, Any]:
    return dict(
        experts=facts['n_routed_experts'], experts_per_token=facts['top_k'], expert_ffn=facts['moe_d_ff'],
        shared_experts=facts['n_shared_experts'] or 0, first_dense=facts['first_k_dense'], router=facts['score'],
        router_bias=True, router_normalize=facts['norm_topk_prob'], router_scale=facts['routed_scaling_factor'],
        expert_groups=facts['n_group'], groups_per_token=facts['topk_group'],
    )  # fmt: skip


def hidden0_scaled(golden: Map, facts: Facts) -> bool:
    """Whether hidden/0 already holds the embedding scale."""
    return 'already' in facts['hidden0_note'] if 'hidden0_note' in facts else golden.scaled


# ----------------------------------------------------------------------- names

REF_MODEL = {'embed': 'embed_tokens', 'head': 'lm_head', 'norm_embed': 'embed_norm', 'norm_final': 'final_norm'}
SUMS = {'norm_attn_sum': 'post_attention_layernorm', 'norm_ffn_sum': 'post_feedforward_layernorm'}
REF = {f'norm_{s}_{at}': f'{side}_{s}_norm' for s in ('attn', 'ffn') for at, side in (('in', 'pre'), ('sum', 'post'))}
GATES = {'attn_gain': 'raw_scaling_factor_attn', 'ffn_gain': 'raw_scaling_factor_mlp'}
OLMO_MODEL = {'embed': 'transformer.wte', 'head': 'transformer.ff_out', 'norm_final': 'transformer.ln_f'}
OLMO_LAYER = {'attn.o': 'attn_out', 'ffn.down': 'ff_out'} | {f'attn.norm_{k}': f'{k}_norm' for k in 'qkv'}
OLMO_FUSED = {'att_proj': ('attn.q', 'attn.k', 'attn.v'), 'ff_proj': ('ffn.up', 'ffn.gate')}
EXITS = {'norm_final_x': 'transformer.ln_f', 'norm_final_y': 'transformer.ln_y_f', 'norm_final': 'transformer.ln_final_f'}
SIAMESE = {'c1': 'c1', 'norm_attn_y': 'attn_y_norm', 'norm_attn_sum': 'ff_norm', 'norm_ffn_y': 'ff_y_norm', 'norm_ffn_in': 'ff_input_norm'}
CORE_MODEL = {'embed': 'embeddings', 'norm_embed': 'embedding_norm', 'norm_final': 'lm_head.norm', 'head': 'lm_head.w_out'}
CORE_LAYER = {'attn.norm_q': 'attention.q_norm', 'attn.norm_k': 'attention.k_norm', 'attn.o': 'attention.w_out'} | {
    f'attn.{k}': f'attention.w_{k}' for k in 'qkv'
} | {'ffn.gate': 'feed_forward.w1', 'ffn.up': 'feed_forward.w3', 'ffn.down': 'feed_forward.w2'}  # fmt: skip
CORE_PRE = {'norm_attn_in': 'attention_norm', 'norm_ffn_in': 'feed_forward_norm'}
CORE_PERI = CORE_PRE | {'norm_attn_branch': 'post_attention_norm', 'norm_ffn_branch': 'post_feed_forward_norm'}
CORE_OUT = {'norm_attn_branch': 'attention_norm', 'norm_ffn_branch': 'feed_forward_norm'}
SEQ_MODEL = {'embed': 'embed_tokens', 'head': 'output_projection', 'norm_final': 'layer_norm'}
SEQ_LAYER = QKV | {'attn.o': 'self_attn.out_proj', 'ffn.up': 'fc1', 'ffn.down': 'fc2'}
SCALE_LAYER = SEQ_LAYER | {'ffn.up': 'ffn.fc1', 'ffn.down': 'ffn.fc2'}
SEQ_IN = {'norm_attn_in': 'self_attn_layer_norm', 'norm_ffn_in': 'final_layer_norm'}
SEQ_SUM = {'norm_attn_sum': 'self_attn_layer_norm', 'norm_ffn_sum': 'final_layer_norm'}
NORMFORMER = SEQ_IN | {'head_gain': 'c_attn', 'norm_attn_branch': 'attn_ln', 'ffn.norm_inner': 'ffn_layernorm', 'resid_gain': 'w_resid'}
SUBLN = SEQ_IN | {'attn.norm_inner': 'self_attn.inner_attn_ln', 'ffn.norm_inner': 'ffn.ffn_layernorm'}
XT_LAYER = {f'attn.{k}': f'attn.to_{k}' for k in 'qkv'} | {'attn.o': 'attn.to_out', 'ffn.down': 'ffn.down'} | {
    f'norm_{s}_{at}': f'{s}.{side}_norm' for s in ('attn', 'ffn') for at, side in (('in', 'inner'), ('sum', 'outer'))
}  # fmt: skip


def hf(topology, norms, fields=lambda facts: {}, scaled=False, **defaults):
    return Map(topology, 'model.layers.', MODEL, lambda facts, l: BLOCK | norms, fields, {'norm_eps': 1e-6} | defaults, scaled)


def ref(topology, fields=lambda facts: {}):
    return Map(topology, 'layers.', REF_MODEL, lambda facts, l: BLOCK | REF, fields, {'norm_eps': 1e-5})


def olmo(topology, norms, model=OLMO_MODEL):
    layer = OLMO_LAYER | norms
    defaults = {'norm_eps': 1e-5, 'rope_theta': 500_000.0}
    return Map(topology, 'transformer.blocks.', model, lambda facts, l: layer, defaults=defaults, fused=OLMO_FUSED)


def core(topology, norms):
    return Map(topology, 'blocks.', CORE_MODEL, lambda facts, l: CORE_LAYER | norms, defaults={'norm_eps': 1e-6})


def seq(topology, norms, layer=SEQ_LAYER, fields=lambda facts: {}, ffn='gelu', **defaults):
    defaults = {'positions': 'none', 'norm': 'LayerNorm with bias', 'norm_eps': 1e-5, 'ffn': ffn} | defaults
    return Map(topology, 'layers.', SEQ_MODEL, lambda facts, l: layer | norms, fields, defaults, scaled=True)


def post_layers(facts):
    return facts.get('n_post_layers', facts.get('env', {}).get('POST_NUM', facts['n_layers'] // 4))


def mix_layer(facts, l):
    return BLOCK | (SUMS if l < post_layers(facts) else PRE)


def without_alpha(facts):
    if facts.get('alpha', 1.0) != 1.0:
        raise ValueError(f'config.json sets alpha = {facts["alpha"]}, which SubLN does not have')
    return {}


def own_alpha(facts):
    return {'alpha': facts.get('alpha')}


MAPS = {
    'hf_llama': hf('pre', PRE, norm_eps=1e-5),
    'hf_gemma2': hf('sandwich', SANDWICH, scaled=True, norm='rms, gain = 1 + weight', ffn='geglu: gelu_tanh'),
    'hf_deepseek_v3': hf('pre', PRE),
    'hf_deepseek_v3_noqlora': hf('pre', PRE),
    'ref_spannorm_mla_moe': ref('span', lambda facts: {'first_skip': 'normed' if facts.get('embed_norm_on_skip', False) else 'raw'}),
    'hf_olmo2': hf('reordered', BRANCHES, rope_theta=500_000.0),
    'hf_hyperclovax_periln': hf('peri', PERI, lambda facts: {'branch_scale': facts.get('residual_multiplier', 1.0)}, norm_eps=1e-5),
    'xt_keel': Map(
        'keel', 'layers.', {'embed': 'token_emb.emb', 'head': 'to_logits', 'norm_final': 'final_norm'}, lambda facts, l: XT_LAYER,
        lambda facts: own_alpha(facts) | {'first_block': 'uniform'}, {'norm_eps': 0.0, 'rope_layout': 'interleaved'},
        fused={'ffn.glu_proj': ('ffn.up', 'ffn.gate')}),
    'ref_spannorm': ref('span', lambda facts: {'first_skip': 'normed' if facts.get('embed_norm_on_skip', False) else 'raw'}),
    'ref_spannorm_skipnormed': ref('span', lambda facts: {'first_skip': 'normed' if facts.get('embed_norm_on_skip', True) else 'raw'}),
    'ref_postnorm': ref('post'),
    'ref_keel': ref('keel', own_alpha),
    'mixln_llama_pre': hf('pre', PRE),
    'mixln_llama_post': hf('post', SUMS),
    'mixln_llama_mix': Map(
        'mixln', 'model.layers.', MODEL, mix_layer, lambda facts: {'post_fraction': post_layers(facts) / facts['n_layers']},
        {'norm_eps': 1e-6}),
    'mixln_llama_deepnorm': hf('deepnorm', SUMS, own_alpha, alpha=8**0.5),  # hard-wired there, whatever the depth
    'mixln_llama_sandwich': hf('sandwich', SANDWICH),
    'mixln_llama_scalarres': hf('pre', PRE | GATES),
    'lns_llama_lns': hf('lns', PRE),
    'hybridnorm_olmo': olmo('hybrid', {'norm_ffn_in': 'ff_norm'}),
    'hybridnorm_star_olmo': olmo('hybrid_star', {'norm_attn_in': 'attn_norm', 'norm_ffn_in': 'ff_norm'}),
    'siamesenorm_olmo': olmo('siamese_olmo', SIAMESE, OLMO_MODEL | EXITS),
    'olmocore_peri_norm': core('peri', CORE_PERI),
    'olmocore_peri_norm_embnorm': core('peri', CORE_PERI),
    'olmocore_lns': core('lns', CORE_PRE),
    'olmocore_reordered_headqknorm': core('reordered', CORE_OUT),
    'torchscale_deepnorm': seq('deepnorm', SEQ_SUM, SCALE_LAYER, own_alpha),
    'torchscale_subln': seq('subln', SUBLN, SCALE_LAYER, without_alpha),
    'residual_fairseq': seq(
        'residual', SEQ_SUM, ffn='relu', final_norm_eps=1e-7, fields=lambda facts: {
            'residual_scale': facts.get('res_scale', 1.0), 'residual_exit_scale': facts.get('dec_alpha', 1.0)}),
    'normformer_fairseq': seq('normformer', NORMFORMER),
    'b2t_fairseq': seq('b2t', SEQ_SUM, ffn='relu'),
}  # fmt: skip


# ------------------------------------------------------- units: streams.py alone


def mhc_unit(facts: Facts, w: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """One mHC sublayer with the branch x W^T, and the learned exit. Rows of hc.fn: pre (n), post (n), mix (n, n) of the transpose of R."""
    n, d, eps, guard = facts['n_streams'], facts['d_model'], facts.get('rms_eps', 1e-6), facts.get('hc_eps', 1e-6)
    split = lambda x: (x[:n], x[n : 2 * n], x[2 * n :].reshape(n, n, *x.shape[1:]).swapaxes(0, 1))  # noqa: E731
    P = [jnp.moveaxis(rows.reshape(*rows.shape[:-1], n, d), (-2, -1), (0, 1)) for rows in split(w['hc.fn'])]
    weights = streams.mhc_weights(inputs['streams'], P, split(w['hc.base']), w['hc.scale'], facts.get('sinkhorn_iters', 20), eps, guard)
    seen = {'post': weights[1], 'comb': weights[2].swapaxes(-1, -2)}

    def branch(x):
        seen.update(collapsed=x, branch_out=x @ w['branch.weight'].T)
        return seen['branch_out']

    new = sum(streams.mhc_sublayer(inputs['streams'], branch, weights))
    P_exit = jnp.moveaxis(w['head.hc_fn'].reshape(n, n, d), 0, -1)
    head = streams.mhc_exit(new, P_exit, w['head.hc_base'], w['head.hc_scale'], eps, guard)
    return seen | {'new_streams': new, 'head_out': head, 'loss_mean_sq': (head**2).mean()}


def hc_unit(facts: Facts, w: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Dynamic Hyper-Connections around tanh branches; their norm is RMSNorm without eps and with gain 1 + gamma."""
    n, d = facts['n_streams'], facts['d_model']
    assert facts.get('norm', 'x/max').startswith('x/max'), f'unknown norm {facts["norm"]}'
    cfg = ModelConfig(width=d, heads=1, head_dim=d, positions='none', norm_eps=0.0, norm_unit_offset=True)
    H, seen = inputs['x'][..., None, :].repeat(n, axis=-2), {}
    for i in range(facts['n_sublayers']):
        own = {k.removeprefix(f'layers.{i}.'): v for k, v in w.items() if k.startswith(f'layers.{i}.')}
        alpha, beta = streams.hc_weights(
            Norm(cfg).apply({'params': {'gain': own['norm.gamma']}}, H), own['static_alpha'], own['static_beta'], own['dynamic_alpha_fn'],
            own['dynamic_beta_fn'], own['dynamic_alpha_scale'].reshape(()), own['dynamic_beta_scale'].reshape(()),
        )  # fmt: skip

        def branch(x, i=i):
            seen[f'branch_in/{i}'] = x
            return jnp.tanh(x @ w[f'branch.{i}.weight'].T)

        H = seen[f'streams/{i + 1}'] = sum(streams.hc_sublayer(H, branch, alpha, beta))
    reduced = H.sum(-2)
    return seen | {'reduced': reduced, 'loss_mean_sq': (reduced**2).mean()}


UNITS = {'hf_mhc_unit': mhc_unit, 'lucid_hc_unit': hc_unit}
