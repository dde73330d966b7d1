"""The models that the claims are measured on, at initialisation, and one compiled program for all that differ in their weights alone."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spannorm_jax.initializers import is_param
from spannorm_jax.model import LM, infos
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.theory import anatomy

ROWS, POSITIONS, VOCAB = 4, 64, 256
SHORT = 16  # positions of the one row that Jacobians are taken at

Tables = dict[str, list[dict[str, Any]]]  # name of a table -> its rows; a number is plain or an Estimate


class Cell(NamedTuple):
    """Width 64, 4 heads, FFN of 170 hidden units, vocabulary 256, no positions, RMSNorm of eps 1e-6 with gains 1, no biases, untied head.

    Weights have std 1/sqrt(fan_in), those of attention's and the FFN's output projections 1/sqrt(2L) of that under sqrt_2L; the embedding
    has embed_std. Only pre has a final norm. `first_skip` is span's reading: 'normed' is B.

    What is left open elsewhere and chosen here: the weights are normals cut at 3 std, widened to the intended std; the 4 x 64 tokens are
    drawn anew for each seed, apart from the weights, and the loss averages the 4 x 63 next tokens that lie among them; the FFN has 170
    hidden units whether it is gated or not; the final norm of pre has eps 1e-6 too; g_1 and g_L are the gradients of the whole
    (170, 64) matrix of the first and of the last block; the mean over seeds is that of the logarithm.
    """

    topology: str
    scale_init: str
    layers: int
    activation: str = 'swiglu'
    first_skip: str = 'normed'
    embed_std: float = 1.0

    def config(self, **fields: Any) -> ModelConfig:
        reading: dict[str, Any] = {'first_skip': self.first_skip} if self.topology == 'span' else {}
        return ModelConfig(
            **{
                'topology': self.topology,
                'layers': self.layers,
                'width': 64,
                'heads': 4,
                'ffn': 170,
                'vocab': VOCAB,
                'positions': 'none',
                'activation': self.activation,
                'scale_init': self.scale_init,
                'embed_std': self.embed_std,
                **reading,
                **fields,
            }
        )

    def to_json(self) -> dict[str, Any]:
        told = self._asdict()
        if self.topology != 'span':
            del told['first_skip']
        return told


def draw_tokens(seed: int, shape: tuple[int, int] = (ROWS, POSITIONS)) -> jax.Array:
    return jax.random.randint(jax.random.fold_in(jax.random.key(seed), 1), shape, 0, VOCAB, jnp.int32)


def measure(
    cell: Cell, seeds: int, wanted: Mapping[Callable[..., Any], tuple[int, int]]
) -> dict[Callable[..., Any], dict[str, np.ndarray]]:
    """For each `of(cfg, params, tokens)` in `wanted`, on tokens of its shape: a dict of float64 arrays, seeds 0, 1, ... in front."""
    cfg = cell.config()
    programs = {of: compiled(of, dataclasses.replace(cfg, scale_init='none', embed_std=None)) for of in wanted}  # what only drawing reads
    found: dict[Callable[..., Any], list[dict[str, np.ndarray]]] = {of: [] for of in wanted}
    for seed in range(seeds):
        params = weights(cell, seed)
        for of, shape in wanted.items():
            found[of].append(jax.device_get(programs[of](params, draw_tokens(seed, shape))))
    return {of: {k: np.stack([np.asarray(f[k], np.float64) for f in each]) for k in each[0]} for of, each in found.items()}


@functools.lru_cache(maxsize=8)
def drawn(layers: int, seed: int) -> dict[str, Any]:
    """Weights of the base std of one model that has every matrix the cells of this depth have."""
    return LM(Cell('span', 'none', layers).config()).init(jax.random.key(seed))


def weights(cell: Cell, seed: int) -> dict[str, Any]:
    """What `LM(cell.config()).init(jax.random.key(seed))` gives, to rounding: draws depend on seed, name and layer alone, and cells differ
    in the std of some. To draw 512 blocks takes longer than to measure them, so cells of a depth share `drawn`."""
    every = dict(jax.tree_util.tree_leaves_with_path(drawn(cell.layers, seed)))

    def value(path, info):
        if info.role == 'gain':
            return jnp.full(info.value.shape, info.init.const)
        branch = (2 * cell.layers) ** -0.5 if info.role == 'write' and cell.scale_init == 'sqrt_2L' else 1.0
        return every[path] * (branch * (cell.embed_std if info.role == 'embed' else 1.0))

    return jax.tree_util.tree_map_with_path(value, infos(cell.config()), is_leaf=is_param)


@functools.cache
def compiled(of: Callable[..., Any], cfg: ModelConfig) -> Callable[..., Any]:
    return jax.jit(functools.partial(of, cfg))


def sums_and_gradients(cfg: ModelConfig, params: Any, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """What T1, T6 and T8 read."""
    g = anatomy.log_gradients(cfg, params, tokens_BT, observing=True)
    found = {'ln_grad': g['weights']['ffn.down'], 'ln_stream': g['stream'], 'ln_embedding': g['embedding'], 'loss': g['loss']}
    return found | {k.replace('/', '_'): v for k, v in g['sums'].items()}


def depths_of(cells: Sequence[Cell]) -> dict[Cell, list[Cell]]:
    """Cells that differ in depth alone, by the first of them, from shallow to deep."""
    groups: dict[Cell, list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: c.layers):
        groups.setdefault(next((g for g in groups if g._replace(layers=cell.layers) == cell), cell), []).append(cell)
    return groups


def log_depths(cells: Sequence[Cell]) -> list[float]:
    return [math.log(c.layers) for c in cells]
