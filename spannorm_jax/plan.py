"""`plan`: the train step, compiled ahead of time for chips that are not here, and what it says about memory, FLOPs and links."""

import math
import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
from jax.experimental import topologies

from spannorm_jax import hlo, sharding
from spannorm_jax.attention import choose_kernel
from spannorm_jax.chips import Chips
from spannorm_jax.config import Config, edit
from spannorm_jax.errors import UserError
from spannorm_jax.model import count_params, each_param, flops_per_token
from spannorm_jax.program import Program, program

FLOOR = 'max(FLOPs / peak, HBM bytes / bandwidth, link bytes / bandwidth)'
GIGA = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclass(frozen=True)
class Bytes:
    """Per chip. peak = arguments + outputs - aliased + temporaries; None where the compiler gave up before it knew."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int | None
    peak: int | None


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind along the same axes of the mesh, per step: `bytes` that a chip sends, `crossing` those that leave
    its slice or host."""

    kind: str
    axes: str
    runs: int
    bytes: float
    crossing: float


@dataclass(frozen=True)
class Plan:
    """What a step of a configuration needs on described chips. Bytes and FLOPs are per chip where not said otherwise."""

    name: str
    chips: str
    mesh: dict[str, int]
    remat: str
    params: int
    tokens_per_step: int
    fits: bool
    hbm_bytes: float
    bytes: Bytes
    compile_s: float
    flops_per_token: float  # 6 per weight and the causal half of attention
    traced_flops_per_token: float  # every matrix product of the traced step, recomputation included
    compiler_flops: float | None  # of one chip, XLA's own count, a loop's body taken once; None where XLA has none
    traced_flops_once: float  # of one chip, the same count of the traced step
    collectives: list[Traffic]
    attention_kernel: str  # that will run
    compiled_kernel: str  # the one in this plan: xla where the library of the other is not here
    floor_s: float
    floor_of: dict[str, float]  # seconds by what limits
    floor_formula: str
    why: str = ''
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def devices_of(chips: Chips) -> list[Any]:
    """The devices of such a slice or cluster, as the compiler describes them.

    Raises: UserError where the compiler's library is not installed, or knows no such topology.
    """
    os.environ.update(chips.environment)  # libtpu reads it once, when it is loaded
    extra = 'tpu' if chips.platform == 'tpu' else 'cuda'
    try:
        if chips.platform == 'tpu':
            more = {'num_slices': chips.slices} if chips.slices > 1 else {}
            return list(topologies.get_topology_desc(chips.topology, 'tpu', **more).devices)
        described = topologies.get_topology_desc('described', 'cuda', target_config=chips.target_config, topology=chips.topology)
        return list(described.devices)
    except (ImportError, FileNotFoundError, NotImplementedError, RuntimeError, AssertionError, ValueError) as e:
        if not installed(extra):
            raise UserError(f"--chips {chips}: no compiler for it is installed; pip install 'spannorm-jax[{extra}]'") from e
        raise UserError(f'--chips {chips}: its compiler knows no such topology ({str(e).splitlines()[0][:200]})') from e


def installed(what: str) -> bool:
    import importlib.util

    names = {'tpu': ('libtpu',), 'cuda': ('jax_cuda12_plugin', 'jax_cuda13_plugin'), 'cudnn': ('nvidia',)}[what]
    return any(importlib.util.find_spec(name) is not None for name in names)


def plan(cfg: Config, chips: Chips) -> Plan:
    """Compile the train step of `cfg` for these chips; nothing runs.

    Raises: UserError (no compiler, a mesh that does not fit the number of chips, a batch that does not divide over it). A program that
    is too large for the chips is no error: then `fits` is False and `why` says what the compiler said.
    """
    mesh = sharding.make_mesh(cfg.mesh, devices_of(chips))
    with jax.set_mesh(mesh):
        kernel, notes = choose_kernel(cfg.model, cfg.data.seq)
    here = edit(cfg, {'model.attn_kernel': 'xla'}) if kernel == 'cudnn' and not installed('cudnn') else cfg
    found = compiled_plan(program(here, mesh), chips)
    return replace(found, attention_kernel=kernel, notes=[*found.notes, *notes])


