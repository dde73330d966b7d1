"""What may be concluded from a few runs: intervals, pairs, the best rate, the edge of stability, and which rates to try next.

A row is a plain dict (experiment.py): configuration fields by dotted name, metrics by their name in metrics.jsonl. A run that diverged is
a row like any other: its loss counts as infinite.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

Row = dict[str, Any]
LEVEL = 0.95
WINDOW, SPIKE = 201, 0.5  # steps, nats: a spike is a loss this far above the running median
RATE, SEED = 'optim.lr_peak', 'run.seed'


class Interval(NamedTuple):
    """A mean and its 95% interval; infinite where one value leaves it open."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return 'diverged'
        return f'{self.mean:.4g}' + (f' ± {(self.high - self.low) / 2:.2g}' if self.n > 1 else '') + f' (n = {self.n})'


def t_interval(values: Iterable[float], level: float = LEVEL) -> Interval:
    """mean ± t s / sqrt(n): s the sample's standard deviation, t the quantile of Student's distribution with n - 1 degrees of freedom.

    One value has no interval (-inf, inf); a value that is not finite (a diverged run) makes the mean infinite.

    Raises: ValueError for no values.
    """
    x = np.asarray(list(values), np.float64)
    if not len(x):
        raise ValueError('an interval of no values')
    if not np.isfinite(x).all():
        return Interval(math.inf, -math.inf, math.inf, len(x))
    mean = float(x.mean())
    half = float(stdtrit(len(x) - 1, (1 + level) / 2) * x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.inf
    return Interval(mean, mean - half, mean + half, len(x))


def value(row: Row, metric: str) -> float:
    """A metric of a row; infinite where the run diverged or has none."""
    found = row.get(metric)
    return math.inf if row['status'] == 'diverged' or found is None else float(found)


def interval(rows: Iterable[Row], metric: str) -> Interval:
    return t_interval(value(row, metric) for row in rows)


def paired(a: Sequence[Row], b: Sequence[Row], metric: str) -> Interval:
    """Interval of a - b over the seeds both have. A seed fixes the order of the data and the numbers the weights start from.

    Raises: ValueError where no seed is common.
    """
    b_of = {row[SEED]: value(row, metric) for row in b}
    pairs = [(value(row, metric), b_of[row[SEED]]) for row in a if row[SEED] in b_of]
    if not pairs:
        raise ValueError('rows to compare have no seed in common')
    return t_interval(x - y if math.isfinite(y) else math.inf for x, y in pairs)


def group(rows: Iterable[Row], *fields: str) -> dict[Any, list[Row]]:
    """Rows by the value of a field, or by the tuple of several, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[f] for f in fields)
        groups.setdefault(key if len(fields) > 1 else key[0], []).append(row)
    return groups


def count_spikes(losses: Sequence[float]) -> int:
    """Steps whose loss is more than 0.5 nat above the median of the 201 steps that end with it."""
    x = np.asarray(losses, np.float64)
    return sum(bool(x[i] > np.median(x[max(0, i + 1 - WINDOW) : i + 1]) + SPIKE) for i in range(len(x)))


def best_rate(rows: Sequence[Row], metric: str = 'eval/loss') -> float | None:
    """The rate with the lowest mean validation loss, no seed diverged, of those tried with the most seeds; None where all diverged."""
    at = group(rows, RATE)
    most = max((len(rs) for rs in at.values()), default=0)
    loss = {rate: interval(rs, metric).mean for rate, rs in at.items() if len(rs) == most}
    rate = min(loss, key=lambda r: (loss[r], r), default=None)
    return rate if rate is not None and math.isfinite(loss[rate]) else None


def at_best(rows: Sequence[Row]) -> list[Row]:
    """The rows at the best rate, chosen on validation; none where every rate diverged."""
    rate = best_rate(rows)
    return [row for row in rows if row[RATE] == rate]


def edge(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """(highest stable rate, lowest rate at which a run diverged): all rates up to the first are stable. Either may be None."""
    bad = min((row[RATE] for row in rows if row['status'] == 'diverged'), default=None)
    good = max((row[RATE] for row in rows if bad is None or row[RATE] < bad), default=None)
    return good, bad


def wanted(
    rows: Sequence[Row],
    grid: Sequence[float],
    seeds: Sequence[int] = (0, 1, 2),
    factor: float = 2.0,
    bounds: tuple[float, float] = (1e-4, 0.5),
    to_edge: bool = False,
) -> set[tuple[float, int]]:
    """The (rate, seed) pairs that the rule asks for, given one arm's rows so far. The rule is the same for every arm:

    first the grid with one seed; while the best rate lies at an end, or with `to_edge` while the highest has not diverged, one more step
    of `factor` at that end, within `bounds`; then all seeds at the best rate and its two neighbours, and with `to_edge` at the highest
    stable rate too.
    """
    first = [row for row in rows if row[SEED] == seeds[0]]
    rates = sorted({row[RATE] for row in first})
    want = {(rate, seeds[0]) for rate in (*grid, *rates)}
    if not set(grid) <= set(rates):
        return want
    best, (stable, bad) = best_rate(first), edge(first)
    lower, higher = (float(f'{r:.3g}') for r in (rates[0] / factor, rates[-1] * factor))
    if best in (None, rates[0]) and lower >= bounds[0]:
        return want | {(lower, seeds[0])}
    if (best == rates[-1] or (to_edge and bad is None)) and higher <= bounds[1]:
        return want | {(higher, seeds[0])}
    if best is None:
        return want
    i = rates.index(best)
    chosen = {best, rates[max(i - 1, 0)], rates[min(i + 1, len(rates) - 1)]} | ({stable or best} if to_edge else set())
    return want | {(rate, seed) for rate in chosen for seed in seeds}


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Least-squares slope and intercept of y over x, and R^2."""
    x_, y_ = np.asarray(x, np.float64), np.asarray(y, np.float64)
    a, b = np.polyfit(x_, y_, 1)
    rest = np.square(y_ - a * x_ - b).sum()
    total = np.square(y_ - y_.mean()).sum()
    return float(a), float(b), float(1 - rest / total) if total else 1.0
