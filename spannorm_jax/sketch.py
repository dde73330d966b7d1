"""A topology as a graph: its own block function, run on symbols that note what is done to them. Nothing is drawn from a description."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from spannorm_jax import streams
from spannorm_jax.config import ModelConfig
from spannorm_jax.topology import TOPOLOGIES, canonical, runs

LAYERS = 12  # of the model that is drawn


@dataclasses.dataclass(eq=False)
class Node:
    """kind: end, port, norm, attn, ffn, read or sum; `sources`: each with the factor on the way from it; `column`: the stream it is on."""

    kind: str
    text: str
    sources: list[tuple['Node', str]]
    column: int = 0
    note: str = ''
    used: bool = False  # something has read it

    def __post_init__(self):
        for source, _ in self.sources:
            source.used = True


@dataclasses.dataclass(frozen=True)
class Factor:
    """A number or a learned array that something is multiplied by."""

    name: str

    def __getitem__(self, _: Any) -> 'Factor':
        return self

    def __mul__(self, value: 'Value') -> 'Value':
        return value * self


@dataclasses.dataclass(frozen=True)
class Value:
    """What a node gives, times a factor."""

    node: Node
    factor: str = ''
    shape: tuple[int, ...] = ()

    def times(self, factor: str) -> 'Value':
        return Value(self.node, f'{self.factor} {factor}'.strip())

    def through(self, kind: str, text: str, note: str = '') -> 'Value':
        return Value(Node(kind, text, [(self.node, self.factor)], self.node.column, note))

    def __add__(self, other: Any) -> 'Value':
        if isinstance(other, Factor):  # an offset of its own
            return self.times(f'+ {other.name}')
        node, sources = self.node, [(self.node, self.factor), (other.node, other.factor)]
        if node.kind == 'sum' and not node.used and not self.factor and {s.column for s, _ in node.sources} == {other.node.column}:
            node.sources.append(sources[1])  # a + b + c is one sum
            other.node.used = True
            return self
        return Value(Node('sum', '+', sources, node.column))

    def __mul__(self, other: Any) -> 'Value':
        name = other.name if isinstance(other, Factor) else f'{other:g}'
        return self if name == '1' else self.times(name)

    __rmul__ = __mul__

    def __truediv__(self, number: float) -> 'Value':
        return self.times(f'1/{number:g}')

    def __getitem__(self, _: Any) -> 'Value':
        return self

    def reshape(self, *_: int) -> 'Value':
        return self

    def repeat(self, *_: Any, **__: Any) -> 'Value':
        return self.times('n copies')

    def sum(self, *_: Any) -> 'Value':
        return self.times('sum of n')


class Context:
    """What a block function knows as `c`."""

    def __init__(self, cfg: ModelConfig, first: bool):
        entry = TOPOLOGIES[cfg.topology]
        self.cfg, self._first = cfg, first and entry.embed_norm_inside(cfg)
        for name in entry.coef(cfg, 0):
            setattr(self, name, Factor({'alpha': 'a'}.get(name, name)))

    def add(self, site: str, skip: Value, o: Value) -> Value:
        return skip + o

    def embedded(self, x: Value) -> Value:
        return x.through('norm', 'embed', 'block 1 only') if self._first else x

    def param(self, name: str, *_: Any, **__: Any) -> Factor:
        return Factor('g' if name.endswith('gain') else name)


def sublayer(kind: str, text: str) -> Callable:
    inside = {'qkv': 'norms of q, k, v', 'inner': 'norm before output', '': ''}
    return lambda x, norms='': x.through(kind, text, inside[norms])


def mixing() -> Any:
    """While entered, the algebra of several streams notes what is done to them. How its weights come about is left out."""
    through = lambda H, sub, mix, read, write: (H.times(mix), sub(H.through('read', read)).times(write))  # noqa: E731
    return mock.patch.multiple(
        streams,
        hc_weights=lambda *_: (None, None),
        mhc_weights=lambda *_: None,
        hc_sublayer=lambda H, sub, *_: through(H, sub, 'A_m', 'a_r', 'beta'),
        mhc_sublayer=lambda H, sub, _: through(H, sub, 'R', 'pre', 'post'),
    )


class Run(NamedTuple):
    """So many equal blocks (layers): where the streams come in and go out."""

    begin: list[Node]
    end: list[Node]
    layers: int


class Sketch(NamedTuple):
    """All nodes, each after those it reads, and the runs of equal blocks."""

    name: str
    nodes: list[Node]
    runs: list[Run]


def sketch(name: str) -> Sketch:
    """The graph of a topology, with its default options, in a model of LAYERS blocks. Raises: UserError (no such topology)."""
    cfg = ModelConfig(topology=canonical(name), layers=LAYERS)
    entry = TOPOLOGIES[cfg.topology]
    there = {'embed': entry.embed_norm and not entry.embed_norm_inside(cfg), 'final': entry.final_norm}
    norm = lambda site, x: x.through('norm', site) if there.get(site, True) else x  # noqa: E731
    attn, ffn = sublayer('attn', 'attention'), sublayer('ffn', 'feed-forward')
    stream, found = entry.enter(Value(Node('end', 'embedding', [])), norm, Context(cfg, False)), []
    with mixing():
        for i, (block, _, count) in enumerate(runs(cfg)):
            begin = ports(stream, 'x')
            stream = ports(block(begin, attn, ffn, norm, Context(cfg, i == 0)), "x'")
            found.append(Run(nodes_of(begin), nodes_of(stream), count))
    head = entry.leave(stream, norm, Context(cfg, False)).through('end', 'head')
    return Sketch(cfg.topology, list(down(head.node, set())), found)


def nodes_of(stream: Any) -> list[Node]:
    return [value.node for value in (stream if isinstance(stream, tuple) else (stream,))]


def ports(stream: Any, text: str) -> Any:
    """Where a stream crosses the border of a block; the second of two is drawn beside the first."""
    if isinstance(stream, Value):
        return stream.through('port', text)
    return tuple(Value(Node('port', '', [(value.node, value.factor)], column)) for column, value in enumerate(stream))


def down(node: Node, seen: set[Node]) -> Iterator[Node]:
    """What a node is made of, and itself: each once, after its sources."""
    if node not in seen:
        seen.add(node)
        for source, _ in node.sources:
            yield from down(source, seen)
        yield node
