"""Block, Stack (a scan per run of the plan) and LM: the model, its parameters by canonical name, and its counts.

Axes as in layers.py. Parameters of a run of blocks are stacked on a leading layer axis; `unstack` names them layer by layer.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from spannorm_jax import cache as caches
from spannorm_jax import parametrization, topology
from spannorm_jax.embedding import look_up
from spannorm_jax.initializers import Init, Param, draw, is_param, make, matrix_init
from spannorm_jax.layers import Attention, Context, Mlp, Norm, accumulator, apply_norm, context, dropout, product
from spannorm_jax.mla import LatentAttention
from spannorm_jax.model_config import KEPT, ModelConfig
from spannorm_jax.moe import Moe
from spannorm_jax.sharding import constrain

_policies = jax.checkpoint_policies
REMAT = {
    'full': None,
    'sqrt': None,
    'dots': _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(KEPT)),
}


def coefficients(cfg: ModelConfig, layers: range) -> dict[str, Array]:
    """The topology's constants of these blocks, each an array (n,), with the block's own 0-based index as `layer`."""
    rows = [topology.TOPOLOGIES[cfg.topology].coef(cfg, l) for l in layers]
    dtype = accumulator(cfg)
    return {k: jnp.array([r[k] for r in rows], dtype) for k in rows[0]} | {'layer': jnp.arange(layers.start, layers.stop)}


def has_norm(cfg: ModelConfig, site: str) -> bool:
    """Whether the norm at a site exists: embed and final can be switched by the config, all others are the topology's."""
    entry = topology.TOPOLOGIES[cfg.topology]
    if site == 'embed':
        return entry.embed_norm if cfg.embed_norm is None else cfg.embed_norm
    if site == 'final':
        return entry.final_norm if cfg.final_norm is None else cfg.final_norm
    return True


def norm_at(cfg: ModelConfig, site: str, x: Array) -> Array:
    eps = cfg.final_norm_eps if site == 'final' else None
    return Norm(cfg, eps, name=f'norm_{site}')(x) if has_norm(cfg, site) else x


