"""What the table's entries add to the functions: updates and gradients against NumPy, scales by token, experts, laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_diagnostics import BATCH
from test_topology import random_params, tiny

from spannorm_jax import diagnostics as d
from spannorm_jax.config import Config, edit
from spannorm_jax.diagnostics import Probe, measures
from spannorm_jax.diagnostics.probe import adam_state
from spannorm_jax.model import LM, each_param, infos, restack, unstack
from spannorm_jax.optim import make_optimizer
from spannorm_jax.step import init_state

REAL = np.asarray(BATCH['segments']) > 0


def settings(model, **changes):
    fixed = {'optim.schedule': 'constant', 'optim.warmup_steps': 0, 'optim.clip': 0.0, 'run.steps': 8}
    return edit(Config(), {'model': model} | fixed | changes)


def gradient_of(cfg):
    """(params, segments) -> gradient of the mean loss, through the public model."""

    def loss(params, segments):
        logp = jax.nn.log_softmax(LM(cfg).apply(params, BATCH['tokens'], segments, BATCH['positions']))
        nats = -jnp.take_along_axis(logp, BATCH['targets'][..., None], -1)[..., 0]
        return jnp.where(segments > 0, nats, 0).sum() / (segments > 0).sum()

    return jax.jit(jax.grad(loss))


@functools.cache
def post():
    """A PostNorm model whose Adam has seen gradients already, and its probe."""
    cfg = settings(tiny('post', layers=2), **{'optim.lr_peak': 0.01, 'optim.weight_decay': 0.1})
    params = random_params(cfg.model)
    state = init_state(cfg, LM(cfg.model), make_optimizer(cfg, infos(cfg.model)))
    adam = adam_state(state.opt_state)
    rng = np.random.default_rng(0)
    m, v = (jax.tree.map(lambda w, s=s: jnp.asarray(s * rng.random(w.shape), jnp.float32), params) for s in (1e-2, 1e-3))
    planted = adam._replace(count=jnp.int32(3), mu=m, nu=v)
    swap = lambda part: planted if part is adam else part  # noqa: E731
    opt_state = jax.tree.map(swap, state.opt_state, is_leaf=lambda part: part is adam)
    return Probe(cfg, params, BATCH, opt_state), m, v


def test_successive_updates_and_the_surprise_of_a_gradient_against_numpy():
    probe, *moments = post()
    cfg, opt = probe.cfg.model, probe.cfg.optim
    gradient = gradient_of(cfg)
    named = lambda tree: {k: np.asarray(w, np.float64) for k, w in unstack(cfg, tree).items()}  # noqa: E731
    roles = {name: info.role for name, _, info in each_param(cfg, infos(cfg))}
    role = lambda name: roles.get(name) or roles[name.split('.', 2)[2]]  # noqa: E731
    (m, v), at, moved, ratio = map(named, moments), probe.params, [], {}
    for step, half in enumerate((0, 1)):
        rows_B1 = (np.arange(len(REAL)) % 2 == half)[:, None]
        g, w, t = named(gradient(at, jnp.where(rows_B1, BATCH['segments'], 0))), named(at), 4 + step
        m = {k: opt.beta1 * m[k] + (1 - opt.beta1) * g[k] for k in g}
        v = {k: opt.beta2 * v[k] + (1 - opt.beta2) * g[k] ** 2 for k in g}
        hat = {k: v[k] / (1 - opt.beta2**t) for k in g}
        decayed = {k: opt.weight_decay * w[k] * (role(k) in opt.decay_roles) for k in g}
        moved.append({k: -opt.lr_peak * (m[k] / (1 - opt.beta1**t) / (np.sqrt(hat[k]) + opt.eps) + decayed[k]) for k in g})
        ratio = ratio or {k: g[k] ** 2 / hat[k] for k in g}
        at = restacked(cfg, {k: w[k] + moved[-1][k] for k in g})
    found = measures.updates(probe)
    for l in range(2):
        for which in ('read', 'write'):
            keys = [k for k in moved[0] if k.startswith(f'layers.{l}.') and role(k) == which]
            u, w, r = (np.concatenate([tree[k].ravel() for k in keys]) for tree in (*moved, ratio))
            assert found[f'cosine/{which}'][l] == pytest.approx(u @ w / np.linalg.norm(u) / np.linalg.norm(w), abs=1e-3)
            assert found[f'surprise/{which}'][l] == pytest.approx(np.sqrt(r.mean()), rel=1e-3)
    assert found['cosine/read'].min() < 0.999 and found['surprise/read'].max() > 0.01
    np.testing.assert_allclose(found['grad_over_eps/read'], probe.step['layer/grad_rms/read'] / 1e-8)
    one_row = Probe(probe.cfg, probe.params, {k: x[:1] for k, x in BATCH.items()})
    assert one_row.successive == []
    half = Probe(probe.cfg, probe.params, BATCH | {'segments': BATCH['segments'].at[1::2].set(0)})
    assert half.successive == []


def restacked(cfg, named):
    return restack(cfg, {k: np.asarray(w, np.float32) for k, w in named.items()})


def test_first_step_of_adam_is_no_surprise():
    """v = g^2 then, but for its eps."""
    probe, *_ = post()
    fresh = Probe(probe.cfg, probe.params, BATCH)
    fresh.__dict__['stepper'] = (init_state_of(fresh), probe.stepper[1])  # the same compiled step
    np.testing.assert_allclose(measures.updates(fresh)['surprise/write'], 1, rtol=1e-3)


def init_state_of(probe):
    state = init_state(probe.cfg, LM(probe.cfg.model), make_optimizer(probe.cfg, infos(probe.cfg.model)))
    return state._replace(params=probe.params)


def test_gradients_their_ranks_and_the_law_of_norms():
    """One real token: every gradient of a matrix of the last block has rank 1. The law is worked out from its sums."""
    probe, *_ = post()
    lone = BATCH | {'segments': jnp.zeros_like(BATCH['segments']).at[0, 0].set(1)}
    found = measures.gradients(Probe(probe.cfg, probe.params, lone))
    np.testing.assert_allclose([found['rank/ffn.down'][-1], found['rank/attn.o'][-1]], 1 / 16, rtol=1e-3)
    g = gradient_of(probe.cfg.model)(probe.params, lone['segments'])
    np.testing.assert_allclose(found['grad_rms/write'], [
        np.sqrt(np.mean(np.concatenate([np.ravel(v) ** 2 for k, v in unstack(probe.cfg.model, g).items()
                                        if k in (f'layers.{l}.attn.o', f'layers.{l}.ffn.down')]))) for l in range(2)
    ], rtol=1e-4)  # fmt: skip

    a, z = np.log([2.0, 3, 5]), np.log([7.0, 11, 13])
    np.testing.assert_allclose(np.exp(d.norm_law('span', a, z)), [1 / (7 * 11 * 13), 1 / (11 * 13), 1 / 13])
    np.testing.assert_allclose(np.exp(d.norm_law('post', a, z)), [1 / (7 * 11 * 13 * 3 * 5), 1 / (11 * 13 * 5), 1 / 13])
    assert d.norm_law('pre', a, z) is None
    all_of_it = measures.gradients(probe)
    sigma = [np.log(probe.step[f'layer/sigma_{site}']) for site in ('attn', 'ffn')]
    assert all_of_it['law'][-1] == pytest.approx(all_of_it['grad_rms/write'][-1])
    assert all_of_it['law'][0] / all_of_it['law'][1] == pytest.approx(np.exp(-sigma[0][1] - sigma[1][0]))
    assert all_of_it['law: ln first over last'] == pytest.approx(-sigma[0][1] - sigma[1][0])


def test_scales_by_token_are_those_of_the_sums():
    cfg = settings(tiny('pre', layers=2))
    probe = Probe(cfg, random_params(cfg.model), BATCH)
    found, seen = measures.scales(probe), probe.seen
    for l in range(2):
        x, y = np.asarray(seen['states'][l] + seen['attn'][l]), np.asarray(seen['states'][l + 1])
        for site, total in (('attn', x), ('ffn', y)):
            want = np.percentile(total.std(-1)[REAL], (5, 50, 95))
            np.testing.assert_allclose([found[f'sigma_{site}/p{q}'][l] for q in (5, 50, 95)], want, rtol=1e-4)
    assert (found['sigma_ffn/p5'] < found['sigma_ffn/p95']).all()


def test_a_moved_network_is_lazy_where_it_is_linear():
    x = jnp.arange(1.0, 5)
    assert d.laziness(lambda p: x * p['w'], {'w': jnp.ones(4)}, {'w': x}) == pytest.approx(0, abs=1e-6)
    # p^2 from 3 to 5: 16 moved, 12 of it along the tangent
    assert d.laziness(lambda p: p**2, jnp.full(3, 3.0), jnp.full(3, 5.0)) == pytest.approx(4 / 16)


@pytest.mark.full
def test_experts_against_numpy():
    """With the router's weights at 0 and selection biases for two experts: balance broken, logits 0, the other experts without gradient."""
    cfg = settings(tiny('pre', experts=4, expert_ffn=8, first_dense=1))
    params = random_params(cfg.model)
    forced = {
        k: np.zeros_like(v) + (np.array([5, 5, 0, 0]) if k.endswith('router_bias') else 0) if 'router' in k else np.asarray(v)
        for k, v in unstack(cfg.model, params).items()
    }
    probe = Probe(cfg, restacked(cfg.model, forced), BATCH)
    found = measures.experts(probe)
    np.testing.assert_allclose(found['load'][1:], np.tile([0.5, 0.5, 0, 0], (2, 1)), atol=1e-6)
    np.testing.assert_allclose(found['cv'], [np.nan, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(found['router_rms'], [np.nan, 0, 0], atol=1e-9)
    g = {k: np.asarray(v) for k, v in unstack(cfg.model, gradient_of(cfg.model)(probe.params, BATCH['segments'])).items()}
    for l in (1, 2):
        norms = np.linalg.norm(g[f'layers.{l}.ffn.down'], axis=(1, 2))
        assert found['grad_cv'][l] == pytest.approx(norms.std() / norms.mean(), rel=1e-3) and norms[2] == norms[3] == 0
    assert np.isnan(found['grad_cv'][0])


def test_the_limit_of_sharpness_is_that_of_the_rate_of_the_last_step(monkeypatch):
    cfg = edit(settings(tiny('pre', layers=2)), {'optim.schedule': 'cosine', 'optim.lr_final': 0.1, 'run.steps': 3})
    params, optimizer = random_params(cfg.model), make_optimizer(cfg, infos(cfg.model))
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for step in range(3):
        _, state = update(params, state, params, step=jnp.int32(step))
    monkeypatch.setattr(measures.curvature, 'hessian_spectrum', lambda *_, **__: jnp.ones(2))
    found = measures.sharpness(Probe(cfg, params, BATCH, state))
    assert found['rate'] == pytest.approx(0.1 * cfg.optim.lr_peak)
    assert found['limit'] == pytest.approx((2 + 2 * cfg.optim.beta1) / (1 - cfg.optim.beta1) / found['rate'])


@pytest.mark.parametrize('changes', [{}, {'model.parametrization': 'completep', 'model.base_width': 8, 'model.base_head_dim': 4}])
def test_what_adam_divides_by(changes):
    """With the factors of a parametrization: moving by Adam is gradient descent with the rate of the base on this preconditioner."""
    cfg = edit(settings(tiny('pre', layers=2)), {'model.base_layers': 1} | changes if changes else {})
    params = random_params(cfg.model)
    optimizer = make_optimizer(edit(cfg, {'optim.weight_decay': 0.0, 'optim.beta1': 0.0}), infos(cfg.model))
    grads = jax.tree.map(lambda w: 1e-7 * (1 + jnp.abs(w)), params)  # where eps counts
    state = jax.jit(optimizer.init)(params)
    updates, state = jax.jit(optimizer.update)(grads, state, params, step=jnp.int32(0))
    probe = Probe(cfg, params, BATCH, state)
    P = probe.preconditioner
    jax.tree.map(lambda u, g, p: np.testing.assert_allclose(u, -cfg.optim.lr_peak * g / p, rtol=2e-3), updates, grads, P)
    eps = cfg.optim.eps * (
        2**-cfg.model.depth_alpha * 8 / cfg.model.width if changes else 1
    )  # twice as deep as the base, width / 8 as wide
    probe.__dict__['step'] = {
        f'layer/{k}/{r}': np.ones(2) for k in ('grad_rms', 'update_ratio', 'update_visible') for r in ('read', 'write')
    }
    probe.__dict__['successive'] = []
    np.testing.assert_allclose(measures.updates(probe)['grad_over_eps/write'], 1 / eps)
