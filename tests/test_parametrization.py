"""muP and CompleteP: every factor against its published formula, what the model does with it, and the coordinate check."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY

from spannorm_jax import LM, Block, ModelConfig, coordinate_check, parametrization
from spannorm_jax.config import Config, edit
from spannorm_jax.diagnostics import size_slopes
from spannorm_jax.errors import UserError
from spannorm_jax.initializers import Init, Param
from spannorm_jax.model import each_param, infos
from spannorm_jax.optim import make_optimizer
from spannorm_jax.topology import TOPOLOGIES

SMALL = dict(width=16, heads=2, layers=2, ffn=24, vocab=31)
MUP = dict(parametrization='mup', base_width=16, base_head_dim=8)
COMPLETE = MUP | dict(parametrization='completep', base_layers=2)
DEEP = [name for name, entry in TOPOLOGIES.items() if entry.depth in ('branch', 'add', 'own')]


def stds(cfg):
    return {name.split('.')[-1]: info.init.std for name, _, info in each_param(cfg, infos(cfg)) if info.init.std}


@pytest.mark.parametrize('name', sorted(TOPOLOGIES))
def test_the_base_model_is_the_standard_one(name):
    """n = m = 1: initial values, factors and scales are those of `standard`, under every topology and recipe."""
    for init in ('common', 'own'):
        standard = ModelConfig(topology=name, init=init, **SMALL)
        for kind in (MUP, COMPLETE) if name in DEEP else (MUP,):
            cfg = ModelConfig(topology=name, init=init, **SMALL, **kind)
            assert stds(cfg) == stds(standard)
            assert parametrization.attn_scale(cfg) == pytest.approx(8**-0.5) and parametrization.logit_scale(cfg) == 1
            for role in ('embed', 'read', 'write', 'head', 'gain', 'router', 'mix'):
                assert parametrization.factors(cfg, role, True) == (1, 1, 1)


@pytest.mark.parametrize('fields', [{}, {'init_std': 0.02}, {'init': 'own'}], ids=['fan_in', 'sigma', 'own'])
@pytest.mark.parametrize('name', ['pre', 'span', 'hybrid', 'deepnorm'])
def test_initial_std_over_width(name, fields):
    """Four times the width: matrices of the blocks at half the std of the base, embedding and head at the same, the router at a quarter."""
    base = stds(ModelConfig(topology=name, experts=2, expert_ffn=8, **SMALL, **fields))
    wide = stds(ModelConfig(topology=name, experts=2, expert_ffn=32, **SMALL | dict(width=64, ffn=96), **fields, **MUP))
    for key, std in base.items():
        factor = {'embed': 1, 'head': 1, 'router': 1 / 4}.get(key, 1 / 2)
        assert wide[key] == pytest.approx(factor * std), key


def test_initial_std_over_depth():
    """Scale Init's factor stays that of the base depth under completep, which scales branches instead; mup leaves depth alone."""
    base = stds(ModelConfig(topology='span', **SMALL))
    deep = ModelConfig(topology='span', **SMALL | dict(layers=8), **COMPLETE)
    assert stds(deep) == base
    mup = stds(ModelConfig(topology='span', **SMALL | dict(layers=8), **MUP))
    assert mup['down'] == pytest.approx(base['down'] / 2) and mup['up'] == base['up']


def test_factors_are_the_published_ones():
    """n = 4, m = 4: the rows of docs/parametrizations.md."""
    wide = SMALL | dict(width=64, heads=8)
    mup = ModelConfig(**wide, **MUP)
    complete = ModelConfig(**wide | dict(layers=8), **COMPLETE)
    half = ModelConfig(**wide | dict(layers=8), **COMPLETE, depth_alpha=0.5)
    for role in ('read', 'write', 'router'):
        assert parametrization.factors(mup, role, True) == (1 / 4, 4, 1 / 4)
        assert parametrization.factors(complete, role, True) == (1 / 4, 4, 1 / 16)
        assert parametrization.factors(half, role, True) == (1 / 8, 4, 1 / 8)
    for role in ('gain', 'bias', 'gate'):
        assert parametrization.factors(mup, role, True) == (1, 1, 1 / 4)
        assert parametrization.factors(half, role, True) == (1 / 2, 1, 1 / 8)
    for role in ('embed', 'head', 'gain'):
        for cfg in (mup, complete, half):
            assert parametrization.factors(cfg, role, False) == (1, 1, 1 / 4)
    assert parametrization.attn_scale(mup) == pytest.approx(8**-0.5)  # more heads, each as wide
    assert parametrization.attn_scale(ModelConfig(**wide | dict(heads=2), **MUP)) == pytest.approx(8**0.5 / 32)  # wider heads: 1/H
    assert parametrization.attn_scale(ModelConfig(**wide, **MUP, attn_scale=0.7)) == 0.7
    assert parametrization.logit_scale(ModelConfig(**wide, **MUP, logit_scale=3.0)) == 3 / 4


