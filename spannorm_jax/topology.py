"""Topologies: where normalization and residual paths go. One pure function per variant, one line per variant in TOPOLOGIES.

A block function has the signature `(x, attn, ffn, norm, c) -> x'`:
  x      the stream entering the block, float32 (B, T, D); a pair of them for ResiDual and SiameseNorm, (B, T, n, D) for HC and mHC
  attn   x -> A(x), attention with its output projection; `attn(x, norms='qkv')` norms queries, keys and values per head,
         `norms='inner'` norms the concatenated heads before the output projection
  ffn    x -> F(x), dense or MoE; `norms='inner'` norms the hidden activation before the down projection
  norm   `norm(site, x)` applies the norm of that site, creating it on first use; a site that the config switches off is the identity
  c      constants and extras: `c.cfg`, the coefficients of `coef` as attributes, `c.add(site, skip, o)` = skip + o (with the learned
         factors), `c.embedded(x)` = N_e(x) in the first block and x in all others (a condition inside the loop over blocks, where a first
         block of its own would double the program), `c.param(name, shape, role, std=..., const=..., fn=...)` for parameters of its own
Sums are float32, so that inside a block a large factor on the skip cannot swallow a branch in low precision.
This file imports no jax, so that the table and the configuration can be read (and `--help` printed) at once.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from spannorm_jax.errors import UserError, nearest


class Recipe(NamedTuple):
    """A published initialisation: base std, exceptions for embedding and head, and factors by name of the matrix."""

    std: float | str = 0.02  # sigma, or 'xavier': sqrt(2 / (fan_in + fan_out))
    embed: float | None = None  # None: as std
    head: float | None = None
    gains: dict[str, float] = {}  # of q k v o gate up down


def embedded(x, norm, c):
    return norm('embed', x)


def finished(x, norm, c):
    return norm('final', x)


class Topology(NamedTuple):
    """One entry of the table. Only `block`, `equation` and `source` have no default."""

    block: Callable
    equation: str
    source: str
    aliases: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # the fields of OPTIONS that this topology reads
    coef: Callable[[Any, int], dict[str, float]] = lambda cfg, l: {}  # constants of block l = 0..L-1
    plan: Callable[[Any], list[tuple[Callable, int]]] | None = None  # runs of (block, count); None: L times `block`
    enter: Callable = embedded  # embedding -> stream
    leave: Callable = finished  # stream -> input of the head
    embed_norm: bool = False
    embed_norm_inside: Callable[[Any], bool] = lambda cfg: False  # applied by the first block, as `c.embedded`, and not by `enter`
    final_norm: bool = True
    recipe: Callable[[Any], Recipe] = lambda cfg: Recipe()
    # Where completep puts its factor: branch (a sublayer's output), add (behind the norm of a branch), own (the skip has it), or why not.
    depth: str = 'branch'


# Config fields that only some topologies read; setting one that the chosen topology ignores is an error.
OPTIONS = (
    'first_skip', 'block_end', 'post_fraction', 'alpha', 'beta', 'first_block', 'residual_scale', 'residual_exit_scale',
    'siamese_input_norm', 'resid_gain', 'streams', 'hc_tanh', 'sinkhorn_rounds', 'stream_exit', 'branch_gain', 'branch_gain_init',
    'branch_scale',
)  # fmt: skip
BRANCH = ('branch_gain', 'branch_gain_init', 'branch_scale')


# ------------------------------------------------------------------ one stream


def pre(x, attn, ffn, norm, c):
    """y = x + A(N1 x); x' = y + F(N2 y).  Source: Xiong et al. 2020, arXiv:2002.04745."""
    x = c.add('attn', x, attn(norm('attn_in', x)))
    return c.add('ffn', x, ffn(norm('ffn_in', x)))


def post(x, attn, ffn, norm, c):
    """y = N1(x + A x); x' = N2(y + F y).  Source: Vaswani et al. 2017, arXiv:1706.03762."""
    x = norm('attn_sum', x + attn(x))
    return norm('ffn_sum', x + ffn(x))


def span(x, attn, ffn, norm, c):
    """y = N1(A(x) + x); x' = N2(F(y) + x): the second skip spans the block. In the first block of reading A the attention, and it
    alone, reads N_e(E).  Source: SpanNorm, arXiv:2601.22580, eqs. 5-6."""
    y = norm('attn_sum', attn(c.embedded(x)) + x)
    return norm('ffn_sum', ffn(y) + x)


