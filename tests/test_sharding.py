"""The mesh, the rules, and that the mesh changes no number."""

import jax
import numpy as np
import pytest
from fakes import TINY, FakeCorpus
from jax.sharding import PartitionSpec as P

from spannorm_jax.config import MeshConfig, edit
from spannorm_jax.errors import UserError
from spannorm_jax.model import LM, infos, unstack
from spannorm_jax.optim import make_optimizer
from spannorm_jax.sharding import MESH_AXES, RULES, check_batch, make_mesh, param_shardings, put_batch, spec, state_shardings
from spannorm_jax.step import TrainState, abstract_state, init_state, make_step
from spannorm_jax.topology import TOPOLOGIES


def test_mesh_takes_what_the_other_axes_leave():
    one = dict.fromkeys(MESH_AXES, 1)
    assert dict(make_mesh(MeshConfig(fsdp=2, tensor=2)).shape) == one | {'data': 2, 'fsdp': 2, 'tensor': 2}
    assert dict(make_mesh(MeshConfig(replica=2, expert=2, sequence=2)).shape) == one | {'replica': 2, 'expert': 2, 'sequence': 2}
    assert dict(make_mesh(MeshConfig(devices=1)).shape) == one


@pytest.mark.parametrize(
    'mesh, words',
    [
        (MeshConfig(fsdp=3), r'\? x 3 x 1 does not make 8 devices'),
        (MeshConfig(data=2, fsdp=2), '2 x 2 x 1 does not make 8 devices'),
        (MeshConfig(expert=16), r'data x fsdp x expert x tensor = \? x 1 x 16 x 1 does not make 8 devices'),
        (MeshConfig(devices=9), 'mesh.devices = 9, but there are 8 cpu devices'),
        (MeshConfig(platform='tpu'), "mesh.platform = 'tpu' is not there .present: cpu"),
    ],
)
def test_a_mesh_that_cannot_be_made_is_explained(mesh, words):
    with pytest.raises(UserError, match=words):
        make_mesh(mesh)


def test_a_batch_that_does_not_divide_is_explained():
    cfg = edit(TINY, {'mesh.devices': 4, 'mesh.fsdp': 2, 'optim.accumulate': 2})
    with pytest.raises(UserError, match=r'data.batch = 4 / optim.accumulate = 2 does not divide over mesh.data x fsdp = 2 x 2'):
        check_batch(cfg, make_mesh(cfg.mesh))
    check_batch(edit(cfg, {'optim.accumulate': 1}), make_mesh(cfg.mesh))


def test_rules_split_what_divides_and_say_what_does_not():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    assert spec(('layers', 'width', 'heads', 'head_dim'), (3, 8, 4, 6), mesh) == (P(None, 'fsdp', 'tensor', None), [])
    assert spec(('width', 'kv', 'head_dim'), (8, 2, 6), mesh) == (
        P('fsdp', None, None),
        ['kv = 2 does not divide over mesh.tensor = 4: kept whole'],
    )
    assert spec(('vocab', 'ffn'), (8, 8), mesh) == (P('tensor', None), [])  # a mesh axis splits one dimension
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, sequence=2))
    assert spec(('width', 'heads'), (16, 3), mesh) == (P(('fsdp', 'expert', 'sequence'), None), [])
    assert spec(('experts', 'width', 'ffn'), (6, 16, 5), mesh) == (P('expert', ('fsdp', 'sequence'), None), [])
    assert spec(('width',), (12,), mesh) == (
        P(('fsdp', 'expert')),
        ['width = 12 does not divide over mesh.fsdp x mesh.expert x mesh.sequence = 2 x 2 x 2: split over fsdp x expert alone'],
    )


@pytest.mark.parametrize('topology', sorted(TOPOLOGIES))
def test_every_axis_of_every_topology_is_in_the_table(topology):
    tree = infos(edit(TINY, {'model.topology': topology, 'model.attn_bias': True, 'model.mlp_bias': True}).model)
    names = {a for p in jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, 'axes')) for a in p.axes if a}
    assert names <= set(RULES) and {'width', 'heads', 'ffn', 'vocab', 'layers'} <= names


def three_steps(topology, mesh_cfg):
    # eps: HC's streams begin equal, so some gradients are 0 up to rounding, which Adam with its usual eps of 1e-8 makes whole steps of.
    cfg = edit(TINY, {'model.topology': topology, 'mesh': mesh_cfg, 'model.vocab': 32, 'data.batch': 8, 'optim.eps': 1e-5})
    lm, tree, mesh = LM(cfg.model), infos(cfg.model), make_mesh(mesh_cfg)
    opt = make_optimizer(cfg, tree)
    params, _ = param_shardings(tree, mesh)
    shapes = abstract_state(tree, opt)
    whole = jax.sharding.NamedSharding(mesh, P())
    places = TrainState(whole, params, state_shardings(shapes.opt_state, shapes.params, params, mesh), whole)
    feed, losses = FakeCorpus().train_batches(8, cfg.data.seq, 0), []
    with jax.set_mesh(mesh):
        step = jax.jit(make_step(cfg, lm, opt, tree), donate_argnums=0, out_shardings=(places, whole))
        state = init_state(cfg, lm, opt, places)
        for _ in range(3):
            state, metrics = step(state, put_batch(next(feed), mesh))
            losses.append((float(metrics['loss']), float(metrics['grad_norm'])))
    return losses, state, cfg


@pytest.mark.parametrize(
    'topology, mesh',
    [
        ('pre', MeshConfig(data=2, fsdp=2, tensor=2)),
        pytest.param('span', MeshConfig(data=1, fsdp=4, tensor=2), marks=pytest.mark.full),
        pytest.param('hc', MeshConfig(data=8), marks=pytest.mark.full),
    ],
)
def test_a_mesh_changes_no_number(topology, mesh):
    losses, state, cfg = three_steps(topology, mesh)
    want_losses, want, _ = three_steps(topology, MeshConfig(devices=1))
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    got, wanted = unstack(cfg.model, state.params), unstack(cfg.model, want.params)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=0, atol=1e-5 * max(1, np.linalg.norm(wanted[name])), err_msg=name)
    q = state.params['stack']['blocks_0']['attn']['q']
    assert len(q.sharding.device_set) == 8 and q.addressable_shards[0].data.size * mesh.fsdp * mesh.tensor == q.size
    moment = [x for x in jax.tree.leaves(state.opt_state) if x.shape == q.shape]
    assert moment and all(m.sharding.is_equivalent_to(q.sharding, q.ndim) for m in moment)
