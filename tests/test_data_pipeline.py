"""Batches against a brute-force oracle; order, resume, hosts, workers; evaluation sets; damaged folders."""

import dataclasses
import hashlib
import itertools
import json
import pickle
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from spannorm_jax.config import DataConfig
from spannorm_jax.data import open_data, pipeline, prepare
from spannorm_jax.data.prepare import split_of
from spannorm_jax.data.shuffle import row_of
from spannorm_jax.data.store import Stream
from spannorm_jax.errors import BadData, MissingInput, UserError

T, B = 16, 6


def texts(n: int = 160) -> list[str]:
    rng = np.random.default_rng(0)
    return [''.join(map(chr, rng.integers(97, 123, rng.integers(1, 60)))) + f' {i}' for i in range(n)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp('corpus')
    lines = [json.dumps({'text': t}) for t in texts()]
    (root / 'a.jsonl').write_text('\n'.join(lines[:80]) + '\n')
    (root / 'b.jsonl').write_text('\n'.join(lines[80:]))
    prepare(str(root), root / 'out', workers=1)
    return root / 'out'


@pytest.fixture(scope='module')
def corpus(folder):
    return open_data(DataConfig(source=str(folder)))


def stream_of(split: str) -> tuple[list[int], list[bytes]]:
    """The split's token stream and documents, from the contract alone."""
    docs = [t.encode() for t in texts() if split_of(hashlib.sha256(t.encode()).digest()) == split]
    return [token for doc in docs for token in (256, *doc)], docs


def brute_row(stream: list[int], lo: int, length: int = T) -> dict[str, list[int]]:
    window = (stream + [256])[lo : lo + length + 1]
    segments, positions, seg, pos = [], [], 1, 0
    for i, token in enumerate(window[:-1]):
        if token == 256:
            seg, pos = seg + 1, 0
        elif i:
            pos += 1
        segments.append(seg)
        positions.append(pos)
    return {'tokens': window[:-1], 'targets': window[1:], 'segments': segments, 'positions': positions}


def first(iterator, n: int) -> list[dict[str, np.ndarray]]:
    with iterator:
        return list(itertools.islice(iterator, n))


def same(a: list[dict], b: list[dict]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            np.testing.assert_array_equal(x[name], y[name])


def test_an_epoch_is_every_row_once_and_each_row_is_the_oracles(corpus):
    stream, _ = stream_of('train')
    rows = corpus.rows(T)
    assert rows == len(stream) // T
    batches = first(corpus.train_batches(B, T, seed=3), -(-2 * rows // B))
    flat = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    for epoch in range(2):
        seen = []
        for i in range(epoch * rows, (epoch + 1) * rows):
            row = row_of(3, epoch, i % rows, rows)
            seen.append(row)
            for name, want in brute_row(stream, row * T).items():
                assert flat[name][i].tolist() == want, (i, name)
        assert sorted(seen) == list(range(rows))
    assert not np.array_equal(flat['tokens'][:rows], flat['tokens'][rows : 2 * rows]), 'both epochs have one order'
    assert all(a.dtype == np.int32 for a in flat.values())


@pytest.mark.parametrize('group', [1, 3 * B * T, 1 << 15])
def test_any_start_and_an_epoch_edge(corpus, monkeypatch, group):
    rows = corpus.rows(T)
    edge = rows // B  # the batch that straddles the end of epoch 0
    assert rows % B, 'the case must straddle'
    whole = first(corpus.train_batches(B, T, seed=0), edge + 4)
    monkeypatch.setattr(pipeline, 'GROUP_TOKENS', group)
    for start in (0, 1, 7, edge - 1, edge, edge + 1):
        same(first(corpus.train_batches(B, T, seed=0, start=start), 3), whole[start : start + 3])
    assert [corpus.epoch_of(k, B, T) for k in (0, edge, edge + 1)] == [0, 0, 1]
    iterator = corpus.train_batches(B, T, seed=0, start=5)
    next(iterator)
    assert iterator.k == 6
    iterator.close()


@pytest.mark.parametrize('hosts', [2, 3])
def test_hosts_together_make_the_global_batch(corpus, hosts):
    whole = first(corpus.train_batches(B, T, seed=0, start=2), 4)
    mine = [range(B)[h::hosts] for h in range(hosts)]  # interleaved: a host's rows need not lie together
    parts = [first(corpus.train_batches(B, T, seed=0, start=2, mine=rows), 4) for rows in mine]
    back = np.argsort(np.concatenate(mine))
    joined = [{name: np.concatenate([p[name] for p in step])[back] for name in step[0]} for step in zip(*parts, strict=True)]
    same(joined, whole)


def test_worker_processes_keep_the_order_beside_a_running_jax(corpus, monkeypatch):
    monkeypatch.setattr(pipeline, 'GROUP_TOKENS', 2 * B * T)  # several groups, so both workers have a part in it
    assert jax.jit(jnp.sum)(jnp.ones(3)) == 3  # its threads are what forked workers would hang on
    whole = first(corpus.train_batches(B, T, seed=0, start=3), 7)
    same(first(corpus.train_batches(B, T, seed=0, start=3, workers=2), 7), whole)


def test_seeds_differ(corpus):
    a, b = (first(corpus.train_batches(B, T, seed=s), 1)[0]['tokens'] for s in (0, 1))
    assert not np.array_equal(a, b)


def test_targets_never_hold_another_documents_text(corpus):
    stream, docs = stream_of('train')
    batch = first(corpus.train_batches(B * 4, T, seed=0), 1)[0]
    ends = batch['targets'] == 256
    assert ends.any()
    # After a token that predicts the end, the next one begins a segment at position 0, and nowhere else does one begin.
    begins = batch['tokens'] == 256
    np.testing.assert_array_equal(ends[:, :-1], begins[:, 1:])
    np.testing.assert_array_equal(np.diff(batch['segments'], axis=1) == 1, begins[:, 1:])
    assert (batch['positions'][begins] == 0).all()
    assert (batch['positions'][:, 0] == 0).all()


def test_a_row_longer_than_the_split_is_refused(corpus):
    with pytest.raises(BadData, match='lower data.seq'):
        corpus.rows(10**6)


@pytest.mark.parametrize('limit', [None, 100, 1])
@pytest.mark.parametrize('split', ['validation', 'test'])
def test_evaluation_covers_whole_documents(corpus, split, limit):
    stream, docs = stream_of(split)
    held = corpus.eval_batches(split, 4, T, limit)
    count, tokens = 0, 0
    for doc in docs:
        if count and limit is not None and tokens + len(doc) + 1 > limit:
            break
        count, tokens = count + 1, tokens + len(doc) + 1
    assert (held.documents, held.tokens, held.bytes) == (count, tokens, sum(len(d) for d in docs[:count]))
    batches = list(held.batches())
    assert len(batches) == len(held) and all(b['tokens'].shape == (4, T) for b in batches)
    flat = {name: np.concatenate([b[name] for b in batches]).ravel() for name in batches[0]}
    real = flat['segments'] > 0
    assert real.sum() == tokens and real[:tokens].all(), 'padding only behind the last token'
    assert flat['tokens'][real].tolist() == stream[:tokens]
    assert flat['targets'][real].tolist() == (stream[:tokens] + [256])[1:]
    assert not any(flat[name][~real].any() for name in flat)
    same(batches, list(held.batches()))
    halves = [list(held.batches(rows)) for rows in (range(2), range(2, 4))]
    same([{n: np.concatenate([a[n], b[n]]) for n in a} for a, b in zip(*halves, strict=True)], batches)


def test_empty_split_says_what_to_do(tmp_path):
    (tmp_path / 'one.txt').write_text('a single document')
    c = open_data(DataConfig(source=str(tmp_path / 'one.txt'), cache=str(tmp_path / 'cache')))
    empty = next(s for s in ('validation', 'test') if not c.splits[s].documents)
    with pytest.raises(BadData, match='more, shorter documents'):
        c.eval_batches(empty, 1, 8)
    with pytest.raises(UserError, match='unknown split'):
        c.eval_batches('dev', 1, 8)


def test_windows_across_blocks_and_shards(tmp_path):
    """A stream of two shards, the first with a short last block, read at every kind of seam."""
    (tmp_path / 'x.jsonl').write_text('\n'.join(json.dumps({'text': t}) for t in texts(2)))
    meta = prepare(str(tmp_path / 'x.jsonl'), tmp_path / 'out', workers=1)
    whole = np.arange(4096 + 4096 + 100 + 50, dtype='<u2') % 250
    for name, lo, hi in (('p', 0, 8292), ('q', 8292, 8342)):
        out = ArrayRecordWriter(str(tmp_path / 'out' / name), 'group_size:1')
        for at in range(lo, hi, 4096):
            out.write(whole[at : min(at + 4096, hi)].tobytes())
        out.close()
    split = dataclasses.replace(meta.splits['train'], tokens=8342, shards=[('p', 8292), ('q', 50)])
    stream = Stream(tmp_path / 'out', 'train', dataclasses.replace(meta, splits=meta.splits | {'train': split}))
    stream = pickle.loads(pickle.dumps(stream))
    want = np.append(whole, 256)
    for lo, hi in ((0, 10), (4090, 4100), (4096, 8192), (8190, 8343), (8292, 8300), (8341, 8343), (0, 8343)):
        np.testing.assert_array_equal(stream.windows([lo], hi - lo)[0], want[lo:hi])


def corrupt_token(folder, meta):
    name, _ = meta['splits']['train']['shards'][0]
    ids = np.full(meta['splits']['train']['tokens'], 7, '<u2')
    ids[20] = 300
    write_shard(folder / name, ids)


def write_shard(path, ids):
    path.unlink()
    out = ArrayRecordWriter(str(path), 'group_size:1')
    for at in range(0, len(ids), 4096):
        out.write(ids[at : at + 4096].tobytes())
    out.close()


def cut_shard(folder, meta):
    path = folder / meta['splits']['train']['shards'][0][0]
    path.write_bytes(path.read_bytes()[:-70_000])


def short_shard(folder, meta):
    write_shard(folder / meta['splits']['train']['shards'][0][0], np.zeros(meta['splits']['train']['tokens'] - 9, '<u2'))


def flipped_shard(folder, meta):
    path = folder / meta['splits']['train']['shards'][0][0]
    data = bytearray(path.read_bytes())
    at = data.find(b'\x00\x01')  # the first separator
    data[at + 20] ^= 0xFF
    path.write_bytes(data)


def lost_shard(folder, meta):
    (folder / meta['splits']['train']['shards'][0][0]).unlink()


@pytest.mark.parametrize(
    ('damage', 'message', 'workers'),
    [
        (corrupt_token, r'token 300 at position 20 of train .* outside the vocabulary of 257; prepare the folder again$', 0),
        (corrupt_token, r'token 300 at position 20 of train .* prepare the folder again$', 1),
        (cut_shard, 'has 0 blocks, not as many as meta.json says', 0),
        (short_shard, 'shorter than meta.json says', 0),
        (flipped_shard, 'cannot be read', 0),
        (lost_shard, 'is missing', 0),
    ],
)
def test_damage_is_named_also_from_a_worker(folder, tmp_path, damage, message, workers):
    copy = tmp_path / 'copy'
    shutil.copytree(folder, copy)
    damage(copy, json.loads((copy / 'meta.json').read_text()))
    corpus = open_data(DataConfig(source=str(copy)))
    with pytest.raises(BadData) as caught:
        first(corpus.train_batches(corpus.rows(T), T, seed=0, workers=workers), 1)
    assert re.search(message, str(caught.value))  # without the note that grain adds to exceptions
    assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    ('text', 'message'), [('{', 'damaged'), ('{"version": 99}', 'upgrade'), ('{"version": 1, "splits": {}}', 'damaged'), ('[]', 'damaged')]
)
def test_bad_meta(tmp_path, text, message):
    (tmp_path / 'meta.json').write_text(text)
    (tmp_path / 'train.documents').touch()  # else it were a folder of texts
    with pytest.raises(BadData, match=message):
        open_data(DataConfig(source=str(tmp_path)))


def test_damaged_document_table(folder, tmp_path):
    shutil.copytree(folder, tmp_path / 'copy')
    (tmp_path / 'copy' / 'test.documents').write_bytes(b'1234')
    with pytest.raises(BadData, match='does not hold'):
        open_data(DataConfig(source=str(tmp_path / 'copy'))).eval_batches('test', 1, 8)


def test_half_prepared_and_missing(tmp_path):
    (tmp_path / 'half' / 'work').mkdir(parents=True)
    (tmp_path / 'half' / 'work' / 'key').write_text('x')
    with pytest.raises(MissingInput, match='half prepared'):
        open_data(DataConfig(source=str(tmp_path / 'half')))
    with pytest.raises(MissingInput, match='does not exist'):
        open_data(DataConfig(source=str(tmp_path / 'nothing')))


def test_tokenizer_of_the_run_must_be_the_folders(folder):
    with pytest.raises(UserError, match="prepared with tokenizer 'bytes', data.tokenizer is 'mistral'") as caught:
        open_data(DataConfig(source=str(folder), tokenizer='mistral'))
    assert caught.value.exit_code == 2


def test_cache_is_keyed_by_content(tmp_path):
    source, cache = tmp_path / 'docs', tmp_path / 'cache'
    source.mkdir()
    for i in range(40):
        (source / f'{i}.txt').write_text(f'document {i}')
    cfg = DataConfig(source=str(source), cache=str(cache))
    one = open_data(cfg)
    again = open_data(cfg)
    assert again.folder == one.folder and again.hash == one.hash
    (source / '3.txt').write_text('Document 3')
    other = open_data(cfg)
    assert other.folder != one.folder and other.hash != one.hash


@pytest.mark.parametrize('n', [1, 2, 3, 1023, 1025, 5000])
def test_row_of_is_a_bijection(n):
    assert sorted(row_of(1, 2, i, n) for i in range(n)) == list(range(n))


def test_row_of_beyond_32_bits():
    n = 10**11
    rows = [row_of(0, 0, i, n) for i in range(2000)]
    assert len(set(rows)) == 2000 and 0 <= min(rows) and max(rows) < n
    assert 0.47 * n < np.mean(rows) < 0.53 * n  # the mean of 2000 uniform draws has standard error 0.0065 n
