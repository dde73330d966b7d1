"""A model taken apart: embedding to stream, block after block, stream to features, with a look or a change at every block.

Axes: L layers, B rows, T positions, D width, N tokens. A stream is what the topology carries: (B, T, D), a pair, or (B, T, n, D).
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spannorm_jax import topology
from spannorm_jax.embedding import look_up
from spannorm_jax.layers import Context, Norm, accumulator, context
from spannorm_jax.model import LM, Block, coefficients, embed_norm_inside, has_norm, join, state
from spannorm_jax.model_config import ModelConfig

Params = dict[str, Any]
Batch = dict[str, Array]  # tokens, segments (0: padding), positions, targets, each (B, T)
Look = Callable[[Callable[[Any], Any], Any], dict[str, Array]]


class Gates(NamedTuple):
    """What is left of each block: `block` 0 puts the stream past it; `branch` 0 keeps its norms and skips, without what they add."""

    block_L: Array
    branch_L: Array


def differentiable(cfg: ModelConfig) -> ModelConfig:
    """The same model, for derivatives of any order and mode: without the dispatch to experts and the attention kernels, whose gradients are
    written by hand, and with a stream that is not rounded between blocks, so that products with its Jacobian are not either."""
    dense: dict[str, Any] = {'expert_exchange': 'dense'} if cfg.experts else {}
    return dataclasses.replace(cfg, residual_dtype=str(accumulator(cfg)), attn_kernel='xla', **dense)


def everything(cfg: ModelConfig) -> Gates:
    return Gates(jnp.ones(cfg.layers), jnp.ones(cfg.layers))


def embed(cfg: ModelConfig, params: Params, batch: Batch) -> tuple[Float[Array, 'B T D'], Context]:
    """Embedded tokens, and what every block sees besides them."""
    x_BTD = look_up(params['embed'], batch['tokens'], cfg.residual_dtype) * cfg.embed_scale
    ctx = context(cfg, batch['positions'], batch['segments'])
    if embed_norm_inside(cfg):
        ctx = ctx._replace(embed_norm=Norm(cfg).apply({'params': params['stack']['norm_embed']}, cfg.width, method='weights'))
    return x_BTD.astype(accumulator(cfg)), ctx


def enter(cfg: ModelConfig, params: Params, x_BTD: Float[Array, 'B T D']) -> Any:
    """The stream that the first block reads."""
    stream = topology.TOPOLOGIES[cfg.topology].enter(x_BTD, *_ends(cfg, params))
    return jax.tree.map(lambda x: x.astype(cfg.residual_dtype), stream)


def leave(cfg: ModelConfig, params: Params, stream: Any) -> Float[Array, 'B T D']:
    """What the head would read if the model ended with this stream."""
    stream = jax.tree.map(lambda x: x.astype(accumulator(cfg)), stream)
    return topology.TOPOLOGIES[cfg.topology].leave(stream, *_ends(cfg, params))


def _ends(cfg: ModelConfig, params: Params) -> tuple[Callable, Any]:
    """The norms and parameters of the ends of a Stack, as a topology asks for them."""
    own = params['stack']

    def norm(site, x):
        eps = cfg.final_norm_eps if site == 'final' else None
        return Norm(cfg, eps).apply({'params': own[f'norm_{site}']}, x) if has_norm(cfg, site) else x

    return norm, SimpleNamespace(cfg=cfg, param=lambda name, *_, **__: own[name])


def through(
    cfg: ModelConfig, params: Params, stream: Any, ctx: Context, gates: Gates | None = None, look: Look | None = None
) -> tuple[Any, dict[str, Array]]:
    """The stream after all blocks, and what `look(block, stream)` says of each, (L, ...): `block` maps a stream to the next one.

    One scan per run of equal blocks, as in the model. What only some runs have is NaN elsewhere.
    """
    lo, found, counts = 0, [], []
    gates = everything(cfg) if gates is None else gates
    for i, (rule, moe, n) in enumerate(topology.runs(cfg)):

        def body(stream, layer, rule=rule, moe=moe):
            own, coef, gate = layer

            def block(stream, seen=None):
                with nn.intercept_methods(_Tap(gate.branch_L, seen)):
                    new, _ = Block(cfg, rule, moe).apply({'params': own}, stream, coef, ctx)
                return jax.tree.map(lambda a, b: jnp.where(gate.block_L > 0, a, b), new, stream)

            said = {} if look is None else look(block, stream)
            return block(stream), said

        here = jax.tree.map(lambda x, lo=lo, n=n: x[lo : lo + n], gates)
        stream, said = jax.lax.scan(body, stream, (params['stack'][f'blocks_{i}'], coefficients(cfg, range(lo, lo + n)), here))
        lo, found, counts = lo + n, [*found, said], [*counts, n]
    return stream, join(found, counts)


class _Tap:
    """Scales what the sublayers of a block put out, and notes it down."""

    def __init__(self, scale: Array, seen: dict[str, Array] | None):
        self.scale, self.seen = scale, {} if seen is None else seen

    def __call__(self, call: Callable, args: tuple, kwargs: dict, where: Any) -> Any:
        found, name = call(*args, **kwargs), where.module.name
        if (name, where.method_name) == ('ffn', 'hidden'):
            self.seen['hidden'] = found
        if name not in ('attn', 'ffn') or where.method_name != '__call__':
            return found
        out, *rest = found if isinstance(found, tuple) else (found,)
        self.seen[name] = out
        out = (out * self.scale).astype(out.dtype)
        return (out, *rest) if rest else out


def record(cfg: ModelConfig, params: Params, batch: Batch) -> dict[str, Array]:
    """Activations of a forward pass: `states` (L + 1, B, T, D), the embedding first (see `model.state`); `attn` and `ffn` (L, B, T, D),
    the sublayers' outputs; `hidden` (L, B, T, F), what a dense FFN's down projection reads; `readout` (L + 1, B, T, D), what the head
    would read after each; `features` (B, T, D), what it does read."""
    x_BTD, ctx = embed(cfg, params, batch)

    def look(block, stream):
        seen: dict[str, Array] = {}
        new = block(stream, seen)
        return seen | {'states': state(new), 'readout': leave(cfg, params, new)}

    first = enter(cfg, params, x_BTD)
    stream, found = through(cfg, params, first, ctx, look=look)
    for name, value in (('states', state(first)), ('readout', leave(cfg, params, first))):
        found[name] = jnp.concatenate([value[None].astype(found[name].dtype), found[name]])
    return found | {'features': leave(cfg, params, stream)}


def features(cfg: ModelConfig, params: Params, x_BTD: Float[Array, 'B T D'], ctx: Context, gates: Gates | None = None) -> Array:
    """What the head reads, from embedded tokens: the map whose Jacobian goes end to end."""
    return leave(cfg, params, through(cfg, params, enter(cfg, params, x_BTD), ctx, gates)[0])


def loss(cfg: ModelConfig, params: Params, batch: Batch, gates: Gates | None = None) -> Float[Array, 'B T']:
    """Nats of every token (0 for padding)."""
    x_BTD, ctx = embed(cfg, params, batch)
    return token_nats(LM(cfg).logits(params, features(cfg, params, x_BTD, ctx, gates)), batch)


def token_nats(logits_BTV: Float[Array, 'B T V'], batch: Batch) -> Float[Array, 'B T']:
    """-log p of each target, 0 for padding."""
    right_BT = jnp.take_along_axis(logits_BTV, batch['targets'][..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits_BTV, -1) - right_BT) * (batch['segments'] > 0)


def mean_over(batch: Batch, x_BT: Array) -> Array:
    """Mean over the real tokens."""
    real_BT = batch['segments'] > 0
    return jnp.where(real_BT, x_BT, 0).sum() / jnp.maximum(real_BT.sum(), 1)


def outputs(model: nn.Module, variables: Any, *args: Any, of: type[nn.Module], **kwargs: Any) -> list[Any]:
    """What every submodule of class `of` put out, in the order of their calls: a Flax model of your own, without a change to it.

    A submodule that is scanned or rematerialised is called inside a transformation and cannot be read this way.
    """
    seen = []

    def tap(call, args, kwargs, where):
        found = call(*args, **kwargs)
        if isinstance(where.module, of) and where.method_name == '__call__':
            seen.append(found)
        return found

    with nn.intercept_methods(tap):
        model.apply(variables, *args, **kwargs)
    return seen
