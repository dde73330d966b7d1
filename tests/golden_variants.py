"""Goldens of our own at other shapes and options: written by the float64 oracle in the golden format, to try the maps beyond the given set.

config.json, layouts and the two units are written here from tests/golden/README.md; of golden_maps.py only the tables of names are used.
"""

import json

import golden_maps as maps
import jax
import jax.numpy as jnp
import numpy as np
import reference
from safetensors.numpy import save_file

from spannorm_jax import ModelConfig

SMALL = dict(layers=2, width=20, heads=6, kv_heads=3, head_dim=4, ffn=14, vocab=37, norm_eps=3e-3)
ROPE = dict(rope_theta=77.0, attn_scale=0.8)
SEQ = dict(kv_heads=6, head_dim=None, width=24, norm='layernorm', norm_bias=True, attn_bias=True, mlp_bias=True, positions='none')
LATE = 'hidden/0 is already multiplied by embed_scale'
RAW = 'hidden/0 is the raw embedding'
GLU = 'glu: proj -> (x, gate) halves in this order; out = x * silu(gate)'
LATENT = dict(
    attention='mla',
    q_latent=9,
    kv_latent=11,
    nope_dim=5,
    rope_dim=2,
    v_dim=3,
    kv_heads=None,
    head_dim=None,
    latent_norm_eps=2e-2,
    positions='rope_interleaved',
    rope_theta=77.0,
)
ROUTED = dict(experts=6, experts_per_token=2, expert_ffn=5, shared_experts=2, first_dense=1, router_bias=True, router_scale=1.7)
# golden name: (fields of ModelConfig over SMALL, keys of config.json that only this golden has)
VARIANTS = {
    'hf_llama': (dict(topology='pre', tie_embeddings=True, layers=1, **ROPE), {}),
    'hf_deepseek_v3': (
        dict(topology='pre', layers=3, tie_embeddings=True, **LATENT, **ROUTED | dict(expert_groups=3, groups_per_token=2)), {}),
    'hf_deepseek_v3_noqlora': (
        dict(topology='pre', layers=1, **LATENT | dict(q_latent=None), **ROUTED | dict(first_dense=0, shared_experts=1)), {}),
    'ref_spannorm_mla_moe': (
        dict(topology='span', first_skip='normed', **LATENT, **ROUTED | dict(router_normalize=False)),
        {'options': {'embed_norm_on_skip': True}}),
    'hf_gemma2': (
        dict(topology='sandwich', norm_unit_offset=True, tie_embeddings=True, embed_scale=20**0.5, activation='geglu_tanh', **ROPE),
        {'hidden0_note': LATE, 'sliding_window': None, 'softcap': None}),
    'hf_olmo2': (dict(topology='reordered', qk_norm='whole', **ROPE), {}),
    'hf_hyperclovax_periln': (
        dict(topology='peri', layers=1, heads=2, kv_heads=1, embed_norm=False, embed_scale=3.0, branch_scale=0.6, logit_scale=0.4, **ROPE),
        {'hidden0_note': RAW, 'embedding_multiplier': 3.0, 'residual_multiplier': 0.6, 'logits_multiplier': 0.4}),
    'xt_keel': (
        dict(topology='keel', first_block='uniform', alpha=2.5, final_norm=False, norm_eps=0.0, positions='rope_interleaved',
             kv_heads=6, width=24, head_dim=4), {'alpha': 2.5}),
    'ref_spannorm': (dict(topology='span', final_norm=True, layers=3), {'options': {'embed_norm_on_skip': False}}),
    'ref_spannorm_skipnormed': (dict(topology='span', first_skip='normed', layers=1), {'options': {'embed_norm_on_skip': True}}),
    'ref_postnorm': (dict(topology='post', final_norm=True), {'options': {'final_norm': True}}),
    'ref_keel': (dict(topology='keel', alpha=3.0, final_norm=False), {'alpha': 3.0, 'options': {'final_norm': False}}),
    'mixln_llama_pre': (dict(topology='pre', **ROPE), {}),
    'mixln_llama_post': (dict(topology='post', final_norm=True, **ROPE), {}),
    'mixln_llama_mix': (dict(topology='mixln', layers=3, post_fraction=1 / 3), {'n_post_layers': 1}),
    'mixln_llama_deepnorm': (dict(topology='deepnorm', final_norm=True, alpha=1.5), {'alpha': 1.5}),
    'mixln_llama_sandwich': (dict(topology='sandwich'), {}),
    'mixln_llama_scalarres': (dict(topology='pre', branch_gain='scalar'), {}),
    'lns_llama_lns': (dict(topology='lns', layers=3), {}),
    'hybridnorm_olmo': (dict(topology='hybrid', **ROPE), {}),
    'hybridnorm_star_olmo': (dict(topology='hybrid_star', tie_embeddings=True, layers=3), {}),
    'siamesenorm_olmo': (dict(topology='siamese_olmo', tie_embeddings=True, layers=3), {}),
    'olmocore_peri_norm': (dict(topology='peri', embed_norm=False, qk_norm='whole', kv_heads=1), {'embedding_norm': False}),
    'olmocore_peri_norm_embnorm': (
        dict(topology='peri', embed_norm=True, embed_scale=0.25), {'hidden0_note': RAW, 'embed_scale': 0.25, 'embedding_norm': True}),
    'olmocore_lns': (dict(topology='lns', embed_scale=2.0), {'hidden0_note': RAW, 'embed_scale': 2.0}),
    'olmocore_reordered_headqknorm': (dict(topology='reordered', qk_norm='head', embed_norm=True), {'embedding_norm': True}),
    'torchscale_deepnorm': (
        dict(topology='deepnorm', alpha=1.2, activation='gelu', embed_scale=24**0.5, final_norm=True, **SEQ), {'alpha': 1.2}),
    'torchscale_subln': (
        dict(topology='subln', activation='gelu', tie_embeddings=True, embed_scale=2.0, **SEQ), {'embed_scale': 2.0, 'hidden0_note': LATE}),
    'residual_fairseq': (
        dict(topology='residual', residual_scale=0.5, residual_exit_scale=0.3, activation='relu', final_norm_eps=1e-2,
             embed_scale=24**0.5, **SEQ), {'res_scale': 0.5, 'dec_alpha': 0.3, 'final_norm_eps': 1e-2}),
    'normformer_fairseq': (dict(topology='normformer', activation='gelu', embed_scale=24**0.5, **SEQ), {}),
    'b2t_fairseq': (dict(topology='b2t', activation='relu', embed_scale=1.5, layers=3, **SEQ), {'embed_scale': 1.5}),
}  # fmt: skip
BARE = ('c1', 'head_gain', 'resid_gain', 'attn_gain', 'ffn_gain')
FFN = {
    'swiglu': 'swiglu',
    'geglu_tanh': 'geglu: down( gelu_tanh(gate(x)) * up(x) )',
    'gelu': 'gelu (erf), fc1/fc2',
    'relu': 'relu, fc1/fc2',
}


