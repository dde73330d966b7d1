"""Initial values: the std of every tensor by recipe and role, what they depend on, and the audit."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from spannorm_jax.config import ModelConfig
from spannorm_jax.initializers import Init, audit_row
from spannorm_jax.model import LM, each_param, infos, unstack
from spannorm_jax.topology import TOPOLOGIES

L, D, F, N, K, H, V = 6, 64, 96, 4, 2, 16, 83
READ = {'q': (D, N * H), 'k': (D, K * H), 'v': (D, K * H), 'gate': (D, F), 'up': (D, F)}
WRITE = {'o': (N * H, D), 'down': (F, D)}


def config(topology='span', **fields):
    return ModelConfig(**{'topology': topology, 'layers': L, 'width': D, 'ffn': F, 'heads': N, 'kv_heads': K, 'vocab': V, **fields})


def intended(cfg):
    """Std by the last part of the name, for matrices."""
    return {
        name.split('.')[-1]: info.init.std
        for name, _, info in each_param(cfg, infos(cfg))
        if info.role in ('embed', 'head', 'read', 'write')
    }


def expect(base, scale=1.0, embed=1.0, head=None, gains=None):
    """The table of stds that a recipe means, written out from fan-in and fan-out."""
    gains = gains or {}
    table = {n: base(*fan) * gains.get(n, 1) for n, fan in READ.items()}
    table |= {n: base(*fan) * gains.get(n, 1) * scale for n, fan in WRITE.items()}
    return table | {'embed': embed, 'head': base(D, V) if head is None else head}


FAN_IN = lambda i, o: 1 / math.sqrt(i)  # noqa: E731
XAVIER = lambda i, o: math.sqrt(2 / (i + o))  # noqa: E731


def sigma(s):
    return lambda i, o: s


@pytest.mark.parametrize('name', sorted(TOPOLOGIES))
@pytest.mark.parametrize(('scale_init', 'scale'), [('none', 1), ('sqrt_L', L**-0.5), ('sqrt_2L', (2 * L) ** -0.5)])
def test_common_recipe_is_the_same_for_every_topology(name, scale_init, scale):
    assert intended(config(name, scale_init=scale_init)) == pytest.approx(expect(FAN_IN, scale))
    published = intended(config(name, scale_init=scale_init, init_std=0.02))
    assert published == pytest.approx(expect(sigma(0.02), scale, embed=0.02))
    tied = intended(config(name, tie_embeddings=True))
    assert tied['embed'] == pytest.approx(D**-0.5) and 'head' not in tied


MEGATRON = expect(sigma(0.02), (2 * L) ** -0.5, embed=0.02)
PLAIN = expect(sigma(0.02), embed=0.02)
HYBRID = expect(sigma((2.5 * D) ** -0.5), (2 * L) ** -0.5, embed=(2.5 * D) ** -0.5)
FAIRSEQ = expect(XAVIER, embed=1.0, head=D**-0.5)  # N(0, 1/D) times sqrt(D)
ALL = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
VALUE = ALL[2:]
OWN = {
    'pre': PLAIN,
    'post': PLAIN,
    'reordered': PLAIN,
    'lns': PLAIN,
    'keel': PLAIN,
    'mhc': PLAIN,
    'mixln': PLAIN | {'embed': math.sqrt(0.4)},
    'span': MEGATRON,
    'peri': MEGATRON,
    'sandwich': MEGATRON,
    'hybrid': HYBRID,
    'hybrid_star': HYBRID,
    'siamese': HYBRID,
    'siamese_olmo': HYBRID,
    'residual': FAIRSEQ,
    'normformer': FAIRSEQ,
    'b2t': expect(XAVIER, embed=1.0, head=D**-0.5, gains=dict.fromkeys(ALL, L**-0.5)),
    'deepnorm': expect(XAVIER, embed=1.0, head=D**-0.5, gains=dict.fromkeys(VALUE, (8 * L) ** -0.25)),
    'subln': expect(XAVIER, embed=1.0, head=D**-0.5, gains=dict.fromkeys(VALUE, math.sqrt(math.log(2 * L)))),
    'hc': expect(sigma(0.02), 4**-0.5, embed=0.02),
}


@pytest.mark.parametrize('name', sorted(OWN))
def test_own_recipe_is_the_published_one(name):
    assert intended(config(name, init='own')) == pytest.approx(OWN[name])


def test_fairseq_stream_starts_at_rms_one_whatever_the_embedding_factor():
    for name in ('deepnorm', 'residual', 'normformer', 'subln', 'b2t'):
        assert intended(config(name, init='own', embed_scale=D**0.5))['embed'] == pytest.approx(D**-0.5)


def test_every_topology_has_its_recipe_checked():
    assert set(OWN) >= set(TOPOLOGIES)


def test_truncated_normal_has_the_intended_std_and_is_cut_at_three():
    x = np.asarray(Init(std=0.5, const=2.0)(jax.random.key(0), (1000, 1000)))
    assert abs(x.mean() - 2) < 5 * 0.5 / 1000
    assert abs(x.std() / 0.5 - 1) < 3e-3
    assert 2.9 < np.abs(x - 2).max() / 0.5 < 3.1


def test_measured_std_of_every_tensor_and_what_it_depends_on():
    """Models of another topology or depth start from the same numbers, up to the factor of their std; another seed differs."""
    span = config('span')
    values = unstack(span, LM(span).init(jax.random.key(3)))
    for name, layers, info in each_param(span, infos(span)):
        for l in layers or [None]:
            key = name if l is None else f'layers.{l}.{name}'
            row = audit_row(key, info, values[key], ('read',))
            assert row.ok, row
            assert row.decays == (info.role == 'read') and row.bytes_per_device == 4 * values[key].size
    assert not np.array_equal(values['layers.0.attn.q'], values['layers.1.attn.q'])
    assert not np.array_equal(values['layers.0.attn.k'], values['layers.0.attn.v'])

    for other in (config('mixln', layers=2, post_fraction=0.5, scale_init='none'), config('hc', layers=9, kv_heads=2)):
        theirs = unstack(other, LM(other).init(jax.random.key(3)))
        for name in ('embed', 'layers.1.attn.q', 'layers.0.ffn.gate'):
            np.testing.assert_array_equal(values[name], theirs[name])
        factor = intended(other)['down'] / intended(span)['down']
        np.testing.assert_allclose(theirs['layers.1.ffn.down'], factor * values['layers.1.ffn.down'], rtol=1e-6)
    seed = unstack(span, LM(span).init(jax.random.key(4)))
    assert not np.allclose(seed['layers.1.attn.q'], values['layers.1.attn.q'])


def test_static_patterns_of_hyper_connections():
    cfg = config('hc', layers=3)
    values = unstack(cfg, LM(cfg).init(jax.random.key(0)))
    for l in range(3):
        for i, site in enumerate(('attn', 'ffn')):
            want = np.concatenate([np.eye(4)[[(2 * l + i) % 4]].T, np.eye(4)], axis=1)
            np.testing.assert_array_equal(values[f'layers.{l}.{site}_alpha'], want)


@pytest.mark.parametrize('wrong', [0.5, 1.05, 0.0])
def test_audit_sees_a_wrong_std(wrong):
    cfg = config()
    info = next(p for name, _, p in each_param(cfg, infos(cfg)) if name == 'embed')
    x = Init(std=wrong)(jax.random.key(0), (V, D))
    assert not audit_row('embed', info, x, ()).ok
    assert audit_row('embed', info, Init(std=1.0)(jax.random.key(0), (V, D)), ()).ok
    gain = dataclasses.replace(info, init=Init(const=1.0))
    assert not audit_row('gain', gain, np.full((D,), 0.99, 'float32'), ()).ok
