"""Theory at initialisation: gradients of a model taken apart, its sums and Jacobians against the float64 oracle; laws; verdicts; tables."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import scipy.stats
from scipy.integrate import quad
from scipy.special import erf, expit

from spannorm_jax import LM, ModelConfig, cli, options
from spannorm_jax.errors import UserError
from spannorm_jax.model import unstack
from spannorm_jax.theory import ACTIVATION_AXIS, CLAIMS, DEPTHS, SEEDS, anatomy, show, theory
from spannorm_jax.theory.cells import Cell, draw_tokens, measure, sums_and_gradients, weights
from spannorm_jax.theory.claims import jacobian, t5, t6, t8
from spannorm_jax.theory.t1 import laws, power_ratio, t1
from spannorm_jax.theory.t11 import norms_of_blocks, t11
from spannorm_jax.theory.verdicts import FAILS, HOLDS, OPEN, Estimate, agrees, estimate, r_squared, slope, within

TINY = dict(width=4, heads=2, ffn=5, vocab=7, positions='none', layers=3, norm_eps=1e-6)
TOKENS = np.array([[1, 4, 2, 6], [3, 3, 0, 5]], np.int32)


def tiny(topology, **fields):
    """A config and random parameters, so that no gain is 1."""
    cfg = ModelConfig(topology=topology, **TINY | fields)
    params = LM(cfg).init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    return cfg, jax.tree.unflatten(tree, [w + 0.3 * rng.standard_normal(w.shape, np.float32) for w in leaves])


def oracle_loss(cfg, named):
    """Mean next-token cross-entropy in float64, position by position."""
    logits = reference.Oracle(cfg, named).run(TOKENS)
    return np.mean([np.log(np.exp(z[t]).sum()) - z[t][row[t + 1]] for row, z in zip(TOKENS, logits, strict=True) for t in range(3)])


def central(f, x, h=1e-5):
    """Numerical derivative of f at x, entry by entry: shape of f's value, then of x."""
    x = np.asarray(x, np.float64)

    def along(i):
        step = np.zeros(x.size)
        step[i] = h
        return (f(x + step.reshape(x.shape)) - f(x - step.reshape(x.shape))) / (2 * h)

    columns = np.stack([along(i) for i in range(x.size)], -1)
    return columns.reshape(*columns.shape[:-1], *x.shape)


@pytest.mark.parametrize(
    ('topology', 'fields'),
    [('pre', {}), ('post', {'activation': 'relu'}), ('span', {'first_skip': 'normed'}), ('span', {}), ('siamese', {'activation': 'gelu'})],
    ids=['pre', 'post', 'span-B', 'span-A', 'siamese'],
)
def test_gradients_block_by_block_are_those_of_the_equations(topology, fields):
    """Against finite differences of the float64 oracle, every entry of three matrices of every block, and the embedded tokens."""
    cfg, params = tiny(topology, **fields)
    got = jax.jit(lambda p: anatomy.log_gradients(cfg, p, TOKENS))(params)
    named = {k: np.asarray(v, np.float64) for k, v in unstack(cfg, params).items()}
    assert got['loss'] == pytest.approx(oracle_loss(cfg, named), rel=1e-5)
    for name in ('ffn.down', 'ffn.up', 'attn.v'):
        for l in range(3):
            key = f'layers.{l}.{name}'
            g = central(lambda w, key=key: oracle_loss(cfg, named | {key: w}), named[key])
            assert got['weights'][name][l] == pytest.approx(math.log(np.linalg.norm(g)), abs=1e-3), key
    assert got['stream'].shape == (4,) and np.isfinite(got['stream']).all()


def test_gradients_no_float_could_hold():
    """A head 1e-25 times its size makes every gradient 1e-25 times its own; their squares are 0 in float32."""
    cfg, params = tiny('post')
    run = jax.jit(lambda p: anatomy.log_gradients(cfg, p, TOKENS))
    small, tiny_ = (run(params | {'head': params['head'] * s}) for s in (1e-6, 1e-25))
    np.testing.assert_allclose(tiny_['weights']['ffn.down'] - small['weights']['ffn.down'], -19 * math.log(10), atol=1e-3)
    np.testing.assert_allclose(tiny_['embedding'] - small['embedding'], -19 * math.log(10), atol=1e-3)


