"""Decoding with a cache is recomputation: every topology, both attentions, both dtypes; segments, padding, experts, a full cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_topology import READINGS, random_params, tiny

from spannorm_jax import LM
from spannorm_jax.topology import TOPOLOGIES

LATENT = dict(attention='mla', q_latent=7, kv_latent=6, nope_dim=4, rope_dim=2, v_dim=5)
EXPERTS = dict(experts=4, experts_per_token=2, expert_ffn=8, shared_experts=1, first_dense=1)
ATTENTION = {'gqa': dict(heads=4, kv_heads=2), 'mla': LATENT}
# Of the largest logit. bfloat16 rounds at other places where products are grouped otherwise: mla attends among compressed vectors.
TOLERANCE = {'float32': 2e-5, 'bfloat16': 4e-2}
# By default each topology with one attention, and one of each kind of stream with the other; --full runs all four of each.
QUICK = {(name, 'gqa', 'float32') for name in TOPOLOGIES} | {(name, 'mla', 'bfloat16') for name in ('pre', 'span', 'residual', 'hc')}
CASES = [
    pytest.param(name, fields, attention, dtype, marks=() if (name, attention, dtype) in QUICK else pytest.mark.full)
    for name, fields in READINGS
    for attention in ATTENTION
    for dtype in TOLERANCE
]


@functools.partial(jax.jit, static_argnums=0)
def whole(lm, params, tokens, segments=None, positions=None):
    return lm.apply(params, tokens, segments, positions)


@functools.partial(jax.jit, static_argnums=(0, 1))
def in_chunks(lm, chunk, params, tokens, segments=None, positions=None):
    """Logits of `chunk` positions at a time; the program of a chunk is compiled once."""
    B, T = tokens.shape
    split = lambda x: None if x is None else jnp.moveaxis(x.reshape(B, T // chunk, chunk), 1, 0)  # noqa: E731

    def step(cache, one):
        logits, extras = lm.apply(params, *one, cache=cache)
        return extras['cache'], logits

    cache, out = jax.lax.scan(step, lm.new_cache(B, T), tuple(map(split, (tokens, segments, positions))))
    return jnp.moveaxis(out, 0, 1).reshape(B, T, -1), cache


def close(got, want, dtype='float32'):
    assert np.abs(got - want).max() <= TOLERANCE[dtype] * np.abs(want).max()


@pytest.mark.parametrize(('name', 'fields', 'attention', 'dtype'), CASES)
def test_cached_is_recomputed(name, fields, attention, dtype, tokens):
    lm = LM(tiny(name, **fields, **ATTENTION[attention], dtype=dtype))
    params = random_params(lm.cfg)
    got, cache = in_chunks(lm, 3, params, tokens)
    close(got, whole(lm, params, tokens), dtype)
    assert {x.dtype for x in jax.tree.leaves(cache.runs)} == {jnp.dtype(dtype)}
    normed = attention == 'mla' and name in ('hybrid', 'hybrid_star', 'siamese_olmo')
    names = {'k', 'v'} if attention == 'gqa' or normed else {'latent'}
    assert {k for run in cache.runs for k in run} == names
    if names == {'latent'}:
        assert [run['latent'].shape for run in cache.runs] == [(len(run['latent']), 2, 12, 6 + 2) for run in cache.runs]


def test_one_token_at_a_time_forgets_nothing(tokens):
    """Not vacuous: the last logits see the first token through the cache alone."""
    lm = LM(tiny('span', kv_heads=1))
    params = random_params(lm.cfg)
    got, cache = in_chunks(lm, 1, params, tokens)
    close(got, whole(lm, params, tokens))
    changed, _ = in_chunks(lm, 1, params, tokens.at[:, 0].add(1))
    assert np.abs(changed[:, -1] - got[:, -1]).max() > 1e-3 and cache.used == 12 and (cache.next_B == 12).all()


def test_experts_drop_nothing(tokens):
    """A capacity that drops choices in training does not when decoding; without one, cached and recomputed agree."""
    for capacity in (None, 0.5):
        lm = LM(tiny('pre', **LATENT, **EXPERTS, capacity_factor=capacity))
        params = random_params(lm.cfg)
        got, _ = in_chunks(lm, 3, params, tokens)
        close(got, whole(LM(dataclasses.replace(lm.cfg, capacity_factor=None)), params, tokens))
    assert np.abs(whole(lm, params, tokens) - got).max() > 0.1  # so it would have dropped some


@pytest.mark.parametrize('document_mask', [True, False])
def test_padding_before_a_prompt_does_not_show(document_mask, tokens):
    """A row that begins with three padded slots gives what it gives alone; experts do not see the padding."""
    lm = LM(tiny('span', document_mask=document_mask, **EXPERTS))
    params = random_params(lm.cfg)
    segments = jnp.ones((2, 12), jnp.int32).at[1, :3].set(0)
    positions = jnp.stack([jnp.arange(12), jnp.maximum(jnp.arange(12) - 3, 0)])
    got, _ = in_chunks(lm, 3, params, tokens, segments, positions)
    alone = whole(lm, params, jnp.concatenate([tokens[1:, 3:], jnp.zeros((1, 3), jnp.int32)], axis=1))
    close(got[1, 3:], alone[0, :9])
    close(got[0], whole(lm, params, tokens)[0])


def test_documents_of_a_row_stay_apart(tokens):
    """Packed rows: segments and positions as in training, and a new token goes on in the last segment."""
    lm = LM(tiny('residual', **LATENT))
    params = random_params(lm.cfg)
    index = jnp.arange(12)
    segments = jnp.broadcast_to(jnp.where(index < 5, 1, 2), (2, 12))
    positions = jnp.broadcast_to(jnp.where(index < 5, index, index - 5), (2, 12))
    want = whole(lm, params, tokens, segments, positions)
    got, _ = in_chunks(lm, 3, params, tokens, segments, positions)
    close(got, want)
    run = jax.jit(lambda t, s, p, c: lm.apply(params, t, s, p, c))
    _, extras = run(tokens[:, :9], segments[:, :9], positions[:, :9], lm.new_cache(2, 12))
    goes_on, extras = run(tokens[:, 9:], None, None, extras['cache'])
    close(goes_on, want[:, 9:])
    assert (extras['cache'].segments_BS == segments).all() and (extras['cache'].next_B == 7).all()


def test_a_full_cache_gives_no_number(tokens):
    lm = LM(tiny('pre', layers=1))
    params = random_params(lm.cfg)
    run = jax.jit(lambda c: lm.apply(params, tokens[:, :4], cache=c))
    logits, extras = run(lm.new_cache(2, 6))
    assert np.isfinite(logits).all()
    assert np.isnan(run(extras['cache'])[0]).all()


def test_statistics_of_a_chunk(tokens):
    """With a cache, statistics are those of the new positions."""
    lm = LM(tiny('span', layers=2))
    params = random_params(lm.cfg)
    _, want = jax.jit(lambda: lm.apply(params, tokens, stats=True))()
    _, got = jax.jit(lambda: lm.apply(params, tokens, cache=lm.new_cache(2, 20), stats=True))()
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-4, err_msg=key)