def span_affine(x, attn, ffn, norm, c):
    """y = N1(A(x) + x); x' = g (F(y) + x) + b: `span` with a learned scale and offset per channel, from 1 and 0, in place of the norm that
    ends a block. A question of the paper's review; no one has published it."""
    y = norm('attn_sum', attn(c.embedded(x)) + x)
    x = c.add('ffn', x, ffn(y))
    return x * c.param('end_gain', (c.cfg.width,), 'gain', const=1.0) + c.param('end_bias', (c.cfg.width,), 'bias')


def span_enter(x, norm, c):
    return norm('embed', x) if c.cfg.first_skip == 'normed' else x


def b2t(x, attn, ffn, norm, c):
    """y = N1(x + A x); x' = N2(x + y + F y).  Source: Takase et al. 2022, arXiv:2206.00330."""
    y = norm('attn_sum', x + attn(x))
    return norm('ffn_sum', x + y + ffn(y))


def hybrid(x, attn, ffn, norm, c):
    """z = N2(x + A_qkv(x)); x' = z + F(z): the skip of the FFN starts after the norm.  Source: arXiv:2503.04598, eqs. 5-7."""
    z = norm('ffn_in', x + attn(x, norms='qkv'))
    return z + ffn(z)


def hybrid_first(x, attn, ffn, norm, c):
    """First block of HybridNorm*: h = x + A_qkv(N1 x); x' = h + F(N2 h)."""
    h = x + attn(norm('attn_in', x), norms='qkv')
    return h + ffn(norm('ffn_in', h))


def peri(x, attn, ffn, norm, c):
    """y = x + N1o(A(N1i x)); x' = y + N2o(F(N2i y)).  Source: Peri-LN, arXiv:2502.02732."""
    x = c.add('attn', x, norm('attn_branch', attn(norm('attn_in', x))))
    return c.add('ffn', x, norm('ffn_branch', ffn(norm('ffn_in', x))))


def reordered(x, attn, ffn, norm, c):
    """y = x + N1(A x); x' = y + N2(F y).  Source: OLMo 2, arXiv:2501.00656."""
    x = c.add('attn', x, norm('attn_branch', attn(x)))
    return c.add('ffn', x, norm('ffn_branch', ffn(x)))


def lns(x, attn, ffn, norm, c):
    """y = x + A(s N1 x); x' = y + F(s N2 y), s = 1/sqrt(l), l = 1..L.  Source: LayerNorm Scaling, arXiv:2502.05795, eq. 12."""
    x = x + attn(c.s * norm('attn_in', x))
    return x + ffn(c.s * norm('ffn_in', x))


def deepnorm(x, attn, ffn, norm, c):
    """y = N1(a x + A x); x' = N2(a y + F y), a = (2L)^(1/4).  Source: DeepNet, arXiv:2203.00555."""
    x = norm('attn_sum', c.alpha * x + attn(x))
    return norm('ffn_sum', c.alpha * x + ffn(x))


def keel(x, attn, ffn, norm, c):
    """Each sublayer: x' = N_o(a x + G(N_i x)), a = 2L = the number of sublayers.  Source: KEEL, arXiv:2601.19895, eq. 8."""
    x = norm('attn_sum', c.alpha * x + attn(norm('attn_in', x)))
    return norm('ffn_sum', c.alpha * x + ffn(norm('ffn_in', x)))


def keel_first(x, attn, ffn, norm, c):
    """First block of KEEL: attention is plain PreNorm, the FFN keeps its outer norm but has no factor."""
    x = x + attn(norm('attn_in', x))
    return norm('ffn_sum', x + ffn(norm('ffn_in', x)))


def normformer(x, attn, ffn, norm, c):
    """y = x + N1o(g * A(N1 x)); x' = w y + F_inner(N2 y): g one gain per head on the projected output, F with a norm before
    its down projection, w = 1 or a learned vector.  Source: NormFormer, arXiv:2110.09456, as wired in fairseq."""
    gain_N = c.param('head_gain', (c.cfg.heads,), 'gain', const=1.0)
    o = attn(norm('attn_in', x))
    o = (o.reshape(*o.shape[:-1], c.cfg.heads, -1) * gain_N[:, None]).reshape(o.shape)
    x = c.add('attn', x, norm('attn_branch', o))
    skip = x * c.param('resid_gain', (c.cfg.width,), 'gain', const=1.0) if c.cfg.resid_gain else x
    return skip + ffn(norm('ffn_in', x), norms='inner')


