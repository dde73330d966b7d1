"""The mesh changes no number: every topology, with dense and expert blocks, on every mesh; and what the compiled program may not do."""

import functools
import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from fakes import TINY, FakeCorpus
from jax.sharding import PartitionSpec as P

from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import MeshConfig, edit
from spannorm_jax.errors import UserError
from spannorm_jax.initializers import is_param
from spannorm_jax.model import LM, infos, param_roles, unstack
from spannorm_jax.optim import make_optimizer
from spannorm_jax.sharding import check_batch, local_rows, make_mesh, param_shardings, put_batch, replicated, state_shardings
from spannorm_jax.step import TrainState, abstract_state, make_step
from spannorm_jax.topology import TOPOLOGIES
from spannorm_jax.train import fit

ONE = MeshConfig(devices=1)
MESHES = {
    '2x4 data fsdp': MeshConfig(data=2, fsdp=4),
    '2x2x2 fsdp expert tensor': MeshConfig(fsdp=2, expert=2, tensor=2),
    '8 expert': MeshConfig(expert=8),
    '4x2 data sequence': MeshConfig(data=4, sequence=2),
    '2x2x2 replica expert sequence': MeshConfig(replica=2, expert=2, sequence=2),
    '2x2x2 data sequence tensor': MeshConfig(data=2, sequence=2, tensor=2),
}
# One dense and one expert block; sizes that divide over every mesh. eps: HC's streams begin equal, so some gradients are 0 up to rounding,
# which Adam with its usual eps of 1e-8 makes whole steps of.
CFG = edit(
    TINY,
    {
        'model.vocab': 32, 'model.attention': 'mla', 'model.q_latent': 8, 'model.kv_latent': 16, 'model.nope_dim': 6, 'model.rope_dim': 4,
        'model.v_dim': 6, 'model.positions': 'rope_half', 'model.experts': 8, 'model.experts_per_token': 3, 'model.expert_groups': 4,
        'model.groups_per_token': 2, 'model.expert_ffn': 8, 'model.shared_experts': 1, 'model.first_dense': 1, 'model.heads': 4,
        'data.batch': 8, 'optim.eps': 1e-5, 'optim.balance_loss': 0.1, 'optim.router_z_loss': 0.01, 'optim.clip': 0.0,
        'optim.lr_peak': 1e-3,
    },
)  # fmt: skip
DENSE = dict.fromkeys(('model.q_latent', 'model.expert_ffn'), None) | {
    'model.attention': 'gqa', 'model.experts': 0, 'model.kv_heads': 2, 'model.kv_latent': 512, 'model.nope_dim': 128, 'model.rope_dim': 64,
    'model.v_dim': 128, 'model.experts_per_token': 2, 'model.expert_groups': 1, 'model.groups_per_token': 1, 'model.shared_experts': 0,
    'model.first_dense': 0,
}  # fmt: skip


def places_of(cfg, mesh):
    tree, whole = infos(cfg.model), jax.sharding.NamedSharding(mesh, P())
    params, _ = param_shardings(tree, mesh)
    shapes = abstract_state(tree, make_optimizer(cfg, tree))
    return TrainState(whole, params, state_shardings(shapes.opt_state, shapes.params, params, mesh), whole), whole


def state_of(cfg, places):
    """Random parameters and empty moments, made on the host: programs that draw them take longer to compile than the step."""
    rng, tree = np.random.default_rng(0), infos(cfg.model)
    shapes = abstract_state(tree, make_optimizer(cfg, tree))

    def draw(p):
        pattern = [p.init(None, p.value.shape[1:], l) for l in range(p.value.shape[0])] if p.init.fn else p.init.const
        return np.float32(np.asarray(pattern) + (p.init.std or 0.1) * rng.standard_normal(p.value.shape))

    state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)._replace(params=jax.tree.map(draw, tree, is_leaf=is_param))
    return jax.device_put(state, places)


