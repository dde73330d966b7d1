"""Baselines against sums over explicit lists."""

import collections
import json
import math

import numpy as np
import pytest

from spannorm_jax.config import DataConfig
from spannorm_jax.data import baselines, open_data
from spannorm_jax.data.baselines import bigram_bits_per_byte, unigram_entropy
from spannorm_jax.errors import BadData, UserError


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp('baselines')
    (root / 'x.jsonl').write_text('\n'.join(json.dumps({'text': f'abc {i} abcd {i * i}'}) for i in range(200)))
    return open_data(DataConfig(source=str(root / 'x.jsonl'), cache=str(root / 'cache')))


def pairs(corpus, split, limit=None):
    held = corpus.eval_batches(split, 1, 50, limit)
    rows = [(b['tokens'][real], b['targets'][real]) for b in held.batches() for real in [b['segments'] > 0]]
    return [(int(a), int(b)) for x, y in rows for a, b in zip(x, y, strict=True)], held


def test_unigram_entropy(corpus):
    counts = collections.Counter(b for _, b in pairs(corpus, 'train')[0])
    total = sum(counts.values())
    assert unigram_entropy(corpus.meta.unigram) == pytest.approx(-sum(n / total * math.log(n / total) for n in counts.values()), rel=1e-12)
    assert unigram_entropy([5, 5, 0, 5, 5]) == pytest.approx(math.log(4)) and unigram_entropy([0, 3]) == 0
    with pytest.raises(BadData, match='train split is empty'):
        unigram_entropy([0, 0])


@pytest.mark.parametrize('limit', [None, 60])
@pytest.mark.parametrize('piece', [7, 1 << 20])
def test_bigram(corpus, limit, piece, monkeypatch):
    monkeypatch.setattr(baselines, 'PIECE', piece)
    (corpus.folder / baselines.KEPT).unlink(missing_ok=True)
    train, _ = pairs(corpus, 'train')
    both, left, right = collections.Counter(train), collections.Counter(a for a, _ in train), collections.Counter(b for _, b in train)
    held, info = pairs(corpus, 'test', limit)
    nats = 0.0
    for a, b in held:
        u = (right[b] + 1) / (len(train) + 257)
        nats -= math.log((both[a, b] + u) / (left[a] + 1))
    assert bigram_bits_per_byte(corpus, 'test', limit) == pytest.approx(nats / math.log(2) / info.bytes, rel=1e-10)
    # It predicts: the conditional distribution sums to one, and beats the unigram on this text.
    assert sum((both[97, b] + (right[b] + 1) / (len(train) + 257)) / (left[97] + 1) for b in range(257)) == pytest.approx(1)
    assert nats / len(held) < unigram_entropy(corpus.meta.unigram)


def test_a_bigram_is_counted_once(corpus, monkeypatch):
    kept = corpus.folder / baselines.KEPT
    kept.unlink(missing_ok=True)
    counted, real = [], baselines._bigram
    monkeypatch.setattr(baselines, '_bigram', lambda corpus, *which: counted.append(which) or real(corpus, *which))
    first = [bigram_bits_per_byte(corpus, *which) for which in (('test', None), ('test', 60), ('validation', None))]
    assert [bigram_bits_per_byte(corpus, *which) for which in (('test', None), ('test', 60), ('validation', None))] == first
    assert counted == [('test', None), ('test', 60), ('validation', None)] and len(set(first)) == 3
    good = json.loads(kept.read_text())
    for bad in (
        '{',
        '[]',
        '{"key": 1}',
        json.dumps(good | {'key': 'of another folder'}),
        json.dumps(good | {'bigram_bits_per_byte': {'test 60': None}}),
    ):
        kept.write_text(bad)
        assert bigram_bits_per_byte(corpus, 'test', 60) == first[1], bad
        assert json.loads(kept.read_text()) == {'key': corpus.meta.key, 'bigram_bits_per_byte': {'test 60': first[1]}}
    assert len(counted) == 8
    assert not [p.name for p in corpus.folder.iterdir() if p.name.startswith('.baselines')]


def test_a_folder_that_cannot_be_written_still_gives_its_bigram(corpus, monkeypatch):
    (corpus.folder / baselines.KEPT).unlink(missing_ok=True)

    def refuse(*_):
        raise OSError(30, 'Read-only file system')

    monkeypatch.setattr(baselines, 'write_whole', refuse)
    assert bigram_bits_per_byte(corpus, 'test') > 0 and not (corpus.folder / baselines.KEPT).exists()


def test_large_vocabularies_are_refused(tmp_path):
    (tmp_path / 'x.jsonl').write_text('\n'.join(json.dumps({'text': f'text {i}'}) for i in range(60)))
    large = open_data(DataConfig(source=str(tmp_path / 'x.jsonl'), tokenizer='mistral', cache=str(tmp_path / 'cache')))
    with pytest.raises(UserError, match='up to 4096'):
        bigram_bits_per_byte(large)
    assert np.isfinite(unigram_entropy(large.meta.unigram))
