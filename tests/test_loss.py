"""Loss: float64 oracle, chunking, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spannorm_jax.loss import CHUNK_LOGITS, loss_sums, positions_per_chunk

B, T, D, V = 3, 10, 8, 23


@pytest.fixture(scope='module')
def case():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    segments = rng.integers(0, 3, (B, T)).astype(np.int32)
    return x, w, rng.integers(0, V, (B, T)).astype(np.int32), segments


def total(chunk):
    def fn(x, w, targets, segments):
        s = loss_sums(lambda x: x @ w, x, targets, segments, chunk)
        return s.nats + 0.1 * s.z, s

    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))


def test_sums_against_float64(case):
    x, w, targets, segments = case
    logits = x.astype(np.float64) @ w
    lse = np.log(np.exp(logits).sum(-1))
    nats = lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    real = segments > 0
    (_, s), _ = total(0)(*case)
    np.testing.assert_allclose([s.nats, s.z, s.tokens], [nats[real].sum(), (lse[real] ** 2).sum(), real.sum()], rtol=2e-6)


@pytest.mark.parametrize('chunk', [1, 9, 12, 30])  # one position, three positions (10 does not divide), four, everything
def test_chunks_change_neither_values_nor_gradients(case, chunk):
    (_, want), grads = total(0)(*case)
    (_, got), got_grads = total(chunk)(*case)
    for a, b in zip(jax.tree.leaves((want, grads)), jax.tree.leaves((got, got_grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_logits_of_the_whole_batch_never_exist_when_chunked(case):
    whole = f'tensor<{B}x{T}x{V}xf32>'
    assert whole in total(0).lower(*case).as_text()
    assert whole not in total(9).lower(*case).as_text()


def test_padding_has_no_gradient(case):
    _, (gx, _) = total(9)(*case)
    padding = case[3] == 0
    assert not np.asarray(gx)[padding].any() and np.abs(np.asarray(gx)[~padding]).min(axis=-1).all()


def test_size_decides():
    assert positions_per_chunk(8, 128, 257, None) == 128
    assert positions_per_chunk(8, 4096, 32000, 0) == 4096
    t = positions_per_chunk(8, 4096, 32000, None)
    assert t == CHUNK_LOGITS // 32000 // 8 and 8 * t * 32000 <= CHUNK_LOGITS
    assert positions_per_chunk(2048, 64, 10**6, None) == 1  # never less than a position


def test_large_logits_do_not_overflow():
    x = jnp.full((1, 2, 1), 300.0)
    s = jax.jit(lambda x: loss_sums(lambda x: x * jnp.arange(3.0), x, jnp.array([[2, 0]]), jnp.ones((1, 2), jnp.int32)))(x)
    np.testing.assert_allclose(s.nats, 600.0)