def describe(name, cfg, extra):
    """config.json, from the README's conventions."""
    norm = {'layernorm': 'LayerNorm with bias', 'rmsnorm': 'rms, gain = 1 + weight' if cfg.norm_unit_offset else 'rms'}[cfg.norm]
    facts = {
        'name': name, 'n_layers': cfg.layers, 'd_model': cfg.width, 'n_heads': cfg.heads, 'd_ff': cfg.resolved_ffn, 'vocab_size': cfg.vocab,
        'norm': norm, 'norm_eps': cfg.norm_eps, 'tie_embeddings': cfg.tie_embeddings,
        'ffn': GLU if name == 'xt_keel' else FFN[cfg.activation],
    }  # fmt: skip
    if cfg.attention == 'mla':
        facts |= {
            'attention': 'mla', 'q_lora_rank': cfg.q_latent, 'kv_lora_rank': cfg.kv_latent, 'qk_nope_head_dim': cfg.nope_dim,
            'qk_rope_head_dim': cfg.rope_dim, 'v_head_dim': cfg.v_dim, 'mla_inner_norm_eps': cfg.latent_norm_eps,
            'n_routed_experts': cfg.experts, 'top_k': cfg.experts_per_token, 'moe_d_ff': cfg.expert_ffn, 'score': cfg.router,
            'n_shared_experts': cfg.shared_experts, 'first_k_dense': cfg.first_dense, 'norm_topk_prob': cfg.router_normalize is not False,
            'routed_scaling_factor': cfg.router_scale, 'n_group': cfg.expert_groups, 'topk_group': cfg.groups_per_token,
        }  # fmt: skip
    else:
        facts |= {'n_kv_heads': cfg.resolved_kv_heads, 'head_dim': cfg.resolved_head_dim}
    if cfg.positions == 'none':
        facts['positions'] = 'none'
    else:
        facts |= {'rope_layout': 'interleaved pairs' if cfg.positions == 'rope_interleaved' else 'half', 'rope_theta': cfg.rope_theta}
    if cfg.attn_scale is not None:
        facts['attn_scale'] = cfg.attn_scale
    return facts | extra


