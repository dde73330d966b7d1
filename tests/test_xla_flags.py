"""XLA's numbers on the CPU are right: what its fusions of products have computed wrongly, and the setting that prevents it."""

import importlib.metadata
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spannorm_jax import xla_flags


@pytest.mark.parametrize('n', [1000, 32_769])
def test_a_reduction_after_a_product_of_many_rows(n):
    x, matrix = jax.random.normal(jax.random.key(0), (n, 3)), jnp.eye(3)
    f = lambda x: jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(x)  # noqa: E731
    np.testing.assert_allclose(jax.jit(f)(x), np.square(np.asarray(x)).sum(1), rtol=1e-5)


def test_reverse_mode_under_vmap_over_a_scan():
    """The rows of a Jacobian, all at once and one after the other in one program, of two blocks of attention without its softmax."""
    T, N, H = 32, 2, 8
    weights = jax.random.normal(jax.random.key(0), (4, 2, N * H, N * H)) / 4

    def model(x):
        def block(x, w):
            q, k, v = ((x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) @ m).reshape(T, N, H) for m in w[:3])
            mixed = jnp.einsum('nts,snh->tnh', jnp.einsum('tnh,snh->nts', q, k) / T, v)
            return x + mixed.reshape(T, N * H) @ w[3], None

        return jax.lax.scan(block, x, jnp.moveaxis(weights, 1, 0))[0]

    @jax.jit
    def both(x):
        row = lambda t: jax.vjp(model, x)[1](t.reshape(x.shape))[0].ravel()  # noqa: E731
        rows = jnp.eye(x.size)
        return jax.vmap(row)(rows), jax.lax.map(row, rows)

    together, apart = both(jax.random.normal(jax.random.key(1), (T, N * H)))
    np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('version', 'before', 'after'),
    [
        ('0.10.2', None, '--xla_cpu_experimental_ynn_fusion_type=individual_dot'),
        ('0.10.2', '--xla_a=b', '--xla_a=b --xla_cpu_experimental_ynn_fusion_type=individual_dot'),
        ('0.10.2', '--xla_cpu_experimental_ynn_fusion_type=', '--xla_cpu_experimental_ynn_fusion_type='),
        ('0.11.0', None, None),
    ],
)
def test_what_is_set(version, before, after, monkeypatch):
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: version)
    monkeypatch.delenv('XLA_FLAGS') if before is None else monkeypatch.setenv('XLA_FLAGS', before)
    xla_flags.sound_products()
    assert os.environ.get('XLA_FLAGS') == after
