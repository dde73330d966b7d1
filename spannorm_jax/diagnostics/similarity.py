"""How alike the states of different layers are. Axes: L + 1 states (the embedding first), N tokens, D channels.

A state that is zero has no direction: its token is left out of the mean, which is NaN where none is left.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike


def _directions(h_LND: Float[Array, 'L N D']) -> tuple[Float[Array, 'L N D'], Float[Array, 'L N']]:
    """Every state over its norm, in float32, and 1 where it has one, 0 where it is zero."""
    h = h_LND.astype(jnp.float32)
    h /= jnp.abs(h).max(-1, keepdims=True, initial=1e-30)  # whose square neither overflows nor vanishes
    size = jnp.linalg.norm(h, axis=-1)
    return h / jnp.where(size > 0, size, 1)[..., None], jnp.where(size == 0, 0.0, 1.0)


def cosine_pairs(h_LND: Float[Array, 'L N D']) -> Float[Array, 'L L']:
    """Mean over tokens of cos(h_i, h_j) for every pair of layers."""
    h, some = _directions(h_LND)
    return jnp.einsum('iND,jND->ij', h, h) / jnp.einsum('iN,jN->ij', some, some)


def by_distance(pairs_LL: ArrayLike) -> np.ndarray:
    """Mean over all pairs that lie 0, 1, ... L - 1 layers apart."""
    pairs = np.asarray(pairs_LL)
    return np.array([np.diagonal(pairs, k).mean() for k in range(len(pairs))])


def angular_distances(h_LND: Float[Array, 'L N D']) -> Float[Array, 'L L']:
    """Mean over tokens of arccos(cos(h_i, h_j)) / pi: 0 alike, 0.5 unrelated, 1 opposite. Give it the last token of each row to follow
    the source.  Source: arXiv:2403.17887, eq. 6."""
    h, some = _directions(h_LND)
    # Half the angle from its sine: near 0 the arccos of a rounded cosine has no digits left.
    gap = jnp.linalg.norm(h[:, None] - h[None], axis=-1)
    both = some[:, None] * some
    return (both * 2 * jnp.arcsin(jnp.clip(gap / 2, 0, 1)) / jnp.pi).sum(-1) / both.sum(-1)


def block_influence(h_LND: Float[Array, 'L N D']) -> Float[Array, ' L-1']:
    """1 - mean cos(h_l, h_{l+1}): how much each block turns the stream.  Source: arXiv:2403.03853, eq. 1."""
    h, some = _directions(h_LND)
    return 1 - (h[:-1] * h[1:]).sum((1, 2)) / (some[:-1] * some[1:]).sum(-1)


def linear_cka(a_ND: Float[Array, 'N D'], b_NE: Float[Array, 'N E']) -> Float[Array, '']:
    """|A' B|^2 / (|A' A| |B' B|) of centred A and B, Frobenius norms: 1 for a rotation and scaling of the same data.
    Source: arXiv:1905.00414, eq. 5."""
    a, b = a_ND - a_ND.mean(0), b_NE - b_NE.mean(0)
    return jnp.square(a.T @ b).sum() / (jnp.linalg.norm(a.T @ a) * jnp.linalg.norm(b.T @ b))