def rows(name, x):
    """A canonical array in the golden's layout: matrices as [out, in], heads in the rows, scalars as [1]."""
    last = name.rsplit('.', 1)[-1]
    if last in ('q', 'k', 'v'):
        return x.reshape(x.shape[0], -1).T
    if last == 'o':
        return x.reshape(-1, x.shape[-1]).T
    if last == 'embed':
        return x
    return x.T if x.ndim == 2 and not last.endswith('_bias') else x.reshape(-1)


ATTENTION = {
    'q_a': 'q_a_proj.weight', 'norm_q_a.gain': 'q_a_layernorm.weight', 'norm_kv_a.gain': 'kv_a_layernorm.weight', 'o': 'o_proj.weight',
}  # fmt: skip


def latent_weights(cfg, l, p):
    """self_attn.* of one block: the two halves of each fused matrix put together as transformers has them."""
    out = {f'self_attn.{golden}': rows(name, p[name]) for name, golden in ATTENTION.items() if name in p}
    out['self_attn.q_proj.weight' if cfg.q_latent is None else 'self_attn.q_b_proj.weight'] = rows('q', p['q'])
    out['self_attn.kv_a_proj_with_mqa.weight'] = np.concatenate([p['kv_a'].T, p['k_rope'].T])
    both = np.concatenate([p['k'], p['v']], -1)  # per head the keys' part first
    out['self_attn.kv_b_proj.weight'] = both.reshape(both.shape[0], -1).T
    return out


def expert_weights(p):
    """mlp.* of one block: experts one by one."""
    out = {'mlp.gate.weight': p['router'].T, 'mlp.gate.e_score_correction_bias': p['router_bias']}
    for k in ('gate', 'up', 'down'):
        out |= {f'mlp.experts.{e}.{k}_proj.weight': w.T for e, w in enumerate(p[k])}
        out[f'mlp.shared_experts.{k}_proj.weight'] = p[f'shared.{k}'].T
    return out


def by_golden_name(golden, facts, named, cfg):
    """Weights, or gradients, under the golden's names and in its layout."""
    out, parts = {}, {}
    if cfg.attention == 'mla':
        for l in range(cfg.layers):
            own = {k.removeprefix(f'layers.{l}.'): v for k, v in named.items() if k.startswith(f'layers.{l}.')}
            of = lambda part, own=own: {k.removeprefix(f'{part}.'): v for k, v in own.items() if k.startswith(f'{part}.')}  # noqa: E731
            block = latent_weights(cfg, l, of('attn')) | (expert_weights(of('ffn')) if l >= cfg.first_dense else {})
            out |= {f'{golden.prefix}{l}.{k}': v for k, v in block.items()}
        special = lambda k: '.attn.' in k or ('.ffn.' in k and int(k.split('.')[1]) >= cfg.first_dense)  # noqa: E731
        named = {k: v for k, v in named.items() if not special(k)}
    for name, value in named.items():
        stem, table, own = '', golden.model, name
        if name.startswith('layers.'):
            _, l, own = name.split('.', 2)
            stem, table = f'{golden.prefix}{l}.', golden.layer(facts, int(l))
        suffix = '' if own in BARE else '.bias' if own.endswith('bias') else '.weight'
        module = own.removesuffix('.gain').removesuffix('.bias').removesuffix('_bias')
        fused = next((f for f, members in golden.fused.items() if module in members), None)
        if fused:
            parts.setdefault(stem + fused + suffix, {})[module] = rows(name, value)
        else:
            out[stem + table[module] + suffix] = rows(name, value)
    for weight, pieces in parts.items():
        members = next(m for f, m in golden.fused.items() if f in weight)
        out[weight] = np.concatenate([pieces[m] for m in members])
    return {k: np.ascontiguousarray(v, np.float32) for k, v in out.items()}