def test_adamw_with_factors_against_hand_computation():
    cfg = edit(TINY, {'model.width': 32, 'model.layers': 8, 'optim.clip': 0.0, 'optim.weight_decay': 0.5, 'optim.lr_peak': 0.1})
    cfg = edit(cfg, {'optim.schedule': 'constant', 'optim.warmup_steps': 0, 'optim.eps': 0.3})
    cfg = edit(cfg, {f'model.{k}': v for k, v in COMPLETE.items()} | {'model.depth_alpha': 0.5})  # n = 2, m = 4
    leaf = lambda role, *axes: Param(jax.ShapeDtypeStruct((1, 2), jnp.float32), axes or (None, None), role, Init(), 1)  # noqa: E731
    tree = {'w': leaf('read', 'layers', None), 'g': leaf('gain', 'layers', None), 'e': leaf('embed'), 'h': leaf('head')}
    rules = {'w': (1 / 4, 2, 1 / 4), 'g': (1 / 2, 0, 1 / 4), 'e': (1, 0, 1 / 2), 'h': (1, 1, 1 / 2)}  # lr, decay, eps
    opt = make_optimizer(cfg, tree)
    params = {k: jnp.array([[1.0, -2.0]]) for k in tree}
    state, x, m, v = opt.init(params), {k: np.array([[1.0, -2.0]]) for k in tree}, 0.0, 0.0
    for i in range(3):
        g = np.array([[0.3, -1.0]]) * (i + 1)
        updates, state = opt.update({k: jnp.asarray(g, jnp.float32) for k in tree}, state, params, step=i)
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        for k, (lr, decay, eps) in rules.items():
            direction = m / (1 - 0.9 ** (i + 1)) / (np.sqrt(v / (1 - 0.95 ** (i + 1))) + 0.3 * eps)
            x[k] = x[k] - 0.1 * lr * (direction + 0.5 * decay * x[k])
    for k in tree:
        np.testing.assert_allclose(params[k], x[k], rtol=1e-5, err_msg=k)


def test_the_state_of_the_optimizer_is_as_before():
    """`standard` adds no stage to the chain, so that checkpoints keep their form."""
    tree = infos(TINY.model)
    state = make_optimizer(TINY, tree).init(LM(TINY.model).init(jax.random.key(0)))
    assert len(state) == 4


@pytest.mark.parametrize(
    'fields', [dict(topology='post', layers=2, **MUP), dict(topology='pre', layers=8, **COMPLETE)], ids=['mup', 'completep']
)
def test_logits_scores_and_what_an_export_says(fields):
    """Four times the width: logits over 4, scores times sqrt(8) / 32, and over four times the depth branches over 4; `settled` says so
    in the fields of a standard config, which computes the same logits."""
    cfg, tokens = ModelConfig(**SMALL | dict(width=64) | fields), jnp.arange(12).reshape(2, 6) % 31
    params = LM(cfg).init(jax.random.key(0))
    settled = parametrization.settled(cfg)
    assert (settled['logit_scale'], settled['attn_scale']) == (1 / 4, pytest.approx(8**0.5 / 32))
    assert settled.get('branch_scale', 1.0) == (1 / 4 if cfg.layers == 8 else 1)
    same = dataclasses.replace(cfg, **settled)
    assert same.parametrization == 'standard'
    want, got = (jax.jit(LM(c).apply)(params, tokens) for c in (cfg, same))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(UserError, match='0.25'):
        parametrization.settled(ModelConfig(**SMALL | dict(layers=8, topology='span'), **COMPLETE))


