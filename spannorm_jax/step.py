"""One optimizer step as a pure function of (state, batch), and exact evaluation. Axes: A micro-batches, B rows, T positions, L layers."""

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from spannorm_jax.config import Config, ModelConfig, OptimConfig
from spannorm_jax.initializers import is_param
from spannorm_jax.loss import loss_sums
from spannorm_jax.model import LM, each_param, unstack
from spannorm_jax.optim import FROZEN, schedule, trainable

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that a step changes, as arrays (or their shapes, or their shardings).

    `step` counts batches used; `stopped` is set, for good, by a non-finite step under the policies stop and rollback.
    """

    step: Any
    params: Any
    opt_state: Any
    stopped: Any


def abstract_state(infos: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state's shapes and dtypes, without its arrays."""
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.value.shape, p.value.dtype), infos, is_leaf=is_param)
    scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype)  # noqa: E731
    return TrainState(scalar(jnp.int32), params, jax.eval_shape(optimizer.init, params), scalar(bool))


def init_state(cfg: Config, lm: LM, optimizer: optax.GradientTransformation, places: TrainState | None = None) -> TrainState:
    """The state before the first step; every array is born where `places`, a tree of shardings, says."""
    params = lm.init(jax.random.key(cfg.run.seed), shardings=places and places.params)
    opt_state = jax.jit(optimizer.init, out_shardings=places and places.opt_state)(params)
    step, stopped = jax.device_put((jnp.zeros((), jnp.int32), jnp.zeros((), bool)), places and places.step)
    return TrainState(step, params, opt_state, stopped)


