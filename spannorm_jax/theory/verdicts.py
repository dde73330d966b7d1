"""Means with intervals, straight lines, and the rules that turn them into verdicts. The rules were written before the runs they judge."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

HOLDS, FAILS, OPEN = 'holds', 'fails', 'cannot tell'


class Estimate(NamedTuple):
    """Mean over seeds and the half-width of its 95% interval (Student's t)."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f'{self.mean:.4g} ± {self.half:.2g}'

    def to_json(self) -> dict[str, float]:
        return {'mean': self.mean, 'low': self.low, 'high': self.high}


def estimate(values: Any) -> Estimate:
    """mean ± t(0.975, n - 1) s / sqrt(n) over n >= 2 seeds."""
    x = np.asarray(values, np.float64)
    return Estimate(float(x.mean()), float(stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / len(x) ** 0.5))


def slope(x: Sequence[float], y: Any) -> np.ndarray:
    """Least-squares slope of the last axis of y on x."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    x = x - x.mean()
    return (y * x).sum(-1) / (x * x).sum()


def r_squared(predicted: Any, measured: Any) -> np.ndarray:
    """1 - |measured - predicted|^2 / |measured - mean|^2 along the last axis, both taken from their means: no line is fitted, so a
    prediction with the wrong slope can score below 0."""
    p, m = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
    p, m = p - p.mean(-1, keepdims=True), m - m.mean(-1, keepdims=True)
    return 1 - np.square(m - p).sum(-1) / np.square(m).sum(-1)


def within(value: Estimate, low: float, high: float) -> str:
    """holds: the whole interval lies in [low, high]; fails: none of it does; else it cannot be told."""
    if low <= value.low and value.high <= high:
        return HOLDS
    return FAILS if value.high < low or high < value.low else OPEN


def agrees(predicted: Any, measured: Any, share: float = 0.25, floor: float = 0.1) -> str:
    """Whether predictions meet measurements, seed by seed: their difference `within` a quarter of the mean measured size, or `floor`."""
    slack = max(share * abs(float(np.mean(measured))), floor)
    return within(estimate(np.asarray(predicted) - np.asarray(measured)), -slack, slack)