def cross_entropy(logits, tokens):
    shifted = logits[:, :-1] - logits[:, :-1].max(-1)[..., None]
    log_p = shifted - jnp.log(jnp.exp(shifted).sum(-1))[..., None]
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


def save(folder, config, weights, inputs, outputs):
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(config))
    save_file(weights, folder / 'model.safetensors')
    np.savez(folder / 'inputs.npz', **inputs)
    np.savez(folder / 'outputs.npz', **{k: np.asarray(v, np.float32) for k, v in outputs.items()})


def gradients(grads):
    return {f'grad_l2/{k}': np.linalg.norm(g) for k, g in grads.items()} | {f'grad/{k}': g for k, g in grads.items() if g.ndim < 2}


def write(folder, name, random_params):
    """The golden `name` under `folder`; `random_params(cfg)` gives float32 parameters by canonical name."""
    if name in UNITS:
        return UNITS[name](folder / name)
    fields, extra = VARIANTS[name]
    cfg = ModelConfig(**SMALL | fields)
    config, golden = describe(name, cfg, extra), maps.MAPS[name]
    named, tokens = random_params(cfg), np.random.default_rng(5).integers(0, cfg.vocab, (2, 9), np.int32)

    def loss(named):
        oracle = reference.Oracle(cfg, named, jnp)
        logits = oracle.run(tokens)
        return cross_entropy(logits, tokens), (logits, oracle.seen)

    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'), jax.default_matmul_precision('highest'):
        wide = {k: jnp.asarray(v, 'float64') for k, v in named.items()}
        (value, (logits, seen)), grads = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(wide))
    facts = maps.Facts(config, golden.defaults)
    out = {'logits': logits, 'loss': value} | {k: v for k, v in seen.items() if k.startswith('hidden/')}
    if extra.get('hidden0_note') == RAW:
        out['hidden/0'] = out['hidden/0'] / cfg.embed_scale
    out |= {k: v for k, v in seen.items() if k.startswith('router/') and name != 'ref_spannorm_mla_moe'}
    if name.startswith('ref_'):
        out |= {k: v for k, v in seen.items() if k.startswith('mid/')}
    if name == 'xt_keel':
        out = {k: v for k, v in out.items() if 'hidden' not in k} | {'sublayer_hidden/0': seen['hidden/0']}
        for l in range(1, cfg.layers + 1):
            out |= {f'sublayer_hidden/{2 * l - 1}': seen[f'mid/{l}'], f'sublayer_hidden/{2 * l}': seen[f'hidden/{l}']}
    second = {'siamesenorm_olmo': 'hidden_y', 'residual_fairseq': 'hidden_residual'}.get(name)
    if second:
        out |= {k.replace('second', second): v for k, v in seen.items() if k.startswith('second/')}
    out['hidden/features' if name.endswith('fairseq') else 'hidden/final_norm'] = seen['features']
    save(
        folder / name,
        config,
        by_golden_name(golden, facts, named, cfg),
        {'tokens': tokens},
        out | {k: v for k, v in gradients(by_golden_name(golden, facts, grads, cfg)).items() if 'e_score' not in k},
    )


# ----------------------------------------------------------------------- units


def write_unit(folder, config, weights, inputs, forward):
    """Outputs and gradients of `forward(weights, inputs) -> outputs`, differentiated in float64."""
    weights, inputs = ({k: v.astype(np.float32) for k, v in x.items()} for x in (weights, inputs))

    def loss(both):
        out = forward(both['weights'], both['inputs'])
        return out['loss_mean_sq'], out

    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'), jax.default_matmul_precision('highest'):
        wide = jax.tree.map(lambda x: jnp.asarray(x, 'float64'), {'weights': weights, 'inputs': inputs})
        grads, out = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(wide))
    out |= gradients(grads['weights']) | {f'grad/{k}': v for k, v in grads['inputs'].items()}
    save(folder, config | {'name': folder.name}, weights, inputs, out)