def dropout_key(seed: int, step: Any) -> jax.Array:
    """A function of (seed, purpose, step): nothing about randomness has to be saved."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), zlib.crc32(b'dropout')), step)


def make_step(cfg: Config, lm: LM, optimizer: optax.GradientTransformationExtraArgs, infos: Any, stats: bool = False) -> Callable:
    """(state, batch, peaks) -> (state, metrics), to be compiled once. peaks: the peak rates (optim.peaks), those of `cfg` where left out.

    The gradient is that of (sum of nats + z_loss * sum of lse^2) / tokens + aux, both sums over all tokens of the global batch, whatever
    optim.accumulate and the mesh are. Where the loss, the gradient norm or the update norm is not finite, nothing is applied.
    metrics: loss, z_loss, aux_loss, grad_norm, update_norm, lr, tokens, bad (index into `leaf_names` of the first non-finite gradient,
    -1 for none), applied; with experts moe/*, with `stats` layer/*, each (L,).
    """
    opt, seed, model = cfg.optim, cfg.run.seed, cfg.model
    sticky = cfg.run.nonfinite != 'skip'
    backward = backward_order(leaf_names(model, infos))

    def objective(params, micro, key, count):
        x_BTD, extras = lm.features(params, micro['tokens'], micro['segments'], micro['positions'], dropout_key=key, stats=stats)
        s = loss_sums(lambda x: lm.logits(params, x), x_BTD, micro['targets'], micro['segments'], opt.loss_chunk)
        counts = extras.pop('moe/count', jnp.zeros(()))
        extras = jax.tree.map(lambda v: v * s.tokens / count, extras)  # means over the tokens of the micro-batch
        aux = opt.balance_loss * jnp.nansum(extras.get('moe/balance', 0)) + opt.router_z_loss * jnp.nansum(extras.get('moe/z', 0))
        parts = {'loss': s.nats / count, 'z_loss': opt.z_loss * s.z / count, 'aux_loss': aux}
        return sum(parts.values()), (parts, extras, counts)

    def gradient(params, batch, key, count):
        grad = jax.grad(objective, has_aux=True)
        if opt.accumulate == 1:
            return grad(params, batch, micro_key(key, 0), count)
        indexed = (jnp.arange(opt.accumulate), micro_batches(batch, opt.accumulate))
        one = lambda i_micro: grad(params, i_micro[1], micro_key(key, i_micro[0]), count)  # noqa: E731
        first = jax.tree.map(lambda x: x[0], indexed)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, first))
        return jax.lax.scan(lambda total, im: (jax.tree.map(jnp.add, total, one(im)), None), zero, indexed)[0]

    def micro_key(key, i):
        return jax.random.fold_in(key, i) if model.dropout else None

    def step(state: TrainState, batch: Batch, peaks: dict[str, Any] | None = None) -> tuple[TrainState, Metrics]:
        chex.assert_equal_shape(list(batch.values()))
        tokens = (batch['segments'] > 0).sum()
        count = jnp.maximum(tokens, 1).astype(jnp.float32)
        grads, (parts, extras, counts) = gradient(state.params, batch, dropout_key(seed, state.step), count)
        grads = trainable(grads, infos)
        squares = leaf_squares(model, grads)
        grad_norm = jnp.sqrt(squares.sum())
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, step=state.step, peaks=peaks)
        update_norm = optax.tree.norm(updates)

        finite = jnp.isfinite(parts['loss']) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        applied = finite & ~state.stopped
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)  # noqa: E731
        params = optax.apply_updates(state.params, updates)
        if model.experts:
            params = balance(model, infos, params, counts, router_bias_rate(opt, cfg.run.steps, state.step))
        new = TrainState(
            state.step + (applied | (not sticky)),
            keep(params, state.params),
            keep(opt_state, state.opt_state),
            state.stopped | (~finite & sticky),
        )
        # A dtype that drifts would compile the step again, and again after a restore.
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        nonfinite = ~jnp.isfinite(squares[backward])
        metrics = parts | {
            'grad_norm': grad_norm,
            'update_norm': update_norm,
            'lr': schedule(opt, cfg.run.steps, peaks and peaks['adam'])(state.step),
            'tokens': tokens,
            'bad': jnp.where(nonfinite.any(), jnp.asarray(backward)[nonfinite.argmax()], -1),
            'applied': applied,
        }
        metrics |= {k: v for k, v in extras.items() if k.startswith('moe/')}
        if model.experts:
            metrics |= load_metrics(model, infos, counts, new.params)
        if stats:
            metrics |= {f'layer/{k}': v for k, v in extras.items() if not k.startswith('moe/')}
            metrics |= layer_ratios(model, infos, grads, updates, state.params)
        return new, metrics

    return step


def micro_batches(batch: Batch, count: int) -> Batch:
    """(B, T) -> (A, B / A, T). Micro-batch a takes rows a, a + A, ...: each device keeps the rows it has."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch)


def router_bias_rate(opt: OptimConfig, steps: int, step: Any) -> jax.Array:
    return jnp.where(step < opt.router_bias_until * steps, opt.router_bias_rate, 0.0)


def balance(model: ModelConfig, infos: Any, params: Any, count_LE: jax.Array, rate: jax.Array) -> Any:
    """Selection biases after a step: + rate for an expert with less than the mean load of its layer, - rate for one with more.

    Source: arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    lower_LE = jnp.sign(count_LE.mean(-1, keepdims=True) - count_LE)
    leaves = zip(each_param(model, infos), jax.tree.leaves(params), strict=True)
    moved = [w + rate * lower_LE[np.asarray(layers)] if info.role == FROZEN else w for (_, layers, info), w in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), moved)


def load_metrics(model: ModelConfig, infos: Any, count_LE: jax.Array, params: Any) -> Metrics:
    """moe/load: share of all choices, (L, E); moe/max_over_mean and moe/bias_norm, (L,). Null for a dense block."""
    load_LE = count_LE / count_LE.sum(-1, keepdims=True)
    norm_L = jnp.full(model.layers, jnp.nan)
    for (_, layers, info), w in zip(each_param(model, infos), jax.tree.leaves(params), strict=True):
        if info.role == FROZEN:
            norm_L = norm_L.at[np.asarray(layers)].set(jnp.linalg.norm(w, axis=-1))
    return {'moe/load': load_LE, 'moe/max_over_mean': load_LE.max(-1) * model.experts, 'moe/bias_norm': norm_L}


def leaf_names(model: ModelConfig, infos: Any) -> list[str]:
    """Canonical names in the order of `leaf_squares`."""
    return list(unstack(model, jax.tree.map(lambda p: np.zeros(p.value.shape[:1]), infos, is_leaf=is_param)))


def leaf_squares(model: ModelConfig, tree: Any) -> jax.Array:
    """Sum of squares of every parameter, one number per layer of a stacked one."""
    return jnp.concatenate([_squares(leaf, layers) for _, layers, leaf in each_param(model, tree)])


def _squares(leaf: jax.Array, layers: range | None) -> jax.Array:
    return jnp.square(leaf).reshape(len(layers) if layers else 1, -1).sum(1)


def backward_order(names: list[str]) -> np.ndarray:
    """Indices of parameters in the order in which the backward pass meets them: head, exit, last block to first, embedding."""

    def place(i):
        layer = re.match(r'layers\.(\d+)\.', names[i])
        group = 3 if 'embed' in names[i] else 2 if layer else 0 if names[i] == 'head' else 1
        return group, -int(layer[1]) if layer else 0, i

    return np.array(sorted(range(len(names)), key=place))


def first_nonfinite(model: ModelConfig, names: list[str], tree: Any) -> str | None:
    """Canonical name of the first parameter, from head to embedding, with a sum of squares that is not finite."""
    squares = leaf_squares(model, tree)
    whole = squares if squares.is_fully_addressable else multihost_utils.process_allgather(squares, tiled=True)
    bad = ~np.isfinite(jax.device_get(whole))
    return next((names[i] for i in backward_order(names) if bad[i]), None)


def role_sums(model: ModelConfig, infos: Any, tree: Any) -> dict[str, jax.Array]:
    """Sum over all elements of each role's parameters, by block: {role: (L,)}; a block without the role has 0."""
    total: dict[str, jax.Array] = {}
    for (_, layers, info), (_, _, leaf) in zip(each_param(model, infos), each_param(model, tree), strict=True):
        if layers is not None:
            before = total.get(info.role, jnp.zeros(model.layers))
            total[info.role] = before.at[layers.start : layers.stop].add(leaf.reshape(len(layers), -1).sum(1))
    return total


def role_counts(model: ModelConfig, infos: Any) -> dict[str, jax.Array]:
    """How many parameters of each role every block has: {role: (L,)}."""
    size = lambda p: np.full(p.value.shape[:1], math.prod(p.value.shape[1:]), np.float32)  # noqa: E731
    return role_sums(model, infos, jax.tree.map(size, infos, is_leaf=is_param))


def layer_ratios(model: ModelConfig, infos: Any, grads: Any, updates: Any, params: Any) -> Metrics:
    """layer/grad_rms/{role}: rms of the gradient; layer/update_ratio/{role}: |update| / |weights|; layer/update_visible/{role}: share of
    the weights that the update would change if they were bfloat16 (|u| > 2^-8 |w|). NaN where a layer has no such role."""
    sums, count = functools.partial(role_sums, model, infos), role_counts(model, infos)
    grad, update, weight = (sums(jax.tree.map(jnp.square, tree)) for tree in (grads, updates, params))
    visible = sums(jax.tree.map(lambda u, w: (jnp.abs(u) > jnp.abs(w) / 256).astype(jnp.float32), updates, params))
    rows = {}
    for role, n in count.items():
        rows[f'layer/grad_rms/{role}'] = jnp.sqrt(grad[role] / n)
        rows[f'layer/update_ratio/{role}'] = jnp.sqrt(update[role] / weight[role])
        rows[f'layer/update_visible/{role}'] = visible[role] / n
    return rows


class Evaluation(NamedTuple):
    """Exact sums over an evaluation set."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def make_eval_step(cfg: Config, lm: LM) -> Callable[[Any, Batch], Any]:
    """(params, batch) -> Sums, to be compiled once."""

    def eval_step(params, batch):
        x_BTD, _ = lm.features(params, batch['tokens'], batch['segments'], batch['positions'])
        return loss_sums(lambda x: lm.logits(params, x), x_BTD, batch['targets'], batch['segments'], cfg.optim.loss_chunk)

    return eval_step


def evaluate(
    eval_step: Callable, params: Any, batches: Iterable[Batch], n_bytes: int, stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Cross-entropy of an evaluation set: float32 sums on the device per batch, added in float64. None where `stop` said so."""
    nats, tokens, pending = 0.0, 0, None
    for batch in batches:
        if stop():
            return None
        launched = eval_step(params, batch)
        if pending is not None:
            nats, tokens = nats + float(pending.nats), tokens + int(pending.tokens)
        pending = launched
    if pending is not None:
        nats, tokens = nats + float(pending.nats), tokens + int(pending.tokens)
    return Evaluation(nats, tokens, n_bytes)
