"""The drawn graph computes what the topology computes, on numbers; and nothing in a picture overlaps."""

import math
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from spannorm_jax import streams
from spannorm_jax.config import ModelConfig
from spannorm_jax.diagram import BOX, Picture, height, svg
from spannorm_jax.errors import UserError
from spannorm_jax.sketch import LAYERS, sketch
from spannorm_jax.topology import TOPOLOGIES, Topology, runs

FACTORS = {'a': 1.25, 's': 0.75, 'g': 1.5, 'c1': 0.875, 'A_m': 0.5, 'a_r': 1.75, 'beta': 0.625, 'R': 1.125, 'pre': 0.375, 'post': 1.375}
FACTORS |= {'': 1.0, 'n copies': 1.0, 'sum of n': 4.0, '1/2': 0.5}
GAIN = {'attn': (3.0, 1.0), 'ffn': (2.0, -1.0)}
INSIDE = {'': 0.0, 'norms of q, k, v': 10.0, 'norm before output': 20.0}
EMBEDDED = 1.7


def gain(site):
    return 1 + sum(map(ord, site)) % 97 / 100


def drawn(name):
    """What arrives at the head of the picture."""
    values = {}
    for node in sketch(name).nodes:
        read = sum(math.prod(FACTORS[f] for f in factor.split(' ') if factor not in FACTORS) * FACTORS.get(factor, 1.0) * values[source]
                   for source, factor in node.sources)  # fmt: skip
        if node.kind == 'norm':
            read *= gain(node.text)
        elif node.kind in GAIN:
            slope, shift = GAIN[node.kind]
            read = slope * read + shift + INSIDE[node.note]
        elif node.kind == 'read':
            read *= FACTORS[node.text]
        values[node] = read if node.sources else EMBEDDED
    return read


def computed(name):
    """The same through the functions of the table, on arrays; a block of each kind once."""
    cfg = ModelConfig(topology=name, layers=LAYERS, width=8, heads=2)
    entry = TOPOLOGIES[cfg.topology]
    there = {'embed': entry.embed_norm and not entry.embed_norm_inside(cfg), 'final': entry.final_norm}
    norm = lambda site, x: x * gain(site) if there.get(site, True) else x  # noqa: E731
    inside = {'': 0.0, 'qkv': 10.0, 'inner': 20.0}
    attn, ffn = (lambda x, norms='', k=k: GAIN[k][0] * x + GAIN[k][1] + inside[norms] for k in ('attn', 'ffn'))

    def context(first):
        coef = {k: FACTORS[{'alpha': 'a'}.get(k, k)] for k in entry.coef(cfg, 0)}
        inner = lambda x: x * gain('embed') if first and entry.embed_norm_inside(cfg) else x  # noqa: E731

        def param(name, shape, *_, **__):
            factor = FACTORS['g' if name.endswith('gain') else name] if name in ('c1', 'head_gain') else 1.0
            return np.full(shape, factor)

        return SimpleNamespace(cfg=cfg, add=lambda site, skip, o: skip + o, embedded=inner, param=param, **coef)

    f = FACTORS
    with mock.patch.multiple(
        streams,
        hc_weights=lambda *_: (None, None),
        mhc_weights=lambda *_: None,
        hc_sublayer=lambda H, sub, *_: (f['A_m'] * H, f['beta'] * sub(f['a_r'] * H)),
        mhc_sublayer=lambda H, sub, _: (f['R'] * H, f['post'] * sub(f['pre'] * H)),
    ):
        stream = entry.enter(np.full((1, 8), EMBEDDED), norm, context(False))
        for i, (block, _, _) in enumerate(runs(cfg)):
            stream = block(stream, attn, ffn, norm, context(i == 0))
        return entry.leave(stream, norm, context(False))


@pytest.mark.parametrize('name', TOPOLOGIES)
def test_the_picture_computes_what_the_topology_computes(name):
    want = np.asarray(computed(name))
    np.testing.assert_allclose(want, drawn(name), rtol=1e-12)
    shapes = [node.kind for node in sketch(name).nodes]
    assert shapes.count('attn') == shapes.count('ffn') == len(sketch(name).runs) and sum(r.layers for r in sketch(name).runs) == LAYERS


@pytest.mark.parametrize('name', TOPOLOGIES)
def test_nothing_overlaps(name):
    """No two boxes of a column, no two lines of a lane; everything lies inside the picture."""
    p = Picture(sketch(name))
    for nodes in p.columns.values():
        for above, below in zip(nodes, nodes[1:], strict=False):
            assert p.y[p.row[above]] + height(above) / 2 < p.y[p.row[below]] - height(below) / 2
    for column, lanes in p.lane.items():
        for (a, b), lane in lanes.items():
            assert p.row[a] < p.row[b]
            for (c, d), other in lanes.items():
                assert (a, b) == (c, d) or lane != other or p.row[b] <= p.row[c] or p.row[d] <= p.row[a], column
    text = svg(name)
    width, tall = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups())
    for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', text):
        assert float(x) >= 0 and float(x) + float(w) <= width
    assert all(float(y) < tall for y in re.findall(r' y="([\d.]+)"', text)) and text.count(f'width="{BOX}"') >= 4


def test_span_is_drawn_as_in_its_paper():
    """Both sums read the block's input, which attention alone reads behind the norm of the embedding."""
    by = {node.text if node.kind != 'sum' else f'sum {i}': node for i, node in enumerate(sketch('span').nodes)}
    x, sums = by['x'], [node for node in by.values() if node.kind == 'sum']
    assert [[source.text for source, _ in node.sources] for node in sums] == [['attention', 'x'], ['feed-forward', 'x']]
    assert by['embed'].sources == [(x, '')] and by['attention'].sources == [(by['embed'], '')] and by['embed'].note == 'block 1 only'


def test_a_topology_of_ones_own_is_drawn(monkeypatch):
    def halved(x, attn, ffn, norm, c):
        y = norm('attn_sum', attn(x) + x)
        return norm('ffn_sum', ffn(y) + x + y) / 2

    monkeypatch.setitem(TOPOLOGIES, 'halved', Topology(halved, '', 'own'))
    last = [node for node in sketch('halved').nodes if node.kind == 'sum'][-1]
    assert [source.text for source, _ in last.sources] == ['feed-forward', 'x', 'attn_sum']
    np.testing.assert_allclose(np.asarray(computed('halved')), drawn('halved'))
    assert '>1/2</text>' in svg('halved')
    with pytest.raises(UserError, match='unknown topology'):
        svg('nix')
