"""Intervals against scipy and closed forms; the rules of selection and growth against cases worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from spannorm_jax import stats
from spannorm_jax.stats import RATE, SEED


def rows_of(losses, bad=(), seeds=(0,)):
    """Rows of one arm: {rate: loss or [loss per seed]}; rates in `bad` diverged."""
    return [
        {RATE: rate, SEED: seed, 'status': 'diverged' if rate in bad else 'completed', 'eval/loss': v, 'test/loss': v + 0.1}
        for rate, loss in losses.items()
        for seed, v in enumerate(np.atleast_1d(loss).tolist())
    ]


@pytest.mark.parametrize('n', [2, 3, 5, 30])
@pytest.mark.parametrize('level', [0.9, 0.95])
def test_interval_is_that_of_scipy(n, level):
    x = np.random.default_rng(n).normal(3, 2, n)
    got = stats.t_interval(x, level)
    low, high = scipy_stats.t.interval(level, n - 1, loc=x.mean(), scale=scipy_stats.sem(x))
    np.testing.assert_allclose(got, (x.mean(), low, high, n), rtol=1e-12)


def test_interval_by_hand():
    """1, 2, 3: s = 1; with 2 degrees of freedom t = (2p - 1) / sqrt(2 p (1 - p)), 4.303 at p = 0.975."""
    got, half = stats.t_interval([1.0, 2.0, 3.0]), 0.95 / math.sqrt(2 * 0.975 * 0.025) / math.sqrt(3)
    np.testing.assert_allclose(got[:3], (2, 2 - half, 2 + half), rtol=1e-9)
    assert str(got) == '2 ± 2.5 (n = 3)'
    assert stats.t_interval([4.0]) == (4, -math.inf, math.inf, 1) and str(stats.t_interval([4.0])) == '4 (n = 1)'
    assert stats.t_interval([1.0, math.inf]) == (math.inf, -math.inf, math.inf, 2) and str(stats.t_interval([math.inf])) == 'diverged'
    with pytest.raises(ValueError, match='no values'):
        stats.t_interval([])


def test_intervals_cover():
    """Of 2000 intervals of three normal numbers 95% hold the mean: 5 standard errors are 2.4%."""
    x = np.random.default_rng(0).normal(1.0, 1.0, (2000, 3))
    inside = np.mean([i.low < 1.0 < i.high for i in map(stats.t_interval, x)])
    assert abs(inside - 0.95) < 0.025


def test_pairs_take_out_what_the_seeds_share():
    noise = np.array([0.0, 5.0, -3.0])
    a, b = rows_of({1e-3: noise + [1.0, 1.1, 1.2]}), rows_of({2e-3: noise})
    got = stats.paired(a, b[::-1], 'eval/loss')
    np.testing.assert_allclose(got, scipy_interval([1.0, 1.1, 1.2]), rtol=1e-9)
    assert stats.paired(a, b[:2], 'eval/loss').n == 2
    assert stats.paired(rows_of({1e-3: [1.0, 2.0]}, bad=(1e-3,)), b, 'eval/loss').mean == math.inf
    with pytest.raises(ValueError, match='no seed in common'):
        stats.paired(a, [row | {SEED: 9} for row in b], 'eval/loss')


def scipy_interval(x):
    return (np.mean(x), *scipy_stats.t.interval(0.95, len(x) - 1, loc=np.mean(x), scale=scipy_stats.sem(x)), len(x))


def test_spikes():
    """A plateau at 2 with steps at 2.4 (none), 2.6 (one) and a rise to 3, of which each step counts until it is the median."""
    assert stats.count_spikes([2.0] * 50 + [2.4] + [2.0] * 50) == 0
    assert stats.count_spikes([2.0] * 50 + [2.6] + [2.0] * 50) == 1
    assert stats.count_spikes([2.0] * 300 + [3.0] * 150) == 100, 'in a window of 201 the 101st of them is the median'
    assert stats.count_spikes(np.linspace(6, 1, 400)) == 0 and stats.count_spikes([]) == 0


def test_best_rate_is_chosen_on_validation_among_rates_with_the_most_seeds():
    rows = rows_of({1e-3: 2.0, 2e-3: [2.5, 2.5], 4e-3: [2.4, 2.5]})
    assert stats.best_rate(rows) == 4e-3 and {r['test/loss'] for r in stats.at_best(rows)} == {2.5, 2.6}
    assert stats.best_rate(rows_of({1e-3: [2.5, 2.5], 4e-3: [2.0, 2.0]}, bad=(4e-3,))) == 1e-3
    assert stats.best_rate(rows_of({1e-3: 2.0}, bad=(1e-3,))) is None and stats.at_best([]) == []


def test_edge():
    losses = {1e-3: 2.0, 2e-3: 2.0, 4e-3: 2.0, 8e-3: 2.0}
    assert stats.edge(rows_of(losses)) == (8e-3, None)
    assert stats.edge(rows_of(losses, bad=(4e-3,))) == (2e-3, 4e-3), 'a rate above one that diverged is not stable'
    assert stats.edge(rows_of(losses, bad=(1e-3,))) == (None, 1e-3)


GRID = (1e-3, 2e-3, 4e-3)
WANTED = {
    'nothing yet': ({}, (), {}, {(r, 0) for r in GRID}),
    'half a grid': ({1e-3: 2.0}, (), {}, {(r, 0) for r in GRID}),
    'best inside': ({1e-3: 2.2, 2e-3: 2.0, 4e-3: 2.1}, (), {}, {(r, s) for r in GRID for s in range(3)}),
    'best at the top': ({1e-3: 2.2, 2e-3: 2.1, 4e-3: 2.0}, (), {}, {(r, 0) for r in (*GRID, 8e-3)}),
    'best at the bottom': ({1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.2}, (), {}, {(r, 0) for r in (5e-4, *GRID)}),
    'best at the bound': (
        {1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.2}, (), {'bounds': (1e-3, 1)}, {(4e-3, 0)} | {(r, s) for r in GRID[:2] for s in range(3)},
    ),
    'all diverged': ({1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.2}, GRID, {}, {(r, 0) for r in (5e-4, *GRID)}),
    'all diverged at the bound': ({1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.2}, GRID, {'bounds': (1e-3, 1)}, {(r, 0) for r in GRID}),
    'to the edge': ({1e-3: 2.2, 2e-3: 2.0, 4e-3: 2.1}, (), {'to_edge': True}, {(r, 0) for r in (*GRID, 8e-3)}),
    'the edge gets all seeds': (
        {1e-3: 2.0, 5e-4: 2.1, 2e-3: 2.1, 4e-3: 2.3, 8e-3: 9.0}, (8e-3,), {'to_edge': True},
        {(8e-3, 0)} | {(r, s) for r in (5e-4, *GRID) for s in range(3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize('losses, bad, options, want', WANTED.values(), ids=list(WANTED))
def test_what_the_grid_asks_for(losses, bad, options, want):
    assert stats.wanted(rows_of(losses, bad), GRID, **options) == want


def test_the_grid_comes_to_an_end():
    """Whatever the losses are, following the rule ends; then it asks for nothing new, and the rows of other seeds change nothing."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        edge, best = 10 ** rng.uniform(-4, 0, 2)
        have: set = set()
        for _ in range(40):
            rows = [
                {RATE: r, SEED: s, 'status': 'diverged' if r > edge else 'completed', 'eval/loss': abs(math.log(r / best)) + 0.01 * s}
                for r, s in sorted(have)
            ]
            want = stats.wanted(rows, GRID, to_edge=True)
            if want == have:
                break
            assert have < want
            have = want
        else:
            raise AssertionError('no end')
        stable = [r for r, _ in have if r <= edge]
        assert len(have) <= 30 and (not stable or (max(stable), 2) in have)


def test_slope():
    x = np.arange(5.0)
    np.testing.assert_allclose(stats.slope(x, 3 - 2 * x), (-2, 3, 1), atol=1e-12)
    got, want = stats.slope(x, [0, 1, 1, 2, 5]), scipy_stats.linregress(x, [0, 1, 1, 2, 5])
    np.testing.assert_allclose(got, (want.slope, want.intercept, want.rvalue**2), rtol=1e-9)
    assert stats.slope(x, np.ones(5))[2] == 1.0
