"""Schedules and optimizers. Which rule moves a parameter, and whether it decays, is decided by its role alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from spannorm_jax import parametrization
from spannorm_jax.config import Config, OptimConfig
from spannorm_jax.initializers import Param, is_param

MUON_ROLES = ('read', 'write')
MUON_RMS = 0.2  # rms of AdamW's updates in practice, to which Muon's are scaled.  Source: arXiv:2502.16982, section 2.2
FROZEN = 'router_bias'  # moved by the step itself: no gradient, no decay, no share in the gradient norm
BATCH_AXES = ('layers', 'experts')  # logical axes along which a parameter holds separate matrices


def schedule(cfg: OptimConfig, steps: int, peak: Any = None) -> Callable[[Any], Array]:
    """Learning rate of the update after `step` earlier ones, step = 0..steps-1.

    With n = step + 1, W = warmup_steps, S = steps, f = lr_final: peak * min(n / W, 1) * decay(n), where
      cosine    f + (1 - f) (1 + cos(pi p)) / 2,   p = (n - W) / (S - W) within [0, 1]
      linear    1 - (1 - f) p
      wsd       1 - (1 - f) q,                     q = (n - S + d S) / (d S) within [0, 1], d = decay_fraction
      constant  1
    so the first update is not lost to a rate of 0, and the last one has the rate f * peak.
    """
    peak = cfg.lr_peak if peak is None else peak

    def rate(step):
        n = jnp.asarray(step, jnp.float32) + 1
        warm = jnp.minimum(n / max(cfg.warmup_steps, 1), 1)
        p = jnp.clip((n - cfg.warmup_steps) / max(steps - cfg.warmup_steps, 1), 0, 1)
        tail = max(cfg.decay_fraction * steps, 1)
        falls = {
            'cosine': lambda: (1 - jnp.cos(jnp.pi * p)) / 2,
            'linear': lambda: p,
            'wsd': lambda: jnp.clip((n - steps + tail) / tail, 0, 1),
            'constant': lambda: jnp.zeros(()),
        }[cfg.schedule]()
        return peak * warm * (1 - (1 - cfg.lr_final) * falls)

    return rate


def peaks(cfg: OptimConfig) -> dict[str, float]:
    """The peak rate of each rule. A step takes them as an argument, so that runs that differ in nothing else share one compiled program."""
    return {'adam': cfg.lr_peak, 'muon': cfg.lr_peak if cfg.muon_lr is None else cfg.muon_lr}


def decays(cfg: OptimConfig, role: str) -> bool:
    return role in cfg.decay_roles and role != FROZEN


def rule(cfg: OptimConfig, role: str) -> str:
    """What moves a parameter of this role: adam, muon or none."""
    if role == FROZEN:
        return 'none'
    return 'muon' if cfg.optimizer == 'muon' and role in MUON_ROLES else 'adam'


def make_optimizer(cfg: Config, infos: Any) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, AdamW or Muon by role, decoupled decay, learning rate.

    u = -lr(step) * (direction(clip(g)) + decay * w), with the parametrization's factors on lr, decay and Adam's eps.
    `update(grads, state, params, step=step, peaks=peaks)` takes the step from the caller, so that a step left out does not shift the
    schedule, and the peak rates (those of `cfg` where left out).
    `infos` is the parameter tree with a Param in place of each array.
    """
    opt = cfg.optim
    labels = _by_param(lambda p: rule(opt, p.role), infos)
    directions: dict[Any, optax.GradientTransformation] = {
        'adam': optax.scale_by_adam(opt.beta1, opt.beta2, opt.eps),
        'none': optax.set_to_zero(),
    }
    if opt.optimizer == 'muon':
        directions['muon'] = scale_by_muon(infos)
    by_role = _by_param(lambda p: parametrization.factors(cfg.model, p.role, 'layers' in p.axes), infos)

    def scale(updates, state, params=None, **extra):
        lr = {name: schedule(opt, cfg.run.steps, peak)(extra['step']) for name, peak in (extra.get('peaks') or peaks(opt)).items()}
        one = lambda u, label, f: -lr.get(label, 0.0) * f.lr * u  # noqa: E731
        return jax.tree.map(one, updates, labels, by_role), state

    def decay(factor):
        chosen = lambda p: decays(opt, p.role) and parametrization.factors(cfg.model, p.role, 'layers' in p.axes).decay == factor  # noqa: E731
        return optax.add_decayed_weights(opt.weight_decay * factor, _by_param(chosen, infos))

    # Adam of g / k with eps is Adam of g with k eps.
    scale_eps = optax.stateless(lambda grads, params: jax.tree.map(lambda g, f: g / f.eps, grads, by_role))
    width = parametrization.width_ratio(cfg.model)
    return optax.chain(
        optax.clip_by_global_norm(opt.clip) if opt.clip else optax.identity(),
        *([] if cfg.model.parametrization == 'standard' else [scale_eps]),
        optax.partition(directions, labels),
        *map(decay, dict.fromkeys((1.0, width))),
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scale),
    )


def scale_by_muon(infos: Any) -> optax.GradientTransformation:
    """Orthogonalised momentum of every matrix, scaled by 0.2 sqrt(max(fan_in, fan_out)): the rms of AdamW's updates.

    Source: Jordan 2024 (Muon); arXiv:2502.16982 for the scale.
    """
    dims = _by_param(lambda p: muon_dims(p) if p.role in MUON_ROLES else optax.MaskedNode(), infos)

    def scale(u, d):
        fans = [1.0, 1.0]
        for i, axes in enumerate((d.reduction_axis, d.output_axis)):
            for axis in axes:
                fans[i] *= u.shape[axis]
        return MUON_RMS * max(fans) ** 0.5 * u

    is_dims = lambda d: isinstance(d, optax.contrib.MuonDimensionNumbers)  # noqa: E731
    rms = optax.stateless(lambda updates, params: jax.tree.map(lambda d, u: scale(u, d), dims, updates, is_leaf=is_dims))
    return optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=dims), rms)


def muon_dims(p: Param) -> optax.contrib.MuonDimensionNumbers:
    """Which axes of a weight are rows and columns of its matrix: q (D, N, H) is D x NH, o (N, H, D) is NH x D; the rest is batch."""
    axes = tuple(i for i, name in enumerate(p.axes) if name not in BATCH_AXES)
    cut = 1 if p.role == 'read' else len(axes) - 1
    return optax.contrib.MuonDimensionNumbers(axes[:cut], axes[cut:])


def trainable(grads: Any, infos: Any) -> Any:
    """Gradients with those of frozen parameters set to 0, so that they count in no norm."""
    return jax.tree.map(lambda p, g: jnp.zeros_like(g) if p.role == FROZEN else g, infos, grads, is_leaf=is_param)


def _by_param(fn: Callable[[Param], Any], infos: Any) -> Any:
    return jax.tree.map(fn, infos, is_leaf=is_param)
