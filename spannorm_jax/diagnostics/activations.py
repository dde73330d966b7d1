"""Sizes inside the model: massive activations, embeddings, and the loss along a row. Axes: L layers, N tokens, D channels, T positions."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike


def massive(h_LND: ArrayLike) -> dict[str, np.ndarray]:
    """Outliers of each layer's state (L, N, D), each (L,): `max` and `median` of |x|, `ratio` of the two, `over_100` and `over_1000` = how
    many numbers are above 100 and 1000 medians, `kurtosis` = excess kurtosis over channels, mean over tokens (0 for a normal; a token
    whose channels are all alike has none), and `token` and `channel` of the largest.

    Source: arXiv:2402.17762 (massive); arXiv:2208.07339 (outlier channels).
    """
    h = np.asarray(h_LND, np.float64)
    size = np.abs(h)
    median = np.median(size, axis=(1, 2))
    largest = size.max((1, 2))
    token, channel = np.unravel_index(size.reshape(len(h), -1).argmax(1), h.shape[1:])
    safe = np.maximum(median, 1e-30)
    z = h - h.mean(-1, keepdims=True)
    var = np.square(z).mean(-1)
    spread = ~(var <= 1e-24 * np.square(h).mean(-1))  # more than float64's rounding
    with np.errstate(divide='ignore', invalid='ignore'):
        kurtosis = np.where(spread, (z**4).mean(-1) / var**2 - 3, 0).sum(-1) / spread.sum(-1)
    over = {f'over_{k}': (size > k * safe[:, None, None]).sum((1, 2)) for k in (100, 1000)}
    return {'max': largest, 'median': median, 'ratio': largest / safe, 'kurtosis': kurtosis, 'token': token, 'channel': channel} | over


def row_norms(w_VD: ArrayLike) -> np.ndarray:
    """Norm of each row over sqrt D (the rms of a token's vector), smallest first."""
    w = np.asarray(w_VD, np.float64)
    return np.sort(np.sqrt(np.square(w).mean(-1)))


def by_position(nats_BT: ArrayLike, real_BT: ArrayLike) -> Float[Array, ' T']:
    """Mean loss at each position of a row, over the rows that have a token there; NaN where none has."""
    nats_BT, real_BT = jnp.asarray(nats_BT), jnp.asarray(real_BT)
    rows_T = real_BT.sum(0)
    return jnp.where(rows_T > 0, (nats_BT * real_BT).sum(0) / jnp.maximum(rows_T, 1), jnp.nan)
