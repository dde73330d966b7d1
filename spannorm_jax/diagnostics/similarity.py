"""How alike the states of different layers are. Axes: L + 1 states (the embedding first), N tokens, D channels."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike


def cosine_pairs(h_LND: Float[Array, 'L N D']) -> Float[Array, 'L L']:
    """Mean over tokens of cos(h_i, h_j) for every pair of layers."""
    h = h_LND.astype(jnp.float32)
    h /= jnp.maximum(jnp.linalg.norm(h, axis=-1, keepdims=True), 1e-30)
    return jnp.einsum('iND,jND->ij', h, h) / h.shape[1]


def by_distance(pairs_LL: ArrayLike) -> np.ndarray:
    """Mean over all pairs that lie 0, 1, ... L - 1 layers apart."""
    pairs = np.asarray(pairs_LL)
    return np.array([np.diagonal(pairs, k).mean() for k in range(len(pairs))])


def angular_distances(h_LND: Float[Array, 'L N D']) -> Float[Array, 'L L']:
    """Mean over tokens of arccos(cos(h_i, h_j)) / pi: 0 alike, 0.5 unrelated, 1 opposite. Give it the last token of each row to follow
    the source.  Source: arXiv:2403.17887, eq. 6."""
    h = h_LND.astype(jnp.float32)
    h /= jnp.maximum(jnp.linalg.norm(h, axis=-1, keepdims=True), 1e-30)
    # Half the angle from its sine: near 0 the arccos of a rounded cosine has no digits left.
    gap = jnp.linalg.norm(h[:, None] - h[None], axis=-1)
    return (2 * jnp.arcsin(jnp.clip(gap / 2, 0, 1)) / jnp.pi).mean(-1)


def block_influence(h_LND: Float[Array, 'L N D']) -> Float[Array, ' L-1']:
    """1 - mean cos(h_l, h_{l+1}): how much each block turns the stream.  Source: arXiv:2403.03853, eq. 1."""
    a, b = h_LND[:-1].astype(jnp.float32), h_LND[1:].astype(jnp.float32)
    size = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return 1 - ((a * b).sum(-1) / jnp.maximum(size, 1e-30)).mean(-1)


def linear_cka(a_ND: Float[Array, 'N D'], b_NE: Float[Array, 'N E']) -> Float[Array, '']:
    """|A' B|^2 / (|A' A| |B' B|) of centred A and B, Frobenius norms: 1 for a rotation and scaling of the same data.
    Source: arXiv:1905.00414, eq. 5."""
    a, b = a_ND - a_ND.mean(0), b_NE - b_NE.mean(0)
    return jnp.square(a.T @ b).sum() / (jnp.linalg.norm(a.T @ a) * jnp.linalg.norm(b.T @ b))
