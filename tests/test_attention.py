"""Attention kernels: what the table says of each, and the numbers of those that run here (in Pallas' interpreter) against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from test_reference import POSITIONS, SEGMENTS, random_params

from spannorm_jax import LM, ModelConfig, attention
from spannorm_jax.attention import KERNELS, attend, attend_in_parts, choose_kernel, may_see, problem, verify_kernel
from spannorm_jax.blocked_attention import Rule, block_length, blocked, blocks
from spannorm_jax.config import MeshConfig, edit
from spannorm_jax.errors import CheckFailed, UserError
from spannorm_jax.model import unstack
from spannorm_jax.sharding import make_mesh

CFG = ModelConfig(width=64, heads=4, kv_heads=2, head_dim=16, layers=1)
MLA = ModelConfig(width=64, heads=2, attention='mla', kv_latent=8, nope_dim=16, rope_dim=8, v_dim=16)


def on(monkeypatch, platform):
    monkeypatch.setattr(attention, 'target', lambda: (platform, platform))


@pytest.mark.parametrize(
    'platform, fields, T, kernel, words',
    [
        ('cpu', {}, 128, 'blocked', None),
        ('cpu', {'attn_soft_cap': 3.0, 'dtype': 'float64'}, 7, 'blocked', None),
        ('cpu', {}, 1031, 'xla', 'rows of 1031 positions do not divide into blocks of at most 512'),
        ('tpu', {}, 128, 'splash', None),
        ('tpu', {'attn_soft_cap': 3.0}, 256, 'splash', None),
        ('tpu', {}, 100, 'xla', 'splash is not used: rows of 100 positions are not a multiple of 128'),
        ('gpu', {'dtype': 'bfloat16'}, 100, 'cudnn', None),
        ('gpu', {}, 100, 'xla', 'cudnn is not used: its products are bfloat16, not float32'),
        ('gpu', {'dtype': 'bfloat16', 'attn_soft_cap': 3.0}, 100, 'xla', 'it has no soft cap'),
        ('gpu', {'dtype': 'bfloat16', 'head_dim': 136}, 100, 'xla', 'heads of 136 dimensions'),
        ('gpu', {'dtype': 'bfloat16', 'head_dim': 12}, 100, 'xla', 'not a multiple of 8'),
        ('gpu', {'dtype': 'bfloat16'}, 101, 'xla', 'rows of 101 positions are odd'),
    ],
)
def test_the_table(platform, fields, T, kernel, words, monkeypatch):
    on(monkeypatch, platform)
    found, notes = choose_kernel(edit(CFG, fields), T)
    assert found == kernel and (len(notes) == 1 and words in notes[0] if words else not notes)


def test_mla_has_other_keys_than_values(monkeypatch):
    on(monkeypatch, 'gpu')
    assert choose_kernel(edit(MLA, {'dtype': 'bfloat16'}), 128) == (
        'xla',
        ['attention kernel cudnn is not used: keys of 24 and values of 16 dimensions differ'],
    )
    on(monkeypatch, 'tpu')
    assert choose_kernel(MLA, 128) == ('splash', [])


def test_a_kernel_asked_for_is_used_or_refused(monkeypatch):
    assert choose_kernel(edit(CFG, {'attn_kernel': 'splash'}), 128) == ('splash', [])  # the CPU interprets it
    with pytest.raises(UserError, match="attn_kernel = 'splash' cannot be used: rows of 100 positions"):
        choose_kernel(edit(CFG, {'attn_kernel': 'splash'}), 100)
    with pytest.raises(UserError, match="attn_kernel = 'cudnn' cannot be used: it is for gpu, and this is cpu; choose auto or xla"):
        choose_kernel(edit(CFG, {'attn_kernel': 'cudnn', 'dtype': 'bfloat16'}), 100)
    on(monkeypatch, 'tpu')
    assert choose_kernel(edit(CFG, {'attn_kernel': 'xla'}), 128) == ('xla', [])
    with jax.set_mesh(make_mesh(MeshConfig(sequence=2))):
        assert choose_kernel(CFG, 128)[1] == ['attention kernel splash is not used: rows are split over mesh.sequence']


def operands(cfg, B=2, T=128):
    keys, N, K = jax.random.split(jax.random.key(0), 4), cfg.heads, cfg.resolved_kv_heads
    shapes = (N, cfg.resolved_head_dim), (K, cfg.resolved_head_dim), (K, cfg.value_dim), (N, cfg.value_dim)
    q, k, v, g = (jax.random.normal(key, (B, T, *s)) for key, s in zip(keys, shapes, strict=True))
    return q, k, v, g, jnp.stack([jnp.arange(T) // 50, jnp.arange(T) // 128]).astype(jnp.int32)[:B] + 1


@pytest.mark.parametrize(
    'cfg, mesh',
    [
        (CFG, None),
        pytest.param(edit(CFG, {'attn_soft_cap': 2.0}), None, marks=pytest.mark.full),
        pytest.param(MLA, None, marks=pytest.mark.full),
        (MLA, MeshConfig(data=2, tensor=2, devices=4)),
        pytest.param(edit(CFG, {'kv_heads': 1}), MeshConfig(fsdp=2, tensor=2, devices=4), marks=pytest.mark.full),
    ],
)
def test_splash_is_the_reference(cfg, mesh):
    """Values and the gradients of queries, keys and values; packed rows; on a mesh each device has its rows and heads."""
    q, k, v, g, segments = operands(cfg)
    made = None if mesh is None else make_mesh(mesh)

    def both(run):
        out, pull = jax.vjp(lambda *x: run(*x, segments, problem(cfg, 128), 0.3), q, k, v)
        return out, *pull(g)

    want = jax.jit(functools.partial(both, KERNELS['xla'].run))()
    if made is None:
        got = jax.jit(functools.partial(both, KERNELS['splash'].run))()
    else:
        with jax.set_mesh(made):
            got = jax.jit(functools.partial(both, KERNELS['splash'].run))()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize('T, causal', [(1, True), (7, True), (96, False), (128, True), (192, True)])
@pytest.mark.parametrize('K, J, soft_cap, packed', [(4, 16, None, True), (2, 8, 2.0, True), (1, 16, None, False)])
def test_blocked_is_the_reference(T, causal, K, J, soft_cap, packed):
    """Values and gradients in float64: one block and several, grouped heads, values of their own size, a cap, packed rows with padding."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(T), 4)
        q, k, v, g = (
            jax.random.normal(key, (2, T, *s), 'float64') for key, s in zip(keys, ((4, 16), (K, 16), (K, J), (4, J)), strict=True)
        )
        segments = jnp.stack([1 + jnp.arange(T) // 50, jnp.maximum(3 - jnp.arange(T) // 60, 0)]) if packed else None

        def both(run):
            out, pull = jax.vjp(run, q, k, v)
            return out, *pull(g)

        got = jax.jit(lambda: both(lambda *x: blocked(*x, segments, Rule(causal, 0.3, soft_cap))))()
        want = jax.jit(lambda: both(lambda *x: attend(*x, may_see(T, segments, causal), 0.3, soft_cap)[0]))()
        largest = max(np.abs(b).max() for b in want)  # of one position alone the gradients of q and k are zeros
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * largest)


def test_blocked_leaves_out_what_no_query_sees():
    """Of 512 causal positions in 8 blocks, 36 of 64 pairs of blocks are computed, in both passes."""
    assert blocks(512, True) == [(lo, lo + 64) for lo in range(0, 512, 64)] and blocks(512, False) == [(0, 512)]
    assert [block_length(T) for T in (1, 100, 128, 130, 256, 1024, 4096)] == [1, 100, 64, 65, 64, 128, 512]
    q = jnp.ones((1, 512, 1, 16))

    def flops(run):
        return jax.jit(jax.grad(lambda q: run(q, q, q).sum())).lower(q).compile().cost_analysis()['flops']

    whole = flops(lambda *x: blocked(*x, None, Rule(False, 1.0, None)))
    assert flops(lambda *x: blocked(*x, None, Rule(True, 1.0, None))) < 0.7 * whole


def test_blocked_holds_no_more_scores_than_the_reference(monkeypatch):
    """Where a block of all rows and heads would be too many scores, the queries are worked off in parts."""
    q, k, v, _, segments = operands(CFG)
    held = lambda name: str(jax.make_jaxpr(lambda q: KERNELS[name].run(q, k, v, segments, problem(CFG, 128), 0.3))(q))  # noqa: E731
    assert 'custom_vjp' in held('blocked')
    monkeypatch.setattr(attention, 'PART_SCORES', 2 * CFG.heads * 64 * 128 - 1)
    assert held('blocked') == held('xla')
    assert KERNELS['blocked'].cannot(problem(CFG, 1024, causal=False)) and not KERNELS['blocked'].cannot(problem(CFG, 1024))


@pytest.mark.parametrize('parts', [2, 8])
def test_in_parts_is_the_whole(parts, monkeypatch):
    q, k, v, g, segments = operands(CFG)
    monkeypatch.setattr(attention, 'PART_SCORES', 2 * CFG.heads * 128 * 128 // parts)
    mask = may_see(128, segments, True)
    want, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, 0.3, 5.0)[0], q, k, v)
    got, pull_parts = jax.vjp(jax.jit(lambda q, k, v: attend_in_parts(q, k, v, mask, 0.3, 5.0)), q, k, v)
    assert f'f32[{parts},2,{128 // parts},4,16]' in str(jax.make_jaxpr(lambda q: attend_in_parts(q, k, v, mask, 0.3))(q)).replace(' ', '')
    np.testing.assert_allclose(got, want, atol=1e-6)
    for a, b in zip(pull_parts(g), pull(g), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_start_up_check_sees_a_kernel_that_is_wrong(monkeypatch):
    cfg = edit(CFG, {'attn_kernel': 'splash', 'heads': 2, 'kv_heads': 1, 'dtype': 'bfloat16'})
    assert verify_kernel(CFG, 128) is None
    assert 'attention kernel splash: within' in verify_kernel(cfg, 128)
    right = KERNELS['splash']
    blind = right._replace(run=lambda q, k, v, segments, problem, scale: right.run(q, k, v, None, problem, scale))
    monkeypatch.setitem(KERNELS, 'splash', blind)
    with pytest.raises(CheckFailed, match='kernel splash differs from the reference by .* set model.attn_kernel xla'):
        verify_kernel(cfg, 128)


def test_without_the_document_mask_a_row_is_one_document():
    """The oracle sees one segment and positions 0, 1, 2, ... in every row; padding is still no token of the load."""
    cfg = ModelConfig(topology='span', layers=2, width=16, heads=4, ffn=24, vocab=29, document_mask=False)
    params, tokens = random_params(cfg), np.random.default_rng(1).integers(0, 29, SEGMENTS.shape, np.int32)
    want = reference.Oracle(cfg, unstack(cfg, params)).run(tokens)
    with jax.default_matmul_precision('highest'):
        got = jax.jit(LM(cfg).apply)(params, tokens, SEGMENTS, POSITIONS)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
