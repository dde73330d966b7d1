"""A model taken apart at its blocks: gradients of any depth without overflow, what each norm saw, and Jacobians.

Axes as in layers.py; U directions. Everything is a pure function of (cfg, params, tokens); jit it, map it over seeds.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spannorm_jax import topology
from spannorm_jax.diagnostics.anatomy import differentiable, embed, enter, leave
from spannorm_jax.layers import Attention, Context, Mlp, Norm
from spannorm_jax.loss import loss_sums
from spannorm_jax.model import LM, Block, coefficients
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.moe import Moe

TINY = 1e-37  # a norm of 0 counts as this: its logarithm is finite


class Run(NamedTuple):
    """Consecutive equal blocks: `apply(params, stream, coef)` of one of them, and the stacked parameters and constants of all."""

    block: Block
    params: Any
    coef: dict[str, Array]
    ctx: Context

    def apply(self, params: Any, stream: Any, coef: dict[str, Array]) -> Any:
        return self.block.apply({'params': params}, stream, coef, self.ctx)[0]  # pyright: ignore[reportIndexIssue]


def start(cfg: ModelConfig, params: Any, tokens_BT: Int[Array, 'B T']) -> tuple[Array, Callable[[Array], Any], list[Run]]:
    """The embedded tokens, the function that makes the stream of them, and the blocks from bottom to top. A row is one document."""
    ones = jnp.ones_like(tokens_BT)
    batch = {'tokens': tokens_BT, 'segments': ones, 'positions': jnp.arange(tokens_BT.shape[1]) * ones}
    x_BTD, ctx = embed(cfg, params, batch)
    parts, lo = [], 0
    for i, (rule, moe, n) in enumerate(topology.runs(cfg)):
        parts.append(Run(Block(cfg, rule, moe), params['stack'][f'blocks_{i}'], coefficients(cfg, range(lo, lo + n)), ctx))
        lo += n
    return x_BTD, lambda x: enter(cfg, params, x), parts


def loss(cfg: ModelConfig, params: Any, stream: Any, tokens_BT: Int[Array, 'B T']) -> Array:
    """Mean cross-entropy of the next token, over the T - 1 positions of each row that have one, from what leaves the last block."""
    x_BTD = leave(cfg, params, stream)
    real_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]) < tokens_BT.shape[1] - 1, tokens_BT.shape).astype(jnp.int32)
    s = loss_sums(lambda x: LM(cfg).logits(params, x), x_BTD, jnp.roll(tokens_BT, -1, axis=1), real_BT, chunk=0)
    return s.nats / s.tokens


def length(tree: Any) -> Array:
    """Euclidean norm of all elements of a tree together; squares are taken of what is at most 1."""
    leaves = jax.tree.leaves(tree)
    largest = jnp.maximum(jnp.stack([jnp.abs(x).max() for x in leaves]).max(), TINY)
    return largest * jnp.sqrt(sum(jnp.square(x / largest).sum() for x in leaves))


def log_size(scale: Array, tree: Any) -> Array:
    """ln of e^scale |tree|"""
    return scale + jnp.log(jnp.maximum(length(tree), TINY))


def log_gradients(cfg: ModelConfig, params: Any, tokens_BT: Int[Array, 'B T'], observing: bool = False) -> dict[str, Any]:
    """ln of the Frobenius norm of the loss's gradient, at any depth: `weights` {name: (L,)} of every parameter of the blocks, `stream`
    (L + 1,) of what enters each block and what leaves the last, `embedding` () of the embedded tokens; and `loss`.

    Back-propagation block by block. The gradient that enters a block is divided by its own norm, whose logarithm is kept apart, so that
    nothing overflows or underflows: a block's gradient is linear in what enters it, so the values are those of plain back-propagation.
    A block is computed again in its backward pass; only the streams between blocks are stored. NaN where a block lacks a parameter.
    `observing` adds what `observe` finds, of the same forward pass, as `sums`.
    """
    x_BTD, make_stream, parts = start(cfg, params, tokens_BT)
    stream, back_in = jax.vjp(make_stream, x_BTD)
    stream, entered, stats = forward(parts, stream, observing)
    value, g = jax.value_and_grad(lambda x: loss(cfg, params, x, tokens_BT))(stream)

    weights, streams, scale = [], [log_size(jnp.zeros(()), g)[None]], jnp.zeros(())
    for run, xs in zip(reversed(parts), reversed(entered), strict=True):

        def backward(carry, inputs, run=run):
            g, scale = carry
            p, coef, x = inputs
            size = jnp.maximum(length(g), TINY)
            g, scale = jax.tree.map(lambda v: v / size, g), scale + jnp.log(size)
            dp, dx = jax.vjp(lambda p, x: run.apply(p, x, coef), p, x)[1](g)
            return (dx, scale), (jax.tree.map(functools.partial(log_size, scale), dp), log_size(scale, dx))

        (g, scale), (found, s) = jax.lax.scan(backward, (g, scale), (run.params, run.coef, xs), reverse=True)
        weights.insert(0, {'.'.join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]})
        streams.insert(0, s)
    (g,) = back_in(g)
    none = [jnp.full(len(run.coef['layer']), jnp.nan) for run in parts]
    names = dict.fromkeys(name for w in weights for name in w)
    named = {name: jnp.concatenate([w.get(name, nan) for w, nan in zip(weights, none, strict=True)]) for name in names}
    found = {'weights': named, 'stream': jnp.concatenate(streams), 'embedding': log_size(scale, g), 'loss': value}
    return found | ({'sums': stats} if observing else {})


def watch(block: Block, params: Any, stream: Any, coef: dict[str, Array], ctx: Context) -> tuple[Any, dict[str, Any]]:
    """A block's output, and what its parts saw: the input of each norm by site, and (input, output) of `attn` and `ffn`."""
    seen = {}

    def look(call, args, kwargs, where):
        out, module = call(*args, **kwargs), where.module
        if where.method_name == '__call__' and len(module.path) == 1:
            if isinstance(module, Norm) and module.name:
                seen[module.name.removeprefix('norm_')] = args[0]
            if isinstance(module, Attention | Mlp | Moe):
                seen[module.name] = args[0], out[0] if isinstance(out, tuple) else out
        return out

    with nn.intercept_methods(look):
        stream, _ = block.apply({'params': params}, stream, coef, ctx)  # pyright: ignore[reportGeneralTypeIssues]
    return stream, seen


