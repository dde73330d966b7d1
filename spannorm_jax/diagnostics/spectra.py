"""Spectra: how many directions activations, embeddings and weights use. NumPy in float64; NaN of what is not finite.

Axes: N tokens, D channels, K singular values.
"""

import numpy as np
from numpy.typing import ArrayLike


def eigenvalues(x_ND: ArrayLike, centred: bool = True) -> np.ndarray:
    """Eigenvalues of the covariance of N tokens, largest first, (D,). `centred=False`: of the second moment, the mean included.

    With fewer than about 4 D tokens the spectrum is that of the sample, steeper than that of the population.
    """
    x = np.asarray(x_ND, np.float64)
    if centred:
        x = x - x.mean(0)
    C = x.T @ x / len(x)
    return np.maximum(np.linalg.eigvalsh(C)[::-1], 0) if np.isfinite(C).all() else np.full(len(C), np.nan)


def singular_values_of(w: ArrayLike) -> np.ndarray:
    """Singular values of a matrix, largest first."""
    w = np.asarray(w, np.float64)
    return np.linalg.svd(w, compute_uv=False) if np.isfinite(w).all() else np.full(min(w.shape), np.nan)


def effective_ranks(eigenvalues_D: ArrayLike) -> dict[str, float]:
    """How many directions a spectrum uses, each a share of the D there are.

    With p = lambda / sum(lambda):  hard = (sum lambda)^2 / sum lambda^2, the participation ratio;  soft = exp(-sum p ln p);
    stable = sum lambda / lambda_max;  rankme = exp(-sum q ln q), q = s / sum(s), s = sqrt(lambda) the singular values. concentration =
    mean over k = 1..D of the share of the k largest, 1 where one direction holds everything and (D + 1) / 2D where all are equal.
    utilisation = harmonic mean of hard and soft, a candidate for what the source calls its spectral utilisation index, whose formula we
    have not read.  Source: arXiv:2510.00537 (hard, soft, concentration); arXiv:2210.02885 (RankMe).
    """
    v = np.asarray(eigenvalues_D, np.float64)
    D, total = len(v), v.sum()
    if not total > 0:
        return dict.fromkeys(('hard', 'soft', 'stable', 'rankme', 'concentration', 'utilisation'), float('nan'))
    p = np.sort(v / total)[::-1]
    hard, soft = 1 / np.square(p).sum() / D, entropy_rank(p) / D
    return {
        'hard': hard,
        'soft': soft,
        'stable': 1 / p[0] / D,
        'rankme': entropy_rank(np.sqrt(p)) / D,
        'concentration': np.cumsum(p).mean(),
        'utilisation': 2 * hard * soft / (hard + soft),
    }


def entropy_rank(weights: ArrayLike) -> float:
    """exp of the Shannon entropy of non-negative weights, normalised: the number of equal ones with the same entropy; NaN of none."""
    p = np.asarray(weights, np.float64)
    if not p.sum() > 0:
        return float('nan')
    p = p[p > 0] / p.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def over_median(spectrum: ArrayLike) -> np.ndarray:
    """A sorted spectrum over the median of its positive part, as the eigenspectra of papers are drawn.

    Positive is what exceeds float64's rounding of the largest value: an eigenvalue that is zero comes out as some 1e-17 of either sign.
    """
    v = np.sort(np.asarray(spectrum, np.float64))[::-1]
    positive = v[v > v[:1] * len(v) * np.finfo(np.float64).eps]
    return v / np.median(positive) if len(positive) else v


def weight_spectrum(w: ArrayLike, floor: float = 1e-6) -> dict[str, float]:
    """Singular values s of a matrix (m, n) in four numbers.

    norm = s_max;  condition = s_max / max(s_min, floor s_max), so never above 1 / floor;  stable_rank = sum s^2 / s_max^2, as a share of
    min(m, n);  outliers = share of the s above the Marchenko-Pastur edge of a matrix of independent entries of the same variance,
    std (sqrt m + sqrt n), by more than 2 per cent (finite matrices cross it by a little).  Source: Marchenko and Pastur 1967.
    """
    w = np.asarray(w, np.float64)
    s = singular_values_of(w)
    if not s[0] > 0:
        return {'norm': float(s[0]), 'condition': float('nan'), 'stable_rank': float('nan'), 'outliers': float('nan')}
    edge = np.sqrt(np.square(w - w.mean()).mean()) * (np.sqrt(w.shape[0]) + np.sqrt(w.shape[1]))
    return {
        'norm': float(s[0]),
        'condition': float(s[0] / max(s[-1], floor * s[0])),
        'stable_rank': float(np.square(s / s[0]).sum() / len(s)),
        'outliers': float((s > 1.02 * edge).mean()),
    }


def matrix(w: np.ndarray, role: str) -> np.ndarray:
    """A weight as (in, out): q (D, N, H) is D x NH, o (N, H, D) is NH x D, experts (E, in, out) stay apart on a leading axis."""
    if role == 'write':
        return w.reshape(-1, w.shape[-1])
    return w.reshape(w.shape[0], -1)
