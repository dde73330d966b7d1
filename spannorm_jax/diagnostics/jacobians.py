"""Jacobians of any function of arrays, by products with vectors: norms, distance to the identity, singular values.

`f` maps an array, or a tree of arrays, to another; J is its Jacobian at x, as a matrix from all numbers of x to all numbers of f(x).
Inputs of less than float32 are widened first: f is called with float32, and its products are summed in it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from spannorm_jax.diagnostics.anatomy import Batch, Params, differentiable, embed, enter, features, through
from spannorm_jax.model_config import ModelConfig


class Products(NamedTuple):
    """A Jacobian as what it does to flat vectors: v -> J v and u -> J' u; numbers in x."""

    push: Callable[[Array], Array]
    pull: Callable[[Array], Array]
    n: int


def products(f: Callable, x: Any) -> Products:
    flat_x, unflat = ravel_pytree(_wide(x))
    _, push = jax.linearize(lambda v: ravel_pytree(_wide(f(unflat(v))))[0], flat_x)
    pull = jax.linear_transpose(push, flat_x)
    return Products(push, lambda u: pull(u)[0], flat_x.size)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.promote_types(a.dtype, jnp.float32)), tree)


def spectral_norm(f: Callable, x: Any, key: Array, steps: int = 20) -> Float[Array, '']:
    """Largest singular value of J by power iteration on J'J. It approaches from below: two close ones take more steps."""
    return _spectral(products(f, x), key, steps)


def _spectral(J: Products, key: Array, steps: int) -> Array:
    def step(v, _):
        Jv = J.push(v)
        v = J.pull(Jv)
        return v / jnp.maximum(jnp.linalg.norm(v), 1e-30), jnp.linalg.norm(Jv)

    v = jax.random.normal(key, (J.n,))
    return jax.lax.scan(step, v / jnp.linalg.norm(v), length=steps)[1][-1]


def random_products(f: Callable, x: Any, key: Array, samples: int = 8) -> tuple[Float[Array, ''], Float[Array, '']]:
    """(Frobenius norm over sqrt n, distance to the identity) from E|Jv|^2 / n and E|Jv - v|^2 / n, v standard normal, n numbers in x.

    1 and 0 for the identity. The distance needs f(x) as large as x, else it is NaN.
    """
    return _random(products(f, x), key, samples)


def _random(J: Products, key: Array, samples: int = 8) -> tuple[Array, Array]:
    v = jax.random.normal(key, (samples, J.n))
    Jv = jax.lax.map(J.push, v)
    away = jnp.square(Jv - v).sum(-1).mean() / J.n if Jv.shape == v.shape else jnp.nan
    return jnp.sqrt(jnp.square(Jv).sum(-1).mean() / J.n), jnp.asarray(away)


def singular_values(f: Callable, x: Any, key: Array, k: int, rounds: int = 3) -> Float[Array, ' k']:
    """The k largest singular values of J, largest first, by randomised subspace iteration; exact where k is all there are.

    Else from below: of a spectrum that falls slowly the last of the k by some ten per cent, the first ones by little; more rounds help.
    Source: Halko, Martinsson and Tropp 2011, algorithm 4.4.
    """
    return _singular(products(f, x), key, k, rounds)


def _singular(J: Products, key: Array, k: int, rounds: int = 3) -> Array:
    def step(q, _):
        Jq = jax.lax.map(J.push, q.T).T
        back = jax.lax.map(J.pull, jnp.linalg.qr(Jq)[0].T).T
        return jnp.linalg.qr(back)[0], jnp.linalg.svd(Jq, compute_uv=False)

    q = jnp.linalg.qr(jax.random.normal(key, (J.n, min(k, J.n))))[0]
    return jax.lax.scan(step, q, length=rounds + 1)[1][-1]


def token_jacobian(f: Callable, x_BTD: Float[Array, 'B T D'], position: int) -> Float[Array, 'D D']:
    """d f(x)[0, position] / d x[0, position], exactly: output channels by input channels of one token."""
    x_BTD = _wide(x_BTD)
    at = lambda v: _wide(f(x_BTD.at[0, position].set(v)))[0, position]  # noqa: E731
    return jax.jacfwd(at)(x_BTD[0, position])


def norm_jacobian(x_D: Float[Array, ' D'], kind: str = 'rmsnorm') -> Float[Array, 'D D']:
    """Jacobian of a norm without gain and eps: (I - x^ x^'/D) / rms, or (I - 1 1'/D - x^ x^'/D) / std for layernorm, x^ the normed x.
    Its spectral norm is 1 / rms (1 / std). Raises: ValueError for another kind."""
    if kind not in ('rmsnorm', 'layernorm'):
        raise ValueError(f'norm_jacobian: kind {kind!r} is neither rmsnorm nor layernorm')
    x_D, D = _wide(x_D), x_D.shape[0]
    x = x_D - x_D.mean() if kind == 'layernorm' else x_D
    scale = jnp.sqrt(jnp.square(x).mean())
    J = jnp.eye(D) - jnp.outer(x, x) / (D * scale**2)
    return (J - 1 / D if kind == 'layernorm' else J) / scale


def block_jacobians(cfg: ModelConfig, params: Params, batch: Batch, key: Array, steps: int = 10) -> dict[str, Array]:
    """Of every block, at the stream that reaches it: spectral norm, Frobenius norm over sqrt n, distance to the identity, each (L,)."""
    cfg = differentiable(cfg)
    x_BTD, ctx = embed(cfg, params, batch)

    def look(block, stream):
        J = products(block, stream)
        frobenius, away = _random(J, key)
        return {'spectral': _spectral(J, key, steps), 'frobenius': frobenius, 'from_identity': away}

    return through(cfg, params, enter(cfg, params, x_BTD), ctx, look=look)[1]


def end_to_end(cfg: ModelConfig, params: Params, batch: Batch, key: Array, k: int = 16) -> dict[str, Array]:
    """Of the map from embedded tokens to what the head reads: the k largest singular values of all tokens together, Frobenius norm over
    sqrt n, distance to the identity, and the whole spectrum (D,) of the last token's output over its own input."""
    cfg = differentiable(cfg)
    x_BTD, ctx = embed(cfg, params, batch)
    f = lambda x: features(cfg, params, x, ctx)  # noqa: E731
    J = products(f, x_BTD)
    frobenius, away = _random(J, key)
    last = jnp.linalg.svd(token_jacobian(f, x_BTD, x_BTD.shape[1] - 1), compute_uv=False)
    return {'singular': _singular(J, key, k), 'frobenius': frobenius, 'from_identity': away, 'last_token': last}