def compiled_plan(made: Program, chips: Chips) -> Plan:
    """The plan of a program, on whatever devices its mesh is made of."""
    cfg, mesh = made.cfg, made.mesh
    begun = time.perf_counter()
    with jax.set_mesh(mesh):
        kernel, _ = choose_kernel(cfg.model, cfg.data.seq)
        traced = made.step().trace(made.abstract, made.batch, made.peaks)
        arguments = sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves((made.abstract, made.batch, made.peaks))
        )
        compiled, why = None, ''
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as e:
            if 'RESOURCE_EXHAUSTED' not in str(e):
                raise
            why = str(e).splitlines()[0].removeprefix('RESOURCE_EXHAUSTED: ')
    seconds = time.perf_counter() - begun
    size = memory(compiled, arguments, why)
    traffic = [] if compiled is None else summed(hlo.collectives(compiled.as_text(), mesh.size), mesh, chips)
    flops = hlo.matmul_flops(traced.jaxpr.jaxpr)
    of = floors(flops / mesh.size, size, traffic, chips)
    fits = compiled is not None and size.peak is not None and size.peak <= chips.chip.hbm_bytes
    if size.peak is not None and not fits and not why:
        why = f'{size.peak / 1e9:.2f} GB of {chips.chip.hbm_bytes / 1e9:.2f} GB'
    cost = None if compiled is None else compiled.cost_analysis()
    tokens = cfg.data.batch * cfg.data.seq
    return Plan(
        name=cfg.name,
        chips=str(chips),
        mesh=dict(mesh.shape),
        remat=cfg.model.remat,
        params=count_params(cfg.model),
        tokens_per_step=tokens,
        fits=fits,
        hbm_bytes=chips.chip.hbm_bytes,
        bytes=size,
        compile_s=seconds,
        flops_per_token=flops_per_token(cfg.model, cfg.data.seq),
        traced_flops_per_token=flops / tokens,
        compiler_flops=cost.get('flops') if cost else None,
        traced_flops_once=hlo.matmul_flops(traced.jaxpr.jaxpr, once=True) / mesh.size,
        collectives=traffic,
        attention_kernel=kernel,
        compiled_kernel=kernel,
        floor_s=max(of.values()),
        floor_of=of,
        floor_formula=FLOOR,
        why=why,
        notes=made.notes,
    )


def memory(compiled: Any, arguments: int, why: str) -> Bytes:
    """Sizes as the compiler planned them, or what its complaint says of them."""
    if compiled is None:
        said = re.search(r'temporaries \(([\d.]+)([KMGT])', why)
        used = re.search(r'Used ([\d.]+)([KMGT])', why)
        temporaries = int(float(said[1]) * GIGA[said[2]]) if said else None
        peak = int(float(used[1]) * GIGA[used[2]]) if used else arguments + temporaries if temporaries else None
        return Bytes(arguments, arguments, arguments, temporaries, peak)
    m = compiled.memory_analysis()
    kept = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return Bytes(m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes, kept + m.temp_size_in_bytes)


def summed(found: list[hlo.Collective], mesh: jax.sharding.Mesh, chips: Chips) -> list[Traffic]:
    """Largest first."""
    total: dict[tuple[str, str], list[float]] = {}
    for c in found:
        entry = total.setdefault((c.kind, hlo.axes_of(c.group, mesh)), [0, 0.0, 0.0])
        for i, n in enumerate((c.runs, c.sent_bytes, c.crossing_bytes(chips.island))):
            entry[i] += n
    rows = [Traffic(kind, axes, int(n), sent, crossing) for (kind, axes), (n, sent, crossing) in total.items()]
    return sorted(rows, key=lambda t: -t.bytes)


def floors(flops: float, size: Bytes, traffic: list[Traffic], chips: Chips) -> dict[str, float]:
    """Seconds that a step takes at least, by what limits it.

    compute: matrix products at the peak. hbm: arguments read, outputs written, temporaries written and read once. links: bytes sent at the
    bandwidth of all links of a chip; network: those that leave its slice or host.
    """
    chip = chips.chip
    moved = size.arguments + size.outputs + 2 * (size.temporaries or 0)
    return {
        'compute': flops / chip.peak_flops,
        'hbm': moved / chip.hbm_bandwidth,
        'links': sum(t.bytes - t.crossing for t in traffic) / chip.link_bandwidth,
        'network': sum(t.crossing for t in traffic) / chip.network_bandwidth,
    }


def parameter_bytes(made: Program) -> dict[str, int]:
    """Bytes on one device of every parameter, by name (all layers of a stacked one together)."""
    size = lambda x: x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))  # noqa: E731
    return {f'{name}[{layers}]' if layers else name: size(x) for name, layers, x in each_param(made.cfg.model, made.abstract.params)}