@functools.cache
def three_steps(topology, mesh_cfg, changes=()):
    """Losses and gradient norms of three steps, the first gradient (Adam's first moment is a tenth of it), the last state, the program."""
    cfg = edit(CFG, {'model.topology': topology, 'mesh': mesh_cfg, **dict(changes)})
    lm, tree, mesh = LM(cfg.model), infos(cfg.model), make_mesh(mesh_cfg)
    check_batch(cfg, mesh)
    opt, (places, whole) = make_optimizer(cfg, tree), places_of(cfg, mesh)
    feed = FakeCorpus().train_batches(8, cfg.data.seq, 0, mine=local_rows(mesh, 8))
    batches, rows, gradient = [put_batch(next(feed), mesh, 8) for _ in range(3)], [], None
    with jax.set_mesh(mesh), jax.default_matmul_precision('highest'):
        state = state_of(cfg, places)
        step = jax.jit(make_step(cfg, lm, opt, tree), out_shardings=(places, whole)).lower(state, batches[0]).compile()
        gather = jax.jit(lambda tree: tree, out_shardings=replicated(mesh)) if jax.process_count() > 1 else lambda tree: tree
        for batch in batches:
            state, metrics = step(state, batch)
            rows.append([float(metrics[k]) for k in ('loss', 'aux_loss', 'grad_norm', 'update_norm')])
            gradient = gradient or unstack(cfg.model, gather(state.opt_state[1].inner_states['adam'].inner_state.mu))
    return rows, gradient, unstack(cfg.model, gather(state.params)), step


def agree(topology, mesh_cfg, changes=()):
    same(topology, *three_steps(topology, mesh_cfg, changes)[:3], changes)


def same(topology, rows, gradient, params, changes=()):
    """Loss, gradient and weights of three steps against those of one device."""
    want_rows, want_gradient, want, _ = three_steps(topology, ONE, changes)
    np.testing.assert_allclose(rows, want_rows, rtol=1e-5)
    length = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in want_gradient.values()))
    for name, g in want_gradient.items():
        assert np.linalg.norm(gradient[name] - g) <= 1e-5 * length, f'gradient of {name}'
        np.testing.assert_allclose(params[name], want[name], rtol=0, atol=1e-5 * max(1, np.linalg.norm(want[name])), err_msg=name)
    assert all(np.abs(g).max() > 0 for name, g in want_gradient.items() if name.endswith(('gate', 'up', 'down', 'router', '.q', '.v')))


ALL = [(t, m) for t in TOPOLOGIES for m in MESHES]
DEFAULT = {(t, m) for t in ('pre', 'span') for m in list(MESHES)[:4]}


@pytest.mark.parametrize('topology, mesh', [c if c in DEFAULT else pytest.param(*c, marks=pytest.mark.full) for c in ALL])
def test_a_mesh_changes_no_number(topology, mesh):
    agree(topology, MESHES[mesh])


@pytest.mark.parametrize('topology', [t for t in TOPOLOGIES if t not in ('pre', 'span')])
def test_nor_with_experts_in_every_block(topology):
    """The other topologies: one scan, half the time to compile."""
    agree(topology, MESHES['2x2x2 fsdp expert tensor'], (('model.first_dense', 0),))


@pytest.mark.parametrize(
    'mesh', [m if m in ('2x4 data fsdp', '2x2x2 data sequence tensor') else pytest.param(m, marks=pytest.mark.full) for m in MESHES]
)
def test_nor_with_grouped_queries_and_packed_rows(mesh):
    agree('span', MESHES[mesh], tuple(DENSE.items()))


@pytest.mark.parametrize('topologies', [('span',), pytest.param(tuple(TOPOLOGIES), marks=pytest.mark.full)], ids=['some', 'all'])
def test_nor_do_two_processes(topologies, tmp_path):
    """Two of four devices each, which talk over gloo."""
    with socket.create_server(('localhost', 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {'PYTHONPATH': os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])}
    command = [sys.executable, '-c', 'import test_meshes, sys; test_meshes.process(*sys.argv[1:])', str(tmp_path), f'localhost:{port}']
    pair = [subprocess.Popen([*command, str(i), *topologies], env=env, stderr=subprocess.PIPE, text=True) for i in range(2)]
    said = [p.communicate()[1] for p in pair]
    assert [p.returncode for p in pair] == [0, 0], '\n'.join(said)[-5000:]
    for topology in topologies:
        found = np.load(tmp_path / f'{topology}.npz')
        tree = {kind: {k.partition('/')[2]: v for k, v in found.items() if k.startswith(kind)} for kind in ('gradient/', 'params/')}
        same(topology, found['rows'], *tree.values())