@pytest.mark.parametrize('topology', ['post', 'span'])
def test_float32_is_float64_at_moderate_depth(topology):
    """24 blocks without Scale Init, where signals of float32 are still those of float64; plain back-propagation there is the reference."""
    cell = Cell(topology, 'none', 24)
    cfg, tokens = cell.config(), draw_tokens(0, (1, 16))
    params = LM(cfg).init(jax.random.key(0))
    got = jax.jit(lambda p: anatomy.log_gradients(cfg, p, tokens)['weights']['ffn.down'])(params)
    with jax.enable_x64(True):
        wide = cell.config(dtype='float64', residual_dtype='float64')

        def loss(params):
            z = LM(wide).apply(params, tokens)[:, :-1]
            return (jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, tokens[:, 1:, None], -1)[..., 0]).mean()

        doubles = jax.tree.map(lambda w: jnp.asarray(np.asarray(w), 'float64'), params)
        g = unstack(wide, jax.jit(jax.grad(loss))(doubles))
    want = np.array([math.log(np.linalg.norm(g[f'layers.{l}.ffn.down'])) for l in range(24)])
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert np.ptp(want) > 0.5  # they do differ over depth


@pytest.mark.parametrize(('topology', 'fields'), [('pre', {}), ('post', {}), ('span', {}), ('span', {'first_skip': 'normed'})])
def test_sums_are_those_of_the_equations(topology, fields):
    cfg, params = tiny(topology, **fields)
    got = jax.jit(lambda p: anatomy.observe(cfg, p, TOKENS))(params)
    o = reference.Oracle(cfg, unstack(cfg, params))
    o.run(TOKENS)
    x = o.seen['hidden/0']
    for l in range(3):
        if topology == 'span':
            into = o.embed(x) if l == 0 else x
            x = into if fields else x
            branch, skip = o.attn(l, into), x
            y = o.n(l, 'attn_sum', branch + skip)
            ffn, ffn_skip = o.ffn(l, y), x
        elif topology == 'post':
            branch, skip = o.attn(l, x), x
            y = o.n(l, 'attn_sum', branch + skip)
            ffn, ffn_skip = o.ffn(l, y), y
        else:
            branch, skip = o.attn(l, o.n(l, 'attn_in', x)), x
            ffn, ffn_skip = o.ffn(l, o.n(l, 'ffn_in', x + branch)), x + branch
        for name, b, s in (('attn', branch, skip), ('ffn', ffn, ffn_skip)):
            rms = np.sqrt(np.square(b + s).mean(-1))
            want = {
                'ln_sigma': np.log(rms).mean(),
                'sigma': rms.mean(),
                'least': rms.min(),
                'std': (b + s).std(-1).mean(),
                'branch_var': (b * b).mean(),
                'share': (b * b).mean() / (s * s).mean(),
                'corr': (b * s).mean() / np.sqrt((b * b).mean() * (s * s).mean()),
            }
            for key, value in want.items():
                assert got[f'{key}/{name}'][l] == pytest.approx(value, abs=2e-5), (key, name, l)
        x = o.seen[f'hidden/{l + 1}']


def test_own_jacobian_is_that_of_the_equations():
    """Columns by finite differences of the embedding of the last token, which occurs once."""
    cfg, params = tiny('post')
    tokens = TOKENS[:1]
    M, s = jax.jit(lambda p: anatomy.own_jacobian(cfg, p, tokens))(params)
    named = {k: np.asarray(v, np.float64) for k, v in unstack(cfg, params).items()}

    def out(row):
        table = named['embed'].copy()
        table[tokens[0, -1]] = row
        o = reference.Oracle(cfg, named | {'embed': table})
        o.run(tokens)
        return o.seen['hidden/3'][0, -1]

    want = central(out, named['embed'][tokens[0, -1]])
    np.testing.assert_allclose(np.asarray(M) * math.exp(s), want, rtol=2e-3, atol=1e-4)
    assert anatomy.length(M) == pytest.approx(1, abs=1e-5)