def subln(x, attn, ffn, norm, c):
    """PreNorm with one more norm before the output projection and before the down projection.  Source: Magneto, arXiv:2210.06423."""
    x = x + attn(norm('attn_in', x), norms='inner')
    return x + ffn(norm('ffn_in', x), norms='inner')


# ----------------------------------------------------------------- two streams


def residual(stream, attn, ffn, norm, c):
    """Each sublayer: o = G(x); r' = r + s o; x' = N(x + o). Exit a x + N_f(r).  Source: ResiDual, arXiv:2304.14802."""
    x, r = stream
    s = c.cfg.residual_scale
    o = attn(x)
    x, r = norm('attn_sum', x + o), r + s * o
    o = ffn(x)
    return norm('ffn_sum', x + o), r + s * o


def residual_enter(x, norm, c):
    x = norm('embed', x)
    return x, c.cfg.residual_scale * x


def residual_leave(stream, norm, c):
    return c.cfg.residual_exit_scale * stream[0] + norm('final', stream[1])


def twice(x, norm, c):
    return (norm('embed', x),) * 2


def siamese_leave(stream, norm, c):
    return stream[0] + norm('final', stream[1])


def siamese_olmo_leave(stream, norm, c):
    return norm('final', norm('final_x', stream[0]) + norm('final_y', stream[1]))


def siamese(stream, attn, ffn, norm, c):
    """Each sublayer: o = G(X + N_y Y); X' = N_x(X + s o); Y' = Y + o, s = 1/sqrt(l), l = 1..L. Exit X + N_f(Y).
    Source: SiameseNorm, arXiv:2602.08064, algorithm 1; `siamese_input_norm` norms the input of G once more."""
    X, Y = stream
    inner = norm if c.cfg.siamese_input_norm else lambda site, x: x
    o = attn(inner('attn_in', X + norm('attn_y', Y)))
    X, Y = norm('attn_sum', c.add('attn', X, c.s * o)), Y + o
    o = ffn(inner('ffn_in', X + norm('ffn_y', Y)))
    return norm('ffn_sum', c.add('ffn', X, c.s * o)), Y + o


def siamese_olmo(stream, attn, ffn, norm, c):
    """o = A_qkv(c1 * X + N_ay Y); X = N_x(X + s o); Y = Y + o; o = F(N_in(X + N_fy Y)); X = X + s o; Y = Y + o,
    s = 1/sqrt(2 l), l = 1..L, c1 a learned vector. Exit N_f(N_fx(X) + N_fyf(Y)).  Source: the code released with SiameseNorm."""
    X, Y = stream
    c1_D = c.param('c1', (c.cfg.width,), 'gain', const=1.0)
    o = attn(c1_D * X + norm('attn_y', Y), norms='qkv')
    X, Y = norm('attn_sum', c.add('attn', X, c.s * o)), Y + o
    o = ffn(norm('ffn_in', X + norm('ffn_y', Y)))
    return c.add('ffn', X, c.s * o), Y + o


# ---------------------------------------------------------------- many streams


def copies(x, norm, c):
    return norm('embed', x)[..., None, :].repeat(c.cfg.streams, axis=-2)


def hc_leave(H, norm, c):
    return norm('final', H.sum(-2))


def hc(H, attn, ffn, norm, c):
    """Dynamic Hyper-Connections around PreNorm sublayers over n streams (B, T, n, D).  Source: arXiv:2409.19606, eqs. 1-14."""
    from spannorm_jax import streams

    n, D = c.cfg.streams, c.cfg.width
    for q, name, sub in ((0, 'attn', attn), (1, 'ffn', ffn)):
        alpha, beta = streams.hc_weights(
            norm(f'{name}_streams', H),
            c.param(f'{name}_alpha', (n, n + 1), 'gate', fn=streams.read_onehot, sublayer=q),
            c.param(f'{name}_beta', (n,), 'gate', const=1.0),
            c.param(f'{name}_alpha_w', (D, n + 1), 'mix'),
            c.param(f'{name}_beta_w', (D,), 'mix'),
            c.param(f'{name}_alpha_scale', (), 'gate', const=0.01),
            c.param(f'{name}_beta_scale', (), 'gate', const=0.01),
            c.cfg.hc_tanh,
        )
        H = c.add(name, *streams.hc_sublayer(H, lambda x, sub=sub, name=name: sub(norm(f'{name}_in', x)), alpha, beta))
    return H