def sums(seen: dict[str, Any], leaving: Array) -> dict[str, tuple[Array, Array]]:
    """(sum, branch) of both sublayers of a block with one stream: the sum that enters, or would enter, a norm, and what was added to it."""
    total = {'attn': seen.get('attn_sum', seen.get('ffn_in')), 'ffn': seen.get('ffn_sum', leaving)}
    return {name: (total[name], seen[name][1]) for name in total}


def observe(cfg: ModelConfig, params: Any, tokens_BT: Int[Array, 'B T']) -> dict[str, Array]:
    """Statistics of the sums A = attn + skip and Z = ffn + skip of every block, each (L,), for one stream without norms on branches.

    ln_sigma/S: mean over tokens of ln rms(S), the rms being what RMSNorm divides by; sigma/S: mean over tokens of rms(S);
    least/S: its minimum; std/S: mean over tokens of the std over channels; branch_var/S: mean square of the branch; share/S: that over
    the mean square of its skip; corr/S: cosine of branch and skip over all elements, which is their correlation about 0.
    """
    x_BTD, make_stream, parts = start(cfg, params, tokens_BT)
    return forward(parts, make_stream(x_BTD), True)[2]


def forward(parts: list[Run], stream: Any, observing: bool) -> tuple[Any, list[Any], dict[str, Array]]:
    """What leaves the last block, what enters the blocks of each run (stacked), and the statistics of `observe` (or none)."""

    def one(x, pc, run):
        if not observing:
            return run.apply(pc[0], x, pc[1]), (x, {})
        out, seen = watch(run.block, pc[0], x, pc[1], run.ctx)
        stats = {}
        for name, (total, branch) in sums(seen, out).items():
            skip, rms_BT = total - branch, jnp.sqrt(jnp.square(total).mean(-1))
            power, branch_power = jnp.square(skip).mean(), jnp.square(branch).mean()
            stats |= {
                f'ln_sigma/{name}': jnp.log(rms_BT).mean(),
                f'sigma/{name}': rms_BT.mean(),
                f'least/{name}': rms_BT.min(),
                f'std/{name}': total.std(-1).mean(),
                f'branch_var/{name}': branch_power,
                f'share/{name}': branch_power / power,
                f'corr/{name}': (skip * branch).mean() / jnp.sqrt(power * branch_power),
            }
        return out, (x, stats)

    entered, found = [], []
    for run in parts:
        stream, (xs, stats) = jax.lax.scan(lambda x, pc, run=run: one(x, pc, run), stream, (run.params, run.coef))
        entered.append(xs)
        found.append(stats)
    return stream, entered, jax.tree.map(lambda *x: jnp.concatenate(x), *found)


def own_jacobian(cfg: ModelConfig, params: Any, tokens_BT: Int[Array, 'B T']) -> tuple[Array, Array]:
    """d x_{L+1}[T] / d x_1[T]: how the last position's input to block 1 moves its own output of block L, J = e^s M with |M|_F = 1.

    Returns (M (D, D), s). Each block maps D tangents at once; their common size is divided out and its logarithm kept. Of one row.
    Of what position T puts out, the input of position T is the only part an identity path could carry.
    """
    cfg = differentiable(cfg)
    x_BTD, make_stream, parts = start(cfg, params, tokens_BT)
    stream, D = make_stream(x_BTD), x_BTD.shape[-1]
    tangent_UBTD = jnp.zeros((D, *stream.shape)).at[:, :, -1].set(jnp.eye(D)[:, None])
    scale = jnp.zeros(())

    def step(carry, pc, run):
        x, t, scale = carry
        f = lambda x: run.apply(pc[0], x, pc[1])  # noqa: E731
        out, push = jax.linearize(f, x)
        t = jax.vmap(push)(t)
        size = jnp.maximum(length(t), TINY)
        return (out, t / size, scale + jnp.log(size)), None

    for run in parts:
        (stream, tangent_UBTD, scale), _ = jax.lax.scan(
            lambda c, pc, run=run: step(c, pc, run), (stream, tangent_UBTD, scale), (run.params, run.coef)
        )
    return tangent_UBTD[:, 0, -1].T, scale


def spectral_norm(f: Callable[[Array], Array], x: Array, key: Array, rounds: int = 16) -> Array:
    """Largest singular value of the Jacobian of f at x, from below, by power iteration on J^T J."""
    _, push = jax.linearize(f, x)
    _, pull = jax.vjp(f, x)

    def step(v, _):
        u = push(v)
        size = length(u)
        (w,) = pull(u / jnp.maximum(size, TINY))
        return w / jnp.maximum(length(w), TINY), size

    v = jax.random.normal(key, x.shape, x.dtype)
    v, _ = jax.lax.scan(step, v / length(v), length=rounds)
    return length(push(v))