def test_identity_network_is_an_identity_path():
    """With output projections 0 a PreNorm model is the identity, and SpanNorm a chain of norms: a projection off the token itself."""
    for topology, rank in (('pre', 64), ('span', 63)):
        cell = Cell(topology, 'none', 2)
        cfg = cell.config()
        params = LM(cfg).init(jax.random.key(0))
        params = jax.tree_util.tree_map_with_path(lambda k, w: 0 * w if k[-1].key in ('o', 'down') else w, params)
        got = jax.device_get(jax.jit(lambda p, cfg=cfg: jacobian(cfg, p, draw_tokens(0, (1, 16))))(params))
        assert got['cosine'] == pytest.approx(math.sqrt(rank / 64), abs=1e-4)
        assert got['singular'][:rank] == pytest.approx(1, abs=1e-3) and got['ln_largest'] == pytest.approx(0, abs=1e-3)
        if rank < 64:
            assert got['singular'][-1] < 1e-3
        m = {k: np.stack([v, v]) for k, v in got.items()}
        row = t5({cell: m})['spectrum'][0]
        assert row['identity_like'] == HOLDS and row['effective_rank'].mean == pytest.approx(rank / 64, abs=1e-3)
    noise = np.stack([np.linspace(1, 0.01, 64)] * 2)
    lost = {'singular': noise, 'cosine': np.array([0.1, 0.12]), 'ln_largest': np.zeros(2)}
    assert t5({Cell('post', 'none', 8): lost})['spectrum'][0]['identity_like'] == FAILS


def test_spectral_norm_by_power_iteration():
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((6, 6)))[0] for _ in 'uv')
    w = jnp.asarray(u @ np.diag([5, 2, 1, 0.5, 0.2, 0]) @ v, jnp.float32)
    assert anatomy.spectral_norm(lambda x: x @ w, jnp.ones((3, 6)), jax.random.key(0)) == pytest.approx(5, rel=1e-4)


def test_norms_of_blocks_against_whole_jacobians():
    """Every norm of t11 against an SVD of the Jacobian by finite differences of the oracle."""
    cfg = ModelConfig(topology='span', first_skip='normed', **TINY)
    params, tokens = LM(cfg).init(jax.random.key(3)), TOKENS[:1]
    got = jax.jit(lambda p: norms_of_blocks(cfg, p, tokens))(params)
    o = reference.Oracle(cfg, unstack(cfg, params))
    o.run(tokens)
    for l in range(3):
        x = o.seen[f'hidden/{l}'] if l else o.embed(o.seen['hidden/0'])
        y = o.n(l, 'attn_sum', o.attn(l, x) + x)
        z = o.ffn(l, y) + x
        parts = {
            'block': (lambda x, l=l: o.n(l, 'ffn_sum', o.ffn(l, o.n(l, 'attn_sum', o.attn(l, x) + x)) + x), x),
            'attn': (lambda x, l=l: o.attn(l, x), x),
            'ffn': (lambda y, l=l: o.ffn(l, y), y),
        }
        for name, (f, at) in parts.items():
            J = central(f, at).reshape(16, 16)
            assert got[name][l] == pytest.approx(np.linalg.norm(J, 2), rel=0.03), (name, l)
            assert got[name][l] <= np.linalg.norm(J, 2) * 1.001  # from below
        assert got['least_ffn'][l] == pytest.approx(np.sqrt(np.square(z).mean(-1)).min(), rel=1e-4)
        assert got['product'][l] == pytest.approx(np.linalg.norm(o[f'layers.{l}.ffn.up'] @ o[f'layers.{l}.ffn.down'], 2), rel=1e-4)
    np.testing.assert_allclose(got['norm'], 1, rtol=1e-3)  # RMSNorm: (I - x x^T / D) / rms


# ------------------------------------------------------------------ laws and rules


def test_power_ratio_is_the_gaussian_integral():
    def mean(f):
        return quad(lambda z: f(z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi), -12, 12, limit=200)[0]

    silu, dsilu = lambda z: z * expit(z), lambda z: expit(z) * (1 + z * (1 - expit(z)))
    gelu = lambda z: z * (1 + erf(z / math.sqrt(2))) / 2  # noqa: E731
    dgelu = lambda z: (1 + erf(z / math.sqrt(2))) / 2 + z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    assert power_ratio('relu') == pytest.approx(1, abs=1e-3)
    assert power_ratio('gelu') == pytest.approx(mean(lambda z: dgelu(z) ** 2) / mean(lambda z: gelu(z) ** 2), rel=1e-3)
    assert power_ratio('swiglu') == pytest.approx(1 + mean(lambda z: dsilu(z) ** 2) / mean(lambda z: silu(z) ** 2), rel=1e-3)