class Block(nn.Module):
    """One block of `cfg.topology`: (stream, constants, context) -> (stream, statistics).

    Inside a Stack the constants are scanned. Alone, in a model of your own, `Block(cfg, layer=l)(x)` is block l (from 0) of
    cfg.layers on x (B, T, D), causal unless `causal=False`. `collect`: '' nothing, 'stats' scalars, 'tensors' activations as well.
    `held` is what attention remembers of earlier positions (see cache.py).

    deferred (in a Stack): the norm that ends the block is left to the next one, and the stream is (sum, weights of its norm). What a
    block hands on is then linear in its last product, as in PreNorm, so that a recomputed block does not need that product.
    """

    cfg: ModelConfig
    rule: Callable | None = None
    moe: bool = False
    layer: int = 0
    causal: bool = True
    collect: str = ''
    deferred: bool = False

    @nn.compact
    def __call__(
        self, stream: Any, coef: dict[str, Array] | None = None, ctx: Context | None = None, held: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        cfg = self.cfg
        if coef is None:
            coef = {k: v[0] for k, v in coefficients(cfg, range(self.layer, self.layer + 1)).items()}
        if ctx is None:
            B, T = jax.tree.leaves(stream)[0].shape[:2]
            ctx = context(cfg, jnp.broadcast_to(jnp.arange(T), (B, T)))
            if self.layer == 0:
                ctx = with_embed_norm(cfg, ctx)
        rule, moe = (self.rule, self.moe) if self.rule is not None else block_rule(cfg, self.layer)
        key = None if ctx.dropout_key is None else jax.random.fold_in(ctx.dropout_key, coef['layer'])
        into, out, sums, stats = {}, {}, {}, {}  # what entered and left each site; (skip, branch) of explicit sums
        weights = {}  # of the norms

        def norm(site, x):
            module = Norm(cfg, name=f'norm_{site}')
            into[site], out[site], weights[site] = x, module(x), module.weights(x.shape[-1])
            return out[site]

        def embedded(x):
            weights = ctx.embed_norm
            if weights is None:
                return x
            return jax.lax.cond(coef['layer'] == 0, lambda x: apply_norm(cfg, x, weights), lambda x: x, x)

        def sublayer(name, module, salt):
            def call(x, norms=''):
                o, s = module(x, norms)
                stats.update(s)
                if (factor := parametrization.branch_scale(cfg, 'branch')) != 1:
                    o *= factor
                into[name], out[name] = x, dropout(o, cfg.dropout, None if key is None else jax.random.fold_in(key, salt))
                return out[name]

            return call

        def param(name, shape, role, std=0.0, const=0.0, fn=None, sublayer=0):
            return make(self, name, shape, (None,) * len(shape), role, Init(std, const, fn, sublayer), layer=coef['layer'])

        def add(site, skip, o):
            if cfg.branch_gain != 'none':
                shape = () if cfg.branch_gain == 'scalar' else o.shape[-1:]
                o *= param(f'{site}_gain', shape, 'gate', const=cfg.branch_gain_init)
            sums[site] = skip, o * (cfg.branch_scale * parametrization.branch_scale(cfg, 'add'))
            return sum(sums[site])

        attn_module = (LatentAttention if cfg.attention == 'mla' else Attention)(cfg, self.causal, name='attn')
        ffn_module: Any = Moe(cfg, name='ffn') if moe else Mlp(cfg, name='ffn')
        attn = sublayer('attn', lambda x, norms: attn_module(x, ctx, norms, bool(self.collect), held), 0)
        ffn = sublayer('ffn', lambda x, norms: ffn_module(x, ctx.real_BT, norms) if moe else (ffn_module(x, norms), {}), 1)
        c = SimpleNamespace(cfg=cfg, param=param, add=add, embedded=embedded, **coef)
        if self.deferred:
            stream = arriving(cfg, coef['first'], *stream)
        stream = jax.tree.map(lambda x: x.astype(accumulator(cfg)), stream)
        stream = rule(stream, attn, ffn, norm, c)
        router = {k: stats.pop(k) for k in ('router_logits', 'router_experts') if k in stats}
        if self.collect:
            stats |= block_stats(into, out, sums, stream, self.collect == 'tensors')
        if self.collect == 'tensors':
            stats |= {'hidden': leaving(cfg, stream), 'after': {k: v for k, v in out.items() if k.startswith(('attn', 'ffn'))} | router}
        if self.deferred:
            total, last = into['ffn_sum'], weights['ffn_sum']
            return (leaving(cfg, total), tuple(w.astype(accumulator(cfg)) for w in last)), stats
        return leaving(cfg, stream), stats


def arriving(cfg: ModelConfig, first: Array, total: Array, weights: tuple[Array, ...]) -> Array:
    """The stream of a deferred block: the norm of what the one before handed on, except in the first."""
    total = total.astype(accumulator(cfg))
    # What is not chosen is normed too, and must have a gradient, whatever the rows of the embedding are.
    normed = apply_norm(cfg, jnp.where(first, jnp.arange(total.shape[-1], dtype=total.dtype), total), weights)
    return jnp.where(first, total, normed)


def leaving(cfg: ModelConfig, stream: Any) -> Any:
    """The stream as it goes from block to block."""
    return jax.tree.map(lambda x: constrain(x.astype(cfg.residual_dtype), 'rows', 'positions', *(None,) * (x.ndim - 2)), stream)


def embed_norm_inside(cfg: ModelConfig) -> bool:
    """Whether the first block applies the norm of the embedding, and not what comes before it."""
    return topology.TOPOLOGIES[cfg.topology].embed_norm_inside(cfg) and has_norm(cfg, 'embed')


def with_embed_norm(cfg: ModelConfig, ctx: Context) -> Context:
    """Hands the norm of the embedding to the blocks, where the topology's first block applies it. Called within a module."""
    if not embed_norm_inside(cfg):
        return ctx
    return ctx._replace(embed_norm=Norm(cfg, name='norm_embed').weights(cfg.width))


def block_rule(cfg: ModelConfig, layer: int) -> tuple[Callable, bool]:
    """The block function of layer `layer`, counted from 0, and whether its FFN is a mixture of experts."""
    return [(rule, moe) for rule, moe, n in topology.runs(cfg) for _ in range(n)][layer]


def block_stats(into: dict[str, Array], out: dict[str, Array], sums: dict[str, tuple], stream: Any, tensors: bool) -> dict[str, Array]:
    """Scalars of one block: the sums that enter (or would enter) a norm, the branches, and how they correlate with their skip.

    sigma = mean over tokens of the std over channels of the sum; branch_var = variance of the branch as it is added; branch_skip_corr =
    correlation of branch and skip over all elements, branch_skip_ratio = rms of the branch over that of its skip; rms of the stream
    that leaves. Several streams count as their mean. With `tensors` the std of each token's sum too, as deviation (B, T).
    `sums` holds what the topology added through `c.add`; where it wrote the sum itself, the branch is the sublayer's output.
    """
    into, out, sums, stream = jax.lax.stop_gradient((into, out, sums, stream))
    x = state(stream)
    totals = {'attn': into.get('attn_sum', into.get('ffn_in', into['ffn'])), 'ffn': into.get('ffn_sum', x)}
    stats = {'rms': jnp.sqrt(jnp.square(x).mean())}
    for name, total in totals.items():
        skip, o = map(one_stream, sums.get(name, (total - out[name], out[name])))
        deviation_BT = (skip + o).std(-1)
        stats[f'sigma_{name}'] = deviation_BT.mean()
        stats[f'branch_var/{name}'] = o.var()
        covariance = ((o - o.mean()) * (skip - skip.mean())).mean()
        stats[f'branch_skip_corr/{name}'] = covariance / jnp.maximum(o.std() * skip.std(), 1e-30)
        stats[f'branch_skip_ratio/{name}'] = jnp.sqrt(jnp.square(o).mean() / jnp.maximum(jnp.square(skip).mean(), 1e-30))
        stats |= {f'deviation/{name}': deviation_BT} if tensors else {}
    return stats


def one_stream(x: Float[Array, '...']) -> Float[Array, '...']:
    """(B, T, D) as it is; several streams (B, T, n, D) as their mean."""
    return x.mean(-2) if x.ndim > 3 else x


def state(stream: Any) -> Float[Array, 'B T D']:
    """The stream between blocks as one array: of a pair (ResiDual, SiameseNorm) the first, of several streams their mean."""
    return one_stream(jax.tree.leaves(stream)[0])


class Stack(nn.Module):
    """L blocks of one topology, from embeddings (B, T, D) to the features (B, T, D) that a head reads, and statistics (L,).

    One scan per run of equal blocks, so that compile time does not grow with depth.
    """

    cfg: ModelConfig
    causal: bool = True
    collect: str = ''

    @nn.compact
    def __call__(
        self, x_BTD: Float[Array, 'B T D'], ctx: Context | None = None, held: list[Any] | None = None
    ) -> tuple[Float[Array, 'B T D'], dict[str, Any]]:
        cfg, entry = self.cfg, topology.TOPOLOGIES[self.cfg.topology]
        if ctx is None:
            ctx = context(cfg, jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2]))

        def param(name, shape, role, std=0.0, const=0.0):
            return make(self, name, shape, (None,) * len(shape), role, Init(std, const))

        ctx = with_embed_norm(cfg, ctx)
        norm, c = functools.partial(norm_at, cfg), SimpleNamespace(cfg=cfg, param=param)
        stream = entry.enter(x_BTD.astype(accumulator(cfg)), norm, c)
        stream = jax.tree.map(lambda x: x.astype(cfg.residual_dtype), stream)
        lo, stats = 0, []
        for i, (rule, moe, n) in enumerate(topology.runs(cfg)):
            # In a loop nothing can merge a forward pass with its recomputation; where there is none (a run of one block) XLA would.
            unrolled = cfg.scan_unroll != 1 or n == 1
            block = Block if cfg.remat == 'none' else nn.remat(Block, prevent_cse=unrolled, policy=REMAT[cfg.remat])
            size = group_size(n) if cfg.remat == 'sqrt' and not self.is_initializing() else n
            blocks = scan(block, size, cfg.scan_unroll)
            each = held and held[i]
            coef = coefficients(cfg, range(lo, lo + n)) | {'first': jnp.arange(n) == 0}
            # LayerNorm takes the mean out of the sum, which may be large: a sum that is rounded before is not as good as one that is not.
            exact = cfg.norm == 'rmsnorm' or cfg.residual_dtype == accumulator(cfg)
            deferred = n > 1 and rule in topology.ENDS_IN_NORM and exact
            if deferred:
                stream = stream, (jnp.zeros(cfg.width, accumulator(cfg)),) * (1 + cfg.norm_bias)
            if size < n:
                split = functools.partial(jax.tree.map, lambda x, n=n, size=size: x.reshape(n // size, size, *x.shape[1:]))
                blocks = nn.map_variables(scan(nn.remat(blocks, prevent_cse=False), n // size), 'params', split)
                coef, each = split((coef, each))
            stream, s = blocks(cfg, rule, moe, causal=self.causal, collect=self.collect, deferred=deferred, name=f'blocks_{i}')(
                stream, coef, ctx, each
            )
            if size < n:
                s = jax.tree.map(lambda x, n=n: x.reshape(n, *x.shape[2:]), s)
            if deferred:
                stream = leaving(cfg, apply_norm(cfg, *stream))
            lo, stats = lo + n, [*stats, s]
        stream = jax.tree.map(lambda x: x.astype(accumulator(cfg)), stream)
        return entry.leave(stream, norm, c), join(stats, [n for *_, n in topology.runs(cfg)])


def scan(block: Any, n: int, unroll: int = 1) -> Any:
    """A module over n layers: parameters, coefficients and caches are stacked on a leading axis, the context is the same for all."""
    return nn.scan(
        block,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        in_axes=(0, nn.broadcast, 0),  # pyright: ignore[reportArgumentType]
        length=n,
        unroll=min(unroll, n) or n,
        metadata_params={nn.PARTITION_NAME: 'layers'},
    )


def group_size(n: int) -> int:
    """Blocks per group under remat sqrt: of the divisors m of n the one with the fewest inputs kept, n / m of groups and m of blocks."""
    return min((m for m in range(n, 0, -1) if n % m == 0), key=lambda m: m + n // m)


def join(runs: list[dict[str, Any]], counts: list[int]) -> dict[str, Any]:
    """Statistics of consecutive runs of so many blocks as arrays over all L layers; what only some runs have is filled with NaN."""
    shapes = {k: v for run in runs for k, v in run.items()}

    def column(key):
        fill = [jax.tree.map(lambda x, n=n: jnp.full((n, *x.shape[1:]), jnp.nan, x.dtype), shapes[key]) for n in counts]
        parts = [run.get(key, f) for run, f in zip(runs, fill, strict=True)]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return {key: column(key) if key not in ('after', 'cache') else [run[key] for run in runs] for key in shapes}


class Transformer(nn.Module):
    """Embedding, Stack and head: tokens (B, T) -> logits (B, T, V), or features (B, T, D) with `head=False`; and statistics."""

    cfg: ModelConfig
    collect: str = ''

    @nn.compact
    def __call__(self, tokens_BT, segments_BT=None, positions_BT=None, dropout_key=None, head: bool = True, cache=None):
        cfg, past, held, after = self.cfg, None, None, None
        V, D = cfg.vocab, cfg.width
        w_VD = make(self, 'embed', (V, D), ('vocab', 'width'), 'embed', matrix_init(cfg, 'embed', V, D), 1)
        x_BTD = look_up(w_VD, tokens_BT, cfg.residual_dtype) * cfg.embed_scale
        if dropout_key is not None:
            x_BTD = dropout(x_BTD, cfg.dropout, jax.random.fold_in(dropout_key, cfg.layers))
        if cache is not None:
            held = cache.runs
            segments_BT, positions_BT, past, after = caches.advance(cfg, cache, tokens_BT.shape[1], segments_BT, positions_BT)
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        ctx = context(cfg, positions_BT, segments_BT, dropout_key if cfg.dropout else None, past)
        x_BTD, extras = Stack(cfg, collect=self.collect, name='stack')(x_BTD, ctx, held)
        if cache is not None and after is not None:
            extras['cache'] = after._replace(runs=caches.remember(cache.runs, extras['cache'], cache.used))
            # A write past the last slot would land on others: better no number than a wrong one.
            x_BTD = jnp.where(after.used <= cache.segments_BS.shape[1], x_BTD, jnp.nan)
        if cfg.tie_embeddings:
            w_DV = w_VD.T
        else:
            w_DV = make(self, 'head', (D, V), ('width', 'vocab'), 'head', matrix_init(cfg, 'head', D, V), D)
        return head_logits(cfg, x_BTD, w_DV) if head else x_BTD, extras


def head_logits(cfg: ModelConfig, x_BTD: Float[Array, '... D'], w_DV: Float[Array, 'D V']) -> Float[Array, '... V']:
    """cap(scale * x W): logits in float32 (or wider)."""
    dtype = jnp.dtype(cfg.dtype)
    logits: Any = product(x_BTD.astype(dtype), w_DV.astype(dtype), accumulator(cfg))
    logits *= parametrization.logit_scale(cfg)
    return logits if cfg.logit_soft_cap is None else cfg.logit_soft_cap * jnp.tanh(logits / cfg.logit_soft_cap)


@dataclass(frozen=True)
class LM:
    """A language model: pure functions over a plain tree of float32 parameters."""

    cfg: ModelConfig

    def init(self, key: Array, tokens: Int[Array, 'B T'] | None = None, shardings: Any = None) -> dict[str, Any]:
        """Initial parameters, born with the given shardings (a tree like theirs). Each depends on the seed, its name and its layer
        alone (see `initializers.draw`); `tokens` is not needed and only there because Flax modules take an example input."""
        return initializer(self.cfg)(key) if shardings is None else _jit_draw(self.cfg, shardings)(key)

    def apply(
        self,
        params: dict[str, Any],
        tokens: Int[Array, 'B T'],
        segments: Int[Array, 'B T'] | None = None,
        positions: Int[Array, 'B T'] | None = None,
        cache: caches.Cache | None = None,
        *,
        dropout_key: Array | None = None,
        stats: bool | str = False,
    ) -> Any:
        """Logits, float32 (B, T, V); with `stats` also a dict of per-layer statistics, each (L,).

        `segments`: equal numbers see each other (0 is padding); `positions`: RoPE positions, 0..T-1 by default; `dropout_key` turns
        dropout on; `stats='tensors'` adds activations: `hidden` (L, B, T, D) and, per run, what each site put out.

        With `cache` (see `new_cache`) the tokens go on where its rows stand: positions and segments continue unless given, the result is
        (logits, extras), and `extras['cache']` is the cache after them. Experts then drop no token, whatever capacity_factor says. A
        cache with too few slots left gives NaN.
        """
        out, extras = self._run(params, tokens, segments, positions, dropout_key, stats, True, cache)
        return (out, extras) if stats or cache is not None else out

    def new_cache(self, rows: int, slots: int) -> caches.Cache:
        """An empty cache for `rows` sequences of at most `slots` tokens, padding included.

        It holds keys and values in cfg.dtype; with mla the compressed vector and the shared rotated key, kv_latent + rope_dim numbers per
        token, unless queries, keys or values are normed per head, which nothing compressed can stand for.
        """
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.value.shape, p.value.dtype), infos(self.cfg), is_leaf=is_param)
        none = caches.empty(rows, 1, [None] * len(topology.runs(self.cfg)))
        tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
        _, extras = jax.eval_shape(lambda p, t: self.apply(p, t, cache=none), shapes, tokens)
        return caches.empty(rows, slots, extras['cache'].runs)

    def features(
        self, params, tokens, segments=None, positions=None, cache=None, *, dropout_key=None, stats: bool | str = False
    ) -> tuple[Array, dict]:
        """What the head reads, (B, T, D), and statistics (empty without `stats` and `cache`)."""
        return self._run(params, tokens, segments, positions, dropout_key, stats, False, cache)

    def logits(self, params: dict[str, Any], features: Float[Array, '... D']) -> Float[Array, '... V']:
        """The head alone."""
        return head_logits(self.cfg, features, params['embed'].T if self.cfg.tie_embeddings else params['head'])

    def _run(self, params, tokens, segments, positions, dropout_key, stats, head, cache) -> Any:
        collect = 'stats' if stats is True else stats or ''
        cfg = self.cfg if cache is None else dataclasses.replace(self.cfg, capacity_factor=None)
        return Transformer(cfg, collect).apply({'params': params}, tokens, segments, positions, dropout_key, head, cache)


def infos(cfg: ModelConfig) -> dict[str, Any]:
    """The parameter tree with a `Param` (shape, role, logical axes, fan-in, initial distribution) in place of each array."""
    return jax.tree.map(lambda p: p, _infos(cfg, topology.TOPOLOGIES[cfg.topology]), is_leaf=is_param)  # the caller's own dictionaries


@functools.lru_cache(maxsize=64)  # asked for at every turn, and a trace of the whole model each time
def _infos(cfg: ModelConfig, entry: topology.Topology) -> dict[str, Any]:
    del entry  # a name may stand for another topology by now
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    cfg = dataclasses.replace(cfg, attn_kernel='xla')  # it has no parameters, and others refuse a row of one token
    return jax.eval_shape(Transformer(cfg).init, jax.random.key(0), tokens)['params']


def each_param(cfg: ModelConfig, tree: Any) -> list[tuple[str, range | None, Any]]:
    """(name, layers, leaf) of a parameter tree, in its order; `layers` is the range a stacked leaf covers, or None."""
    counts = [n for *_, n in topology.runs(cfg)]
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_param)[0]:
        keys = [k.key for k in path if k.key != 'stack']
        run = re.fullmatch(r'blocks_(\d+)', keys[0])
        layers = None
        if run:
            i = int(run[1])
            layers, keys = range(sum(counts[:i]), sum(counts[: i + 1])), keys[1:]
        leaves.append(('.'.join(keys), layers, leaf))
    return leaves


def _jit_draw(cfg: ModelConfig, shardings: Any = None) -> Callable[[Array], dict[str, Any]]:
    # Random bits are long straight-line code that XLA:CPU takes many seconds to optimise and that runs once.
    options = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None
    return jax.jit(functools.partial(draw_all, cfg), out_shardings=shardings, compiler_options=options)


initializer = functools.cache(_jit_draw)  # compiled once per model


def draw_all(cfg: ModelConfig, key: Array) -> dict[str, Any]:
    """The initial value of every parameter (a pure function; jit it)."""
    tree = infos(cfg)
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_param), draw(each_param(cfg, tree), key))


