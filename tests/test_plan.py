"""Plans: chips by name, the reader of compiled programs on known programs, the floor's formula, and bytes against real arrays."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spannorm_jax import chips, hlo, load, plan, search
from spannorm_jax.chips import CHIPS, parse_chips
from spannorm_jax.config import MeshConfig, edit
from spannorm_jax.errors import CheckFailed, UserError
from spannorm_jax.program import program
from spannorm_jax.sharding import make_mesh
from spannorm_jax.step import init_state

CPU = chips.Chips('v5e', 1, (2, 4))  # as many as there are CPU devices here


@pytest.mark.parametrize(
    'text, slices, sizes, topology, island',
    [
        ('v5e:16x16', 1, (16, 16), 'v5e:16x16', 256),
        ('V5P:4x4x4', 1, (4, 4, 4), 'v5p:4x4x4', 64),
        ('2xv5e:16x16', 2, (16, 16), 'v5e:16x16', 256),
        ('h100:8x8', 1, (8, 8), '1x8x8', 8),
    ],
)
def test_chips(text, slices, sizes, topology, island):
    c = parse_chips(text)
    assert (c.slices, c.sizes, c.topology, c.island) == (slices, sizes, topology, island)
    assert str(c) == text.lower() and parse_chips(str(c)) == c
    assert c.count == slices * np.prod(sizes)


@pytest.mark.parametrize(
    'text, words',
    [
        ('v5e', 'v5e takes the 2 sides of its torus, as in v5e:8x8'),
        ('v5p:8x8', 'v5p takes the 3 sides'),
        ('h10:8x8', "unknown chip 'h10'; did you mean 'h100'"),
        ('groq:4', 'known chips: v4, v5e'),
        ('h100:64', 'hosts and GPUs per host'),
        ('2xh100:8x8', r'only TPUs come in slices; .* h100:16x8'),
        ('v5e:0x4', 'a size of 0'),
        ('v5e-256', 'is not understood; expected v5e:16x16'),
    ],
)
def test_chips_that_are_not_there_are_explained(text, words):
    with pytest.raises(UserError, match=words):
        parse_chips(text)


def test_one_table_of_peaks():
    assert {c.kind for c in CHIPS.values()} <= set(chips.PEAK_FLOPS)
    assert parse_chips('v5p:4x4x4').environment['TPU_ACCELERATOR_TYPE'] == 'v5p-128'  # libtpu counts two cores per chip
    assert 'cuda_compute_capability { major: 9 minor: 0 }' in parse_chips('h100:1x8').target_config


def compiled(f, mesh, out, *args):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, s)) for shape, s in args]
    return jax.jit(f, out_shardings=NamedSharding(mesh, out)).lower(*shapes).compile().as_text()


def test_collectives_of_known_programs():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2)
    gather = hlo.collectives(compiled(lambda x: x * 2, mesh, P(), ((8, 32), P('fsdp'))), 8)
    assert [(c.kind, c.runs, c.operand_bytes, hlo.axes_of(c.group, mesh)) for c in gather] == [('all-gather', 1, 256, 'fsdp')]
    assert gather[0].sent_bytes == 3 * 256  # a shard of 2 x 32 floats goes to three others
    reduce = hlo.collectives(compiled(lambda x: x.sum(0), mesh, P(), ((8, 32), P('data'))), 8)
    assert [(c.kind, c.operand_bytes, hlo.axes_of(c.group, mesh)) for c in reduce] == [('all-reduce', 128, 'data')]
    assert reduce[0].sent_bytes == 2 * 128 / 2

    def loop(x):  # five times the mean over fsdp, which lies outermost within a group of four
        body = jax.shard_map(lambda z: z + jax.lax.pmean(z, 'fsdp'), in_specs=P('fsdp'), out_specs=P('fsdp'), mesh=mesh, check_vma=False)
        return jax.lax.scan(lambda y, _: (jnp.sin(body(y)), None), x, None, length=5)[0]

    looped = hlo.collectives(compiled(loop, mesh, P('fsdp'), ((8, 32), P('fsdp'))), 8)
    assert [(c.kind, c.runs, c.group) for c in looped] == [('all-reduce', 5, (0, 1, 2, 3))]
    assert looped[0].sent_bytes == 5 * 2 * 256 * 3 / 4


STEPS = """
HloModule jit_step

%step.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-gather.1 = f32[16]{0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, dimensions={0}
}

