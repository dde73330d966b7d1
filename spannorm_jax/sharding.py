"""The mesh, and the one table that says which logical axis of a parameter lies along which axis of the mesh."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from spannorm_jax.config import Config, MeshConfig
from spannorm_jax.errors import UserError
from spannorm_jax.initializers import is_param

MESH_AXES = ('replica', 'data', 'fsdp', 'expert', 'sequence', 'tensor')  # slowest links first
BATCH = ('replica', 'data', 'fsdp', 'expert')  # what the rows of a batch are split over
WEIGHTS = ('fsdp', 'expert', 'sequence')  # what a weight is split over along its width: every axis that would else hold copies of it
# Logical axis of an array -> mesh axes that split it. An axis taken by an earlier dimension of the array is left out.
RULES: dict[str, tuple[str, ...]] = {
    'experts': ('expert',),
    'vocab': ('tensor',),
    'heads': ('tensor',),
    'kv': ('tensor',),
    'ffn': ('tensor',),
    'width': WEIGHTS,
    'latent': WEIGHTS,
    'head_dim': (),
    'norm': (),
    'layers': (),
    # of activations
    'rows': BATCH,
    'positions': ('sequence',),
}


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Devices as a mesh with the axes MESH_AXES; `devices` are used instead of this process's (those of a slice that is only described).

    On TPU the order follows the links of the slice, and `replica` counts slices. Raises: UserError where the platform is absent, there
    are too few devices, or the sizes do not multiply to their number.
    """
    found = list(devices) if devices is not None else _present(cfg.platform)
    n = len(found) if cfg.devices is None else cfg.devices
    if not 1 <= n <= len(found):
        raise UserError(f'mesh.devices = {n}, but there are {len(found)} {found[0].platform} devices')
    sizes = [getattr(cfg, axis) for axis in MESH_AXES]
    if cfg.data == -1:
        rest = math.prod(size for axis, size in zip(MESH_AXES, sizes, strict=True) if axis != 'data')
        sizes[MESH_AXES.index('data')] = n // rest
    if math.prod(sizes) != n or 0 in sizes:
        given = {a: getattr(cfg, a) for a in MESH_AXES if a in ('data', 'fsdp', 'tensor') or getattr(cfg, a) != 1}
        shown = ' x '.join('?' if size == -1 else str(size) for size in given.values())
        raise UserError(f'mesh.{" x ".join(given)} = {shown} does not make {n} devices; change the sizes, or set mesh.devices')
    return Mesh(_arranged(found[:n], sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _present(platform: str) -> list[Any]:
    try:
        return jax.devices() if platform == 'auto' else jax.devices(platform)
    except RuntimeError as e:
        here = ', '.join(sorted({d.platform for d in jax.devices()}))
        raise UserError(f'mesh.platform = {platform!r} is not there (present: {here}); run `spannorm doctor`, or choose auto') from e


def _arranged(devices: list[Any], sizes: list[int]) -> np.ndarray:
    """Devices in the shape of the mesh. A TPU's position in the torus decides its place, so that neighbours on an axis are neighbours."""
    if devices[0].platform != 'tpu' or len(devices) == 1:
        return np.asarray(devices).reshape(sizes)
    slices = len({getattr(d, 'slice_index', 0) for d in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if sizes[0] % slices:
        raise UserError(
            f'mesh.replica = {sizes[0]} is not a multiple of the number of slices, {slices}: only replicas lie on different slices'
        )
    within, between = [sizes[0] // slices, *sizes[1:]], [slices, *[1] * (len(sizes) - 1)]
    return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)


def check_batch(cfg: Config, mesh: Mesh) -> None:
    """Raise UserError where the rows of one micro-batch, their positions or the experts do not divide over the mesh."""
    rows, shards = cfg.data.batch // cfg.optim.accumulate, math.prod(mesh.shape[a] for a in BATCH)
    if rows % shards:
        micro = f' / optim.accumulate = {cfg.optim.accumulate}' if cfg.optim.accumulate > 1 else ''
        axes = [a for a in BATCH if a in ('data', 'fsdp') or mesh.shape[a] > 1]
        raise UserError(
            f'data.batch = {cfg.data.batch}{micro} does not divide over mesh.{" x ".join(axes)} = '
            f'{" x ".join(str(mesh.shape[a]) for a in axes)}; change the batch, or use fewer devices (mesh.devices)'
        )
    if cfg.model.experts % mesh.shape['expert']:
        raise UserError(
            f'model.experts = {cfg.model.experts} does not divide over mesh.expert = {mesh.shape["expert"]}; change one of them'
        )
    if cfg.data.seq % mesh.shape['sequence']:
        raise UserError(f'data.seq = {cfg.data.seq} does not divide over mesh.sequence = {mesh.shape["sequence"]}; change one of them')


def spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> tuple[PartitionSpec, list[str]]:
    """Where each dimension of an array lies, and a note for each that is split less than the rules say, because it does not divide."""
    places, notes, taken = [], [], set()
    for name, size in zip(axes, shape, strict=True):
        wanted = tuple(a for a in RULES.get(name, ()) if a not in taken and mesh.shape[a] > 1) if name is not None else ()
        place = wanted
        while size % math.prod(mesh.shape[a] for a in place):
            place = place[:-1]
        if place != wanted:
            over = ' x '.join(f'mesh.{a}' for a in wanted)
            kept = f'split over {" x ".join(place)} alone' if place else 'kept whole'
            notes.append(f'{name} = {size} does not divide over {over} = {" x ".join(str(mesh.shape[a]) for a in wanted)}: {kept}')
        taken.update(place)
        places.append(place[0] if len(place) == 1 else place or None)
    return PartitionSpec(*places), notes


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x, split over the mesh that is set (`jax.set_mesh`) as the rules say of its logical axes; x itself where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh)[0])


def target() -> tuple[str, str]:
    """Platform and kind of the devices that programs are made for: those of the mesh that is set, else this process's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.config.values['jax_default_device'] or jax.devices()[0]
    return device.platform, device.device_kind


def pieces(axis: str) -> int:
    """How many pieces the mesh that is set cuts a logical axis into."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[a] for a in RULES[axis])


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


def local_rows(mesh: Mesh, batch: int) -> list[int]:
    """The rows of a global batch that lie, whole or in part, on devices of this process."""
    places = NamedSharding(mesh, PartitionSpec(BATCH)).addressable_devices_indices_map((batch,))
    return sorted({r for index in places.values() if index for r in range(batch)[index[0]]})


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, size: int | None = None) -> dict[str, jax.Array]:
    """The rows that `local_rows` names, as a global batch of `size` rows (None: they are all there), split over rows and positions."""
    if size is None:
        return {k: jax.device_put(v, _batch(mesh)) for k, v in batch.items()}
    at = {r: i for i, r in enumerate(local_rows(mesh, size))}

    def place(array):
        part = lambda index: array[[at[r] for r in range(size)[index[0]]], index[1]]  # noqa: E731
        return jax.make_array_from_callback((size, array.shape[1]), _batch(mesh), part)

    return {k: place(v) for k, v in batch.items()}


def abstract_batch(shape: tuple[int, int], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What `put_batch` returns for a global batch of this shape, without the data."""
    names = ('tokens', 'targets', 'segments', 'positions')
    return {k: jax.ShapeDtypeStruct(shape, np.int32, sharding=_batch(mesh)) for k in names}


def _batch(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH, 'sequence'))
