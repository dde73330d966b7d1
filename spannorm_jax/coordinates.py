"""The coordinate check: do activations change by the same amount in a few steps, whatever the width or depth of the model?

Source: Yang et al. 2022, arXiv:2203.03466, appendix D.1; over depth Dey et al. 2025, arXiv:2505.01618, figure 7.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spannorm_jax.config import Config, edit
from spannorm_jax.loss import loss_sums
from spannorm_jax.model import LM, infos
from spannorm_jax.optim import make_optimizer

PLACES = ('quarter', 'middle', 'last block', 'features', 'logits')


class Coordinates(NamedTuple):
    """What `coordinate_check` found. A slope near 0 is what a parametrisation that claims transfer must show."""

    sizes: tuple[int, ...]
    change: dict[str, np.ndarray]  # by place of PLACES: rms of (activation after t steps - at init), (sizes, seeds, steps), t = 1..steps
    slope: dict[str, float]  # of ln change after the last step over ln size, mean over seeds

    @property
    def worst(self) -> float:
        return max(abs(s) for s in self.slope.values())


def coordinate_check(
    cfg: Config, axis: Literal['width', 'layers'], sizes: Sequence[int], steps: int = 3, seeds: int = 1, shape: tuple[int, int] = (4, 32)
) -> Coordinates:
    """Train copies of cfg.model with model.width or model.layers set to each size for a few steps on one batch of random tokens.

    Width: `heads`, and `ffn` where it is None, are kept, so head_dim and F grow with it. The rate is optim.lr_peak from the first step on;
    decay, clipping and eps are the config's. rms over all tokens and channels of the stream after block ceil(L / 4), ceil(L / 2) and L
    (the mean of several streams), of what the head reads, and of the logits. Over depth take multiples of 4: one block's share of the
    change is 1/L of it, so places are compared at equal parts of the depth.
    """
    found = {place: [] for place in PLACES}
    flat = edit(cfg, {'optim.schedule': 'constant', 'optim.warmup_steps': 0})
    for size in sizes:
        run = _compiled(edit(flat, {f'model.{axis}': size}), steps, shape)
        each = [jax.device_get(run(jax.random.key(seed))) for seed in range(seeds)]
        for place in PLACES:
            found[place].append([e[place] for e in each])
    change = {place: np.asarray(v, np.float64) for place, v in found.items()}
    ln_size = np.log(sizes) - np.log(sizes).mean()
    slope = {p: float(ln_size @ np.log(v[:, :, -1]).mean(1) / (ln_size @ ln_size)) for p, v in change.items()}
    return Coordinates(tuple(sizes), change, slope)


@functools.cache
def _compiled(cfg: Config, steps: int, shape: tuple[int, int]) -> Any:
    """key -> {place: (steps,)}."""
    lm, tree = LM(cfg.model), infos(cfg.model)
    optimizer = make_optimizer(cfg, tree)

    def loss(params, tokens):
        x_BTD, extras = lm.features(params, tokens, stats='tensors')
        hidden = jax.tree.leaves(extras['hidden'])[0]  # of two streams the first, the normed one
        hidden = hidden.mean(-2) if hidden.ndim > 4 else hidden
        at = [-(-cfg.model.layers // parts) - 1 for parts in (4, 2, 1)]
        places = dict(zip(PLACES, (*(hidden[l] for l in at), x_BTD, lm.logits(params, x_BTD)), strict=True))
        ones = jnp.ones(tokens.shape, jnp.int32)
        s = loss_sums(lambda x: lm.logits(params, x), x_BTD, jnp.roll(tokens, -1, axis=1), ones, chunk=0)
        return s.nats / s.tokens, places

    def run(params, key):
        tokens = jax.random.randint(key, shape, 0, cfg.model.vocab, jnp.int32)

        def step(carry, t):
            params, state = carry
            grads, places = jax.grad(loss, has_aux=True)(params, tokens)
            updates, state = optimizer.update(grads, state, params, step=t)
            return (optax.apply_updates(params, updates), state), places

        # The pass of step t sees what the t updates before it have made.
        _, seen = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps + 1))
        return jax.tree.map(lambda x: jnp.sqrt(jnp.square(x[1:] - x[0]).mean(tuple(range(1, x.ndim)))), seen)

    jitted = jax.jit(run)
    return lambda key: jitted(lm.init(key), jax.random.fold_in(key, 1))
