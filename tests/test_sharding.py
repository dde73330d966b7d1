"""The mesh, the rules, and that the mesh changes no number."""

import jax
import pytest
from fakes import TINY
from jax.sharding import PartitionSpec as P

from spannorm_jax.config import MeshConfig, edit
from spannorm_jax.errors import UserError
from spannorm_jax.model import infos
from spannorm_jax.sharding import MESH_AXES, RULES, check_batch, make_mesh, spec
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
