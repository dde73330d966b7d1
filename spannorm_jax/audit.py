"""The init audit: every parameter of a config as it would be initialised, against what its recipe intends."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spannorm_jax.config import Config, MeshConfig
from spannorm_jax.initializers import AuditRow, Param, audit_row, draw
from spannorm_jax.model import LM, count_params, each_param, infos, layer_name
from spannorm_jax.optim import decays
from spannorm_jax.sharding import MESH_AXES, spec

WHOLE_PARAMS = 2**28  # 1 GiB: up to here one program draws them all, which compiles four times faster than one for each


def audit(cfg: Config) -> Iterator[AuditRow]:
    """A row per parameter and layer, of the values that training starts from."""
    mesh, roles = _unplaced_mesh(cfg.mesh), tuple(r for r in cfg.optim.decay_roles if decays(cfg.optim, r))
    for name, layers, info, value in _values(cfg):
        shards, value = _shards(info, mesh), np.asarray(value)
        for i, l in enumerate(layers or [None]):
            yield audit_row(layer_name(name, l), info, value if l is None else value[i], roles, shards)


def _values(cfg: Config) -> Iterator[tuple[str, range | None, Param, jax.Array]]:
    """Every parameter with its initial value; a large model's are drawn one (stacked) array at a time, so that it need not fit."""
    key, params = jax.random.key(cfg.run.seed), each_param(cfg.model, infos(cfg.model))
    if count_params(cfg.model) <= WHOLE_PARAMS:
        drawn = each_param(cfg.model, LM(cfg.model).init(key))
        yield from ((*param, value) for param, (_, _, value) in zip(params, drawn, strict=True))
        return
    # As in LM.init: random bits are long code that runs once and that XLA:CPU is slow to optimise.
    options = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None
    for param in params:
        yield *param, jax.jit(functools.partial(draw, [param]), compiler_options=options)(key)[0]


def _unplaced_mesh(cfg: MeshConfig) -> Mesh:
    """A mesh of the config's size whether or not those devices are here: one stands in for all, nothing is placed on it."""
    sizes = [1 if axis in ('replica', 'data') else getattr(cfg, axis) for axis in MESH_AXES]
    return Mesh(np.full(sizes, jax.devices()[0], dtype=object), MESH_AXES)


def _shards(info: Param, mesh: Mesh) -> int:
    """Into how many parts the mesh splits a parameter."""
    places, _ = spec(info.axes, info.value.shape, mesh)
    return math.prod(mesh.shape[axis] for place in places if place is not None for axis in np.atleast_1d(place))


def grouped(rows: Iterable[AuditRow]) -> dict[tuple[Any, ...], list[AuditRow]]:
    """Rows that differ in nothing but their layer and the values drawn, together; the key begins with the name without the layer."""
    groups: dict[tuple[Any, ...], list[AuditRow]] = {}
    for row in rows:
        key = (_unlayered(row.name), row.role, row.shape, row.fan_in, row.decays, row.dtype, row.bytes_per_device)
        groups.setdefault(key, []).append(row)
    return groups


def _unlayered(name: str) -> str:
    return name.split('.', 2)[2] if name.startswith('layers.') else name


def span_of(values: Iterable[float | None], show: Callable[[float], str] = '{:.4g}'.format) -> str:
    """`low..high` of some numbers, one number where all print the same, a dash where there are none."""
    known = [v for v in values if v is not None]
    ends = list(dict.fromkeys(show(v) for v in (min(known), max(known)))) if known else ['-']
    return '..'.join(ends)