def write_mhc(folder, n=3, d=6, rounds=4, eps=1e-2, guard=1e-3):
    """transformers' order of operations: softmax over the last axis plus eps, columns, then rows and columns in turn."""
    z = np.random.default_rng(3).standard_normal
    weights = {
        'branch.weight': z((d, d)), 'hc.fn': 0.4 * z((2 * n + n * n, n * d)), 'hc.base': z(2 * n + n * n), 'hc.scale': 1 + 0.3 * z(3),
        'head.hc_base': z(n), 'head.hc_fn': 0.4 * z((n, n * d)), 'head.hc_scale': 1 + 0.3 * z(1),
    }  # fmt: skip

    def unit(x):
        v = x.reshape(*x.shape[:2], -1)
        return v / jnp.sqrt((v**2).mean(-1)[..., None] + eps)

    def forward(w, inputs):
        H = inputs['streams']
        raw = unit(H) @ w['hc.fn'].T
        pre = jax.nn.sigmoid(raw[..., :n] * w['hc.scale'][0] + w['hc.base'][:n]) + guard
        post = 2 * jax.nn.sigmoid(raw[..., n : 2 * n] * w['hc.scale'][1] + w['hc.base'][n : 2 * n])
        comb = jnp.exp(raw[..., 2 * n :] * w['hc.scale'][2] + w['hc.base'][2 * n :]).reshape(*raw.shape[:2], n, n)
        comb = comb / comb.sum(-1)[..., None] + guard
        comb = comb / (comb.sum(-2)[..., None, :] + guard)
        for _ in range(rounds - 1):
            comb = comb / (comb.sum(-1)[..., None] + guard)
            comb = comb / (comb.sum(-2)[..., None, :] + guard)
        collapsed = (pre[..., None] * H).sum(-2)
        branch = collapsed @ w['branch.weight'].T
        new = post[..., None] * branch[..., None, :] + jnp.swapaxes(comb, -1, -2) @ H
        gate = jax.nn.sigmoid(unit(new) @ w['head.hc_fn'].T * w['head.hc_scale'] + w['head.hc_base']) + guard
        head = (gate[..., None] * new).sum(-2)
        return {
            'post': post, 'comb': comb, 'collapsed': collapsed, 'branch_out': branch, 'new_streams': new, 'head_out': head,
            'loss_mean_sq': (head**2).mean(),
        }  # fmt: skip

    config = {'n_streams': n, 'd_model': d, 'sinkhorn_iters': rounds, 'rms_eps': eps, 'hc_eps': guard}
    write_unit(folder, config, weights, {'streams': z((2, 4, n, d))}, forward)


def write_hc(folder, n=3, d=6, sublayers=2):
    z, weights = np.random.default_rng(4).standard_normal, {}
    for i in range(sublayers):
        own = {
            'dynamic_alpha_fn': z((d, n + 1)), 'dynamic_alpha_scale': z(1), 'dynamic_beta_fn': z(d), 'dynamic_beta_scale': z(1),
            'norm.gamma': 0.3 * z(d), 'static_alpha': z((n, n + 1)), 'static_beta': z(n),
        }  # fmt: skip
        weights |= {f'layers.{i}.{k}': v for k, v in own.items()} | {f'branch.{i}.weight': z((d, d))}

    def forward(w, inputs):
        streams, seen = [inputs['x']] * n, {}
        for i in range(sublayers):
            p = lambda k, i=i: w[f'layers.{i}.{k}']  # noqa: E731
            normed = [h / jnp.sqrt((h**2).sum(-1))[..., None] * d**0.5 * (1 + p('norm.gamma')) for h in streams]
            alpha = [p('static_alpha')[s] + p('dynamic_alpha_scale') * jnp.tanh(normed[s] @ p('dynamic_alpha_fn')) for s in range(n)]
            beta = [p('static_beta')[s] + p('dynamic_beta_scale') * jnp.tanh(normed[s] @ p('dynamic_beta_fn')) for s in range(n)]
            carry = [sum(alpha[s][..., t, None] * streams[s] for s in range(n)) for t in range(n + 1)]
            out = jnp.tanh(carry[0] @ w[f'branch.{i}.weight'].T)
            streams = [carry[t + 1] + beta[t][..., None] * out for t in range(n)]
            seen |= {f'branch_in/{i}': carry[0], f'streams/{i + 1}': jnp.stack(streams, -2)}
        reduced = sum(streams)
        return seen | {'reduced': reduced, 'loss_mean_sq': (reduced**2).mean()}

    write_unit(folder, {'n_streams': n, 'd_model': d, 'n_sublayers': sublayers}, weights, {'x': z((2, 4, d))}, forward)


UNITS = {'hf_mhc_unit': write_mhc, 'lucid_hc_unit': write_hc}
