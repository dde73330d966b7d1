"""Measures over training: slopes over depth, coordinate checks over depth and width, sensitivity to the learning rate, spikes."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from spannorm_jax.config import Config
from spannorm_jax.diagnostics.anatomy import record
from spannorm_jax.model import LM, infos
from spannorm_jax.optim import make_optimizer
from spannorm_jax.step import init_state, make_step

PLACES = ('embedding', 'lower', 'middle', 'upper', 'last')  # relative depths 0, 1/4, 1/2, 3/4, 1


def slope(y: ArrayLike, x: ArrayLike | None = None) -> float:
    """Least-squares slope of y over x, by default over 1, 2, ...; what is not finite is left out; NaN for fewer than two points."""
    y = np.asarray(y, np.float64)
    x = np.arange(1.0, len(y) + 1) if x is None else np.asarray(x, np.float64)
    known = np.isfinite(y) & np.isfinite(x)
    x, y = x[known], y[known]
    return float(np.polyfit(x, y, 1)[0]) if len(np.unique(x)) > 1 else float('nan')


def depth_profile(value_L: ArrayLike) -> dict[str, float]:
    """A positive quantity over layers: `first_over_last`, `factor` per layer = exp of the slope of its log, `variation` = std / mean,
    `exponent` of growth = slope of its log over the log of the layer, from 1."""
    v = np.asarray(value_L, np.float64)
    log, known = np.log(np.where(v > 0, v, np.nan)), v[np.isfinite(v)]
    return {
        'first_over_last': float(v[0] / v[-1]) if v[-1] else float('nan'),
        'factor': float(np.exp(slope(log))),
        'variation': float(known.std() / known.mean()) if known.size else float('nan'),
        'exponent': slope(log, np.log(np.arange(1, len(v) + 1))),
    }


def norm_law(topology: str, ln_a_L: ArrayLike, ln_z_L: ArrayLike) -> np.ndarray | None:
    """ln |g_l| of what writes to the stream, up to a constant, if norms on sums divided what comes back and nothing else happened.

    ln_a, ln_z (..., L): logs of the scales of the sums at attention's and at the FFN's norm; for post
    -sum_{m >= l} ln z_m - sum_{m > l} ln a_m, for span -sum_{m >= l} ln z_m; None for others.  Source: SpanNorm, arXiv:2601.22580, eq. 11.
    """
    if topology not in ('post', 'span'):
        return None
    ln_a, ln_z = np.asarray(ln_a_L, np.float64), np.asarray(ln_z_L, np.float64)
    above = lambda x: np.cumsum(x[..., ::-1], -1)[..., ::-1] - x  # noqa: E731  sum over m > l
    return -ln_z - above(ln_z) - (above(ln_a) if topology == 'post' else 0)


def laziness(f: Callable[[Any], jax.Array], start: Any, now: Any) -> float:
    """|f(now) - lin(now)| / |f(now) - f(start)|, lin the tangent of f at `start`: near 0 where training never left its first linearisation.

    f: parameters -> an array, such as the logits of a probe batch.  Source: arXiv:2505.01618, the test of lazy against rich layers.
    """
    f_start, moved_linearly = jax.jvp(f, (start,), (jax.tree.map(jnp.subtract, now, start),))
    moved = f(now) - f_start
    return float(jnp.linalg.norm((moved - moved_linearly).ravel()) / jnp.linalg.norm(moved.ravel()))


def coordinate_check(configs: Mapping[int, Config], batches: Iterable[Any], probe: Any, steps: int = 5) -> dict[int, dict[str, np.ndarray]]:
    """How far training moves the states of models of several sizes: size -> place -> rms(x_l(t) - x_l(0)), t = 1..steps.

    Places are PLACES, at relative depths 0 to 1, and `logits`; all sizes see the same `batches` and are read on the `probe` batch. For a
    parametrisation that transfers learning rates nothing may grow or shrink with the size: see `size_slopes`.
    Source: arXiv:2203.03466, section D.1 (width); arXiv:2505.01618 (depth).
    """
    batches, found = list(itertools.islice(batches, steps)), {}
    probe = jax.tree.map(jnp.asarray, probe)
    for size, cfg in configs.items():
        lm, tree = LM(cfg.model), infos(cfg.model)
        optimizer = make_optimizer(cfg, tree)
        step = jax.jit(make_step(cfg, lm, optimizer, tree))
        read = jax.jit(lambda params, cfg=cfg: _places(cfg, params, probe))
        state = init_state(cfg, lm, optimizer)
        start, rows = read(state.params), []
        for batch in batches:
            state, _ = step(state, batch)
            rows.append(jax.tree.map(lambda now, then: jnp.sqrt(jnp.square(now - then).mean()), read(state.params), start))
        found[size] = {place: np.array([float(row[place]) for row in rows]) for place in rows[0]}
    return found


def _places(cfg: Config, params: Any, probe: Any) -> dict[str, jax.Array]:
    seen = record(cfg.model, params, probe)
    at = [round(cfg.model.layers * i / (len(PLACES) - 1)) for i in range(len(PLACES))]
    states = {place: seen['states'][l].astype(jnp.float32) for place, l in zip(PLACES, at, strict=True)}
    return states | {'logits': LM(cfg.model).logits(params, seen['features'])}


def size_slopes(check: Mapping[int, Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Slope of the log of the last movement over the log of the size, for every place: near 0 where a learning rate transfers."""
    sizes = np.log(np.array(list(check), np.float64))
    places = next(iter(check.values()))
    return {place: slope(np.log([max(float(moved[place][-1]), 1e-30) for moved in check.values()]), sizes) for place in places}


def lr_sensitivity(final_by_lr: Mapping[float, float], at_init: float) -> dict[str, float]:
    """Final losses by peak rate on a log grid -> `sensitivity` = mean of min(final, loss at init) - best, `best_lr`, `best`, and
    `max_stable_lr`, the largest rate below every one that ended at or above the loss at init. A loss that is not finite is a divergence;
    where no rate ended below the loss at init there is no best one, and all are NaN.

    Source: arXiv:2309.14322, section 2.2.
    """
    rates = sorted(final_by_lr)
    loss = np.array([min(v, at_init) if np.isfinite(v := final_by_lr[r]) else at_init for r in rates], np.float64)
    stable = list(itertools.takewhile(lambda i: loss[i] < at_init, range(len(rates))))
    best = int(loss.argmin())
    if loss[best] >= at_init:
        return dict.fromkeys(('sensitivity', 'best_lr', 'best', 'max_stable_lr'), float('nan'))
    return {
        'sensitivity': float((loss - loss[best]).mean()),
        'best_lr': rates[best],
        'best': float(loss[best]),
        'max_stable_lr': rates[stable[-1]] if stable else float('nan'),
    }


def spikes(loss: ArrayLike, above: float = 0.5, window: int = 201) -> np.ndarray:
    """Steps (from 0) whose loss is not finite, or more than `above` nats over the median of the `window` steps that end there."""
    loss = np.asarray(loss, np.float64)
    median = np.array([np.nanmedian(loss[max(0, i + 1 - window) : i + 1]) for i in range(len(loss))])
    return np.flatnonzero(~np.isfinite(loss) | (loss > median + above))