def mhc(H, attn, ffn, norm, c):
    """Manifold-constrained Hyper-Connections around PreNorm sublayers over n streams.  Source: arXiv:2512.24880, eqs. 6-9."""
    from spannorm_jax import streams

    n, D = c.cfg.streams, c.cfg.width
    for q, name, sub in ((0, 'attn', attn), (1, 'ffn', ffn)):
        P = [c.param(f'{name}_{k}_w', (n, D, *tail), 'mix') for k, tail in (('pre', (n,)), ('post', (n,)), ('mix', (n, n)))]
        b = [
            c.param(f'{name}_pre_b', (n,), 'gate', fn=streams.one_stream, sublayer=q),
            c.param(f'{name}_post_b', (n,), 'gate'),
            c.param(f'{name}_mix_b', (n, n), 'gate', fn=streams.identity_mix),
        ]
        a = [c.param(f'{name}_{k}_a', (), 'gate', const=0.01) for k in ('pre', 'post', 'mix')]
        weights = streams.mhc_weights(H, P, b, a, c.cfg.sinkhorn_rounds, c.cfg.norm_eps)
        H = c.add(name, *streams.mhc_sublayer(H, lambda x, sub=sub, name=name: sub(norm(f'{name}_in', x)), weights))
    return H


def mhc_leave(H, norm, c):
    from spannorm_jax import streams

    n, D = c.cfg.streams, c.cfg.width
    if c.cfg.stream_exit == 'sum':
        return norm('final', H.sum(-2))
    P, b = c.param('exit_w', (n, D, n), 'mix', std=0.02), c.param('exit_b', (n,), 'gate')
    return norm('final', streams.mhc_exit(H, P, b, c.param('exit_a', (), 'gate', const=1.0), c.cfg.norm_eps))


# Blocks whose last operation is the norm 'ffn_sum' of the one stream.
ENDS_IN_NORM = frozenset((post, span, b2t, deepnorm, keel, keel_first))


# ------------------------------------------------------------------- the table


def megatron(cfg, std=0.02):
    """Base std, and 1/sqrt(2L) on the matrices that write to the residual stream."""
    scale = (2 * cfg.layers) ** -0.5
    return Recipe(std, gains={'o': scale, 'down': scale})


def hybrid_recipe(cfg):
    return megatron(cfg, std=(2.5 * cfg.width) ** -0.5)


def fairseq(cfg, gains=None):
    """Xavier for the matrices; embedding N(0, 1/D) times its factor sqrt(D), which is a stream of rms 1 whatever embed_scale is."""
    return Recipe('xavier', embed=1 / cfg.embed_scale, head=cfg.width**-0.5, gains=gains or {})


def deepnorm_recipe(cfg):
    beta = (8 * cfg.layers) ** -0.25 if cfg.beta is None else cfg.beta
    return fairseq(cfg, dict.fromkeys(('v', 'o', 'gate', 'up', 'down'), beta))


def subln_recipe(cfg):
    return fairseq(cfg, dict.fromkeys(('v', 'o', 'gate', 'up', 'down'), math.log(2 * cfg.layers) ** 0.5))


def first(block_0, block):
    """A plan whose first block differs from the rest."""
    return lambda cfg: [(block_0, 1), (block, cfg.layers - 1)]


def post_blocks(cfg) -> int:
    return int(cfg.post_fraction * cfg.layers + 0.5)  # halves up at every depth