def layer_name(name: str, layer: int | None) -> str:
    return name if layer is None else f'layers.{layer}.{name}'


def unstack(cfg: ModelConfig, tree: Any) -> dict[str, Any]:
    """Parameters by canonical name: embed, head, norm_final.gain, layers.3.attn.q, ... Arrays come as NumPy views, tracers as slices."""
    named = {}
    for name, layers, leaf in each_param(cfg, tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            leaf = np.asarray(leaf)  # one copy; slicing a device array layer by layer is a dispatch each
        for i, l in enumerate(layers or [None]):
            named[layer_name(name, l)] = leaf if l is None else leaf[i]
    return named


def restack(cfg: ModelConfig, named: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `unstack`. Raises KeyError for a missing name and ValueError for one that is left over or has another shape."""
    tree, used, values = infos(cfg), set(), []
    for name, layers, info in each_param(cfg, tree):
        names = [layer_name(name, l) for l in layers or [None]]
        used.update(names)
        value = named[names[0]] if layers is None else np.stack([np.asarray(named[n]) for n in names])
        if value.shape != info.value.shape:
            raise ValueError(f'{names[0]}: shape {value.shape}, expected {info.value.shape}')
        values.append(jnp.asarray(value))
    if left := sorted(set(named) - used):
        raise ValueError(f'{len(left)} parameters have no place in this model: {", ".join(left[:5])}')
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_param), values)


def count_params(cfg: ModelConfig) -> int:
    """Number of parameters, embedding and head included."""
    return sum(math.prod(info.value.shape) for _, _, info in each_param(cfg, infos(cfg)))


def flops_per_token(cfg: ModelConfig, seq: int) -> float:
    """Training FLOPs per token: 6 per weight of every matrix product (the embedding is a look-up) and 12 L N H for each
    position seen, (seq + 1) / 2 of them on average under the causal mask; H is the mean of the dimensions of keys and values.

    Of E experts the K that a token chooses count.
    """
    matrices = ('read', 'write', 'head', 'mix', 'router')
    matmul = float(cfg.vocab * cfg.width if cfg.tie_embeddings else 0)
    for _, _, p in each_param(cfg, infos(cfg)):
        if p.role in matrices:
            matmul += math.prod(p.value.shape) * (cfg.experts_per_token / cfg.experts if 'experts' in p.axes else 1)
    return 6.0 * matmul + 6.0 * cfg.layers * cfg.heads * (cfg.resolved_head_dim + cfg.value_dim) * (seq + 1) / 2


def param_roles(cfg: ModelConfig) -> Any:
    """The parameter tree with each leaf's role in its place."""
    return jax.tree.map(lambda p: p.role, infos(cfg), is_leaf=is_param)


__all__ = ['LM', 'Block', 'Param', 'Stack', 'Transformer', 'count_params', 'flops_per_token', 'infos', 'param_roles', 'restack', 'unstack']