def test_laws_in_closed_form():
    """Constant sigma: Post falls by sigma_A sigma_Z per block, Span by sigma_Z; what comes back through a ReLU branch makes both flat."""
    L, a, z = 9, 0.02, 0.03
    ln_a, ln_z = np.full((2, L), a), np.full((2, L), z)
    ends = lambda p: (p[:, 0] - p[:, -1])[0]  # noqa: E731
    post, span, pre = (laws(t, ln_a, ln_z, 1.0) for t in ('post', 'span', 'pre'))
    assert ends(post['paper']) == pytest.approx(-(L - 1) * (a + z)) and ends(span['paper']) == pytest.approx(-(L - 1) * z)
    assert ends(pre['paper']) == 0
    assert ends(post['branches']) == pytest.approx(0, abs=1e-12) and ends(span['branches']) == pytest.approx(0, abs=1e-12)
    gated = laws('span', ln_a, ln_z, 2.0)['branches']
    assert ends(gated) == pytest.approx((L - 1) * (0.5 * math.log(1 + 2 * math.expm1(2 * z)) - z))
    grows = np.log(np.arange(1, 2 * L + 1)).reshape(L, 2)[None] / 2  # the rms of a sum of independent branches
    growing = laws('pre', grows[..., 0], grows[..., 1], 1.0)['branches']
    # kappa = 1: the power that comes back is the power the stream gained, from the sum of block 1 to that of block L
    assert ends(growing) == pytest.approx(grows[0, -1, 1] - grows[0, 0, 1])


def test_estimates_and_rules():
    x = np.array([1.0, 2.0, 4.0, 3.5, 2.2])
    low, high = scipy.stats.t.interval(0.95, 4, x.mean(), scipy.stats.sem(x))
    e = estimate(x)
    assert (e.low, e.mean, e.high) == pytest.approx((low, x.mean(), high)) and e.to_json()['high'] == e.high
    assert [within(Estimate(0, 1), *r) for r in ((-1, 1), (0.5, 2), (1.5, 2))] == [HOLDS, OPEN, FAILS]
    assert agrees([1.0, 1.01], [1.1, 1.11]) == HOLDS and agrees([2.0, 2.01], [1.0, 1.01]) == FAILS
    assert agrees([0.5, 2.0], [1.0, 1.0]) == OPEN and agrees([0.0, 0.001], [0.05, 0.05]) == HOLDS
    t = np.arange(6.0)
    assert slope(t, np.stack([3 * t + 1, t * t])) == pytest.approx([3, np.polyfit(t, t * t, 1)[0]])
    assert r_squared(2 * t + 5, 2 * t) == pytest.approx(1) and r_squared(-2 * t, 2 * t) == pytest.approx(-3)
    assert r_squared(0 * t, 2 * t) == pytest.approx(0)


def planted(layers, a, z, ln_grad, seeds=3):
    """Measurements with constant sigma and a given ln gradient per block, alike up to 1e-6 for each seed."""
    noise = 1 + 1e-6 * np.arange(seeds)[:, None]
    rows = lambda v: v * np.ones((seeds, layers)) * noise  # noqa: E731
    return {'ln_sigma_attn': rows(a), 'ln_sigma_ffn': rows(z), 'ln_grad': ln_grad * np.arange(layers) * noise, 'loss': noise[:, 0] * 5}


def test_t1_verdicts_on_planted_measurements():
    """Gradients that obey eq. 11 to the letter hold it; the same gradients with the sign turned do not."""
    a = z = math.log(1.05)
    cells = {
        Cell('post', 'none', 128): planted(128, a, z, a + z),  # g grows toward the top by sigma^2 a block
        Cell('span', 'none', 128): planted(128, a, z, z),
        Cell('span', 'none', 128, 'gelu'): planted(128, a, z, -z),
    }
    out = t1(cells)
    post, span, wrong = out['cells']
    assert (post['paper']['verdict'], span['paper']['verdict'], wrong['paper']['verdict']) == (HOLDS, HOLDS, FAILS)
    assert span['ln_g1_over_gL'].mean == pytest.approx(-127 * z, rel=1e-5) and span['slope'].mean == pytest.approx(z, rel=1e-5)
    assert span['paper']['r2'].mean == pytest.approx(1) and wrong['paper']['r2'].mean < 0
    assert span['branches']['verdict'] == FAILS  # SwiGLU's branches would have made it grow
    (root,) = out['root']
    assert root['root'] == HOLDS and root['span_over_post'].mean == pytest.approx(0.5, rel=1e-4)
    assert root['gain'] == HOLDS and root['ln_gain_measured'].mean == pytest.approx(math.log(1.05**127), rel=1e-4)
    assert root['factor_500'] == HOLDS  # the paper's own example


