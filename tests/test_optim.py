"""Schedules, AdamW and Muon by role."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY

from spannorm_jax.config import OptimConfig, edit
from spannorm_jax.initializers import Init, Param, is_param
from spannorm_jax.model import LM, each_param, infos, layer_name, unstack
from spannorm_jax.optim import decays, make_optimizer, muon_dims, schedule, trainable


def rates(steps, **kw):
    rate = schedule(OptimConfig(lr_peak=2.0, lr_final=0.1, **kw), steps)
    return np.array([rate(i) for i in range(max(steps, 1))])


@pytest.mark.parametrize('kind', ['cosine', 'linear', 'wsd', 'constant'])
def test_schedule_warms_up_and_ends_where_it_should(kind):
    lr = rates(50, schedule=kind, warmup_steps=5)
    np.testing.assert_allclose(lr[:5], 2.0 * np.arange(1, 6) / 5, rtol=1e-6)
    np.testing.assert_allclose(lr[-1], 2.0 if kind == 'constant' else 0.2, rtol=1e-5)
    assert (np.diff(lr[4:]) <= 1e-6).all()


def test_schedule_shapes():
    np.testing.assert_allclose(rates(21, schedule='cosine', warmup_steps=1)[10], 2 * (0.1 + 0.9 / 2), rtol=1e-6)  # half-way: the mean
    np.testing.assert_allclose(rates(21, schedule='linear', warmup_steps=1)[5], 2 * (1 - 0.9 / 4), rtol=1e-6)
    wsd = rates(20, schedule='wsd', warmup_steps=0, decay_fraction=0.2)
    np.testing.assert_allclose(wsd, [2.0] * 16 + [2 * (1 - 0.9 * q) for q in (0.25, 0.5, 0.75, 1)], rtol=1e-6)


@pytest.mark.parametrize('kind', ['cosine', 'linear', 'wsd', 'constant'])
@pytest.mark.parametrize('steps', [0, 1, 3])
def test_schedule_is_defined_for_short_runs(kind, steps):
    lr = rates(steps, schedule=kind, warmup_steps=10)
    assert np.isfinite(lr).all() and (lr > 0).all() and (lr <= 2).all()


def leaf(shape, role, axes=None):
    return Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes or (None,) * len(shape), role, Init(), 1)


def test_adamw_against_hand_computation():
    cfg = edit(TINY, {'optim.clip': 0.0, 'optim.weight_decay': 0.5, 'optim.lr_peak': 0.1})
    cfg = edit(cfg, {'optim.schedule': 'constant', 'optim.warmup_steps': 0})
    tree = {'w': leaf((2,), 'read'), 'g': leaf((2,), 'gain'), 'b': leaf((2,), 'router_bias')}
    opt = make_optimizer(cfg, tree)
    params = {k: jnp.array([1.0, -2.0]) for k in tree}
    state, x = opt.init(params), {k: np.array([1.0, -2.0]) for k in tree}
    m = v = np.zeros(2)
    for i in range(3):
        g = np.array([0.3, -1.0]) * (i + 1)
        grads = trainable({k: jnp.asarray(g, jnp.float32) for k in tree}, tree)
        updates, state = opt.update(grads, state, params, step=i)
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        direction = m / (1 - 0.9 ** (i + 1)) / (np.sqrt(v / (1 - 0.95 ** (i + 1))) + 1e-8)
        x['w'] = x['w'] - 0.1 * (direction + 0.5 * x['w'])  # decays
        x['g'] = x['g'] - 0.1 * direction  # does not
    for k in tree:  # the router's bias stays
        np.testing.assert_allclose(params[k], x[k], rtol=1e-5)


def test_clip_is_by_the_global_norm_and_frozen_parameters_do_not_count():
    tree = {'w': leaf((1,), 'read'), 'b': leaf((1,), 'router_bias')}
    cfg = edit(TINY, {'optim.clip': 1.0, 'optim.beta1': 0.0, 'optim.beta2': 0.0, 'optim.eps': 1.0, 'optim.weight_decay': 0.0})
    opt = make_optimizer(edit(cfg, {'optim.warmup_steps': 0, 'optim.schedule': 'constant', 'optim.lr_peak': 1.0}), tree)
    params = {k: jnp.zeros(1) for k in tree}
    grads = trainable({'w': jnp.array([10.0]), 'b': jnp.array([1e9])}, tree)
    updates, _ = opt.update(grads, opt.init(params), params, step=0)
    np.testing.assert_allclose(updates['w'], [-1.0 / (1.0 + 1.0)], rtol=1e-6)  # g = 1 after clipping, u = g / (|g| + eps)
    np.testing.assert_array_equal(updates['b'], [0.0])


def test_decay_follows_roles():
    cfg = OptimConfig(decay_roles=('read', 'router_bias'))
    assert decays(cfg, 'read') and not decays(cfg, 'gain') and not decays(cfg, 'router_bias')


def test_muon_on_stacked_layers_is_muon_on_each_layer():
    cfg = edit(TINY, {'model.topology': 'span', 'model.layers': 3, 'model.kv_heads': 1, 'optim.optimizer': 'muon', 'optim.clip': 0.0})
    tree = infos(cfg.model)
    named = {}
    for name, layers, info in each_param(cfg.model, tree):
        for l in layers or [None]:
            one = info if l is None else info.replace(value=jax.ShapeDtypeStruct(info.value.shape[1:], jnp.float32), axes=info.axes[1:])
            named[layer_name(name, l)] = one
    stacked, single = make_optimizer(cfg, tree), make_optimizer(cfg, named)
    params = LM(cfg.model).init(jax.random.key(0))
    apart = unstack(cfg.model, params)

    def run(opt, p):
        @jax.jit
        def one(p, state, i):
            grads = jax.tree.map(lambda w: 0.1 * jnp.sin(3 * w + i), p)  # any function of the weights will do
            updates, state = opt.update(grads, state, p, step=i)
            return jax.tree.map(jnp.add, p, updates), state

        state = opt.init(p)
        for i in range(3):
            p, state = one(p, state, i)
        return p

    got, want = unstack(cfg.model, run(stacked, params)), run(single, apart)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert not np.allclose(got[name], apart[name]), name


def test_muon_update_is_orthogonal_with_the_rms_of_adamw():
    cfg = edit(TINY, {'optim.optimizer': 'muon', 'optim.weight_decay': 0.0, 'optim.lr_peak': 1.0, 'optim.schedule': 'constant'})
    cfg = edit(cfg, {'optim.warmup_steps': 0, 'optim.muon_lr': 2.0})
    tree = {
        'q': leaf((2, 16, 4, 3), 'read', ('layers', 'width', 'heads', 'head_dim')),  # 16 x 12, twice
        'o': leaf((2, 4, 3, 16), 'write', ('layers', 'heads', 'head_dim', 'width')),  # 12 x 16, twice
        'e': leaf((5, 16), 'embed'),
    }
    params = {k: jax.random.normal(jax.random.key(i), p.value.shape) for i, (k, p) in enumerate(tree.items())}
    opt = make_optimizer(cfg, tree)
    u, _ = jax.jit(lambda p: opt.update(p, opt.init(p), p, step=0))(params)
    for layer in range(2):
        for name, shape in (('q', (16, 12)), ('o', (12, 16))):
            singular = np.linalg.svd(np.asarray(u[name][layer]).reshape(shape), compute_uv=False)
            scaled = singular / (2.0 * 0.2 * 4.0)  # lr 2, 0.2 sqrt(max(16, 12))
            assert 0.6 < scaled.min() and scaled.max() < 1.3  # five Newton-Schulz rounds leave singular values near 1
    np.testing.assert_allclose(np.abs(u['e']), 1.0, rtol=1e-3)  # Adam's first step, at its own rate
    assert muon_dims(tree['q']) == ((1,), (2, 3)) and muon_dims(tree['o']) == ((1, 2), (3,))


def test_every_parameter_has_a_rule():
    cfg = edit(TINY, {'optim.optimizer': 'muon', 'model.topology': 'hc'})
    params = LM(cfg.model).init(jax.random.key(0))
    tree = infos(cfg.model)
    opt = make_optimizer(cfg, tree)
    ones = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1), p.shape), params)
    updates, _ = jax.jit(lambda p: opt.update(ones, opt.init(p), p, step=0))(params)
    assert all(np.abs(u).min() > 0 for u in jax.tree.leaves(updates))
    assert len(jax.tree.leaves(updates)) == len(jax.tree.leaves(tree, is_leaf=is_param))