@pytest.mark.parametrize('name', DEEP)
def test_branches_over_depth(name):
    """m^-alpha on what a block adds. Where nothing norms the branch that is a factor on the projections that write; behind a norm (peri,
    ...) those do not matter and the factor is `branch_scale`'s; KEEL's skip has it already."""
    cfg = ModelConfig(topology=name, **SMALL | dict(layers=8), **COMPLETE, depth_alpha=1.0)
    standard = ModelConfig(topology=name, **SMALL | dict(layers=8))
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    block = Block(cfg, layer=5)
    params = jax.jit(block.init)(jax.random.key(0), x)['params']
    params = jax.tree.map(lambda p: p.value, params, is_leaf=lambda p: isinstance(p, Param))
    got, _ = jax.jit(block.apply)({'params': params}, x)
    where = TOPOLOGIES[name].depth
    if name in ('peri', 'sandwich', 'reordered'):
        want, _ = jax.jit(Block(edit(standard, {'branch_scale': 1 / 4}), layer=5).apply)({'params': params}, x)
    else:
        factor = 1.0 if where == 'own' else 1 / 4
        scaled = jax.tree_util.tree_map_with_path(lambda k, w: w * factor if k[-1].key in ('o', 'down') else w, params)
        want, _ = jax.jit(Block(standard, layer=5).apply)({'params': scaled}, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    plain, _ = jax.jit(Block(standard, layer=5).apply)({'params': params}, x)
    assert np.allclose(got, plain, atol=1e-4) == (where == 'own')


FULL = pytest.mark.full


@pytest.mark.parametrize('topology', ['span', pytest.param('pre', marks=FULL), pytest.param('peri', marks=FULL)])
def test_coordinates_over_width(topology):
    """Four times the width: under mup the stream moves as far in two small steps, under standard nearly four times as far. (After large
    ones it cannot: a norm bounds how far a branch moves, and Peri-LN has one behind each.)"""
    slopes = check(topology, 'width', (32, 128), MUP | dict(base_width=32), rate=3e-4)
    for place in ('lower', 'middle', 'upper', 'last'):
        assert abs(slopes['mup'][place]) < 0.15 and slopes['standard'][place] > 0.65, (place, slopes)
    # W_0 dx / n has a random part that falls as n^-1/2 toward what stays
    assert -0.5 < slopes['mup']['logits'] < 0.15 and slopes['standard']['logits'] > 0.75
    assert all(abs(found['embedding']) < 0.1 for found in slopes.values())


@pytest.mark.parametrize('topology', ['pre', pytest.param('span', marks=FULL), pytest.param('hybrid', marks=FULL)])
def test_coordinates_over_depth(topology):
    """Four times the depth, the same with completep."""
    slopes = check(topology, 'layers', (4, 16), COMPLETE | dict(base_width=32, base_layers=4))
    for place in ('middle', 'upper', 'last', 'logits'):
        assert abs(slopes['completep'][place]) < 0.2 < slopes['standard'][place] - 0.1, (place, slopes)


def check(topology, axis, sizes, kind, rate=3e-3):
    """Slopes of the movement over the size, standard and with the parametrization; at the base both are one model."""
    small = {'model.vocab': 61, 'model.width': 32, 'model.heads': 4, 'model.layers': 4, 'model.topology': topology, 'optim.lr_peak': rate}
    cfg = edit(Config(), small | {'optim.schedule': 'constant', 'optim.warmup_steps': 0})
    tokens = np.random.default_rng(0).integers(0, 61, (2, 17))
    ones = np.ones((2, 16), np.int32)
    batch = {'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'segments': ones, 'positions': ones.cumsum(1) - 1}
    batch = {k: v.astype(np.int32) for k, v in batch.items()}
    moved = {}
    for name, fields in (('standard', {}), (kind['parametrization'], kind)):
        configs = {size: edit(cfg, {f'model.{k}': v for k, v in fields.items()} | {f'model.{axis}': size}) for size in sizes}
        moved[name] = coordinate_check(configs, [batch] * 2, batch, steps=2)
    first, second = (m[sizes[0]] for m in moved.values())
    for place in first:
        np.testing.assert_allclose(first[place], second[place], rtol=1e-3)
    return {name: size_slopes(m) for name, m in moved.items()}


@pytest.mark.parametrize(
    ('fields', 'says'),
    [
        (dict(parametrization='mup', base_width=16), 'base_head_dim'),
        (COMPLETE | dict(base_layers=None), 'base_layers'),
        (dict(base_width=16), 'no effect'),
        (MUP | dict(base_layers=2), 'no effect'),
        (COMPLETE | dict(depth_alpha=0.3), 'depth_alpha'),
        (COMPLETE | dict(topology='deepnorm'), r'2L.*mup'),
        (COMPLETE | dict(topology='lns'), 'sqrt'),
        (COMPLETE | dict(topology='keel', alpha=2.0), 'alpha'),
        (MUP | dict(topology='mhc', stream_exit='learned'), 'stream_exit'),
        (MUP | dict(base_width=0), 'base_width'),
    ],
)
def test_refusals(fields, says):
    with pytest.raises(UserError, match=says):
        ModelConfig(**SMALL | fields)


def test_muon_has_no_rules():
    with pytest.raises(UserError, match='Adam'):
        edit(Config(), {'optim.optimizer': 'muon', 'model.parametrization': 'mup', 'model.base_width': 64, 'model.base_head_dim': 32})


def test_every_topology_says_where_its_depth_factor_goes():
    for name in set(TOPOLOGIES) - set(DEEP):
        assert len(TOPOLOGIES[name].depth) > 20, name
    assert {'pre', 'post', 'span', 'b2t', 'hybrid', 'peri', 'mixln', 'keel'} <= set(DEEP)