def process(folder, at, number, *topologies):
    """What one of the two does."""
    import conftest  # the same settings  # noqa: F401

    jax.config.update('jax_num_cpu_devices', 4)
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(at, 2, int(number))
    for topology in topologies:
        rows, gradient, params, _ = three_steps(topology, MESHES['2x2x2 fsdp expert tensor'])
        named = {f'{kind}/{k}': v for kind, tree in (('gradient', gradient), ('params', params)) for k, v in tree.items()}
        if number == '0':
            np.savez(pathlib.Path(folder) / f'{topology}.npz', rows=rows, **named)


@pytest.mark.parametrize(
    'changes',
    [
        {'model.balance': 'batch', 'model.router': 'softmax', 'model.capacity_factor': 0.7, 'optim.accumulate': 2, 'optim.loss_chunk': 24},
        pytest.param({'model.capacity_factor': 0.4}, marks=pytest.mark.full),
        pytest.param({'model.topology': 'subln', 'model.norm': 'layernorm'}, marks=pytest.mark.full),
        pytest.param({'model.remat': 'sqrt', 'model.layers': 4}, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_nor_do_options_of_the_experts(changes):
    changes = dict(changes)
    agree(changes.pop('model.topology', 'span'), MESHES['2x2x2 fsdp expert tensor'], tuple(changes.items()))


@pytest.mark.parametrize('mesh', ['2x2x2 fsdp expert tensor', '2x2x2 data sequence tensor'])
def test_logits_and_a_batch_that_does_not_divide(mesh):
    """One row cannot be split over the mesh: it is computed on every part of it, and is the same row."""
    cfg, tokens = CFG.model, np.arange(12, dtype=np.int32)[None] * 5 % 32
    lm, made = LM(cfg), make_mesh(MESHES[mesh])
    places, _ = places_of(CFG, made)
    params = state_of(CFG, places).params
    want = jax.jit(lm.apply)(jax.device_get(params), tokens)
    with jax.set_mesh(made):
        got = jax.jit(lm.apply)(params, tokens)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize('mesh', MESHES)
def test_every_matrix_is_split_over_all_that_would_copy_it(mesh):
    """Bytes on one device times the devices that share a copy are the bytes of the array: parameters and moments."""
    made = make_mesh(MESHES[mesh])
    places, _ = places_of(CFG, made)
    tree = infos(CFG.model)
    opt = make_optimizer(CFG, tree)
    shapes = abstract_state(tree, opt)
    shared = math.prod(made.shape[a] for a in ('fsdp', 'expert', 'sequence'))
    for place, info, shape in zip(*(jax.tree.leaves(t, is_leaf=is_param) for t in (places.params, tree, shapes.params)), strict=True):
        if shape.size < 64 * CFG.model.layers:
            continue
        parts = shape.size // math.prod(place.shard_shape(shape.shape))
        split_by_tensor = any(a in ('heads', 'kv', 'ffn', 'vocab') for a in info.axes)
        assert parts == shared * (made.shape['tensor'] if split_by_tensor else 1), (info.axes, shape.shape)
    paths = {path: place for path, place in jax.tree_util.tree_flatten_with_path(places.params)[0]}
    moments = jax.tree_util.tree_flatten_with_path(places.opt_state)[0]
    of = {path: next((p for p in paths if path[-len(p) :] == p), None) for path, _ in moments}
    assert sum(p is not None for p in of.values()) == 2 * len([r for r in jax.tree.leaves(param_roles(CFG.model)) if r != 'router_bias'])
    assert all(place == paths[of[path]] for path, place in moments if of[path])


CHAINS = {
    'there and back': ['2x2x2 fsdp expert tensor', None],
    'all': ['2x4 data fsdp', '8 expert', '2x2x2 fsdp expert tensor', '4x2 data sequence', None, '2x2x2 replica expert sequence'],
}


@pytest.mark.parametrize('chain', ['there and back', pytest.param('all', marks=pytest.mark.full)])
def test_a_checkpoint_goes_on_on_another_mesh(chain, tmp_path):
    """A run that changes its mesh at each checkpoint is the run on one device: rows, weights, moments, selection biases."""
    meshes = CHAINS[chain]
    run = {'optim.schedule': 'constant', 'run.eval_every': 0, 'run.steps': len(meshes) + 1, 'optim.router_bias_rate': 0.01}
    cfg = edit(CFG, run | {'model.topology': 'pre', 'model.layers': 1, 'model.first_dense': 0, 'mesh': ONE})

    def go(name, mesh, until):
        folder = {'run.dir': str(tmp_path / name)}
        return fit(edit(cfg, folder | {'mesh': mesh}), stop=lambda step: step >= until, corpus=FakeCorpus())

    assert go('straight', ONE, 99).status == 'completed'
    for i, mesh in enumerate([None, *meshes]):
        assert go('chain', MESHES[mesh] if mesh else ONE, i + 1).step == i + 1

    def result(name):
        tree = infos(cfg.model)
        shapes = abstract_state(tree, make_optimizer(cfg, tree))
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=one), shapes)
        with Checkpoints(tmp_path / name / 'checkpoints', read_only=True) as checkpoints:
            state = checkpoints.restore(cfg.run.steps, like)
        rows = [json.loads(line) for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
        return state, [(r['step'], r['train/loss'], r['train/grad_norm'], *r['moe/bias_norm']) for r in rows]

    (state, rows), (want, want_rows) = result('chain'), result('straight')
    np.testing.assert_allclose(rows, want_rows, rtol=1e-5)
    assert rows[-1][-1] > 0
    arrays = [jax.tree.leaves((s.params, s.opt_state)) for s in (state, want)]
    for x, y in zip(*arrays, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1, np.linalg.norm(np.asarray(y, np.float64))))


def shapes_of(text, kind):
    """Output shapes of the collectives of a kind in a compiled program."""
    lines = [line for line in text.splitlines() if re.search(rf'= .*\b{kind}(-start)?\(', line)]
    results = [line.split(' = ')[1].split(kind)[0] for line in lines]
    return [tuple(map(int, dims.split(','))) for result in results for dims in re.findall(r'\w\d+\[([\d,]+)\]', result)]


def test_experts_and_tokens_are_not_gathered():
    """With one expert per device tokens travel by all-to-all: no gather brings all experts' weights, or all tokens' vectors, anywhere."""
    *_, step = three_steps('span', MESHES['8 expert'])
    text, D, F, tokens = step.as_text(), CFG.model.width, CFG.model.expert_ffn, 8 * CFG.data.seq
    travelling = shapes_of(text, 'all-to-all')
    assert any(dims[-1] == D and math.prod(dims) >= tokens * D // 8 for dims in travelling), travelling
    for dims in shapes_of(text, 'all-gather'):
        assert math.prod(dims) < 8 * D * F, f'{dims}: as large as the experts of a block'
        assert not (dims[-1] == D and math.prod(dims) >= tokens * D), f'{dims}: the vectors of all tokens'


def test_what_does_not_divide_is_refused():
    with pytest.raises(UserError, match='model.experts = 8 does not divide over mesh.expert = 3'):
        check_batch(edit(CFG, {'data.batch': 6}), make_mesh(MeshConfig(expert=3, devices=3)))
    with pytest.raises(UserError, match='data.seq = 13 does not divide over mesh.sequence = 2'):
        check_batch(edit(CFG, {'data.seq': 13}), make_mesh(MESHES['4x2 data sequence']))


@pytest.mark.parametrize('topology', [n if n == 'span' else pytest.param(n, marks=pytest.mark.full) for n in TOPOLOGIES])
def test_a_mesh_changes_no_statistic(topology):
    """layer/* and moe/* of one step, with experts and latent attention, rows split over their positions too."""
    found = []
    for mesh_cfg in (ONE, MeshConfig(fsdp=2, expert=2, sequence=2)):
        cfg = edit(CFG, {'model.topology': topology, 'mesh': mesh_cfg})
        lm, tree, mesh = LM(cfg.model), infos(cfg.model), make_mesh(mesh_cfg)
        opt, (places, whole) = make_optimizer(cfg, tree), places_of(cfg, mesh)
        batch = next(FakeCorpus().train_batches(8, cfg.data.seq, 0))
        with jax.set_mesh(mesh), jax.default_matmul_precision('highest'):
            step = jax.jit(make_step(cfg, lm, opt, tree, stats=True), out_shardings=(places, whole))
            found.append(jax.device_get(step(state_of(cfg, places), put_batch(batch, mesh))[1]))
    names = {k for k in found[0] if k.startswith(('layer/', 'moe/'))}
    assert {'layer/attn_sink', 'layer/grad_rms/router', 'layer/sigma_ffn', 'moe/load'} <= names
    for k in names:
        np.testing.assert_allclose(found[1][k], found[0][k], rtol=2e-4, atol=1e-6, err_msg=k)
