"""Scaled dot-product attention: the reference, and the table of kernels with what each of them cannot do.

Axes: B rows, T query and S key positions, N query heads, K kv heads, G query heads per kv head, H dimensions of a key, J of a value.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from spannorm_jax import parametrization
from spannorm_jax.blocked_attention import MASKED, Rule, blocked, blocks
from spannorm_jax.errors import CheckFailed, UserError
from spannorm_jax.model_config import KEPT, ModelConfig
from spannorm_jax.sharding import constrain, pieces, spec, target

PART_SCORES = 2**24  # 64 MiB in float32
LONGEST_BLOCK = 512  # of the CPU's kernel, whose scores exist for a block of queries at a time
LOOKED_AT = 64  # queries of a row that statistics are taken from


def may_see(T: int, segments_BT: Int[Array, 'B T'] | None, causal: bool) -> Bool[Array, '#B T S']:
    """Whether position t may look at position s: not at later ones (causal), nor at those of another segment."""
    t = jnp.arange(T)
    mask_BTS = (t[:, None] >= t[None, :])[None] if causal else jnp.ones((1, T, T), bool)
    return mask_BTS if segments_BT is None else mask_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])


def attend(
    q_BTNH: Float[Array, 'B T N H'],
    k_BSKH: Float[Array, 'B S K H'],
    v_BSKJ: Float[Array, 'B S K J'],
    mask_BTS: Bool[Array, '#B T S'],
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Float[Array, 'B T N J'], Float[Array, 'B K G T S']]:
    """softmax(cap(scale q k) + mask) v; query head n reads kv head n // (N/K). Returns the result and the probabilities (float32)."""
    B, T, N, _ = q_BTNH.shape
    p_BKGTS = jax.nn.softmax(scores(q_BTNH, k_BSKH, mask_BTS, scale, soft_cap), axis=-1)
    out = jnp.einsum('BKGTS,BSKJ->BTKGJ', p_BKGTS.astype(v_BSKJ.dtype), v_BSKJ)
    return out.reshape(B, T, N, -1), p_BKGTS


