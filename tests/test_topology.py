"""Every topology of the table: identities between them, causality, isolation of documents, dropout, and adding one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spannorm_jax import catalog, cli, topology
from spannorm_jax.config import ModelConfig
from spannorm_jax.errors import UserError
from spannorm_jax.initializers import is_param
from spannorm_jax.model import LM, infos, restack, unstack
from spannorm_jax.topology import TOPOLOGIES, Topology

NAMES = sorted(TOPOLOGIES)
READINGS = [(n, {}) for n in NAMES] + [
    ('span', {'first_skip': 'normed'}),
    ('span', {'block_end': 'affine'}),
    ('keel', {'first_block': 'uniform'}),
    ('siamese', {'siamese_input_norm': True}),
    ('normformer', {'resid_gain': True}),
    ('mhc', {'stream_exit': 'learned'}),
    ('pre', {'branch_gain': 'vector', 'branch_gain_init': 0.3}),
    ('peri', {'branch_gain': 'scalar', 'branch_gain_init': 0.5}),
]


def tiny(name, **fields):
    return ModelConfig(**{'topology': name, 'layers': 3, 'width': 16, 'heads': 2, 'vocab': 61, 'ffn': 24, **fields})


def random_params(cfg, seed=0):
    """Parameters near their initial distribution, with every gain, bias and gate moved off its start, so that a missing one shows."""
    rng = np.random.default_rng(seed)

    def value(info):
        std = info.init.std or 0.25
        start = info.init.const if info.init.fn is None else np.asarray(info.init.fn(None, info.value.shape[1:], info.init.sublayer))
        return jnp.asarray(start + std * rng.standard_normal(info.value.shape), jnp.float32)

    return jax.tree.map(value, infos(cfg), is_leaf=is_param)


@functools.cache
def forward(cfg):
    """One compiled forward for all tests of a model."""
    return jax.jit(lambda params, tokens, segments, positions: LM(cfg).apply(params, tokens, segments, positions))


def logits(cfg, params, tokens, segments=None, positions=None):
    segments = jnp.ones_like(tokens) if segments is None else segments
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    return np.asarray(forward(cfg)(params, tokens, segments, positions))


def edited(cfg, params, change):
    """Parameters with `change(name, value)` applied to each canonical one."""
    return restack(cfg, {k: change(k, np.asarray(v)) for k, v in unstack(cfg, params).items()})


@pytest.mark.parametrize(('name', 'fields'), READINGS)
def test_future_tokens_do_not_leak_and_documents_are_isolated(name, fields, tokens):
    cfg = tiny(name, **fields)
    params = random_params(cfg)
    segments = jnp.where(jnp.arange(12) < 5, 1, 2)[None].repeat(2, 0)
    positions = jnp.where(jnp.arange(12) < 5, jnp.arange(12), jnp.arange(12) - 5)[None].repeat(2, 0)
    plain = functools.partial(logits, cfg, params)
    run = lambda t: logits(cfg, params, t, segments, positions)  # noqa: E731

    before, after = plain(tokens), plain(tokens.at[:, 9].add(1))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.allclose(before[:, 9:], after[:, 9:])

    before, after = run(tokens), run(tokens.at[:, 2].add(1))
    np.testing.assert_array_equal(before[:, 5:], after[:, 5:])
    assert not np.allclose(before[:, 2:5], after[:, 2:5])
    # A packed document gives what it gives alone.
    alone = plain(jnp.pad(tokens[:, 5:], ((0, 0), (0, 5))))[:, :7]
    np.testing.assert_allclose(before[:, 5:], alone, atol=2e-5 * np.abs(alone).max())


FULL = pytest.mark.full


@pytest.mark.parametrize('layers', [3, *(pytest.param(n, marks=FULL) for n in (1, 2, 8))])
@pytest.mark.parametrize('name', NAMES)
def test_scanned_is_unrolled(name, layers, tokens):
    """The same parameters, logits and gradients whether blocks are scanned or written out, with and without rematerialisation."""
    base = tiny(name, layers=layers, **({'post_fraction': 0.5} if name == 'mixln' else {}))
    params = random_params(base)

    def value_and_grad(cfg):
        def loss(p):
            out = jax.nn.log_softmax(LM(cfg).apply(p, tokens))
            return -jnp.take_along_axis(out[:, :-1], tokens[:, 1:, None], -1).mean(), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (want, want_out), want_grad = value_and_grad(base)
    changes = [{'scan_unroll': 0}]
    if name in ('span', 'residual', 'hc'):  # one of each kind of stream; remat knows nothing else about a topology
        changes += [{'scan_unroll': 2, 'remat': 'full'}, {'remat': 'none'}]
    for change in changes:
        cfg = dataclasses.replace(base, **change)
        (got, got_out), got_grad = value_and_grad(cfg)
        assert abs(got - want) < 1e-5
        assert np.linalg.norm(got_out - want_out) <= 1e-5 * np.linalg.norm(want_out)
        for g, w in zip(jax.tree.leaves(got_grad), jax.tree.leaves(want_grad), strict=True):
            assert np.linalg.norm(g - w) <= 1e-5 * np.linalg.norm(w) + 1e-9
            assert np.linalg.norm(w) > 0 or w.size == 0


def start(info):
    """A parameter without its noise, but for the embedding: gains 1, matrices 0, patterns as they are."""
    if info.init.fn is not None:
        return jnp.stack([info.init.fn(None, info.value.shape[1:], 2 * l + info.init.sublayer) for l in range(len(info.value))])
    noise = np.random.default_rng(1).standard_normal(info.value.shape) if info.role == 'embed' else 0
    return jnp.full(info.value.shape, info.init.const, jnp.float32) + jnp.asarray(noise, jnp.float32)


def silent(cfg, params):
    """All W_O and down projections 0: the branches vanish."""
    return edited(cfg, params, lambda k, v: np.zeros_like(v) if k.endswith(('attn.o', 'ffn.down')) else v)


@pytest.mark.parametrize('name', NAMES)
def test_silent_branches_leave_the_normed_embedding(name, tokens):
    """With gains 1 and all W_O and down projections 0 the head sees N(E), or 2 N(E) where two streams are added at the exit."""
    cfg = tiny(name)
    params = silent(cfg, jax.tree.map(start, infos(cfg), is_leaf=is_param))
    params['head'] = jnp.eye(*params['head'].shape)  # the first `width` logits are the features
    features = logits(cfg, params, tokens)[..., : cfg.width]
    E = np.asarray(params['embed'])[tokens]
    normed = E / np.sqrt(np.square(E).mean(-1, keepdims=True))
    twice = 2 if name in ('residual', 'siamese') else 1
    np.testing.assert_allclose(features, twice * normed, atol=1e-4)


def same(a, b, params_a, params_b, tokens):
    np.testing.assert_allclose(logits(a, params_a, tokens), logits(b, params_b, tokens), atol=2e-5)


def test_identities_between_topologies(tokens):
    """variants.md section 15: what one topology becomes when its distinguishing part is taken away."""

    def carry(a, b, **fields):
        # The parameters that both have, from a model of topology b into one of topology a.
        cfg_b = tiny(b, **fields)
        params = random_params(cfg_b)
        return cfg_b, params, unstack(cfg_b, params)

    # LNS with s = 1 is PreNorm: undo the factor in the gains.
    cfg, params, named = carry('lns', 'pre')
    undo = {k: v * np.sqrt(int(k.split('.')[1]) + 1) if '_in.gain' in k else v for k, v in named.items()}
    same(tiny('lns'), cfg, restack(tiny('lns'), undo), params, tokens)
    # Mix-LN with no post blocks is PreNorm, with only post blocks PostNorm and a final norm.
    same(tiny('mixln', post_fraction=0.0), cfg, restack(tiny('mixln', post_fraction=0.0), named), params, tokens)
    cfg, params, named = carry('mixln', 'post', final_norm=True)
    same(tiny('mixln', post_fraction=1.0), cfg, restack(tiny('mixln', post_fraction=1.0), named), params, tokens)
    # DeepNorm with a = 1 is PostNorm.
    cfg, params, named = carry('deepnorm', 'post')
    same(tiny('deepnorm', alpha=1.0), cfg, restack(tiny('deepnorm', alpha=1.0), named), params, tokens)
    # Sandwich-LN is Peri-LN without the embedding norm; Peri-LN's branch norms are what PreNorm lacks.
    cfg, params, named = carry('sandwich', 'peri', embed_norm=False)
    same(tiny('sandwich'), cfg, restack(tiny('sandwich'), named), params, tokens)
    # KEEL with a = 1, no exceptions and inner norms that do nothing (gain 1 on vectors of rms 1) is PostNorm.
    cfg, params, named = carry('keel', 'post', norm_eps=1e-12)
    unit = {k: np.ones_like(v) if '.norm_' in k else v for k, v in named.items()}
    unit['embed'] = unit['embed'] / np.sqrt(np.square(unit['embed']).mean(-1, keepdims=True))
    keel = tiny('keel', alpha=1.0, first_block='uniform', final_norm=False, norm_eps=1e-12)
    inner = {k.replace('_sum.', '_in.'): v for k, v in unit.items() if '_sum.' in k}
    same(keel, cfg, restack(keel, unit | inner), restack(cfg, unit), tokens)
    # HC with one stream at its initial mixing is PreNorm.
    cfg, params, named = carry('hc', 'pre')
    hc = tiny('hc', streams=1)
    own = {k: v for k, v in unstack(hc, jax.tree.map(start, infos(hc), is_leaf=is_param)).items() if k not in named}
    same(hc, cfg, restack(hc, named | own), params, tokens)
    # The readings of SpanNorm differ in the first block only: with one block and a normed embedding they agree.
    one = {'layers': 1}
    cfg, params, named = carry('span', 'span', first_skip='normed', **one)
    raw = dict(named)
    E = raw['embed']
    raw['embed'] = E / np.sqrt(np.square(E).mean(-1, keepdims=True) + cfg.norm_eps)
    raw['norm_embed.gain'] = named['norm_embed.gain'] * 0 + 1
    normed = dict(raw)
    same(tiny('span', **one), cfg, restack(tiny('span', **one), raw), restack(cfg, normed), tokens)


def test_span_forgets_attention_without_ffn(tokens):
    """With F = 0 attention has no effect at all: the second skip spans it."""
    cfg = tiny('span')
    params = edited(cfg, random_params(cfg), lambda k, v: np.zeros_like(v) if k.endswith('ffn.down') else v)
    other = edited(cfg, params, lambda k, v: v + 1 if '.attn.' in k else v)
    np.testing.assert_array_equal(logits(cfg, params, tokens), logits(cfg, other, tokens))
    b2t = tiny('b2t')  # the negative control: B2T keeps y
    carried = {k: v for k, v in unstack(cfg, params).items() if not k.startswith('norm_embed')}
    changed = {k: v + 1 if '.attn.' in k else v for k, v in carried.items()}
    assert not np.allclose(logits(b2t, restack(b2t, carried), tokens), logits(b2t, restack(b2t, changed), tokens))


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('layers', [512, pytest.param(1, marks=FULL), pytest.param(1024, marks=FULL)])
def test_depths_and_low_precision(name, layers, tokens):
    """From 1 to 1024 blocks, in bfloat16, the result is finite and a branch still changes it."""
    cfg = tiny(name, layers=layers, width=8, ffn=8, dtype='bfloat16')
    params = LM(cfg).init(jax.random.key(0))
    run = jax.jit(lambda p: LM(cfg).features(p, tokens)[0])  # before the head rounds them to bfloat16 once more
    before = run(params)
    assert before.dtype == jnp.float32 and np.isfinite(before).all()
    for branch in ('attn.o', 'ffn.down'):
        layer = layers - 1 if branch == 'ffn.down' else layers // 2
        change = lambda k, v, at=f'layers.{layer}.{branch}': v * 0 if k == at else v  # noqa: E731
        changed = (before != run(edited(cfg, params, change))).mean()
        assert changed > 0.9, f'{branch} of block {layer} reaches {changed:.0%} of the features'


def test_dropout_is_off_by_default_and_keyed_by_layer(tokens):
    cfg = tiny('pre', dropout=0.5)
    params = random_params(cfg)
    run = jax.jit(lambda key: LM(cfg).apply(params, tokens, dropout_key=key, stats='tensors')[1]['after'][0])
    off = logits(tiny('pre'), params, tokens)
    np.testing.assert_array_equal(logits(cfg, params, tokens), off)
    a, b = run(jax.random.key(1)), run(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    dropped = np.asarray(a['attn'] == 0)
    assert 0.45 < dropped.mean() < 0.55
    assert (dropped[0] != dropped[1]).any() and (dropped != np.asarray(a['ffn'] == 0)).any()


def test_names_aliases_and_refusals():
    for name, entry in TOPOLOGIES.items():
        for alias in (name, name.upper(), *entry.aliases):
            assert topology.canonical(alias) == name
        assert entry.equation and entry.source
        assert set(entry.options) <= set(topology.OPTIONS)
    aliases = [a for entry in TOPOLOGIES.values() for a in entry.aliases]
    assert len(set(aliases)) == len(aliases) and not set(aliases) & set(TOPOLOGIES)
    for name, message in (('spam', 'span'), ('hybridnorm', 'axlearn'), ('hybrid-norm-', 'unknown')):
        with pytest.raises(UserError, match=message):
            ModelConfig(topology=name)
    with pytest.raises(UserError, match='read by deepnorm, keel'):
        ModelConfig(topology='pre', alpha=3.0)


def test_adding_a_topology_takes_one_function_and_one_line(monkeypatch, tokens, capsys):
    def average(x, attn, ffn, norm, c):
        """y = N1(A(x) + x); x' = N2(F(y) + (x + y) / 2)"""
        y = norm('attn_sum', attn(x) + x)
        return norm('ffn_sum', ffn(y) + (x + y) / 2)

    monkeypatch.setitem(TOPOLOGIES, 'average', Topology(average, average.__doc__, 'this test', final_norm=False))
    cfg = tiny('average')
    params = random_params(cfg)
    out, stats = jax.jit(lambda p: LM(cfg).apply(p, tokens, stats=True))(params)
    assert out.shape == (2, 12, 61) and stats['sigma_ffn'].shape == (3,)
    assert {'layers.2.norm_attn_sum.gain', 'layers.0.norm_ffn_sum.gain'} <= set(unstack(cfg, params))
    # The command line and the audit see it.
    assert next(row for row in catalog.rows() if row['name'] == 'average')['norm_sites'] == ['attn_sum', 'ffn_sum']
    assert cli.main(['topologies']) == 0 and "y = N1(A(x) + x); x' = N2(F(y) + (x + y) / 2)" in capsys.readouterr().out
    assert cli.main(['audit', 'debug', '--model.topology', 'average']) == 0 and 'norm_ffn_sum.gain' in capsys.readouterr().out
    # It is what it says: halfway between SpanNorm's skip and PostNorm's.
    post, named = tiny('post'), unstack(cfg, params)
    assert set(unstack(post, random_params(post))) == set(named)
    assert not np.allclose(out, logits(post, restack(post, named), tokens))