%step.2 (q: f32[8]) -> f32[16] {
  %q = f32[8]{0} parameter(0)
  ROOT %all-gather.2 = f32[16]{0} all-gather(%q), channel_id=7, replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %there = f32[8]{0} all-to-all(%x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %begun = f32[16]{0} fusion(%there), kind=kOutput, calls=%step.1
  %ended = f32[16]{0} fusion(%there), kind=kOutput, calls=%step.2
  ROOT %back = f32[8]{0} all-to-all(%there), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}
"""


def test_one_cut_into_steps_counts_once_and_two_on_one_channel_twice():
    """A TPU fuses the steps of a gather with what runs beside them; shard_map gives all its exchanges one channel."""
    assert sorted((c.kind, c.runs) for c in hlo.collectives(STEPS, 2)) == [('all-gather', 1), ('all-to-all', 1), ('all-to-all', 1)]


def test_what_crosses_islands():
    four_of_eight = hlo.Collective('all-reduce', 80, 3, tuple(range(8)))
    assert four_of_eight.sent_bytes == 3 * 2 * 80 * 7 / 8
    assert four_of_eight.crossing_bytes(8) == 0
    assert four_of_eight.crossing_bytes(4) == 3 * 2 * (80 / 4) * 1 / 2  # 20 bytes are left of each after its island has reduced
    assert hlo.Collective('all-gather', 10, 1, (0, 4)).crossing_bytes(4) == 10
    assert hlo.Collective('all-to-all', 80, 1, tuple(range(8))).crossing_bytes(4) == 40


@pytest.mark.parametrize(
    'text, group',
    [
        ('x), replica_groups={{0,2},{1,3}}, dim', (0, 2)),
        ('x), replica_groups=[4,2]<=[2,4]T(1,0), dim', (0, 4)),
        ('x), replica_groups=[2,4]<=[8], dim', (0, 1, 2, 3)),
        ("x), replica_groups=mesh['a'=2,'b'=4] {'a'}, dim", (0, 4)),
        ("x), replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}, dim", (0, 1, 4, 5)),
        ('x), replica_groups={}, dim', tuple(range(8))),
        ('x), source_target_pairs={{0,1},{1,0}}, dim', (0, 1)),
    ],
)
def test_groups_in_every_spelling(text, group):
    assert hlo.replica_group(text, 8) == group


def test_bytes_of_shapes():
    assert hlo.array_bytes('f32[2,3]{1,0:T(8,128)}') == 24
    assert hlo.array_bytes('(bf16[4]{0}, /*index=1*/s32[], pred[3])') == 15


def test_matrix_products_are_counted_through_loops():
    def f(x, w):
        return jax.lax.scan(lambda y, _: (y @ w, None), x, None, length=7)[0] @ w

    jaxpr = jax.make_jaxpr(f)(jnp.zeros((3, 5)), jnp.zeros((5, 5))).jaxpr
    assert hlo.matmul_flops(jaxpr) == 8 * 2 * 3 * 5 * 5
    assert hlo.matmul_flops(jaxpr, once=True) == 2 * 2 * 3 * 5 * 5


def test_products_of_groups_are_counted_once_for_each_row():
    """2 M D F for y = x w, and as much for the gradient of x and for that of w, however many groups there are."""
    M, D, F, E = 64, 16, 32, 4
    x, w, sizes = jnp.zeros((M, D)), jnp.zeros((E, D, F)), jnp.full(E, M // E)
    f = lambda x, w: jax.lax.ragged_dot(x, w, sizes).sum()  # noqa: E731
    assert hlo.matmul_flops(jax.make_jaxpr(f)(x, w).jaxpr) == 2 * M * D * F
    for i in (0, 1):
        assert hlo.matmul_flops(jax.make_jaxpr(jax.grad(f, argnums=i))(x, w).jaxpr) == 4 * M * D * F


def test_matrix_products_under_shard_map_are_those_of_all_devices():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2)
    f = jax.shard_map(lambda x, w: x @ w, in_specs=(P('data'), P()), out_specs=P('data'), mesh=mesh, axis_names={'data'}, check_vma=False)
    jaxpr = jax.make_jaxpr(jax.jit(f))(jnp.zeros((4, 5)), jnp.zeros((5, 6))).jaxpr
    assert hlo.matmul_flops(jaxpr) == 2 * 4 * 5 * 6


def test_floor():
    size = plan.Bytes(arguments=10**9, outputs=10**9, aliased=10**9, temporaries=3 * 10**9, peak=4 * 10**9)
    traffic = [plan.Traffic('all-gather', 'fsdp', 2, 5e9, 1e9)]
    found = plan.floors(2e12, size, traffic, parse_chips('2xv5e:16x16'))
    assert found == {'compute': 2e12 / 197e12, 'hbm': 8e9 / 819e9, 'links': 4e9 / 200e9, 'network': 1e9 / 3.1e9}


@pytest.fixture(scope='module')
def made():
    cfg = edit(TINY, {'mesh': MeshConfig(fsdp=4, tensor=2), 'data.batch': 8, 'model.remat': 'full'})
    return program(cfg, make_mesh(cfg.mesh))


def test_bytes_per_device_are_those_of_real_arrays(made):
    with jax.set_mesh(made.mesh):
        state = init_state(made.cfg, made.lm, made.optimizer, made.places)
    device = jax.devices()[3]
    real = lambda x: sum(s.data.nbytes for s in x.addressable_shards if s.device == device)  # noqa: E731
    planned = lambda x: x.dtype.itemsize * np.prod(x.sharding.shard_shape(x.shape), dtype=int)  # noqa: E731
    assert jax.tree.map(real, state) == jax.tree.map(planned, made.abstract)
    by_name = plan.parameter_bytes(made)
    assert sum(by_name.values()) == sum(map(real, jax.tree.leaves(state.params)))
    found = plan.compiled_plan(made, CPU)
    one = planned(made.batch['tokens'])
    # Whatever of the batch this model does not read is no argument of the program; nor is Muon's rate, beside Adam's of 4 bytes.
    assert (found.bytes.arguments - 4 - sum(map(real, jax.tree.leaves(state)))) / one in (2, 3, 4)


def test_a_plan_of_the_devices_here(made):
    p = plan.compiled_plan(made, CPU)
    assert p.fits and p.mesh['fsdp'] == 4 and p.bytes.peak == p.bytes.arguments + p.bytes.outputs - p.bytes.aliased + p.bytes.temporaries
    assert {'all-gather', 'all-reduce'} <= {t.kind for t in p.collectives} and any('fsdp' in t.axes for t in p.collectives)
    assert 1 < p.traced_flops_per_token / p.flops_per_token < 2  # attention over all positions, and the forward pass once more
    document = json.loads(json.dumps(p.to_json()))
    wanted = {'params', 'fits', 'bytes', 'compile_s', 'flops_per_token', 'collectives', 'attention_kernel'}
    assert wanted <= set(document) and {'arguments', 'temporaries', 'peak'} <= set(document['bytes'])


def test_what_the_compiler_says_of_too_much():
    said = 'Ran out of memory on HBM, the total memory required for HLO temporaries (54.92G) exceeds available HBM (15.75G).'
    assert plan.memory(None, 1000, said) == plan.Bytes(1000, 1000, 1000, int(54.92 * 2**30), 1000 + int(54.92 * 2**30))
    assert plan.memory(None, 7, 'Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm.').peak == 20 * 2**30


def test_candidates_come_cheapest_first_and_divide():
    cfg, where = load.load_config('dense_5b'), parse_chips('v5e:16x16')
    found = search.candidates(cfg, where)
    room = CHIPS['v5e'].hbm_bytes
    fitting = [c for c in found if c.bytes <= room]
    assert fitting and found[: len(fitting)] == fitting and [c.floor_s for c in fitting] == sorted(c.floor_s for c in fitting)
    for c in found:
        m = c.cfg.mesh
        assert m.data * m.fsdp * m.tensor == 256 and 256 % (m.data * m.fsdp) == 0 and cfg.model.heads % m.tensor == 0
    with pytest.raises(UserError, match='splits data.batch = 3 rows evenly'):
        search.search(edit(cfg, {'data.batch': 3}), where, 1)


def test_search_takes_the_first_that_fits(monkeypatch):
    asked = []

    def fake(cfg, where):
        asked.append(cfg)
        fits = len(asked) == 2
        return plan.Plan(
            **dict.fromkeys(('name', 'chips', 'remat', 'attention_kernel', 'compiled_kernel', 'floor_formula'), ''),
            mesh={}, params=0, tokens_per_step=0,
            fits=fits, hbm_bytes=0, bytes=plan.Bytes(0, 0, 0, 0, 10), compile_s=0, flops_per_token=0, traced_flops_per_token=0,
            compiler_flops=None, traced_flops_once=0, collectives=[], floor_s=0, floor_of={}, why='too large',
        )  # fmt: skip

    monkeypatch.setattr(search, 'plan', fake)
    told = []
    cfg, where = load.load_config('dense_5b'), parse_chips('v5e:16x16')
    assert search.search(cfg, where, 4, told.append).fits and len(asked) == 2
    assert 'compiling 1 of at most 4' in told[0] and 'does not fit: too large' in told[1]
    with pytest.raises(CheckFailed, match='none of 1 compiled candidates fits'):
        search.search(cfg, where, 1)


@pytest.mark.parametrize(
    'line, code, words',
    [
        ('plan debug', 2, 'say for what with --chips'),
        ('plan debug --chips v5e:2', 2, 'v5e takes the 2 sides'),
        ('plan debug --chips v5e:2x2 --compiles 0 --search', 2, '--compiles 0 must be at least 1'),
    ],
)
def test_usage(line, code, words, capsys):
    from spannorm_jax import cli

    assert cli.main(line.split()) == code
    assert words in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is not None, reason='libtpu is installed')
def test_a_missing_compiler_is_named():
    with pytest.raises(UserError, match=r"pip install 'spannorm-jax\[tpu\]'"):
        plan.devices_of(parse_chips('v5e:2x2'))


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason="needs libtpu: pip install 'spannorm-jax[tpu]'")
def test_a_small_slice():
    """In a process of its own: this one's backend is set up otherwise."""
    line = [sys.executable, '-m', 'spannorm_jax', 'plan', 'debug', '--chips', 'v5e:2x2', '--mesh.fsdp', '4', '--json']
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {'XLA_FLAGS': ''})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found['fits'] and found['mesh']['fsdp'] == 4 and found['bytes']['temporaries'] > 0
    assert {'all-gather', 'all-reduce'} <= {t['kind'] for t in found['collectives']}
