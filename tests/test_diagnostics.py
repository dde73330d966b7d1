"""Known answers and brute-force twins of every diagnostic; models taken apart are the models."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, FakeCorpus
from test_topology import NAMES, random_params, tiny

from spannorm_jax import diagnostics as d
from spannorm_jax.config import edit
from spannorm_jax.diagnostics import anatomy, removal, spectra
from spannorm_jax.model import LM, Block, restack, unstack

RNG = np.random.default_rng(3)
KEY = jax.random.key(1)
EVERY = [n if n in ('pre', 'span', 'mixln', 'siamese_olmo', 'mhc') else pytest.param(n, marks=pytest.mark.full) for n in NAMES]


def batch_of(B=2, T=6, seed=0):
    """Two documents in a row, the last row with padding."""
    rng = np.random.default_rng(seed)
    segments = np.where(np.arange(T) < 2, 1, 2)[None].repeat(B, 0)
    segments[-1, -1] = 0
    positions = np.where(np.arange(T) < 2, np.arange(T), np.arange(T) - 2)[None].repeat(B, 0)
    tokens, targets = rng.integers(0, 61, (2, B, T))
    return {k: jnp.asarray(v, jnp.int32) for k, v in
            {'tokens': tokens, 'targets': targets, 'segments': segments, 'positions': positions}.items()}  # fmt: skip


BATCH = batch_of()


def mean_loss(cfg, named):
    """The loss from the public model, in NumPy."""
    return reference_loss(cfg)(restack(cfg, named))


@functools.cache
def reference_loss(cfg):
    logits = jax.jit(lambda p: LM(cfg).apply(p, BATCH['tokens'], BATCH['segments'], BATCH['positions']))

    def run(params):
        logp = np.asarray(jax.nn.log_softmax(logits(params)))
        nats = -np.take_along_axis(logp, np.asarray(BATCH['targets'])[..., None], -1)[..., 0]
        return nats[np.asarray(BATCH['segments']) > 0].mean()

    return run


# ------------------------------------------------------------------ a model taken apart


@pytest.mark.parametrize('name', EVERY)
def test_taken_apart_it_is_the_model_scanned_and_unrolled(name):
    """States, sublayers' outputs and features of a scan over the parts are those of the unrolled model; with all blocks skipped nothing
    happens between its ends; the readout of the last state is the features."""
    cfg = tiny(name)
    params, unrolled = random_params(cfg), dataclasses.replace(cfg, scan_unroll=0)

    @jax.jit
    def both(params):
        whole = LM(unrolled).features(params, BATCH['tokens'], BATCH['segments'], BATCH['positions'], stats='tensors')
        x, ctx = anatomy.embed(cfg, params, BATCH)
        nothing = anatomy.features(cfg, params, x, ctx, d.Gates(jnp.zeros(3), jnp.ones(3)))
        return whole, anatomy.record(cfg, params, BATCH), nothing

    (features, extras), seen, nothing = both(params)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    close(seen['features'], features)
    close(seen['readout'][-1], features)
    close(seen['readout'][0], nothing)
    hidden = jax.tree.leaves(extras['hidden'])[0]
    close(seen['states'][1:], hidden.mean(-2) if hidden.ndim > 4 else hidden)
    after = jax.tree.map(lambda *x: np.concatenate(x), *({k: run[k] for k in ('attn', 'ffn')} for run in extras['after']))
    close(seen['attn'], after['attn'])
    close(seen['ffn'], after['ffn'])
    if name in ('pre', 'span'):
        down = np.stack([v for k, v in unstack(cfg, params).items() if k.endswith('ffn.down')])
        close(np.einsum('LBTF,LFD->LBTD', seen['hidden'], down), seen['ffn'], atol=1e-4)


def test_the_parts_of_a_mixture_of_experts():
    cfg = tiny('span', experts=4, first_dense=1, shared_experts=1, expert_ffn=8)
    params = random_params(cfg)
    run = jax.jit(lambda p: (LM(cfg).features(p, BATCH['tokens'], BATCH['segments'], BATCH['positions'])[0], anatomy.record(cfg, p, BATCH)))
    features, seen = run(params)
    np.testing.assert_allclose(seen['features'], features, atol=2e-5)
    assert np.isfinite(seen['hidden'][0]).all() and np.isnan(seen['hidden'][1:]).all(), 'the first block alone has a dense FFN'


class Toy(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.Dense(4, name=f'layer_{i}')(x)
        return x


def test_outputs_of_a_foreign_model():
    model, x = Toy(), jnp.asarray(RNG.standard_normal((5, 4)), jnp.float32)
    variables = model.init(KEY, x)
    found = d.outputs(model, variables, x, of=nn.Dense)
    assert len(found) == 3
    np.testing.assert_allclose(found[-1], model.apply(variables, x), rtol=1e-6)
    want = x @ variables['params']['layer_0']['kernel'] + variables['params']['layer_0']['bias']
    np.testing.assert_allclose(found[0], want, rtol=1e-5)


# ------------------------------------------------------------------------- removal


@pytest.mark.parametrize('name', ['span', 'mixln', pytest.param('pre', marks=pytest.mark.full)])
def test_removal_against_models_without_the_block(name):
    """Silenced: with zeros for its output matrices. Skipped: for PreNorm a model with one block less. Swapped: with exchanged weights."""
    cfg = tiny(name, layers=4)
    named = {k: np.asarray(v) for k, v in unstack(cfg, random_params(cfg)).items()}
    params = restack(cfg, named)
    found, swapped = jax.jit(lambda p: (removal.one_by_one(cfg, p, BATCH), removal.swaps(cfg, p, BATCH)))(params)
    whole = mean_loss(cfg, named)
    for l in range(4):
        quiet = named | {k: 0 * named[k] for k in (f'layers.{l}.attn.o', f'layers.{l}.ffn.down')}
        np.testing.assert_allclose(found['silenced'][l], mean_loss(cfg, quiet) - whole, atol=2e-5)
        if name == 'pre':
            kept = [i for i in range(4) if i != l]
            less = {k: v for k, v in named.items() if not k.startswith('layers.')}
            less |= {
                f'layers.{i}.{k.split(".", 2)[2]}': named[k] for i, j in enumerate(kept) for k in named if k.startswith(f'layers.{j}.')
            }
            np.testing.assert_allclose(found['skipped'][l], mean_loss(tiny('pre'), less) - whole, atol=2e-5)
            np.testing.assert_allclose(found['skipped'], found['silenced'], atol=2e-5)
    kinds = {'pre': [0, 0, 0, 0], 'span': [0, 0, 0, 0], 'mixln': [0, 1, 1, 1]}[name]
    for l in range(3):
        if kinds[l] != kinds[l + 1]:
            assert np.isnan(swapped[l])
            continue
        there = {f'layers.{l}': f'layers.{l + 1}', f'layers.{l + 1}': f'layers.{l}'}
        moved = {k: named[there.get(at := k[:8], at) + k[8:]] for k in named}
        np.testing.assert_allclose(swapped[l], mean_loss(cfg, moved) - whole, atol=2e-5)
    assert np.abs(found['silenced']).max() > 1e-3 and np.nanmax(np.abs(swapped)) > 1e-4


def test_groups_are_those_that_turn_least():
    away = np.zeros((5, 5))
    away[np.triu_indices(5, 1)] = [0.3, 0.4, 0.5, 0.6, 0.1, 0.4, 0.2, 0.3, 0.4, 0.2]  # pairs 01 02 03 04 12 13 14 23 24 34
    assert d.groups(away).tolist() == [1, 0, 1], 'block 1 alone, then blocks 0-1 (0.4 first of equals), then 1-3'
    cfg = tiny('pre', layers=4)
    named = {k: np.asarray(v) for k, v in unstack(cfg, random_params(cfg)).items()}
    found = jax.jit(lambda p: removal.in_groups(cfg, p, BATCH, jnp.array([1, 0, 1])))(restack(cfg, named))
    for n, gone in enumerate(([1], [0, 1], [1, 2, 3])):
        quiet = named | {f'layers.{l}.{k}': 0 * named[f'layers.{l}.{k}'] for l in gone for k in ('attn.o', 'ffn.down')}
        np.testing.assert_allclose(found['skipped'][n], mean_loss(cfg, quiet) - mean_loss(cfg, named), atol=2e-5)


# ----------------------------------------------------------------------- jacobians


def test_jacobians_of_matrices_and_norms():
    A = jnp.asarray(RNG.standard_normal((9, 7)), jnp.float32)
    values = np.linalg.svd(A, compute_uv=False)
    x = {'a': jnp.ones(3), 'b': jnp.ones((2, 2))}
    f = lambda t: A @ jnp.concatenate([t['a'], t['b'].ravel()])  # noqa: E731
    np.testing.assert_allclose(d.singular_values(f, x, KEY, 7), values, rtol=1e-4)
    np.testing.assert_allclose(d.singular_values(f, x, KEY, 2, rounds=20), values[:2], rtol=1e-3)
    np.testing.assert_allclose(d.spectral_norm(f, x, KEY, 60), values[0], rtol=1e-3)
    frobenius, away = d.random_products(f, x, KEY, 2000)
    np.testing.assert_allclose(frobenius, np.sqrt(np.square(values).sum() / 7), rtol=0.05)
    assert np.isnan(away)

    half = x | {'a': x['a'].astype(jnp.bfloat16)}  # widened, not computed with
    np.testing.assert_allclose(d.singular_values(f, half, KEY, 7), values, rtol=1e-4)
    np.testing.assert_allclose(d.random_products(f, half, KEY, 2000)[0], frobenius, rtol=1e-6)
    token = lambda h: jnp.tanh(h @ A[:7])  # noqa: E731
    at = jnp.ones((1, 2, 7), jnp.bfloat16)
    np.testing.assert_allclose(d.token_jacobian(token, at, 1), d.token_jacobian(token, at.astype(jnp.float32), 1), rtol=1e-6)

    v = jnp.asarray(RNG.standard_normal(50), jnp.float32)
    same = d.random_products(lambda z: z, v, KEY)
    np.testing.assert_allclose(same[1], 0, atol=1e-12)
    np.testing.assert_allclose(d.random_products(lambda z: 3 * z, v, KEY, 500)[1], 4, rtol=0.05)
    rotation = jnp.linalg.qr(jnp.asarray(RNG.standard_normal((50, 50)), jnp.float32))[0]
    np.testing.assert_allclose(d.singular_values(lambda z: rotation @ z, v, KEY, 50), 1, rtol=1e-4)

    for kind in ('rmsnorm', 'layernorm'):
        centre = v.mean() if kind == 'layernorm' else 0

        def norm(z, kind=kind):
            z = z - z.mean() if kind == 'layernorm' else z
            return z / jnp.sqrt(jnp.square(z).mean())

        np.testing.assert_allclose(d.norm_jacobian(v, kind), jax.jacobian(norm)(v), atol=1e-5)
        with pytest.raises(ValueError, match='neither rmsnorm nor layernorm'):
            d.norm_jacobian(v, 'layer_norm')
        scale = float(jnp.sqrt(jnp.square(v - centre).mean()))
        np.testing.assert_allclose(np.linalg.norm(d.norm_jacobian(v, kind), 2), 1 / scale, rtol=1e-4)
        np.testing.assert_allclose(d.spectral_norm(norm, v, KEY), 1 / scale, rtol=1e-4)


@pytest.mark.parametrize(
    'name, fields',
    [
        ('span', {'first_skip': 'normed'}),
        pytest.param('residual', {}, marks=pytest.mark.full),
        pytest.param('pre', {'experts': 4, 'expert_ffn': 8}, marks=pytest.mark.full),
    ],
)
def test_jacobians_of_blocks_against_whole_matrices(name, fields):
    """Norms of every block, and of the whole model, against Jacobians written out; experts too, which have no forward mode."""
    cfg = tiny(name, width=8, ffn=12, layers=2, **fields)
    params, batch = random_params(cfg), {k: v[:1, 2:5] for k, v in batch_of().items()}
    found = jax.jit(lambda p: (d.block_jacobians(cfg, p, batch, KEY, 60), d.end_to_end(cfg, p, batch, KEY, 24)))(params)

    @jax.jit
    def written_out(params):
        x, ctx = anatomy.embed(cfg, params, batch)
        square = lambda f, at: jax.jacrev(lambda v: jnp.concatenate([z.ravel() for z in jax.tree.leaves(f(v))]))(at)  # noqa: E731
        look = lambda block, stream: {'J': jnp.concatenate([j.reshape(j.shape[0], -1) for j in jax.tree.leaves(square(block, stream))], 1)}  # noqa: E731
        J_L = anatomy.through(cfg, params, anatomy.enter(cfg, params, x), ctx, look=look)[1]['J']
        end = square(lambda v: anatomy.features(cfg, params, v, ctx), x)
        return J_L, end.reshape(end.shape[0], -1)

    J_L, end = written_out(params)
    blocks, ends = found
    np.testing.assert_allclose(blocks['spectral'], [np.linalg.norm(J, 2) for J in J_L], rtol=1e-2)
    n = J_L.shape[-1]
    np.testing.assert_allclose(blocks['frobenius'], [np.linalg.norm(J) / np.sqrt(n) for J in J_L], rtol=0.3)
    np.testing.assert_allclose(blocks['from_identity'], [np.square(J - np.eye(n)).sum() / n for J in J_L], rtol=0.5)
    np.testing.assert_allclose(ends['singular'], np.linalg.svd(end, compute_uv=False), rtol=1e-3, atol=1e-3 * np.abs(end).max())
    np.testing.assert_allclose(ends['last_token'], np.linalg.svd(end[-8:, -8:], compute_uv=False), rtol=1e-3, atol=1e-5)
    # A block alone, through the public module, is the same map.
    if name == 'span':
        own = {k.split('.', 2)[2]: v for k, v in unstack(cfg, params).items() if k.startswith('layers.1.')}
        tree = {}
        for k, v in own.items():
            *path, leaf = k.split('.')
            functools.reduce(lambda t, p: t.setdefault(p, {}), path, tree)[leaf] = jnp.asarray(v)
        state = anatomy.record(cfg, params, batch)['states'][1]
        J = jax.jacrev(lambda z: Block(cfg, layer=1).apply({'params': tree}, z)[0])(state).reshape(n, n)
        np.testing.assert_allclose(J, J_L[1], atol=1e-4)


# ------------------------------------------------------------------------- spectra


def test_ranks_of_known_data():
    D = 16
    flat = d.effective_ranks(np.ones(D))
    assert {k: round(v, 9) for k, v in flat.items()} == {
        'hard': 1, 'soft': 1, 'stable': 1, 'rankme': 1, 'utilisation': 1, 'concentration': round((D + 1) / 2 / D, 9)
    }  # fmt: skip
    one = d.effective_ranks(np.eye(D)[0])
    assert one['hard'] == one['soft'] == one['stable'] == one['rankme'] == pytest.approx(1 / D) and one['concentration'] == 1
    # k orthogonal directions of equal size, in D: every rank is k / D
    k, basis = 5, np.linalg.qr(RNG.standard_normal((D, D)))[0]
    signs = np.array([[1 if i >> j & 1 else -1 for j in range(k)] for i in range(2**k)])
    found = d.effective_ranks(d.eigenvalues(signs @ basis[:k]))
    for name in ('hard', 'soft', 'stable', 'rankme', 'utilisation'):
        np.testing.assert_allclose(found[name], k / D, rtol=1e-6, err_msg=name)
    # a planted direction of variance 100 among unit ones, written out
    x = np.concatenate([[100.0], np.ones(9)])
    got = d.effective_ranks(x)
    p = x / x.sum()
    np.testing.assert_allclose([got['hard'], got['soft']], [109**2 / (100**2 + 9) / 10, np.exp(-(p * np.log(p)).sum()) / 10], rtol=1e-9)
    np.testing.assert_allclose([got['stable'], got['concentration']], [0.109, np.mean([(100 + i) / 109 for i in range(10)])], rtol=1e-9)
    shifted = signs @ basis[:k] + 7 * basis[-1]
    assert d.eigenvalues(shifted)[k] < 1e-9 < 40 < d.eigenvalues(shifted, centred=False)[0], 'the mean, unless taken off'
    assert all(np.isnan(v) for v in d.effective_ranks(np.zeros(4)).values())
    np.testing.assert_allclose(d.over_median([4, 1, 2, 0]), [2, 1, 0.5, 0])
    few = np.random.default_rng(0).normal(size=(16, 128))  # 112 eigenvalues are zero, but for rounding
    assert 1 < d.over_median(d.eigenvalues(few))[0] < 4
    assert d.entropy_rank([0, 2, 2]) == pytest.approx(2) and np.isnan(d.entropy_rank([0, 0]))


def test_weights_of_known_spectra():
    orthogonal = np.linalg.qr(RNG.standard_normal((32, 32)))[0]
    found = d.weight_spectrum(3 * orthogonal)
    np.testing.assert_allclose([found['norm'], found['condition'], found['stable_rank'], found['outliers']], [3, 1, 1, 0], rtol=1e-9)
    noise = RNG.standard_normal((200, 80))
    assert d.weight_spectrum(noise)['outliers'] == 0
    u, v = np.linalg.qr(RNG.standard_normal((200, 1)))[0], np.linalg.qr(RNG.standard_normal((80, 1)))[0]
    planted = d.weight_spectrum(noise + 60 * u @ v.T)
    assert planted['outliers'] == 1 / 80 and planted['norm'] == pytest.approx(60, rel=0.1)
    assert d.weight_spectrum(np.diag([1.0, 1e-12]))['condition'] == pytest.approx(1e6), 'the floor'
    w = RNG.standard_normal((3, 2, 4))  # o: (heads, head_dim, width)
    assert spectra.matrix(w, 'write').shape == (6, 4) and spectra.matrix(w, 'read').shape == (3, 8)


# ---------------------------------------------------------------------- similarity


def test_similarity_of_known_states():
    e = np.eye(4, dtype=np.float32)
    h = jnp.asarray(np.stack([np.tile(e[0], (3, 1)), np.tile(5 * e[0], (3, 1)), np.tile(e[1], (3, 1)), np.tile(-e[0], (3, 1))]))
    np.testing.assert_allclose(d.cosine_pairs(h), [[1, 1, 0, -1], [1, 1, 0, -1], [0, 0, 1, 0], [-1, -1, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(d.angular_distances(h)[0], [0, 0, 0.5, 1], atol=1e-6)
    np.testing.assert_allclose(d.block_influence(h), [0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(d.by_distance(d.cosine_pairs(h)), [1, 1 / 3, -0.5, -1], atol=1e-6)
    some = h.at[1, 0].set(0)  # a token without a direction is left out
    np.testing.assert_allclose(d.angular_distances(some), d.angular_distances(h), atol=1e-6)
    np.testing.assert_allclose(d.cosine_pairs(some), d.cosine_pairs(h), atol=1e-6)
    np.testing.assert_allclose(d.block_influence(some), d.block_influence(h), atol=1e-6)
    for found in (d.angular_distances(h.at[1].set(0)), d.cosine_pairs(h.at[1].set(0)), d.angular_distances(h.at[1, 0].set(jnp.nan))):
        np.testing.assert_array_equal(np.isnan(found), (np.arange(4) == 1) | (np.arange(4) == 1)[:, None])
    np.testing.assert_allclose(d.cosine_pairs(1e-30 * h), d.cosine_pairs(h), atol=1e-6)
    x = RNG.standard_normal((4, 7, 5))
    cosine = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)  # noqa: E731
    pairs = np.array([[[cosine(x[i, n], x[j, n]) for n in range(7)] for j in range(4)] for i in range(4)])
    np.testing.assert_allclose(d.cosine_pairs(jnp.asarray(x, jnp.float32)), pairs.mean(-1), atol=1e-5)
    angles = np.arccos(np.clip(pairs, -1, 1)).mean(-1) / np.pi
    np.testing.assert_allclose(d.angular_distances(jnp.asarray(x, jnp.float32)), angles, atol=1e-5)
    a, turn = jnp.asarray(x[0], jnp.float32), jnp.linalg.qr(jnp.asarray(x[1][:5], jnp.float32))[0]
    np.testing.assert_allclose(d.linear_cka(a, 3 * a @ turn + 1), 1, rtol=1e-5)
    assert d.linear_cka(a, jnp.asarray(x[2], jnp.float32)) < 0.9


# --------------------------------------------------------------- sizes and read-outs


def test_a_planted_outlier_is_found():
    h = RNG.standard_normal((3, 50, 40)).astype('float32')
    h[1, 7, 5] = 5000
    found = d.massive(h)
    assert (found['token'][1], found['channel'][1]) == (7, 5)
    assert found['over_1000'].tolist() == [0, 1, 0] and found['over_100'].tolist() == [0, 1, 0] and found['max'][1] == 5000
    np.testing.assert_allclose(found['ratio'][1], 5000 / np.median(np.abs(h[1])), rtol=1e-6)
    z = (h[0] - h[0].mean(-1, keepdims=True)) / h[0].std(-1, keepdims=True)
    np.testing.assert_allclose(found['kurtosis'][0], ((z**4).mean(-1) - 3).mean(), rtol=1e-4)
    assert found['kurtosis'][1] > found['kurtosis'][0]
    np.testing.assert_allclose(d.massive(1e-12 * h.astype('float64'))['kurtosis'], found['kurtosis'], rtol=1e-6)
    h[2], h[0, 1:] = 0.1, 0.1
    np.testing.assert_allclose(d.massive(h)['kurtosis'][[0, 2]], [((z[0] ** 4).mean() - 3), np.nan], rtol=1e-4)
    np.testing.assert_allclose(d.row_norms([[3, 4], [0, 1]]), [np.sqrt(0.5), np.sqrt(12.5)])
    nats, real = jnp.array([[1.0, 2, 3], [3, 9, 9]]), jnp.array([[1, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(d.by_position(nats, real), [2, 2, np.nan])


def test_the_lens_ends_at_the_model_and_agrees_with_a_loop():
    head = jnp.asarray(RNG.standard_normal((5, 11)), jnp.float32)
    readout = jnp.asarray(RNG.standard_normal((3, 2, 6, 5)), jnp.float32)
    batch = BATCH | {'targets': BATCH['targets'] % 11}
    found = jax.jit(lambda x: d.logit_lens(lambda z: z @ head, x, batch))(readout)
    logp = np.asarray(jax.nn.log_softmax(readout @ head))
    real = np.asarray(batch['segments']) > 0
    for l in range(3):
        kl = (np.exp(logp[-1]) * (logp[-1] - logp[l])).sum(-1)
        nats = -np.take_along_axis(logp[l], np.asarray(batch['targets'])[..., None], -1)[..., 0]
        np.testing.assert_allclose(found['kl'][l], kl[real].mean(), atol=1e-5)
        np.testing.assert_allclose(found['loss'][l], nats[real].mean(), rtol=1e-5)
        np.testing.assert_allclose(found['agreement'][l], (logp[l].argmax(-1) == logp[-1].argmax(-1))[real].mean(), rtol=1e-6)
    np.testing.assert_allclose([found['kl'][-1], found['agreement'][-1]], [0, 1], atol=1e-6)
    assert [d.effective_depth(jnp.array(k)) for k in ([2, 0.01, 1, 0.05, 0.0], [0.0, 0.0], [1, 1, 0.0], [0, np.nan])] == [3, 0, 2, 2]


# ----------------------------------------------------------------------- curvature


def test_curvature_of_a_quadratic_and_of_a_small_network():
    values = np.array([9.0, 4, 1, 0.5, -2])
    Q = np.linalg.qr(RNG.standard_normal((5, 5)))[0]
    A = jnp.asarray(Q * values @ Q.T, jnp.float32)
    loss = lambda p: 0.5 * p['x'] @ A @ p['x']  # noqa: E731
    np.testing.assert_allclose(d.hessian_spectrum(loss, {'x': jnp.ones(5)}, KEY, 9), np.sort(values)[::-1], atol=1e-3)
    P = np.array([4.0, 1, 2, 1, 0.5])
    want = np.linalg.eigvalsh(np.asarray(A) / np.sqrt(np.outer(P, P)))[::-1]
    np.testing.assert_allclose(d.hessian_spectrum(loss, {'x': jnp.ones(5)}, KEY, 5, {'x': jnp.asarray(P)}), want, atol=1e-3)
    # a start within two eigenvectors sees two eigenvalues
    start = jnp.asarray(Q[:, 0] + Q[:, 3], jnp.float32)
    np.testing.assert_allclose(np.sort(np.abs(d.lanczos(lambda v: A @ v, start, 5)))[-2:], [0.5, 9], rtol=1e-3)

    w = jnp.asarray(RNG.standard_normal(6), jnp.float32)
    x = jnp.asarray(RNG.standard_normal((8, 2)), jnp.float32)
    net = lambda w: jnp.square(jnp.tanh(x @ w[:4].reshape(2, 2)) @ w[4:] - 1).mean()  # noqa: E731
    whole = np.linalg.eigvalsh(jax.hessian(net)(w))[::-1]
    np.testing.assert_allclose(d.hessian_spectrum(net, w, KEY, 6), whole, atol=1e-3 * np.abs(whole).max())
    assert d.stability_limit(0.1) == 20 and d.stability_limit(0.01, 0.9) == pytest.approx(3800)


# ------------------------------------------------------------------------ training


def test_slopes_sensitivity_and_spikes():
    assert d.slope([1, 3, np.nan, 7]) == pytest.approx(2) and np.isnan(d.slope([1.0]))
    profile = d.depth_profile(8 * 0.5 ** np.arange(5))
    assert (profile['first_over_last'], profile['factor']) == (16, pytest.approx(0.5))
    assert d.depth_profile(np.arange(1, 9) ** 0.5)['exponent'] == pytest.approx(0.5)
    lost = d.depth_profile(np.array([np.nan, 2.0, np.inf, 4.0]))  # a warning is an error here
    assert lost['variation'] == pytest.approx(1 / 3) and np.isnan(d.depth_profile(np.full(3, np.nan))['variation'])
    found = d.lr_sensitivity({1e-3: 3.0, 1e-2: 2.0, 1e-1: float('nan'), 1.0: 9.0}, at_init=5.0)
    assert found == {'sensitivity': pytest.approx((1 + 0 + 3 + 3) / 4), 'best_lr': 1e-2, 'best': 2.0, 'max_stable_lr': 1e-2}
    loss = np.ones(300)
    loss[[40, 200]] = 2, 1.4
    assert d.spikes(loss).tolist() == [40]
    assert d.spikes([1.0, 1, float('nan'), 1, float('inf'), 9, 1]).tolist() == [2, 4, 5]
    assert np.isnan([*d.lr_sensitivity({1e-3: float('nan'), 1e-2: 9.0}, 5.0).values()]).all()


def test_coordinate_check_sees_what_grows_with_size():
    """Frozen: nothing moves. Adam without width scaling: logits move more in wider models; the probe is read before and after."""
    base = edit(TINY, {'model.layers': 2, 'model.vocab': 61, 'optim.schedule': 'constant', 'optim.warmup_steps': 0, 'optim.lr_peak': 0.01})
    batches = list(b for b, _ in zip(FakeCorpus().train_batches(2, 8, 0), range(2), strict=False))
    sizes = {w: edit(base, {'model.width': w, 'model.heads': 2}) for w in (8, 64)}
    moved = d.coordinate_check(sizes, batches, batches[0], steps=2)
    assert set(moved[8]) == {'embedding', 'lower', 'middle', 'upper', 'last', 'logits'} and moved[8]['logits'].shape == (2,)
    assert all((v > 0).all() for v in moved[64].values())
    slopes = d.size_slopes(moved)
    assert slopes['logits'] > 0.25 and abs(slopes['embedding']) < 0.1
    assert d.size_slopes({2: {'a': np.array([9, 1.0])}, 8: {'a': np.array([0, 4.0])}}) == {'a': pytest.approx(1)}
    frozen = d.coordinate_check({8: edit(sizes[8], {'optim.lr_peak': 0.0})}, batches, batches[0], steps=1)
    assert all(v == 0 for v in frozen[8].values())
