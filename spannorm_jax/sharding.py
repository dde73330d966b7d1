"""The mesh, and the one table that says which logical axis of a parameter lies along which axis of the mesh."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spannorm_jax.config import Config, MeshConfig
from spannorm_jax.errors import UserError
from spannorm_jax.initializers import is_param

MESH_AXES = ('data', 'fsdp', 'tensor')
BATCH = ('data', 'fsdp')  # what the rows of a batch are split over
RULES: dict[str, str | None] = {
    'vocab': 'tensor',
    'heads': 'tensor',
    'kv': 'tensor',
    'ffn': 'tensor',
    'width': 'fsdp',
    'head_dim': None,
    'norm': None,
    'layers': None,
}


def make_mesh(cfg: MeshConfig) -> Mesh:
    """Devices as a (data, fsdp, tensor) mesh.

    Raises: UserError where the platform is absent, there are too few devices, or the sizes do not multiply to their number.
    """
    try:
        found = jax.devices() if cfg.platform == 'auto' else jax.devices(cfg.platform)
    except RuntimeError as e:
        here = ', '.join(sorted({d.platform for d in jax.devices()}))
        raise UserError(f'mesh.platform = {cfg.platform!r} is not there (present: {here}); run `spannorm doctor`, or choose auto') from e
    n = len(found) if cfg.devices is None else cfg.devices
    if not 1 <= n <= len(found):
        raise UserError(f'mesh.devices = {n}, but there are {len(found)} {found[0].platform} devices')
    rest = cfg.fsdp * cfg.tensor
    data = n // rest if cfg.data == -1 else cfg.data
    if data * rest != n:
        sizes = f'mesh.data x fsdp x tensor = {"?" if cfg.data == -1 else cfg.data} x {cfg.fsdp} x {cfg.tensor}'
        raise UserError(f'{sizes} does not make {n} devices; change the sizes, or set mesh.devices')
    devices = np.asarray(found[:n]).reshape(data, cfg.fsdp, cfg.tensor)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def check_batch(cfg: Config, mesh: Mesh) -> None:
    """Raise UserError where the rows of one micro-batch do not divide over the mesh."""
    rows, shards = cfg.data.batch // cfg.optim.accumulate, math.prod(mesh.shape[a] for a in BATCH)
    if rows % shards:
        micro = f' / optim.accumulate = {cfg.optim.accumulate}' if cfg.optim.accumulate > 1 else ''
        raise UserError(
            f'data.batch = {cfg.data.batch}{micro} does not divide over mesh.data x fsdp = {mesh.shape["data"]} x {mesh.shape["fsdp"]}; '
            f'change the batch, or use fewer devices (mesh.devices)'
        )


def spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> tuple[PartitionSpec, list[str]]:
    """Where each dimension of a parameter lies, and a note for each that stays whole because it does not divide."""
    places, notes = [], []
    for name, size in zip(axes, shape, strict=True):
        place = RULES[name] if name is not None else None
        if place in places:
            place = None  # a mesh axis splits one dimension of an array; the first that asks has it
        if place is not None and size % mesh.shape[place]:
            notes.append(f'{name} = {size} does not divide over mesh.{place} = {mesh.shape[place]}: kept whole')
            place = None
        places.append(place)
    return PartitionSpec(*places), notes


def param_shardings(infos: Any, mesh: Mesh) -> tuple[Any, list[str]]:
    """A NamedSharding per parameter, and the distinct notes of `spec`."""
    found = jax.tree.map(lambda p: spec(p.axes, p.value.shape, mesh), infos, is_leaf=is_param)
    is_pair = lambda x: isinstance(x, tuple) and isinstance(x[0], PartitionSpec)  # noqa: E731
    notes = sorted({note for _, notes in jax.tree.leaves(found, is_leaf=is_pair) for note in notes})
    return jax.tree.map(lambda s: NamedSharding(mesh, s[0]), found, is_leaf=is_pair), notes


def state_shardings(state: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """A NamedSharding per leaf of a tree that holds copies of the parameter tree (moments): theirs; all else is on every device."""
    places = {tuple(map(str, path)): s for path, s in jax.tree_util.tree_flatten_with_path(shardings)[0]}
    shapes = {tuple(map(str, path)): x.shape for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}

    def place(path, leaf):
        keys = tuple(map(str, path))
        for lo in range(len(keys)):
            if shapes.get(keys[lo:]) == leaf.shape:
                return places[keys[lo:]]
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows as a global batch, rows split over data and fsdp."""
    return {k: jax.make_array_from_process_local_data(_rows(mesh), v) for k, v in batch.items()}


def abstract_batch(shape: tuple[int, int], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What `put_batch` returns for a global batch of this shape, without the data."""
    names = ('tokens', 'targets', 'segments', 'positions')
    return {k: jax.ShapeDtypeStruct(shape, np.int32, sharding=_rows(mesh)) for k in names}


def _rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH))
