"""Modules used alone, statistics against brute force, canonical names, dtypes and counts."""

import dataclasses
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_topology import random_params, tiny

from spannorm_jax.attention import LOOKED_AT, attend, attention_stats, may_see
from spannorm_jax.errors import UserError
from spannorm_jax.layers import Attention, Norm, context, rope, rope_angles
from spannorm_jax.model import LM, Block, Stack, count_params, flops_per_token, infos, restack, unstack
from spannorm_jax.topology import TOPOLOGIES

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((2, 6, 16)), jnp.float32)


def test_names_round_trip_and_misfits_are_named():
    for name in ('span', 'mixln', 'hc'):
        cfg = tiny(name, layers=5)
        params = random_params(cfg)
        named = unstack(cfg, params)
        assert {'embed', 'head', 'layers.4.attn.q', 'layers.0.ffn.down'} <= set(named)
        jax.tree.map(np.testing.assert_array_equal, restack(cfg, named), params)
        with pytest.raises(ValueError, match='no place.*extra'):
            restack(cfg, named | {'extra': X})
        with pytest.raises(KeyError, match='layers.3.attn.o'):
            restack(cfg, {k: v for k, v in named.items() if k != 'layers.3.attn.o'})
        with pytest.raises(ValueError, match='head: shape'):
            restack(cfg, named | {'head': named['head'][:, 1:]})
    # Both readings of SpanNorm, and every way to scan, share their names.
    names = [set(unstack(c, infos_values(c))) for c in (tiny('span'), tiny('span', first_skip='normed'), tiny('span', scan_unroll=0))]
    assert names[0] == names[1] == names[2] and 'norm_embed.gain' in names[0]


def infos_values(cfg):
    return jax.tree.map(lambda p: np.zeros(p.value.shape), infos(cfg), is_leaf=lambda p: hasattr(p, 'role'))


def test_counts():
    cfg = tiny('span', layers=3, kv_heads=1)
    params = random_params(cfg)
    assert count_params(cfg) == sum(x.size for x in jax.tree.leaves(params))
    D, F, V, H = 16, 24, 61, 8
    block = D * 2 * H + 2 * D * H + 2 * H * D + 3 * D * F
    assert count_params(cfg) == 2 * V * D + 3 * block + 7 * D
    assert flops_per_token(cfg, 12) == 6 * (3 * block + V * D) + 12 * 3 * 16 * 6.5
    tied = dataclasses.replace(cfg, tie_embeddings=True)
    assert count_params(tied) == count_params(cfg) - V * D and flops_per_token(tied, 12) == flops_per_token(cfg, 12)


@pytest.mark.parametrize('name', sorted(TOPOLOGIES))
def test_blocks_one_by_one_are_the_scan(name):
    """Block(cfg, layer=l), l = 0..L-1, each with its slice of the parameters, give the stream that the scan gives: no scan involved."""
    cfg = tiny(name)
    tree = random_params(cfg)
    _, extras = jax.jit(lambda p: Stack(cfg, collect='tensors').apply({'params': p}, X))(tree['stack'])
    runs = [v for k, v in tree['stack'].items() if k.startswith('blocks_')]
    layers = [jax.tree.map(lambda x, i=i: x[i], run) for run in runs for i in range(len(jax.tree.leaves(run)[0]))]
    outside = {k: v for k, v in tree['stack'].items() if not k.startswith('blocks_')}

    def norm(site, x):
        return Norm(cfg).apply({'params': outside[f'norm_{site}']}, x) if f'norm_{site}' in outside else x

    stream = TOPOLOGIES[name].enter(X, norm, SimpleNamespace(cfg=cfg))
    assert len(layers) == 3
    if TOPOLOGIES[name].embed_norm_inside(cfg):
        layers[0] |= {'norm_embed': outside['norm_embed']}
    for l, params in enumerate(layers):
        stream, _ = jax.jit(Block(cfg, layer=l).apply)({'params': params}, stream)
        want = jax.tree.map(lambda x, l=l: x[l], extras['hidden'])
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max()), stream, want)


def test_block_in_a_model_of_ones_own():
    class Denoiser(nn.Module):
        @nn.compact
        def __call__(self, x):
            cfg = tiny('span', layers=4)
            for l in range(1, 4):
                x, _ = Block(cfg, layer=l, causal=False, name=f'block_{l}')(x)
            return nn.Dense(16)(x)

    model = Denoiser()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    grad = jax.jit(jax.grad(lambda v, x: model.apply(v, x)[:, 0].sum(), argnums=1))(variables, X)
    assert np.abs(grad[:, 5]).max() > 0  # not causal: the first output sees the last input
    norms = jax.tree.map(np.linalg.norm, nn.meta.unbox(variables['params']))
    assert set(norms) == {'block_1', 'block_2', 'block_3', 'Dense_0'}