def scores(q_BTNH: Array, k_BSKH: Array, mask_BTS: Array, scale: float, soft_cap: float | None = None) -> Float[Array, 'B K G T S']:
    """cap(scale q k), and MASKED where a position may not be seen."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    score_BKGTS = jnp.einsum('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH, preferred_element_type=wide) * scale
    if soft_cap is not None:
        score_BKGTS = soft_cap * jnp.tanh(score_BKGTS / soft_cap)
    return jnp.where(mask_BTS[:, None, None], score_BKGTS, MASKED)


def attend_in_parts(q_BTNH: Array, k_BSKH: Array, v_BSKJ: Array, mask_BTS: Array, scale: float, soft_cap: float | None = None) -> Array:
    """The result of `attend`, some queries after the others, so that at most PART_SCORES scores per device exist at a time.

    Scores are computed again in the backward pass. A part takes every P-th query, so that every shard of the positions has some.
    """
    B, T, N = q_BTNH.shape[:3]
    scores = B * N * T * k_BSKH.shape[1] / (pieces('rows') * pieces('positions') * pieces('heads'))
    P = next((p for p in range(1, T + 1) if T % p == 0 and scores / p <= PART_SCORES and T // p % pieces('positions') == 0), 1)
    if P == 1:
        return attend(q_BTNH, k_BSKH, v_BSKJ, mask_BTS, scale, soft_cap)[0]
    one = jax.checkpoint(lambda q, k, v, mask: attend(q, k, v, mask, scale, soft_cap)[0], prevent_cse=False)

    def split(x):  # (B, T, ...) -> (P, B, T / P, ...)
        return jnp.moveaxis(x.reshape(x.shape[0], T // P, P, *x.shape[2:]), 2, 0)

    q_PBtNH = constrain(split(q_BTNH), None, 'rows', 'positions', 'heads', None)
    _, o_PBtNJ = jax.lax.scan(lambda _, qm: (None, one(qm[0], k_BSKH, v_BSKJ, qm[1])), None, (q_PBtNH, split(mask_BTS)))
    return jnp.moveaxis(o_PBtNJ, 0, 2).reshape(B, T, N, -1)


def attention_stats(
    q_BTNH: Float[Array, 'B T N H'],
    k_BSKH: Float[Array, 'B S K H'],
    mask_BTS: Bool[Array, '#B T S'],
    real_BT: Bool[Array, '#B T'],
    scale: float,
    soft_cap: float | None = None,
) -> dict[str, Float[Array, '']]:
    """Of evenly spread queries, at most LOOKED_AT in a row, over all heads; padding and queries that see one position are left out.

    attn_entropy: mean entropy of the attention row over the log of the positions it may see; attn_sink: mean weight of the first
    position it may see; attn_logit_max: largest score. NaN where no query sees more than one.
    """
    every = -(-q_BTNH.shape[1] // LOOKED_AT)
    q_BTNH, mask_BTS, real_BT = jax.lax.stop_gradient(q_BTNH[:, ::every]), mask_BTS[:, ::every], real_BT[:, ::every]
    score_BKGTS = scores(q_BTNH, jax.lax.stop_gradient(k_BSKH), mask_BTS, scale, soft_cap)
    visible_BT = mask_BTS.sum(-1)
    counts_BKGT = jnp.broadcast_to(((visible_BT > 1) & real_BT)[:, None, None], score_BKGTS.shape[:-1])
    # Not from the probabilities: an exponential and a log for every score would cost more than the attention itself.
    top_BKGT1 = score_BKGTS.max(-1, keepdims=True)
    weight_BKGTS = jnp.exp(score_BKGTS - top_BKGT1)
    total_BKGT = weight_BKGTS.sum(-1)
    first_BTS = jnp.arange(mask_BTS.shape[-1]) == mask_BTS.argmax(-1, keepdims=True)
    gap_BKGT = (weight_BKGTS * (score_BKGTS - top_BKGT1)).sum(-1) / total_BKGT
    entropy_BKGT = (jnp.log(total_BKGT) - gap_BKGT) / jnp.log(jnp.maximum(visible_BT, 2))[:, None, None]
    sink_BKGT = jnp.where(first_BTS[:, None, None], weight_BKGTS, 0).sum(-1) / total_BKGT
    known = jnp.where(counts_BKGT.any(), 1.0, jnp.nan)
    mean = lambda x: known * jnp.where(counts_BKGT, x, 0).sum() / jnp.maximum(counts_BKGT.sum(), 1)  # noqa: E731
    largest = known * jnp.where(counts_BKGT, top_BKGT1[..., 0], MASKED).max()
    return {'attn_entropy': mean(entropy_BKGT), 'attn_sink': mean(sink_BKGT), 'attn_logit_max': largest}


class Problem(NamedTuple):
    """What a kernel is asked to do."""

    T: int
    H: int
    J: int
    dtype: str
    causal: bool
    soft_cap: float | None
    shards: int  # of the positions


class Kernel(NamedTuple):
    """One way to compute attention: run(q, k, v, segments, problem, scale) -> (B, T, N, J)."""

    platform: str | None  # None: every one
    cannot: Callable[[Problem], str | None]  # why not, in words
    run: Callable[..., Array]


def _xla(q_BTNH, k_BSKH, v_BSKJ, segments_BT, problem, scale):
    mask_BTS = may_see(problem.T, segments_BT, problem.causal)
    return attend_in_parts(q_BTNH, k_BSKH, v_BSKJ, mask_BTS, scale, problem.soft_cap)


def _splash(q_BTNH, k_BSKH, v_BSKJ, segments_BT, problem, scale):
    """Pallas, on each device its own rows and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = next(b for b in (512, 384, 256, 128) if problem.T % b == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )  # fmt: skip

    def body(q_BTNH, k_BSKH, v_BSKJ, segments_BT):
        one = splash.CausalMask if problem.causal else splash.FullMask
        mask = splash.MultiHeadMask([one((problem.T, problem.T)) for _ in range(q_BTNH.shape[2])])
        kernel = splash.make_splash_mha(
            mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, attn_logits_soft_cap=problem.soft_cap,
            residual_checkpoint_name=KEPT, interpret=target()[0] == 'cpu',
        )  # fmt: skip
        heads_first = (jnp.moveaxis(x, 2, 1) for x in (q_BTNH * scale, k_BSKH, v_BSKJ))
        out_BNTJ: Any = jax.vmap(kernel)(*heads_first, None if segments_BT is None else splash.SegmentIds(segments_BT, segments_BT))
        return jnp.moveaxis(out_BNTJ, 1, 2)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return body(q_BTNH, k_BSKH, v_BSKJ, segments_BT)
    place = lambda x, heads: spec(('rows', None, heads, None), x.shape, mesh)[0]  # noqa: E731
    q, k, v = place(q_BTNH, 'heads'), place(k_BSKH, 'kv'), place(v_BSKJ, 'kv')
    if q[2] != k[2]:  # kv heads that do not divide over the mesh
        q = PartitionSpec(*q[:2], None, None)
    rows = None if segments_BT is None else PartitionSpec(q[0], None)
    return jax.shard_map(body, in_specs=(q, k, v, rows), out_specs=q, check_vma=False)(q_BTNH, k_BSKH, v_BSKJ, segments_BT)


