"""Checkpoints of format 1 kept SpanNorm's first block in a run of its own, with the norm of the embedding in it; now all blocks are one.

Paths are those of a flat tree of parameters or of optimizer state: [...]stack.blocks_0.attn.q, [...]stack.norm_embed.gain.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp

BLOCKS = re.compile(r'(.*\bstack\.)blocks_(\d+)\.(.*)')
EMBED = re.compile(r'(.*\bstack\.)(norm_embed\..*)')


def split_first(meta: dict[str, Any]) -> bool:
    """Whether a checkpoint with this meta is laid out so."""
    model = meta['config'].get('model', {})
    return meta['format'] == 1 and model.get('topology') == 'span' and model.get('first_skip') == 'raw'


def before(like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """For each path of today the paths, in order, whose arrays make it up, each on all devices."""
    several = any(m[2] == '0' and s.shape[0] > 1 for path, s in like.items() if (m := BLOCKS.fullmatch(path)))
    parts = {}
    for path, s in like.items():
        shapes = {path: s.shape}
        if m := BLOCKS.fullmatch(path):
            run, count = int(m[2]), s.shape[0]
            shapes = {f'{m[1]}blocks_{run + several}.{m[3]}': s.shape}
            if run == 0:
                shapes = {f'{m[1]}blocks_{i}.{m[3]}': (n, *s.shape[1:]) for i, n in enumerate((1, count - 1)) if n}
        elif m := EMBED.fullmatch(path):
            shapes = {f'{m[1]}blocks_0.{m[2]}': (1, *s.shape)}
        parts[path] = {old: jax.ShapeDtypeStruct(shape, s.dtype, sharding=_everywhere(s.sharding)) for old, shape in shapes.items()}
    return parts


def join(like: dict[str, jax.ShapeDtypeStruct], found: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays of today, placed like `like`, from those at the paths of `before`."""
    joined = {
        path: jnp.concatenate([found[old] for old in parts]) if like[path].ndim else found[path] for path, parts in before(like).items()
    }
    return {path: jax.device_put(x.reshape(like[path].shape), like[path].sharding) for path, x in joined.items()}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The tree of a flat one."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *above, name = path.split('.')
        inner = tree
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = leaf
    return tree


def _everywhere(place: Any) -> Any:
    return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec()) if isinstance(place, jax.sharding.NamedSharding) else place