TOPOLOGIES: dict[str, Topology] = {
    'pre': Topology(pre, 'y = x + A(N1 x); x\' = y + F(N2 y)', 'arXiv:2002.04745', ('prenorm', 'pre_norm', 'preln'), options=BRANCH,
        depth='add'),
    'post': Topology(post, 'y = N1(x + A x); x\' = N2(y + F y)', 'arXiv:1706.03762', ('postnorm', 'post_norm', 'postln'), final_norm=False),
    'span': Topology(
        span, 'y = N1(A(x) + x); x\' = N2(F(y) + x)', 'arXiv:2601.22580', ('spannorm', 'span_norm', 'fusenorm'),
        options=('first_skip', 'block_end'), embed_norm=True, final_norm=False, recipe=megatron,
        plan=lambda cfg: [(span if cfg.block_end == 'norm' else span_affine, cfg.layers)],
        embed_norm_inside=lambda cfg: cfg.first_skip == 'raw', enter=span_enter),
    'b2t': Topology(
        b2t, 'y = N1(x + A x); x\' = N2(x + y + F y)', 'arXiv:2206.00330', ('b2t_connection', 'bottom_to_top'), final_norm=False,
        recipe=lambda cfg: fairseq(cfg, dict.fromkeys(('q', 'k', 'v', 'o', 'gate', 'up', 'down'), cfg.layers**-0.5))),
    'hybrid': Topology(
        hybrid, 'z = N2(x + A_qkv(x)); x\' = z + F(z)', 'arXiv:2503.04598', ('hybrid_norm',), recipe=hybrid_recipe),
    'hybrid_star': Topology(
        hybrid, 'block 1: h = x + A_qkv(N1 x); x\' = h + F(N2 h); then hybrid', 'arXiv:2503.04598',
        ('hybridnorm_star', 'hybrid*', 'hybridnorm*'), plan=first(hybrid_first, hybrid), recipe=hybrid_recipe),
    'peri': Topology(
        peri, 'y = x + N1o(A(N1i x)); x\' = y + N2o(F(N2i y))', 'arXiv:2502.02732', ('periln', 'peri_ln', 'perinorm'),
        options=BRANCH, embed_norm=True, recipe=megatron,
        depth='add'),
    'reordered': Topology(
        reordered, 'y = x + N1(A x); x\' = y + N2(F y)', 'arXiv:2501.00656', ('olmo2', 'outputnorm', 'output_norm'), options=BRANCH,
        depth='add'),
    'mixln': Topology(
        pre, 'first post_fraction of the blocks post, the rest pre', 'arXiv:2412.13795', ('mix_ln', 'mix'),
        options=('post_fraction',), plan=lambda cfg: [(post, post_blocks(cfg)), (pre, cfg.layers - post_blocks(cfg))],
        recipe=lambda cfg: Recipe(0.02, embed=0.4**0.5)),
    'lns': Topology(
        lns, 'y = x + A(s N1 x); x\' = y + F(s N2 y), s = 1/sqrt(l)', 'arXiv:2502.05795', ('layernorm_scaling', 'ln_scaling'),
        coef=lambda cfg, l: {'s': (l + 1) ** -0.5},
        depth='its factors 1/sqrt(l) on the inputs depend on depth already'),
    'deepnorm': Topology(
        deepnorm, 'y = N1(a x + A x); x\' = N2(a y + F y), a = (2L)^(1/4)', 'arXiv:2203.00555', ('deepnet', 'deep_norm'),
        options=('alpha', 'beta'), final_norm=False, recipe=deepnorm_recipe,
        coef=lambda cfg, l: {'alpha': (2 * cfg.layers) ** 0.25 if cfg.alpha is None else cfg.alpha},
        depth='its skip has the factor (2L)^(1/4)'),
    'sandwich': Topology(
        peri, 'as peri, without the embedding norm', 'arXiv:2105.13290', ('sandwichln', 'sandwich_ln', 'sandwich_norm'),
        options=BRANCH, recipe=megatron,
        depth='add'),
    'residual': Topology(
        residual, 'o = G(x); r\' = r + s o; x\' = N(x + o); exit x + N_f(r)', 'arXiv:2304.14802', ('resi_dual', 'dual_residual'),
        options=('residual_scale', 'residual_exit_scale'), recipe=fairseq, enter=residual_enter, leave=residual_leave,
        depth='its second stream sums every branch beside the normed one'),
    'siamese': Topology(
        siamese, 'o = G(X + N_y Y); X\' = N_x(X + s o); Y\' = Y + o; exit X + N_f(Y), s = 1/sqrt(l)', 'arXiv:2602.08064',
        ('siamesenorm', 'siamese_norm'), options=('siamese_input_norm',), recipe=hybrid_recipe,
        coef=lambda cfg, l: {'s': (l + 1) ** -0.5}, enter=twice, leave=siamese_leave,
        depth='its factors 1/sqrt(l) on the branches depend on depth already'),
    'siamese_olmo': Topology(
        siamese_olmo, 'SiameseNorm as released: X hybrid-like, s = 1/sqrt(2l), exit N_f(N_fx(X) + N_fy(Y))', 'arXiv:2602.08064 (code)',
        ('siamese_released',), recipe=hybrid_recipe, coef=lambda cfg, l: {'s': (2 * (l + 1)) ** -0.5}, enter=twice,
        leave=siamese_olmo_leave,
        depth='its factors 1/sqrt(l) on the branches depend on depth already'),
    'keel': Topology(
        keel, 'each sublayer x\' = N_o(a x + G(N_i x)), a = 2L; first attention pre, first FFN without a', 'arXiv:2601.19895',
        options=('alpha', 'first_block'), coef=lambda cfg, l: {'alpha': 2.0 * cfg.layers if cfg.alpha is None else cfg.alpha},
        plan=lambda cfg: first(keel_first, keel)(cfg) if cfg.first_block == 'paper' else [(keel, cfg.layers)],
        depth='own'),
    'normformer': Topology(
        normformer, 'y = x + N1o(g A(N1 x)); x\' = y + F_inner(N2 y)', 'arXiv:2110.09456', ('norm_former',), options=('resid_gain',),
        recipe=fairseq,
        depth='one of its branches is normed behind the sublayer, the other is not'),
    'subln': Topology(
        subln, 'y = x + A_inner(N1 x); x\' = y + F_inner(N2 y)', 'arXiv:2210.06423', ('magneto', 'sub_ln'), recipe=subln_recipe),
    'hc': Topology(
        hc, 'H\' = A_m H + beta T(a_r H) over n streams, per sublayer', 'arXiv:2409.19606', ('hyper_connections',),
        options=('streams', 'hc_tanh'), enter=copies, leave=hc_leave,
        recipe=lambda cfg: Recipe(0.02, gains=dict.fromkeys(('o', 'down'), cfg.streams**-0.5)),
        depth='it learns the weight of its branches'),
    'mhc': Topology(
        mhc, 'x\' = R x + post^T T(pre x), R doubly stochastic, per sublayer', 'arXiv:2512.24880', ('manifold_hc',),
        options=('streams', 'sinkhorn_rounds', 'stream_exit'), enter=copies, leave=mhc_leave,
        depth='it learns the weight of its branches'),
}  # fmt: skip