def _splash_cannot(p: Problem) -> str | None:
    if p.T % 128:
        return f'rows of {p.T} positions are not a multiple of 128'
    if p.shards > 1:
        return 'rows are split over mesh.sequence'
    return None if p.dtype != 'float64' else 'it has no float64'


def _cudnn(q_BTNH, k_BSKH, v_BSKJ, segments_BT, problem, scale):
    same_B1TS = None if segments_BT is None else (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKJ, mask=same_B1TS, scale=scale, is_causal=problem.causal, implementation='cudnn'
    )


def _cudnn_cannot(p: Problem) -> str | None:
    if p.dtype != 'bfloat16':
        return f'its products are bfloat16, not {p.dtype}'
    if p.soft_cap is not None:
        return 'it has no soft cap'
    if p.H != p.J:
        return f'keys of {p.H} and values of {p.J} dimensions differ'
    if p.H > 128 or p.H % 8:
        return f'heads of {p.H} dimensions are not a multiple of 8 up to 128'
    if p.T % 2:
        return f'rows of {p.T} positions are odd'
    if p.shards > 1:
        return 'rows are split over mesh.sequence'
    return None


def _blocked(q_BTNH, k_BSKH, v_BSKJ, segments_BT, problem, scale):
    B, T, N = q_BTNH.shape[:3]
    if B * N * longest_block(problem) * T / (pieces('rows') * pieces('heads')) > PART_SCORES:
        return _xla(q_BTNH, k_BSKH, v_BSKJ, segments_BT, problem, scale)
    return blocked(q_BTNH, k_BSKH, v_BSKJ, segments_BT, Rule(problem.causal, scale, problem.soft_cap))


def longest_block(p: Problem) -> int:
    return max(hi - lo for lo, hi in blocks(p.T, p.causal))


def _blocked_cannot(p: Problem) -> str | None:
    if p.shards > 1:
        return 'rows are split over mesh.sequence'
    if longest_block(p) > LONGEST_BLOCK:
        return f'rows of {p.T} positions do not divide into blocks of at most {LONGEST_BLOCK}'
    return None


# In order of preference. Each takes several queries per kv head and packed rows.
KERNELS = {
    'splash': Kernel('tpu', _splash_cannot, _splash),
    'cudnn': Kernel('gpu', _cudnn_cannot, _cudnn),
    'blocked': Kernel('cpu', _blocked_cannot, _blocked),
    'xla': Kernel(None, lambda p: None, _xla),
}


def problem(cfg: ModelConfig, T: int, causal: bool = True) -> Problem:
    return Problem(T, cfg.resolved_head_dim, cfg.value_dim, cfg.dtype, causal, cfg.attn_soft_cap, pieces('positions'))


def choose_kernel(cfg: ModelConfig, T: int, causal: bool = True) -> tuple[str, list[str]]:
    """The kernel for rows of T positions on the devices that programs are made for, and why a better one was passed over.

    Raises: UserError where `model.attn_kernel` names one that cannot do it.
    """
    asked, platform = problem(cfg, T, causal), target()[0]
    if cfg.attn_kernel != 'auto':
        kernel = KERNELS[cfg.attn_kernel]
        why = kernel.cannot(asked)
        # On the CPU the kernels of other platforms run in an interpreter, where they have one: slow, but the same numbers.
        if why is None and kernel.platform not in (None, platform) and (cfg.attn_kernel, platform) != ('splash', 'cpu'):
            why = f'it is for {kernel.platform}, and this is {platform}'
        if why:
            raise UserError(f'model.attn_kernel = {cfg.attn_kernel!r} cannot be used: {why}; choose auto or xla')
        return cfg.attn_kernel, []
    notes = []
    for name, kernel in KERNELS.items():
        if kernel.platform in (None, platform):
            why = kernel.cannot(asked)
            if why is None:
                return name, notes
            notes.append(f'attention kernel {name} is not used: {why}')
    raise AssertionError('xla does everything')