def test_statistics_are_what_they_say(tokens):
    """sigma, branch variance, correlation, rms and entropy recomputed from the activations of a PostNorm-like and a PreNorm-like model."""
    for name in ('pre', 'span'):
        cfg = tiny(name, layers=2, norm_eps=1e-12)
        params = jax.tree.map(lambda x: x, random_params(cfg))
        _, extras = jax.jit(lambda p, cfg=cfg: LM(cfg).apply(p, tokens, stats='tensors'))(params)
        _, scalars = jax.jit(lambda p, cfg=cfg: LM(cfg).apply(p, tokens, stats=True))(params)
        after = jax.tree.map(lambda *x: np.concatenate(x), *({k: r[k] for k in ('attn', 'ffn')} for r in extras['after']))
        hidden = np.asarray(extras['hidden'])
        np.testing.assert_allclose(scalars['rms'], np.sqrt(np.square(hidden).mean((1, 2, 3))), rtol=1e-5)
        np.testing.assert_allclose(scalars['branch_var/attn'], after['attn'].var((1, 2, 3)), rtol=1e-4)
        np.testing.assert_allclose(scalars['branch_var/ffn'], after['ffn'].var((1, 2, 3)), rtol=1e-4)
        enters = np.concatenate([np.asarray(params['embed'])[tokens][None], hidden[:-1]])
        if name == 'pre':
            skip_ffn = enters + after['attn']
            total_ffn = hidden
        else:
            skip_ffn, total_ffn = enters, enters + after['ffn']
        total_attn = enters + after['attn']
        np.testing.assert_allclose(scalars['sigma_attn'], total_attn.std(-1).mean((1, 2)), rtol=1e-4)
        np.testing.assert_allclose(scalars['sigma_ffn'], total_ffn.std(-1).mean((1, 2)), rtol=1e-4)
        for site, skip in (('attn', enters), ('ffn', skip_ffn)):
            want = [np.corrcoef(a.ravel(), s.ravel())[0, 1] for a, s in zip(after[site], skip, strict=True)]
            np.testing.assert_allclose(scalars[f'branch_skip_corr/{site}'], want, atol=1e-4)
            ratio = np.sqrt(np.square(after[site]).mean((1, 2, 3)) / np.square(skip).mean((1, 2, 3)))
            np.testing.assert_allclose(scalars[f'branch_skip_ratio/{site}'], ratio, rtol=1e-4)


def test_statistics_see_the_branch_as_it_is_added(tokens):
    """Factors on a branch count: a gate of 0 adds nothing, a constant scales the variance, SiameseNorm adds s o to its first stream."""

    def stats(name, **fields):
        cfg = tiny(name, **fields)
        params = unstack(cfg, random_params(cfg))
        if fields.get('branch_gain') == 'scalar':
            params |= {k: np.zeros_like(v) for k, v in params.items() if k.endswith(('attn_gain', 'ffn_gain'))}
        return jax.jit(lambda p: LM(cfg).apply(p, tokens, stats='tensors')[1])(restack(cfg, params))

    gated = stats('pre', branch_gain='scalar')
    for site in ('attn', 'ffn'):
        np.testing.assert_array_equal(gated[f'branch_var/{site}'], 0)
        np.testing.assert_allclose(gated[f'branch_skip_corr/{site}'], 0, atol=1e-6)
    for name in ('pre', 'peri'):
        plain, scaled = stats(name, layers=1), stats(name, layers=1, branch_scale=0.1)
        np.testing.assert_allclose(scaled['branch_var/attn'], 0.01 * plain['branch_var/attn'], rtol=1e-4)
    siamese = stats('siamese')
    for run in siamese['after']:
        s_L = (np.arange(3) + 1) ** -0.5
        want = (s_L[:, None, None, None] * run['attn']).var((1, 2, 3))
        np.testing.assert_allclose(siamese['branch_var/attn'], want, rtol=1e-4)
    former = stats('normformer')  # what is added is attention's output under a norm, which no factor before it changes
    for run in former['after']:
        np.testing.assert_allclose(former['branch_var/attn'], run['attn_branch'].var((1, 2, 3)), rtol=1e-4)