def test_t6_t8_verdicts_on_planted_measurements():
    def m(L, var, corr, share=None):
        full = lambda v: v * np.ones((3, L)) * (1 + 1e-6 * np.arange(3)[:, None])  # noqa: E731
        out = {
            f'{k}_{b}': full(v) for b in ('attn', 'ffn') for k, v in (('branch_var', var), ('corr', corr), ('share', var), ('sigma', 1.0))
        }
        out |= {'loss': full(5.0)[:, 0], 'ln_embedding': full(1.0)[:, 0], 'ln_stream': np.zeros((3, L + 1)), 'ln_grad': full(0.0)}
        if share:
            out['share_ffn'][:, 0] = share * out['share_ffn'][:, 1]
        return out

    scaled = {Cell('span', 'sqrt_2L', L): m(L, 0.3 / L, 0.0) for L in (8, 32)}
    constant = {Cell('post', 'sqrt_2L', L): m(L, 0.3, 0.2) for L in (8, 32)}
    out = t6(scaled | constant)
    assert [row['order_1_over_L'] for row in out['slopes']] == [HOLDS] * 2 + [FAILS] * 2
    assert out['slopes'][0]['slope'].mean == pytest.approx(-1) and out['slopes'][0]['depths'] == [8, 32]
    assert [row['uncorrelated'] for row in out['correlations'] if row['branch'] == 'ffn'] == [HOLDS, HOLDS, FAILS, FAILS]

    choices = [Cell('span', 'sqrt_2L', 8, 'swiglu', skip, std) for skip in ('raw', 'normed') for std in (1.0, 0.02)]
    measured = dict(zip(choices, (m(8, 0.1, 0, s) for s in (1.1, 400, 0.9, 0.8)), strict=True))
    measured[choices[2]]['ln_embedding'] *= 0.1
    out = t8(measured)
    assert [row['one_regime'] for row in out['choices']] == [HOLDS, FAILS, HOLDS, HOLDS]
    assert out['recommended'] == [{'layers': 8, 'first_skip': 'normed', 'embed_std': 1.0, 'in_one_regime': 3, 'verdict': HOLDS}]


def test_t11_verdicts_on_planted_measurements():
    def m(L, above=0.05, block=1.0):
        full = lambda v: v * np.ones((3, L)) * (1 + 1e-6 * np.arange(3)[:, None])  # noqa: E731
        out = {k: full(1 + above) for k in ('sigma_attn', 'sigma_ffn', 'least_attn', 'least_ffn')}
        return out | {'norm': full(1.0), 'ffn': full(3 / L), 'product': full(2 / L), 'attn': full(0.0), 'block': full(block)}

    rows = t11({Cell('span', 'sqrt_2L', L): m(L) for L in (8, 32)})['assumptions']
    said = {(row['assumption'], row.get('layers')): row for row in rows}
    verdict = lambda name, L=None: next(r['verdict'] for (a, n), r in said.items() if a.startswith(name) and n == L)  # noqa: E731
    assert verdict('sigma > 1', 8) == HOLDS and verdict('sigma_A the same', 8) == HOLDS and verdict('norm Jacobian', 8) == HOLDS
    assert verdict('FFN Jacobian', 8) == FAILS  # 3/2
    assert verdict('eq. 18: bound over block norm, least', 8) == HOLDS
    assert verdict('second term') == HOLDS and verdict('product of block norms: slope') == HOLDS
    worse = t11({Cell('span', 'none', L): m(L, above=-0.05, block=1.5) for L in (8, 32)})['assumptions']
    found = {row['assumption']: row['verdict'] for row in worse}
    assert found['sigma > 1: share of sums'] == FAILS and found['eq. 18: bound over block norm, least'] == FAILS
    assert found['product of block norms: slope of its ln over ln L'] == FAILS


# --------------------------------------------------------------------------- cells


