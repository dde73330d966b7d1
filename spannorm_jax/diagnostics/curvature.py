"""Sharpness of the loss by Hessian-vector products, plain and as Adam sees it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float


def lanczos(product: Callable[[Array], Array], start: Float[Array, ' n'], steps: int) -> Float[Array, ' k']:
    """Eigenvalues of the tridiagonal matrix of `steps` Lanczos steps of a symmetric `product`, largest first: the ends of its spectrum.

    Orthogonalised against all earlier vectors, twice, since rounding would otherwise find the largest eigenvalue again and again; so it
    holds `steps` vectors. Where the start reaches fewer directions than steps, the rest are 0.
    """
    steps = min(steps, start.size)
    basis = jnp.zeros((steps + 1, start.size)).at[0].set(start / jnp.linalg.norm(start))

    def step(carry, i):
        basis, alive = carry
        w = product(basis[i]) * alive
        along = basis @ w
        w -= along @ basis
        again = basis @ w
        w -= again @ basis
        length = jnp.linalg.norm(w)
        # Relative to what was there: an exhausted start leaves only rounding.
        alive = alive * (length > 1e-5 * jnp.linalg.norm(along))
        new = jnp.where(alive > 0, w / jnp.maximum(length, 1e-30), 0)
        return (basis.at[i + 1].set(new), alive), ((along + again)[i], length * alive)

    _, (a, b) = jax.lax.scan(step, (basis, jnp.ones(())), jnp.arange(steps))
    T = jnp.diag(a) + jnp.diag(b[:-1], 1) + jnp.diag(b[:-1], -1)
    return jnp.linalg.eigvalsh(T)[::-1]


def hessian_spectrum(
    loss: Callable[[Any], Array], params: Any, key: Array, steps: int = 20, preconditioner: Any = None
) -> Float[Array, ' k']:
    """Ritz values of the Hessian H of loss(params), largest first; with a `preconditioner` P > 0 (a tree like params) of P^-1/2 H P^-1/2.

    P of Adam is sqrt(v / (1 - beta2^t)) + eps. The first is the sharpness.  Source: arXiv:2207.14484 (adaptive edge of stability).
    """
    flat, unflat = ravel_pytree(params)
    scale = jnp.ones_like(flat) if preconditioner is None else 1 / jnp.sqrt(ravel_pytree(preconditioner)[0])
    slope = jax.grad(lambda v: loss(unflat(v)))

    def product(v):
        # Reverse twice: a product with its own rule, as the head's, has no forward mode.
        return scale * jax.grad(lambda at: slope(at) @ (scale * v))(flat)

    return lanczos(product, jax.random.normal(key, flat.shape), steps)


def stability_limit(learning_rate: float, beta1: float | None = None) -> float:
    """The sharpness above which a step overshoots on a quadratic: 2 / lr for gradient descent, (2 + 2 beta1) / ((1 - beta1) lr) for
    Adam's preconditioned one (38 / lr at beta1 = 0.9).  Source: arXiv:2207.14484, eq. 3."""
    return 2 / learning_rate if beta1 is None else (2 + 2 * beta1) / ((1 - beta1) * learning_rate)