@pytest.mark.parametrize('name', ['hc', 'mhc', 'siamese_olmo'])
def test_statistics_of_several_streams(name, tokens):
    """With gates that read nothing of their input the branch and its skip follow by hand from the streams: their means over the streams
    (HC, mHC), the first stream and s o (SiameseNorm as released)."""
    cfg = tiny(name)
    n, named = cfg.streams, unstack(cfg, random_params(cfg))
    named = {k: 0 * v if k.rsplit('.')[-1].endswith(('_alpha_scale', '_beta_scale', '_a')) else v for k, v in named.items()}
    _, found = jax.jit(lambda p: LM(cfg).apply(p, tokens, stats='tensors'))(restack(cfg, named))
    after = jax.tree.map(lambda *x: np.concatenate(x), *({k: r[k] for k in ('attn', 'ffn')} for r in found['after']))
    first = np.float64(named['embed'])[tokens]
    streams = jax.tree.map(np.float64, found['hidden'][0] if name == 'siamese_olmo' else found['hidden'])
    enters = np.concatenate([(first if name == 'siamese_olmo' else first[..., None, :].repeat(n, -2))[None], streams[:-1]])

    def gates(l, site):
        """How the mean over the new streams depends on the old ones (n), the factor of the branch in it, and the mix itself (n, n)."""
        of = lambda k: np.float64(named[f'layers.{l}.{site}_{k}'])  # noqa: E731
        if name == 'hc':
            mix, beta = of('alpha')[:, 1:], of('beta')
        else:
            R = np.exp(of('mix_b'))
            for _ in range(cfg.sinkhorn_rounds):
                R /= R.sum(0)
                R /= R.sum(1, keepdims=True)
            mix, beta = R.T, 2 / (1 + np.exp(-of('post_b')))
        return mix, beta

    for l in range(cfg.layers):
        H = enters[l]
        for site in ('attn', 'ffn'):
            o = np.float64(after[site][l])
            if name == 'siamese_olmo':
                skip, branch = H, o * (2 * (l + 1)) ** -0.5
                total = skip + branch
                gain = named[f'layers.{l}.norm_attn_sum.gain']
                H = gain * total / np.sqrt(np.square(total).mean(-1, keepdims=True) + cfg.norm_eps)
            else:
                mix, beta = gates(l, site)
                new = np.einsum('...sd,st->...td', H, mix), beta[:, None] * o[..., None, :]
                skip, branch, H = new[0].mean(-2), new[1].mean(-2), sum(new)
            at = {k: found[f'{k}/{site}'][l] for k in ('branch_var', 'branch_skip_corr', 'branch_skip_ratio')}
            np.testing.assert_allclose(at['branch_var'], branch.var(), rtol=1e-4)
            np.testing.assert_allclose(at['branch_skip_corr'], np.corrcoef(branch.ravel(), skip.ravel())[0, 1], atol=1e-4)
            np.testing.assert_allclose(at['branch_skip_ratio'], np.sqrt(np.square(branch).mean() / np.square(skip).mean()), rtol=1e-4)
            np.testing.assert_allclose(found[f'sigma_{site}'][l], (skip + branch).std(-1).mean(), rtol=1e-4)


def test_attention_entropy_is_one_when_uniform_and_zero_when_certain():
    cfg = tiny('pre')
    module = Attention(cfg)
    ctx = context(cfg, jnp.arange(6)[None].repeat(2, 0))
    variables = nn.meta.unbox(jax.jit(lambda x: module.init(jax.random.key(0), x, ctx))(X))
    stats = jax.jit(lambda v: module.apply(v, X, ctx, stats=True)[1])
    flat = jax.tree.map(lambda x: x, variables)
    flat['params']['q'] = 0 * flat['params']['q']
    np.testing.assert_allclose(stats(flat)['attn_entropy'], 1, rtol=1e-6)
    np.testing.assert_allclose(stats(flat)['attn_sink'], np.mean(1 / np.arange(2, 7)), rtol=1e-6)
    flat['params']['q'] = variables['params']['k'] * 0 + 1e4
    assert stats(flat)['attn_entropy'] < 0.2
    first = jax.jit(attention_stats)(*(X[:, :1, None],) * 2, jnp.ones((1, 1, 1), bool), jnp.ones((1, 1), bool), 1.0)
    assert all(np.isnan(value) for value in first.values()), 'no query sees more than one position'