def test_the_cell_is_the_model_that_the_table_asks_for():
    from spannorm_jax.model import each_param, infos

    for topology in ('pre', 'post', 'span'):
        for scale, factor in (('none', 1.0), ('sqrt_2L', 0.25)):
            cfg = Cell(topology, scale, 8).config()
            params = each_param(cfg, infos(cfg))
            std = {name.split('.')[-1]: info.init.std for name, _, info in params if info.init.std}
            want = {k: 1 / 8 for k in ('q', 'k', 'v', 'gate', 'up', 'head')} | {'embed': 1.0, 'o': factor / 8}
            assert std == pytest.approx(want | {'down': factor * 170**-0.5})
            others = {name for name, _, info in params if not info.init.std}
            assert all(name.endswith('.gain') for name in others)  # gains, which start at 1; no biases
            assert ('norm_final.gain' in others) == (topology == 'pre') and ('norm_embed.gain' in others) == (topology == 'span')
            assert (cfg.positions, cfg.norm, cfg.norm_eps, cfg.heads, cfg.dtype) == ('none', 'rmsnorm', 1e-6, 4, 'float32')
    assert Cell('span', 'none', 8).config().first_skip == 'normed'
    tokens = draw_tokens(3)
    assert tokens.shape == (4, 64) and 0 <= tokens.min() < 10 < 245 < tokens.max() < 256
    assert not np.array_equal(tokens, draw_tokens(4))


def test_shared_draws_are_those_of_each_model():
    for cell in (Cell('pre', 'sqrt_2L', 2), Cell('post', 'none', 2, 'gelu'), Cell('span', 'sqrt_2L', 2, 'relu', 'raw', 0.02)):
        got, want = weights(cell, 1), LM(cell.config()).init(jax.random.key(1))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_cells_that_differ_in_their_weights_share_a_program():
    from spannorm_jax.theory.cells import compiled

    compiled.cache_clear()
    wanted = {sums_and_gradients: (4, 64)}
    a, b = (measure(Cell('post', scale, 2), 2, wanted)[sums_and_gradients] for scale in ('none', 'sqrt_2L'))
    assert compiled.cache_info().misses == 1
    assert a['ln_grad'].shape == (2, 2) and a['ln_grad'].dtype == np.float64
    # the second seed's weights at the branch's std: W_2 of Scale Init is half of it at L = 2
    assert np.exp(np.log(a['branch_var_attn'] / b['branch_var_attn']).mean()) == pytest.approx(4, rel=0.1)


def test_theory_from_the_command_line(capsys):
    words = '--only t1 --depths 2 2 --seeds 2 --activations swiglu'.split()
    assert cli.main(['theory', *words, '--json']) == 0
    said = json.loads(capsys.readouterr().out)
    cells = said['T1']['cells']
    assert [(c['topology'], c['scale_init'], c['layers']) for c in cells] == [
        (t, s, 2) for s in ('none', 'sqrt_2L') for t in ('pre', 'post', 'span')
    ]
    assert all(c['ln_g1_over_gL']['low'] < c['ln_g1_over_gL']['mean'] < c['ln_g1_over_gL']['high'] for c in cells)
    assert [r['scale_init'] for r in said['T1']['root']] == ['none', 'sqrt_2L'] and set(said) == {'T1'}
    assert cli.main(['theory', *words]) == 0
    first = capsys.readouterr().out.split('T1 cells')[0]
    assert f'{cells[0]["ln_g1_over_gL"]["mean"]:.5f}' in first and 'L = 2' in first


@pytest.mark.parametrize(
    ('given', 'says'),
    [({'only': ('T2',)}, 'T2'), ({'depths': (1,)}, 'at least 2'), ({'seeds': 1}, 'at least 2'), ({'activations': ('swish',)}, 'swish')],
)
def test_theory_refuses(given, says):
    with pytest.raises(UserError, match=says):
        theory(**given)


def test_what_theory_asks_by_default():
    assert set(CLAIMS) == {'T1', 'T5', 'T6', 'T8', 'T11'}
    typed = options.Theory()
    assert (typed.depths, typed.seeds, typed.activations) == (DEPTHS, SEEDS, ACTIVATION_AXIS)


def test_a_table_to_compare_for_each_ffn_kind():
    def row(kind, L, mean):
        return {'topology': 'pre', 'scale_init': 'none', 'layers': L, 'activation': kind, 'ln_g1_over_gL': Estimate(mean, 1)}

    tables = list(show.comparison({'T1': {'cells': [row('swiglu', 8, 1.234567), row('relu', 8, -2.0), row('swiglu', 32, 3.0)]}}))
    assert [(title.split()[-1], heads[2:], rows) for title, heads, rows in tables] == [
        ('swiglu', ['L = 8', 'L = 32'], [['pre', 'none', '1.23457', '3.00000']]),
        ('relu', ['L = 8'], [['pre', 'none', '-2.00000']]),
    ]
    assert list(show.comparison({'T6': {}})) == []