AMBIGUOUS = {
    'hybridnorm': "in axlearn and praxis 'hybridnorm' is Peri-LN, in arXiv:2503.04598 it is HybridNorm: say 'hybrid' or 'peri'",
    'siamesenorm_released': "say 'siamese_olmo' (the released code) or 'siamese' (algorithm 1 of the paper)",
}


def canonical(name: str) -> str:
    """The table's name for a name or alias. Raises UserError for an unknown or ambiguous one."""
    key = name.lower().replace('-', '_')
    if key in TOPOLOGIES:
        return key
    for known, entry in TOPOLOGIES.items():
        if key in entry.aliases:
            return known
    if key in AMBIGUOUS:
        raise UserError(f'topology {name!r} is ambiguous: {AMBIGUOUS[key]}')
    own = 'one of your own is known where its file is the CONFIG (eval, generate and export take --topology-file)'
    raise UserError(f'unknown topology {name!r}; {nearest(key, TOPOLOGIES)}; {own}')


def runs(cfg: Any) -> list[tuple[Callable, bool, int]]:
    """The blocks of a model as runs of (block function, whether the FFN is a mixture of experts, count), bottom to top, none empty."""
    entry = TOPOLOGIES[cfg.topology]
    found, lo = [], 0
    for block, n in entry.plan(cfg) if entry.plan else [(entry.block, cfg.layers)]:
        dense = min(max(cfg.first_dense - lo, 0), n) if cfg.experts else n
        found += [(block, False, dense), (block, True, n - dense)]
        lo += n
    return [run for run in found if run[-1]]