def test_attention_statistics_against_a_loop():
    """Grouped queries, packed documents with padding, more queries than are looked at: every second one counts."""
    T, scale, rng = 2 * LOOKED_AT, 0.4, np.random.default_rng(2)
    q, k = (rng.standard_normal((1, T, n, 4)).astype('float32') for n in (4, 2))
    segment_T = np.where(np.arange(T) < 50, 1, np.where(np.arange(T) < 110, 2, 0))
    mask_BTS = may_see(T, jnp.asarray(segment_T)[None], True)
    got = jax.jit(attention_stats)(q, k, mask_BTS, jnp.asarray(segment_T > 0)[None], scale)
    entropy, sink, largest = [], [], []
    for t in range(0, T, 2):
        seen = [s for s in range(t + 1) if segment_T[s] == segment_T[t]]
        if segment_T[t] == 0 or len(seen) == 1:
            continue
        for n in range(4):
            score = np.array([q[0, t, n] @ k[0, s, n // 2] * scale for s in seen], np.float64)
            p = np.exp(score) / np.exp(score).sum()
            entropy.append(-(p * np.log(p)).sum() / np.log(len(seen)))
            sink.append(p[0])
            largest.append(score.max())
    want = {'attn_entropy': np.mean(entropy), 'attn_sink': np.mean(sink), 'attn_logit_max': max(largest)}
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, err_msg=name)


def test_grouped_queries_and_masks_against_a_loop():
    B, T, N, K, H = 2, 5, 4, 2, 6
    q, k, v = (RNG.standard_normal((B, T, n, H)).astype('float32') for n in (N, K, K))
    mask = np.tril(np.ones((1, T, T), bool)) & (RNG.random((B, T, T)) < 0.7) | np.eye(T, dtype=bool)
    out, p = jax.jit(lambda q, k, v, m: attend(q, k, v, m, 0.3, 2.0))(q, k, v, mask)
    for b in range(B):
        for n in range(N):
            score = np.where(mask[b], 2 * np.tanh(q[b, :, n] @ k[b, :, n // 2].T * 0.3 / 2), -np.inf)
            prob = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
            np.testing.assert_allclose(out[b, :, n], prob @ v[b, :, n // 2], atol=1e-5)
            np.testing.assert_allclose(p[b, n // 2, n % 2], prob, atol=1e-5)


@pytest.mark.parametrize('interleaved', [False, True])
def test_rope_turns_pairs_as_complex_numbers(interleaved):
    x = jnp.asarray(RNG.standard_normal((1, 7, 2, 8)), jnp.float32)
    t = np.array([[0, 1, 2, 3, 0, 1, 50]])
    got = rope(x, *rope_angles(jnp.asarray(t), 8, 100.0), interleaved)
    pair = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    z = (x[..., pair[0]] + 1j * x[..., pair[1]]) * np.exp(1j * t[..., None, None] * 100.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(got[..., pair[0]], z.real, atol=1e-5)
    np.testing.assert_allclose(got[..., pair[1]], z.imag, atol=1e-5)


def test_norms_keep_float32_statistics_and_survive_zero_rows():
    for fields in ({}, {'norm': 'layernorm', 'norm_bias': True}, {'norm_unit_offset': True}, {'norm_input_guard': True}):
        module = Norm(tiny('pre', dtype='bfloat16', norm_eps=1e-5, **fields))
        x = (X * 300).astype(jnp.bfloat16)
        variables = nn.meta.unbox(module.init(jax.random.key(0), x))
        y = module.apply(variables, x)
        z = np.asarray(x, np.float64) - (np.asarray(x, np.float64).mean(-1, keepdims=True) if 'norm' in fields else 0)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, z / np.sqrt(np.square(z).mean(-1, keepdims=True)), rtol=2e-4, atol=2e-4)
        grad = jax.grad(lambda x, m=module, v=variables: m.apply(v, x).sum())(jnp.zeros((2, 16)))
        assert np.isfinite(grad).all()


def test_residual_dtype_is_a_field(tokens):
    params = random_params(tiny('pre'))
    for dtype in ('float32', 'bfloat16'):
        cfg = tiny('pre', dtype='bfloat16', residual_dtype=dtype)
        _, extras = jax.eval_shape(lambda p, cfg=cfg: LM(cfg).apply(p, tokens, stats='tensors'), params)
        assert extras['hidden'].dtype == dtype


def test_soft_cap_and_scale_act_on_the_logits(tokens):
    cfg = tiny('pre')
    params = random_params(cfg)
    run = lambda **f: np.asarray(jax.jit(LM(tiny('pre', **f)).apply)(params, tokens))  # noqa: E731
    plain = run()
    np.testing.assert_allclose(run(logit_soft_cap=2.0, logit_scale=0.5), 2 * np.tanh(plain * 0.5 / 2), atol=1e-5)


def test_double_precision_agrees_to_float32(tokens):
    """float64 products and sums, as an oracle for everything above them."""
    cfg = tiny('span')
    params = random_params(cfg)
    single = jax.jit(LM(cfg).apply)(params, tokens)
    with pytest.raises(UserError, match='jax_enable_x64'):
        jax.eval_shape(LM(tiny('span', dtype='float64')).apply, params, tokens)
    with jax.enable_x64(True):
        wide = dataclasses.replace(cfg, dtype='float64', residual_dtype='float64')
        double = jax.jit(LM(wide).apply)(jax.tree.map(lambda x: np.asarray(x, np.float64), params), tokens)
        assert double.dtype == jnp.float64
    np.testing.assert_allclose(single, double, atol=2e-5)
