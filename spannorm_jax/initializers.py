"""How parameters begin: the metadata every parameter carries, the std of each matrix by recipe and role, and the init audit.

Roles: embed, read (q k v gate up), write (o down: what adds to the residual stream), head, gain, bias, gate (static factors of a
topology), mix (its learned matrices), router, router_bias. They also decide weight decay and what each diagnostic reports.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spannorm_jax import parametrization
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.topology import TOPOLOGIES, Recipe

CUT = 3.0  # normals are truncated at this many std, and widened so that the std is the intended one
_CUT_STD = math.sqrt(1 - 2 * CUT * math.exp(-CUT * CUT / 2) / math.sqrt(2 * math.pi) / math.erf(CUT / math.sqrt(2)))


class Init(NamedTuple):
    """Initial value: `const` plus `std` times a normal truncated at 3 std, or `fn(key, shape, 2 * layer + sublayer)`."""

    std: float = 0.0
    const: float = 0.0
    fn: Callable | None = None
    sublayer: int = 0

    def __call__(self, key: jax.Array, shape: tuple[int, ...], layer: Any = 0) -> jax.Array:
        if self.fn is not None:
            return self.fn(key, shape, 2 * layer + self.sublayer).astype(jnp.float32)
        value = jnp.full(shape, self.const, jnp.float32)
        if self.std:
            value += self.std / _CUT_STD * jax.random.truncated_normal(key, -CUT, CUT, shape, jnp.float32)
        return value


@flax.struct.dataclass
class Param(nn.meta.AxisMetadata):
    """A parameter with its role, logical axes, fan-in and initial distribution; Linen unboxes it wherever it is used."""

    value: Any
    axes: tuple[str | None, ...] = flax.struct.field(pytree_node=False)
    role: str = flax.struct.field(pytree_node=False)
    init: Init = flax.struct.field(pytree_node=False)
    fan_in: int = flax.struct.field(pytree_node=False, default=1)

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return dataclasses.replace(self, value=val)

    def add_axis(self, index, params):
        return dataclasses.replace(self, axes=(*self.axes[:index], params[nn.PARTITION_NAME], *self.axes[index:]))

    def remove_axis(self, index, params):
        return dataclasses.replace(self, axes=self.axes[:index] + self.axes[index + 1 :])

    @classmethod
    def from_nnx_metadata(cls, metadata):
        """Back from a variable of NNX (flax.nnx.bridge), which has attributes of its own besides ours."""
        return cls(**{f.name: metadata[f.name] for f in dataclasses.fields(cls)})


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def make(
    mod: nn.Module, name: str, shape: tuple[int, ...], axes: tuple, role: str, init: Init, fan_in: int = 1, layer: Any = 0
) -> jax.Array:
    """Create (or read) the parameter `name` of a Linen module; `layer` is the 0-based block index that some inits depend on."""
    value: Any = mod.param(name, lambda key: Param(init(key, shape, layer), axes, role, init, fan_in))  # unboxed by Linen
    return value


def recipe(cfg: ModelConfig) -> Recipe:
    """The recipe a config asks for, constants worked out; `std = 'fan_in'` means 1 / sqrt(fan_in)."""
    if cfg.init == 'own':
        return TOPOLOGIES[cfg.topology].recipe(cfg)
    scale = {'none': 1.0, 'sqrt_L': cfg.layers**-0.5, 'sqrt_2L': (2 * cfg.layers) ** -0.5}[cfg.scale_init]
    std = 'fan_in' if cfg.init_std is None else cfg.init_std
    # A tied embedding is also the head: at std 1 its logits would start sqrt(width) too large.
    embed = next(s for s in (cfg.embed_std, cfg.init_std, cfg.width**-0.5 if cfg.tie_embeddings else 1.0) if s is not None)
    return Recipe(std, embed=embed, gains={'o': scale, 'down': scale})


def matrix_init(cfg: ModelConfig, name: str, fan_in: int, fan_out: int) -> Init:
    """Initial distribution of the matrix `name` (embed, head, q, k, v, o, gate, up, down) under the config's recipe.

    std = base * gain(name), base = sigma, 1/sqrt(fan_in) or Xavier's sqrt(2 / (fan_in + fan_out)); under mup and completep that of the
    base model times `parametrization.init_factor`.
    """
    r = recipe(parametrization.base(cfg))
    special = {'embed': r.embed, 'head': r.head}.get(name)
    if special is not None:
        return Init(special)
    if cfg.parametrization != 'standard':
        fan_in, fan_out = parametrization.base_fans(cfg, name, fan_in, fan_out)
    base = {'fan_in': fan_in**-0.5, 'xavier': (2 / (fan_in + fan_out)) ** 0.5}[r.std] if isinstance(r.std, str) else r.std
    return Init(base * r.gains.get(name, 1.0) * parametrization.init_factor(cfg, name))


def draw(params: list[tuple[str, range | None, Param]], key: jax.Array) -> list[jax.Array]:
    """Initial values of (name, layers, info), each from the seed, its own name and its layer alone.

    So a weight does not depend on the topology around it, on the depth below or above it, on how blocks are split into scans, or on
    the mesh: models that are compared start from the same numbers (up to each one's std).
    """
    # All keys in one go: hashing is long code, and XLA compiles each use of it anew.
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    names = fold(key, jnp.array([zlib.crc32(name.encode()) for name, _, _ in params], jnp.uint32))
    depth = 1 + max((layers.stop for _, layers, _ in params if layers), default=0)
    keys = jax.vmap(fold, (0, None))(names, jnp.arange(depth))  # layer l of a stacked parameter at l + 1, any other one at 0

    def value(i, layers, info):
        if layers is None:
            return info.init(keys[i, 0], info.value.shape)
        one = lambda k, l: info.init(k, info.value.shape[1:], l)  # noqa: E731
        return jax.vmap(one)(keys[i, layers.start + 1 : layers.stop + 1], jnp.arange(layers.start, layers.stop))

    return [value(i, layers, info) for i, (_, layers, info) in enumerate(params)]


class AuditRow(NamedTuple):
    """One parameter (one layer of a stacked one): what was intended and what was measured."""

    name: str
    role: str
    shape: tuple[int, ...]
    fan_in: int
    intended_mean: float | None
    intended_std: float | None
    mean: float
    std: float
    decays: bool
    dtype: str
    bytes_per_device: int
    ok: bool


def audit_row(name: str, info: Param, value: np.ndarray | jax.Array, decay_roles: tuple[str, ...], shards: int = 1) -> AuditRow:
    """Compare a parameter with its recipe. Bounds are five standard errors of the mean and of the std of n truncated normals."""
    x = np.asarray(value, np.float64)
    mean, std, n = float(x.mean()), float(x.std()), x.size
    init = info.init
    if init.fn is not None:  # a fixed pattern: any finite value will do, its function has its own test
        want_mean = want_std = None
        ok = bool(np.isfinite(x).all())
    else:
        want_mean, want_std = init.const, init.std
        # The variance of s^2 of a normal is 2 sigma^4 / (n - 1); truncation only narrows it.
        slack = 5 * max(n - 1, 1) ** -0.5
        ok = abs(mean - want_mean) <= 5 * want_std * n**-0.5 + 1e-6 and (n == 1 or abs(std - want_std) <= slack * want_std + 1e-6)
    size = value.size * value.dtype.itemsize // shards
    decays = info.role in decay_roles
    return AuditRow(name, info.role, value.shape, info.fan_in, want_mean, want_std, mean, std, decays, str(value.dtype), size, ok)