def attention(
    cfg: ModelConfig,
    q_BTNH: Float[Array, 'B T N H'],
    k_BSKH: Float[Array, 'B S K H'],
    v_BSKJ: Float[Array, 'B S K J'],
    segments_BT: Int[Array, 'B T'] | None,
    causal: bool,
    stats: bool = False,
) -> tuple[Float[Array, 'B T N J'], dict[str, Array]]:
    """softmax(cap(scale q k) + mask) v by the chosen kernel, and statistics where asked for."""
    T, scale = q_BTNH.shape[1], parametrization.attn_scale(cfg)
    name, _ = choose_kernel(cfg, T, causal)
    out_BTNJ = KERNELS[name].run(q_BTNH, k_BSKH, v_BSKJ, segments_BT, problem(cfg, T, causal), scale)
    if not stats:
        return out_BTNJ, {}
    real_BT = jnp.ones((1, T), bool) if segments_BT is None else segments_BT > 0
    return out_BTNJ, attention_stats(q_BTNH, k_BSKH, may_see(T, segments_BT, causal), real_BT, scale, cfg.attn_soft_cap)


def masked_attention(
    cfg: ModelConfig,
    q_BTNH: Float[Array, 'B T N H'],
    k_BSKH: Float[Array, 'B S K H'],
    v_BSKJ: Float[Array, 'B S K J'],
    mask_BTS: Bool[Array, '#B T S'],
    stats: bool = False,
) -> tuple[Float[Array, 'B T N J'], dict[str, Array]]:
    """The same by the reference, for any mask: the T queries need not stand at the S positions of the keys."""
    scale, cap = parametrization.attn_scale(cfg), cfg.attn_soft_cap
    out_BTNJ = attend_in_parts(q_BTNH, k_BSKH, v_BSKJ, mask_BTS, scale, cap)
    return out_BTNJ, attention_stats(q_BTNH, k_BSKH, mask_BTS, mask_BTS.any(-1), scale, cap) if stats else {}


def verify_kernel(cfg: ModelConfig, T: int) -> str | None:
    """Run the chosen kernel against the reference on this machine's device: a sentence of what was found, None where it is plain
    operations, the same everywhere.

    Raises: CheckFailed where values or gradients are further apart than bfloat16's rounding.
    """
    name, _ = choose_kernel(cfg, T)
    if KERNELS[name].platform in (None, 'cpu'):  # the same operations everywhere: the tests have seen them
        return None
    N, K = (
        (2 * cfg.heads // cfg.resolved_kv_heads, 2) if cfg.heads > 1 and cfg.resolved_kv_heads > 1 else (cfg.heads, cfg.resolved_kv_heads)
    )
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (N, cfg.resolved_head_dim), (K, cfg.resolved_head_dim), (K, cfg.value_dim), (N, cfg.value_dim)
    q, k, v, g = (jax.random.normal(key, (1, T, *s), jnp.float32).astype(cfg.dtype) for key, s in zip(keys, shapes, strict=True))
    segments = 1 + (jnp.arange(T) > T // 3)[None].astype(jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def both(run, q, k, v):
        out, pull = jax.vjp(lambda q, k, v: run(q, k, v, segments, problem(cfg, T), cfg.resolved_head_dim**-0.5), q, k, v)
        return [x.astype(jnp.float32) for x in (out, *pull(g.astype(out.dtype)))]

    apart = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(both(KERNELS[name].run, q, k, v), both(_xla, q, k, v), strict=True)
    )
    if not apart < 0.03:
        raise CheckFailed(
            f'attention kernel {name} differs from the reference by {apart:.2g} of the largest value on this device (expected below 0.03); '
            f'set model.attn_kernel xla'
        )
    return f'attention kernel {name}: within {apart:.1g} of the reference'
