"""The graph of a topology as a picture: SVG that is read on white and on black, with no font or script of its own. Sizes in pixels."""

import itertools
from collections import defaultdict
from html import escape

from spannorm_jax.sketch import Node, Sketch, sketch

LINE = '#7d8590'  # half way between white and black
FILL = {'norm': '#1b7f5c', 'attn': '#2a63b5', 'ffn': '#b0530d', 'read': '#75569c'}  # white text is read on all of them
BOX, GAP, EDGE, GUTTER = 112, 18, 13, 46  # width of a box, between rows, around the picture and its frames, between two streams
HEIGHT = {'end': 16, 'port': 12, 'sum': 20}  # any other: 24
ARROW = ' marker-end="url(#to)"'
NOTE = 14  # more, for a second line
FONT = 'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" font-size="12"'


def svg(name: str) -> str:
    """The picture of a topology, by its name in the table. Raises: UserError (no such topology)."""
    return Picture(sketch(name)).svg()


class Picture:
    """Every node has a row, below those it reads; each stream is a column of nodes, and what passes a node by runs in a lane beside it."""

    def __init__(self, graph: Sketch):
        self.graph, self.parts = graph, []
        self.columns = defaultdict(list)
        for node in graph.nodes:
            self.columns[node.column].append(node)
        self.row = self._rows()
        self.edges = [(source, node, factor) for node in graph.nodes for source, factor in node.sources]
        self.lane = {column: self._lanes(column) for column in self.columns}
        longest = max((len(factor) for source, node, factor in self.edges if self._passes(source, node)), default=0)
        self.pitch = 16 + 9 * longest
        room = [self.pitch * (1 + max(self.lane[column].values(), default=-1)) for column in sorted(self.columns)]
        self.x = {0: 2 * EDGE + room[0] + BOX / 2, 1: 2 * EDGE + room[0] + BOX * 1.5 + GUTTER}
        self.width = self.x[max(self.columns)] + BOX / 2 + 2 * EDGE + (room[1] if len(room) > 1 else 0)
        self.y = self._heights()

    def _rows(self) -> dict[Node, int]:
        """Least rows such that a node stands below what it reads in its own column, and no higher than what it reads beside it."""
        row = dict.fromkeys(self.graph.nodes, 0)
        level = [ports for run in self.graph.runs for ports in (run.begin, run.end)]
        while True:
            before = dict(row)
            for node in self.graph.nodes:
                step = {source: node.kind in ('port', 'end') or source.column == node.column for source, _ in node.sources}
                row[node] = max([row[node], *(row[source] + below for source, below in step.items())])
            for above, node in itertools.chain.from_iterable(itertools.pairwise(nodes) for nodes in self.columns.values()):
                row[node] = max(row[node], row[above] + 1)
            for ports in level:
                row |= dict.fromkeys(ports, max(row[port] for port in ports))
            if row == before:
                return row

    def _passes(self, source: Node, node: Node) -> bool:
        """Whether something stands between the two in their column."""
        own = self.columns[node.column]
        return source.column == node.column and own.index(node) > own.index(source) + 1

    def _lanes(self, column: int) -> dict[tuple[Node, Node], int]:
        """Lanes of the edges that pass something by, the shortest nearest to the boxes; in a lane none meets another."""
        lanes: dict[tuple[Node, Node], int] = {}
        passing = {(a, b) for a, b, _ in self.edges if b.column == column and self._passes(a, b)}
        for a, b in sorted(passing, key=lambda e: (self.row[e[1]] - self.row[e[0]], self.row[e[0]])):
            met = {i for (c, d), i in lanes.items() if self.row[c] < self.row[b] and self.row[a] < self.row[d]}
            lanes[a, b] = next(i for i in itertools.count() if i not in met)
        return lanes

    def _heights(self) -> dict[int, float]:
        """The middle of each row."""
        tall = [max(height(n) for n in self.graph.nodes if self.row[n] == r) for r in range(1 + max(self.row.values()))]
        tops = [30.0, *itertools.accumulate((h + GAP for h in tall), initial=30.0)][1:]
        self.height = tops[-1] - GAP + EDGE
        return {r: top + tall[r] / 2 for r, top in enumerate(tops[:-1])}

    def svg(self) -> str:
        for run in self.graph.runs:
            self._frame(self.row[run.begin[0]], self.row[run.end[0]], run.layers)
        for source, node, factor in self.edges:
            self._edge(source, node, factor)
        for node in self.graph.nodes:
            self._node(node)
        text = self._text(self.width / 2, 18, self.graph.name, size=14, weight='bold')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" {FONT} stroke-width="1.3">\n'
            f'<title>The topology {escape(self.graph.name)}</title>\n'
            f'<marker id="to" refX="5.5" refY="3" markerWidth="6" markerHeight="6" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0 6 3 0 6z" fill="{LINE}"/></marker>\n{text}\n' + '\n'.join(self.parts) + '\n</svg>\n'
        )

    def _frame(self, first: int, last: int, count: int) -> None:
        top, bottom = self.y[first] - HEIGHT['port'] / 2 - 2, self.y[last] + HEIGHT['port'] / 2 + 2
        self.parts.append(
            f'<rect x="{EDGE}" y="{top:g}" width="{self.width - 2 * EDGE:g}" height="{bottom - top:g}" rx="6" fill="none" '
            f'stroke="{LINE}" stroke-dasharray="4 3"/>'
        )
        self.parts.append(self._text(self.width - EDGE - 6, top + 15, f'× {count}', anchor='end'))

    def _edge(self, source: Node, node: Node, factor: str) -> None:
        xs, xn, ys, yn = self.x[source.column], self.x[node.column], self.y[self.row[source]], self.y[self.row[node]]
        out, top = ys + height(source) / 2, yn - height(node) / 2
        aside = 1 if xn < xs else -1  # the side of the node that the source is on, where they stand side by side
        if (source, node) in self.lane[node.column]:
            aside = 1 if node.column else -1
            lane = xn + aside * (BOX / 2 + self.pitch * (self.lane[node.column][source, node] + 0.75))
            path, at = f'M{xs:g} {out:g}v4H{lane:g}V{yn:g}H{xn + aside * width(node) / 2:g}', (lane + 4, (out + yn) / 2)
        elif source.column == node.column:
            path, at = f'M{xs:g} {out:g}V{top:g}', (xs + 5, (out + top) / 2)
        elif self.row[source] == self.row[node]:
            path = f'M{xs - aside * width(source) / 2:g} {ys:g}H{xn + aside * width(node) / 2:g}'
            at = ((xs + xn) / 2 - 4, ys - 8)
        elif node.kind == 'port':
            path, at = f'M{xs - aside * width(source) / 2:g} {ys:g}H{xn:g}V{top:g}', (xn + 5, (ys + top) / 2)
        else:
            path, at = f'M{xs:g} {out:g}V{yn:g}H{xn + aside * width(node) / 2:g}', (xs + 5, (out + yn) / 2)
        self.parts.append(f'<path d="{path}" fill="none" stroke="{LINE}"{"" if node.kind == "port" else ARROW}/>')
        if factor:
            self.parts.append(self._text(*at, factor, size=11, anchor='start', dy=4))

    def _node(self, node: Node) -> None:
        x, y, h = self.x[node.column], self.y[self.row[node]], height(node)
        if node.kind == 'sum':
            self.parts.append(f'<path d="M{x - 5:g} {y:g}h10M{x:g} {y - 5:g}v10" stroke="{LINE}"/>')
            self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9.3" fill="none" stroke="{LINE}"/>')
        elif node.kind == 'end':
            self.parts.append(self._text(x, y + 4, node.text))
        elif node.kind == 'port':
            self.parts.append(f'<path d="M{x:g} {y - h / 2:g}v{h}" stroke="{LINE}"/>')
            self.parts.append(self._text(x + 7, y + 4, node.text, anchor='start', style='italic'))
        else:
            dash = ' stroke="#fff" stroke-dasharray="3 2"' if node.kind == 'norm' and node.note else ''
            self.parts.append(
                f'<rect x="{x - BOX / 2:g}" y="{y - h / 2:g}" width="{BOX}" height="{h}" rx="5" fill="{FILL[node.kind]}"{dash}/>'
            )
            label = f'norm {node.text}' if node.kind == 'norm' else node.text
            self.parts.append(self._text(x, y + 4 - (NOTE / 2 if node.note else 0), label, fill='#fff'))
            if node.note:
                self.parts.append(self._text(x, y + 4 + NOTE / 2, node.note, size=10, fill='#fff'))

    def _text(self, x, y, text, size=12, anchor='middle', fill=LINE, dy=0, weight='normal', style='normal') -> str:
        extra = ''.join(f' font-{k}="{v}"' for k, v in (('weight', weight), ('style', style)) if v != 'normal')
        extra += '' if size == 12 else f' font-size="{size}"'
        return f'<text x="{x:g}" y="{y + dy:g}" text-anchor="{anchor}" fill="{fill}"{extra}>{escape(text)}</text>'


def height(node: Node) -> int:
    return HEIGHT.get(node.kind, 24 + (NOTE if node.note else 0))


def width(node: Node) -> int:
    return {'sum': 20, 'port': 0, 'end': 70}.get(node.kind, BOX)
