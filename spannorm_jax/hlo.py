"""Reading a compiled program: its collectives, each as often as it runs, with the bytes that a chip sends.

XLA's own counts take the body of a loop once. Here every loop counts as often as its condition's constant says.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core
import numpy as np

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all', 'collective-permute', 'collective-broadcast')
BITS = {'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16, 's32': 32, 'u32': 32, 's64': 64, 'u64': 64, 'c64': 64}
INSTRUCTION = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
ARRAY = re.compile(r'\b([a-z]+\d+\w*|pred)\[([\d,]*)\]')
CALLED = re.compile(r'(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}')


@dataclass(frozen=True)
class Collective:
    """One collective of the program and how often a step runs it. `group`: positions, in the program's order of devices, that exchange."""

    kind: str
    operand_bytes: int  # per chip, per run
    runs: int
    group: tuple[int, ...]

    @property
    def sent_bytes(self) -> float:
        """Bytes that a chip sends per step, by the best algorithm for g chips that each hold n bytes: all-gather n (g - 1),
        reduce-scatter and all-to-all n (g - 1) / g, all-reduce twice that, permute n."""
        return self.runs * self.operand_bytes * _share(self.kind, len(self.group))

    def crossing_bytes(self, island: int) -> float:
        """What of it a chip must send to other islands (runs of `island` chips), m of the g chips being on its own: the parts that
        its island has already gathered or reduced go over once, divided among the m."""
        g = len(self.group)
        k = len({i // island for i in self.group})
        m, n = g / k, self.runs * self.operand_bytes
        if k == 1:
            return 0.0
        if self.kind in ('all-to-all', 'ragged-all-to-all'):
            return n * (g - m) / g
        return n * _share(self.kind, k) / (1 if self.kind in ('all-gather', 'collective-permute') else m)


def _share(kind: str, g: int) -> float:
    if kind == 'all-gather':
        return g - 1
    if kind in ('collective-permute', 'collective-broadcast'):
        return 1.0
    return (2 if kind == 'all-reduce' else 1) * (g - 1) / g


def collectives(text: str, devices: int) -> list[Collective]:
    """All collectives that run, from `compiled.as_text()` of a program over so many devices."""
    bodies = computations(text)
    fused = {called[0] for body in bodies.values() for *_, op, rest in body if op == 'fusion' for called in CALLED.findall(rest)}
    found, seen = [], set()
    for name, runs in executions(text, bodies).items():
        sizes = {}
        for instruction, shape, op, rest in bodies[name]:
            sizes[instruction] = array_bytes(shape)
            kind = op.removesuffix('-start')
            if kind not in KINDS:
                continue
            if name in fused and (channel := re.search(r'channel_id=(\d+)', rest)):
                if channel[1] in seen:  # one that was cut into steps, each fused with a computation that runs beside it
                    continue
                seen.add(channel[1])
            operands = re.findall(r'%?([\w.\-]+)', rest[: rest.index(')')])
            size = sum(sizes.get(o, 0) for o in operands)
            if kind == 'all-reduce' and 'all-reduce-scatter' in name:  # what a TPU makes of a reduce-scatter
                kind = 'reduce-scatter'
            found.append(Collective(kind, size, runs, replica_group(rest, devices)))
    return found


def computations(text: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """Name of each computation -> its instructions: name, shape, operation, and what follows."""
    bodies, current = {}, None
    for line in text.splitlines():
        head = re.match(r'^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$', line)
        if head:
            current = bodies.setdefault(head[1], [])
        elif current is not None and (m := INSTRUCTION.match(line)):
            current.append((m[2], m[3], m[4], m[5]))
    return bodies


def executions(text: str, bodies: dict[str, list[tuple[str, str, str, str]]]) -> dict[str, int]:
    """How often a step runs each computation that it reaches; callers come before what they call."""
    entry = re.search(r'^ENTRY %?([\w.\-]+)', text, re.M)
    if entry is None:
        raise ValueError('no entry computation in the text of the program')
    order, visited = [], set()

    def visit(name):
        if name not in visited and name in bodies:
            visited.add(name)
            for callee, _ in _calls(bodies, name):
                visit(callee)
            order.append(name)

    visit(entry[1])
    runs = dict.fromkeys(reversed(order), 0)
    runs[entry[1]] = 1
    for name in runs:
        for callee, times in _calls(bodies, name):
            if callee in runs:
                runs[callee] += runs[name] * times
    return runs


def _calls(bodies: dict[str, list[tuple[str, str, str, str]]], name: str) -> Iterator[tuple[str, int]]:
    for _, _, op, rest in bodies[name]:
        times = 1
        if op == 'while':
            known = re.search(r'known_trip_count[^\d}]*(\d+)', rest)
            condition = re.search(r'condition=%?([\w.\-]+)', rest)
            times = int(known[1]) if known else trip_count(bodies, condition[1]) if condition else 1
        for one, several in CALLED.findall(rest):
            for callee in [one] if one else re.findall(r'[\w.\-]+', several):
                yield callee, times


def trip_count(bodies: dict[str, list[tuple[str, str, str, str]]], condition: str) -> int:
    """Runs of a scan, whose condition compares its counter with a constant; 1 where the condition is of another kind."""
    names, constants = [condition], []
    for name in names:
        for _, shape, op, rest in bodies.get(name, []):
            if op == 'constant' and shape.startswith(('s32[]', 's64[]')) and (m := re.match(r'(\d+)\)', rest)):
                constants.append(int(m[1]))
            names += [callee for callee, _ in CALLED.findall(rest) if callee and callee not in names]
    return max(constants, default=1)


def array_bytes(shape: str) -> int:
    """Bytes of a shape, all parts of a tuple together; layouts and memory spaces are left out."""
    total = 0
    for dtype, dims in ARRAY.findall(re.sub(r'\{[^{}]*\}', '', shape)):
        width = BITS.get(dtype) or int(re.findall(r'\d+', dtype)[0])  # f32, bf16, f8e4m3fn
        total += math.prod(int(d) for d in dims.split(',') if d) * width
    return total // 8


def replica_group(rest: str, devices: int) -> tuple[int, ...]:
    """The first group of a collective, in any of the ways XLA writes them; all devices where it writes none."""
    if m := re.search(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}', rest):
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", m[1])}
        ids = _iota(m[2] or ','.join(map(str, sizes.values())), m[3]).reshape(list(sizes.values()))
        wanted = re.findall(r"'(\w+)'", m[4])
        index = tuple(slice(None) if axis in wanted else 0 for axis in sizes)
        return tuple(int(i) for i in np.asarray(ids[index]).reshape(-1))
    if m := re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest):
        return tuple(int(i) for i in _iota(m[3], m[4]).reshape(int(m[1]), int(m[2]))[0])
    if m := re.search(r'replica_groups=\{\{([\d,]+)\}', rest):
        return tuple(int(i) for i in m[1].split(','))
    if m := re.search(r'source_target_pairs=\{(.*?)\}\}', rest):
        pairs = [(int(a), int(b)) for a, b in re.findall(r'\{?(\d+),(\d+)', m[1])]
        far = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        return tuple(sorted(set(far)))
    return tuple(range(devices))


def _iota(dims: str, transposed: str | None) -> np.ndarray:
    sizes = [int(n) for n in dims.split(',')]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(n) for n in transposed.split(',')]) if transposed else ids


