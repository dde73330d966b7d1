"""`plan --search`: which mesh and remat policy to try first, by formula; the compiler has the last word."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from spannorm_jax.chips import Chips
from spannorm_jax.config import Config, MeshConfig, edit
from spannorm_jax.errors import CheckFailed, UserError
from spannorm_jax.model import count_params, flops_per_token, group_size
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.plan import Plan, plan
from spannorm_jax.topology import runs

RECOMPUTED = {'none': 0.0, 'dots': 0.1, 'full': 1.0, 'sqrt': 2.0}  # forward passes done again in the backward pass
KEPT = {'none': 34.0, 'dots': 12.0}  # values per token, block and channel of width that wait for the backward pass


class Candidate(NamedTuple):
    cfg: Config
    floor_s: float  # by `estimate`, not by the compiler
    bytes: float


def estimate(cfg: Config, chips: Chips, params: int, flops: float) -> tuple[float, float]:
    """(seconds, bytes per chip) of a step by formula, good enough to order candidates; flops: per token.

    compute: (6 + 2 r) FLOPs per weight and token, r forward passes being recomputed. links, in products' bytes: fsdp gathers the weights
    once forward and once backward and scatters the gradient; tensor adds 2 all-reduces of the activations forward, 2 backward, and 2 r
    more per block; data adds an all-reduce of the gradient shards. memory: 16 bytes per parameter (weight, two moments, gradient), one
    block's gathered weights, and what waits for the backward pass.
    """
    model, mesh, chip = cfg.model, cfg.mesh, chips.chip
    width = 4 if model.dtype == 'float32' else 2
    again = RECOMPUTED[model.remat]
    rows = mesh.replica * max(mesh.data, 1) * mesh.fsdp * mesh.expert
    tokens = cfg.data.batch * cfg.data.seq / cfg.optim.accumulate / rows / mesh.sequence
    compute = flops * (1 + again / 3) * cfg.data.batch * cfg.data.seq / chips.count / chip.peak_flops
    split = mesh.fsdp * mesh.expert * mesh.sequence
    gathered = 3 * width * params / mesh.tensor * (split - 1) / split * cfg.optim.accumulate
    summed = (4 + 2 * again) * model.layers * width * tokens * model.width * 2 * (mesh.tensor - 1) / mesh.tensor * cfg.optim.accumulate
    copies = mesh.replica * max(mesh.data, 1)
    shard = params / split / mesh.tensor
    reduced = 2 * 4 * shard * (copies - 1) / copies
    fast = split * mesh.tensor <= chips.island
    links = (gathered + summed) / (chip.link_bandwidth if fast else chip.network_bandwidth)
    links += reduced / (chip.link_bandwidth if chips.count <= chips.island else chip.network_bandwidth)
    inputs = {'full': model.layers, 'sqrt': inputs_kept(model)}  # of blocks, which tensor does not split
    waiting = inputs[model.remat] if model.remat in inputs else KEPT[model.remat] * model.layers / mesh.tensor
    kept = tokens * model.width * width * (waiting + KEPT['none'])
    logits = 3 * 4 * min(tokens * model.vocab, 2**25) / mesh.tensor
    block = 2 * width * params / model.layers / mesh.tensor
    return max(compute, links), 16 * shard + kept + logits + block


def inputs_kept(model: ModelConfig) -> int:
    """Inputs of blocks, or of groups of them, that wait at most under remat sqrt."""
    sizes = [(n, group_size(n)) for *_, n in runs(model)]
    return sum(n if size == n else n // size for n, size in sizes) + max((size for n, size in sizes if size < n), default=0)


def candidates(cfg: Config, chips: Chips) -> list[Candidate]:
    """Every mesh over these chips that splits rows and heads evenly, with every remat policy: those that fit first, then by floor."""
    found, counts = [], (count_params(cfg.model), flops_per_token(cfg.model, cfg.data.seq))
    for mesh in meshes(cfg, chips):
        for remat in RECOMPUTED:
            if remat == 'sqrt' and inputs_kept(cfg.model) >= cfg.model.layers:
                continue  # no groups: the same program as full
            one = edit(cfg, {'mesh': mesh, 'model.remat': remat})
            found.append(Candidate(one, *estimate(one, chips, *counts)))
    room = chips.chip.hbm_bytes
    return sorted(found, key=lambda c: (c.bytes > room, c.floor_s if c.bytes <= room else c.bytes, c.cfg.mesh.tensor, -c.cfg.mesh.fsdp))


def meshes(cfg: Config, chips: Chips) -> Iterator[MeshConfig]:
    """Expert and sequence shards stay as configured; replica is the number of slices."""
    mesh, rows = cfg.mesh, cfg.data.batch // cfg.optim.accumulate
    per = chips.count // chips.slices
    if per % (mesh.expert * mesh.sequence):
        return
    rest = per // (mesh.expert * mesh.sequence)
    for tensor in (n for n in range(1, rest + 1) if rest % n == 0):
        if cfg.model.heads % tensor or cfg.model.resolved_kv_heads % tensor or cfg.model.resolved_ffn % tensor:
            continue
        for fsdp in (n for n in range(1, rest // tensor + 1) if rest // tensor % n == 0):
            one = dataclasses.replace(mesh, replica=chips.slices, data=rest // tensor // fsdp, fsdp=fsdp, tensor=tensor)
            if rows % (one.replica * one.data * one.fsdp * one.expert) == 0:
                yield one


def search(cfg: Config, chips: Chips, compiles: int, tell: Callable[[str], None] = lambda text: None) -> Plan:
    """The first candidate that the compiler makes fit, of at most so many that it is asked about.

    Raises: UserError where no mesh splits the batch; CheckFailed where none that was compiled fits.
    """
    found = candidates(cfg, chips)
    if not found:
        raise UserError(f'no mesh over {chips} splits data.batch = {cfg.data.batch} rows evenly; change data.batch or the chips')
    tried = []
    for i, c in enumerate(found[:compiles]):
        mesh = ' x '.join(f'{a} {n}' for a, n in dataclasses.asdict(c.cfg.mesh).items() if isinstance(n, int) and n != 1)
        tell(
            f'compiling {i + 1} of at most {compiles} ({len(found)} candidates): {mesh or "one chip"}, remat {c.cfg.model.remat}: '
            f'by formula {1000 * c.floor_s:.0f} ms, {c.bytes / 1e9:.1f} GB'
        )
        made = plan(c.cfg, chips)
        if made.fits:
            return made
        tried.append(made)
        tell(f'  does not fit: {made.why}')
    least = min(tried, key=lambda p: p.bytes.peak or math.inf)
    raise CheckFailed(f'none of {len(tried)} compiled candidates fits {chips}; the least needs {least.why}; allow more with --compiles')
