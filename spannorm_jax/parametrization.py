"""How a model's numbers change with its width and depth, so that settings tuned on a small (base) model serve a large one.

standard   nothing changes: the recipe of `init` and one learning rate for all.
mup        the maximal update parametrization for Adam over width.  Source: Yang et al. 2022, arXiv:2203.03466, tables 3 and 8.
completep  mup and, over depth, a factor on every branch (alpha = 1; depth-muP is alpha = 1/2).  Source: Dey et al. 2025, arXiv:2505.01618,
           table 1 and eq. 40; depth-muP: Yang et al. 2023, arXiv:2310.02244.

With n = width / base_width, m = layers / base_layers and a = depth_alpha, every rule is a factor on what the base model has, and 1 at the
base. docs/parametrizations.md is the table. This file imports no jax, so that the configuration can be read at once.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

from spannorm_jax.errors import UserError
from spannorm_jax.topology import TOPOLOGIES

MATRICES = ('read', 'write', 'router', 'mix')  # what multiplies a vector that grows with width, but for the head
NEEDS = {'standard': (), 'mup': ('base_width', 'base_head_dim'), 'completep': ('base_width', 'base_head_dim', 'base_layers')}
FIELDS = ('base_width', 'base_head_dim', 'base_layers', 'depth_alpha')
UNUSED = {'standard': FIELDS, 'mup': ('base_layers', 'depth_alpha'), 'completep': ()}


class Factors(NamedTuple):
    """What a parameter's learning rate, weight decay and Adam eps are multiplied by."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


def check(cfg: Any) -> None:
    """Raises UserError for a base that is not given, and for a topology or option that the rules do not reach."""
    kind = cfg.parametrization
    if missing := [name for name in NEEDS[kind] if getattr(cfg, name) is None]:
        raise UserError(
            f'model.parametrization = {kind!r} needs model.{missing[0]}: that of the small model whose settings are carried over'
        )
    if kind != 'standard' and cfg.topology == 'mhc' and cfg.stream_exit == 'learned':
        raise UserError(f"model.stream_exit = 'learned' has no rule under model.parametrization = {kind!r}; use sum")
    if kind != 'completep':
        return
    where = TOPOLOGIES[cfg.topology].depth
    if where not in ('branch', 'add', 'own'):
        raise UserError(
            f"model.parametrization = 'completep' is not defined for topology {cfg.topology!r}: {where}; use mup, which scales width alone"
        )
    if where == 'own' and (cfg.alpha is not None or cfg.depth_alpha != 1):
        raise UserError(
            f'topology {cfg.topology!r} scales its skip by the number of layers, which stands for the factor on the branches: '
            f'leave out model.alpha and model.depth_alpha'
        )


def width_ratio(cfg: Any) -> float:
    """n"""
    return 1.0 if cfg.parametrization == 'standard' else cfg.width / cfg.base_width


def depth_ratio(cfg: Any) -> float:
    """m"""
    return cfg.layers / cfg.base_layers if cfg.parametrization == 'completep' else 1.0


def base(cfg: Any) -> Any:
    """The fields of the base model, as an initialisation recipe reads them: a weight begins as there, times `init_factor`."""
    if cfg.parametrization == 'standard':
        return cfg
    layers = cfg.base_layers if cfg.parametrization == 'completep' else cfg.layers
    return SimpleNamespace(**{**vars(cfg), 'width': cfg.base_width, 'layers': layers})


def init_factor(cfg: Any, name: str) -> float:
    """On the std: n^-1/2 for what maps width to width, n^-1 for the router (width to a fixed number), 1 for embedding and head."""
    return width_ratio(cfg) ** {'embed': 0.0, 'head': 0.0, 'router': -1.0}.get(name, -0.5)


def base_fans(cfg: Any, name: str, fan_in: float, fan_out: float) -> tuple[float, float]:
    """Fan-in and fan-out of the matrix in the base model, whose FFN and heads (or their number) are in proportion to its width."""
    n = width_ratio(cfg)
    return fan_in / (1 if name == 'embed' else n), fan_out / (1 if name in ('head', 'router') else n)


def attn_scale(cfg: Any) -> float:
    """1/sqrt(H), under mup sqrt(base_head_dim)/H; model.attn_scale, where it is given."""
    if cfg.attn_scale is not None:
        return cfg.attn_scale
    H = cfg.resolved_head_dim
    return H**-0.5 if cfg.parametrization == 'standard' else cfg.base_head_dim**0.5 / H


def logit_scale(cfg: Any) -> float:
    """model.logit_scale / n"""
    return cfg.logit_scale / width_ratio(cfg)


def branch_scale(cfg: Any, where: str) -> float:
    """m^-a where the topology takes its depth factor: 'branch' a sublayer's output, 'add' behind the norm of the branch."""
    return depth_ratio(cfg) ** -cfg.depth_alpha if TOPOLOGIES[cfg.topology].depth == where else 1.0


def settled(cfg: Any) -> dict[str, Any]:
    """The fields with which a `standard` config computes the same function of the same parameters, for layouts that know no other.

    Raises: UserError where no field holds the factor on the branches.
    """
    if cfg.parametrization == 'standard':
        return {}
    fields = {'parametrization': 'standard', 'attn_scale': attn_scale(cfg), 'logit_scale': logit_scale(cfg), 'depth_alpha': 1.0}
    fields |= dict.fromkeys(('base_width', 'base_head_dim', 'base_layers'))
    if branch_scale(cfg, 'branch') != 1:
        raise UserError(
            f'the factor of {cfg.parametrization} on the branches of {cfg.topology!r} has no place in this layout: multiply the output '
            f'projections of attention and FFN by {branch_scale(cfg, "branch"):g} and set model.parametrization standard'
        )
    if (factor := branch_scale(cfg, 'add')) != 1:
        fields['branch_scale'] = cfg.branch_scale * factor
    return fields


def factors(cfg: Any, role: str, in_block: bool) -> Factors:
    """Adam's factors for a parameter of this role; `in_block`: of a block, not of embedding, head and the norms outside the blocks.

    lr      n^-1 for the matrices of MATRICES; times m^(a-1) in a block
    decay   n for those matrices, so that lr * decay does not depend on n
    eps     n^-1, as gradients are; times m^-a in a block
    """
    n, m, a = width_ratio(cfg), depth_ratio(cfg) if in_block else 1.0, cfg.depth_alpha
    matrix = role in MATRICES
    return Factors(m ** (a - 1) / (n if matrix else 1), n if matrix else 1.0, m**-a / n)