def axes_of(group: Sequence[int], mesh: jax.sharding.Mesh) -> str:
    """The axes of the mesh along which the members of a group differ: 'fsdp', 'data x fsdp'."""
    places = np.array(np.unravel_index(list(group), mesh.devices.shape))
    return ' x '.join(axis for axis, place in zip(mesh.axis_names, places, strict=True) if len(set(place)) > 1)


def matmul_flops(jaxpr: jax.extend.core.Jaxpr, once: bool = False) -> float:
    """FLOPs of every matrix product of a traced program: 2 per multiply-add, loops counted by their length (`once`: as XLA counts them,
    a single time), recomputation included."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name, times = eqn.primitive.name, 1
        if name == 'dot_general':
            (contracted, _), _ = eqn.params['dimension_numbers']
            lhs = _shape(eqn.invars[0])
            total += 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(lhs[d] for d in contracted)
        elif name == 'ragged_dot_general':
            lhs, rhs = map(_shape, eqn.invars[:2])
            numbers = eqn.params['ragged_dot_dimension_numbers']
            (contracted, _), _ = numbers.dot_dimension_numbers
            if set(numbers.lhs_ragged_dimensions) <= set(contracted):  # of a weight: each row meets one group's matrix
                total += 2.0 * math.prod(lhs) * math.prod(rhs) / math.prod(lhs[d] for d in contracted)
            else:
                total += 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(lhs[d] for d in contracted)
        elif name == 'scan':
            times = 1 if once else eqn.params['length']
        elif name == 'shard_map':
            mesh = eqn.params['mesh']
            times = math.prod(mesh.shape[a] for a in eqn.params['newly_manual_axes'])
        elif name == 'pallas_call':
            times = math.prod(eqn.params['grid_mapping'].grid)
        inner = [matmul_flops(sub, once) for sub in _inner(eqn.params)]
        total += times * (max(inner, default=0.0) if name == 'cond' else sum(inner))
    return total


def _shape(v: Any) -> tuple[int, ...]:
    return v.aval.shape


def _inner(params: dict) -> Iterator[jax.extend.core.Jaxpr]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else [value]:
            if isinstance(one, jax.extend.core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, jax.extend.core.Jaxpr):
                yield one
