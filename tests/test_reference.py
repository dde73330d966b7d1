"""The model against the float64 oracle: every topology at one layer and at three, and every option of the sublayers."""

import jax
import numpy as np
import pytest
import reference

from spannorm_jax import LM, TOPOLOGIES, ModelConfig, topology
from spannorm_jax.initializers import is_param
from spannorm_jax.model import infos, unstack

TINY = dict(width=16, heads=4, kv_heads=2, ffn=24, vocab=29)
# Two packed rows: three documents whose positions start again; one that starts late and has gaps (RoPE cannot see a mere shift), padding.
SEGMENTS = np.array([[1] * 4 + [2] * 3 + [3] * 3, [1] * 8 + [0] * 2])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2], [5, 6, 7, 9, 10, 11, 14, 15, 0, 1]])
BUILT_IN = [name for name, entry in TOPOLOGIES.items() if entry.block.__module__ == topology.__name__]
MLA = dict(attention='mla', q_latent=10, kv_latent=6, nope_dim=4, rope_dim=2, v_dim=5, kv_heads=None, latent_norm_eps=1e-2)
MOE = dict(
    experts=8, experts_per_token=3, expert_groups=4, groups_per_token=2, expert_ffn=12, shared_experts=1, first_dense=1, router_scale=2.5
)
OPTIONS = {
    'span-normed': dict(topology='span', first_skip='normed'),
    'span-affine': dict(topology='span', block_end='affine'),
    'span-no-embed-norm-final': dict(topology='span', embed_norm=False, final_norm=True, final_norm_eps=1e-2),
    'mixln-half': dict(topology='mixln', layers=4, post_fraction=0.5),
    'reordered-branch-vector': dict(topology='reordered', branch_gain='vector', branch_scale=0.7),
    'deepnorm-alpha': dict(topology='deepnorm', alpha=3.0, norm='layernorm', norm_bias=True, activation='gelu'),
    'keel-uniform-alpha': dict(topology='keel', first_block='uniform', alpha=2.5, positions='rope_interleaved'),
    'residual-scales': dict(topology='residual', residual_scale=0.5, residual_exit_scale=0.25, embed_norm=True, activation='relu'),
    'siamese-input-norm': dict(topology='siamese', siamese_input_norm=True, embed_norm=True),
    'normformer-resid': dict(topology='normformer', resid_gain=True, attn_bias=True, mlp_bias=True, positions='none',
                             activation='gelu_tanh'),
    'hc-no-tanh': dict(topology='hc', hc_tanh=False, streams=2),
    'mhc-learned-exit': dict(topology='mhc', stream_exit='learned', streams=3, sinkhorn_rounds=3),
    'pre-scalar-gains': dict(topology='pre', branch_gain='scalar', branch_scale=0.5, activation='geglu'),
    'pre-guard': dict(topology='pre', norm_input_guard=True, norm_eps=0.3, norm='layernorm'),
    'gemma': dict(topology='sandwich', norm_unit_offset=True, attn_soft_cap=1.5, logit_soft_cap=2.0, tie_embeddings=True,
                  embed_scale=4.0, activation='geglu_tanh', attn_scale=0.3),
    'olmo2': dict(topology='reordered', qk_norm='whole', head_dim=6, kv_heads=1, rope_theta=100.0, logit_scale=0.5),
    'qk-v-norm': dict(topology='peri', qk_norm='head', v_norm=True, embed_norm=False, kv_heads=None),
    'hybrid-whole-qk': dict(topology='hybrid', qk_norm='whole', norm_eps=1e-2),
    'mla-direct-queries': dict(topology='span', **MLA | {'q_latent': None}, qk_norm='whole', v_norm=True, positions='none'),
    'moe-softmax': dict(topology='pre', experts=6, experts_per_token=2, router='softmax', activation='gelu', norm='layernorm'),
    'moe-softmax-normalized-bias': dict(topology='post', experts=4, experts_per_token=3, router='softmax', router_normalize=True,
                                        router_bias=True, shared_experts=2, expert_ffn=7),
    'moe-groups-without-bias': dict(topology='span', experts=8, experts_per_token=3, router='softmax', expert_groups=4, groups_per_token=2,
                                    router_scale=1.7, activation='relu'),
    'moe-one-expert-each': dict(topology='pre', experts=3, experts_per_token=1, router_normalize=False, first_dense=1, layers=3),
    'moe-capacity': dict(topology='span', experts=4, experts_per_token=2, capacity_factor=0.6, shared_experts=1),
    'moe-inner-layernorm': dict(topology='subln', experts=4, norm='layernorm', norm_bias=True, shared_experts=1),
    'moe-inner-offset': dict(topology='normformer', experts=4, norm_unit_offset=True),
}  # fmt: skip


def random_params(cfg, seed=0):
    """A tree drawn anew by role: gains, biases and gates far from their start, so that none can be left out unseen."""
    rng = np.random.default_rng(seed)

    def draw(info):
        z = rng.standard_normal(info.value.shape, np.float32)
        if info.role == 'gain':
            return 0.25 * z + (0 if cfg.norm_unit_offset else 1)
        if info.role in ('gate', 'bias'):
            return 0.5 * z
        if info.role == 'router_bias':
            return 0.1 * z
        return z if info.role == 'embed' else z * (info.fan_in**-0.5 if info.fan_in > 1 else 0.3)

    return jax.tree.map(draw, infos(cfg), is_leaf=is_param)


def agree(cfg, seed=0):
    params, rng = random_params(cfg, seed), np.random.default_rng(seed + 1)
    tokens = rng.integers(0, cfg.vocab, SEGMENTS.shape, np.int32)
    oracle = reference.Oracle(cfg, unstack(cfg, params))
    want = oracle.run(tokens, SEGMENTS, POSITIONS)
    assert oracle.used == set(oracle.params), f'parameters the equations do not have: {sorted(set(oracle.params) - oracle.used)}'
    apply = jax.jit(LM(cfg).apply)
    with jax.default_matmul_precision('highest'):
        got = apply(params, tokens, SEGMENTS, POSITIONS)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize('layers', [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize('name', BUILT_IN)
def test_topology(name, layers):
    assert name in reference.TOPOLOGIES, f'write the equations of {name!r} in tests/reference.py'
    agree(ModelConfig(topology=name, layers=layers, **TINY))


@pytest.mark.parametrize('name', BUILT_IN)
def test_topology_with_mla_and_moe(name):
    """No topology knows what its sublayers are."""
    agree(ModelConfig(topology=name, layers=2, **TINY | MLA | MOE))


@pytest.mark.parametrize('name', OPTIONS)
def test_options(name):
    agree(ModelConfig(**{'layers': 2} | TINY | OPTIONS[name]))


def test_every_parameter_matters():
    """The oracle is no rubber stamp: moving any one parameter of SpanNorm's two layers moves its logits."""
    cfg = ModelConfig(topology='span', layers=2, **TINY)
    named, tokens = unstack(cfg, random_params(cfg)), np.arange(20).reshape(2, 10) % 29
    base = reference.Oracle(cfg, named).run(tokens)
    for name, value in named.items():
        moved = reference.Oracle(cfg, named | {name: 1.1 * value}).run(tokens)
        assert np.abs(moved - base).max() > 1e-4, name
