"""prepare: the same bytes for any number of workers and after any kill; refusals; what the folder says of itself."""

import gzip
import hashlib
import io
import json
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from spannorm_jax.config import DataConfig
from spannorm_jax.data import open_data, prepare, sources
from spannorm_jax.data.meta import read_meta
from spannorm_jax.data.prepare import split_of
from spannorm_jax.data.readers import DOCUMENT_BYTES, cut
from spannorm_jax.data.store import Stream
from spannorm_jax.errors import BadData, MissingInput, StorageError, UserError


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr(sources, 'TASK_BYTES', 2000)


def write_corpus(root: Path, files: int = 4, lines: int = 60) -> Path:
    root.mkdir()
    for f in range(files):
        rows = [json.dumps({'id': i, 'text': f'file {f} line {i} ' + 'é' * (i % 30)}) for i in range(lines)]
        (root / f'part{f}.jsonl').write_text('\n'.join(rows) + '\n')
    return root


def tree(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def stored(folder: Path) -> list[bytes]:
    """All documents of a prepared folder, from its token streams."""
    meta, found = read_meta(folder), []
    for name, split in meta.splits.items():
        if split.tokens:
            ids = Stream(folder, name, meta).windows([0], split.tokens)[0]
            ends = np.flatnonzero(np.append(ids, 256) == 256)
            found += [bytes(ids[a + 1 : b].astype(np.uint8)) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    return found


def test_bytes_do_not_depend_on_workers(tmp_path, small_tasks):
    source = write_corpus(tmp_path / 'in')
    told = []
    one = prepare(str(source), tmp_path / 'one', workers=1, progress=lambda done, whole: told.append((done, whole)))
    two = prepare(str(source), tmp_path / 'two', workers=2)
    assert len(one.splits['train'].shards) > 3, 'the case must have several shards'
    assert one == two and tree(tmp_path / 'one') == tree(tmp_path / 'two')
    size = sum(p.stat().st_size for p in source.iterdir())
    assert told[-1] == (size, size) and [d for d, _ in told] == sorted(d for d, _ in told)


def test_every_document_is_stored_once_and_counted(tmp_path, small_tasks):
    source = write_corpus(tmp_path / 'in')
    with open(source / 'part0.jsonl', 'a') as f:  # one repeat, one empty text, one blank line
        f.write('{"text": "file 1 line 0 "}\n\n{"text": ""}\n')
    meta = prepare(str(source), tmp_path / 'out', workers=1)
    want = [json.loads(line)['text'].encode() for p in sorted(source.iterdir()) for line in p.read_text().splitlines() if line]
    want = [w for w in want if w]
    assert sorted(stored(tmp_path / 'out')) == sorted(want)
    assert (meta.duplicates, meta.empty) == (1, 1)
    assert sum(s.documents for s in meta.splits.values()) == len(want)
    assert sum(s.bytes for s in meta.splits.values()) == sum(map(len, want))
    assert meta.hash == hashlib.sha256(b''.join(hashlib.sha256(w).digest() for w in want)).hexdigest()
    for name, split in meta.splits.items():
        table = Stream(tmp_path / 'out', name, meta).documents()
        assert table[-1, 0] == split.tokens and table[:, 1].sum() == split.bytes
        np.testing.assert_array_equal(np.diff(table[:, 0], prepend=0), table[:, 1] + 1)


def test_unigram_counts_are_those_of_the_train_targets(tmp_path):
    source = write_corpus(tmp_path / 'in')
    c = open_data(DataConfig(source=str(source), cache=str(tmp_path / 'cache')))
    held = c.eval_batches('train', 1, 64)
    targets = np.concatenate([b['targets'][b['segments'] > 0] for b in held.batches()])
    np.testing.assert_array_equal(np.bincount(targets, minlength=257), c.meta.unigram)
    assert held.tokens == sum(c.meta.unigram)


def test_splits_are_90_5_5_by_hash():
    names = [split_of(hashlib.sha256(str(i).encode()).digest()) for i in range(20_000)]
    shares = [names.count(s) / len(names) for s in ('train', 'validation', 'test')]
    # Three standard errors of a share of 0.05 over 20,000 documents are 0.0046.
    np.testing.assert_allclose(shares, [0.9, 0.05, 0.05], atol=0.0065)
    assert split_of(b'\x00' * 32) == 'train' and split_of(b'\xff' * 32) == 'test' and split_of(b'\xe7' + b'\0' * 31) == 'validation'


KILLED = """
import sys
from spannorm_jax.data import prepare, sources
sources.TASK_BYTES = 25_000
if __name__ == '__main__':
    prepare(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]), progress=lambda done, whole: print(done, flush=True))
"""


def test_killed_and_run_again_gives_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'TASK_BYTES', 25_000)
    source = write_corpus(tmp_path / 'in', files=4, lines=1500)
    prepare(str(source), tmp_path / 'straight', workers=1)
    (tmp_path / 'run.py').write_text(KILLED)
    for workers in ('1', '2'):
        out = tmp_path / f'out{workers}'
        command = [sys.executable, str(tmp_path / 'run.py'), str(source), str(out), workers]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
            for _ in range(2):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        assert not (out / 'meta.json').exists(), 'killed too late for the case to mean anything'
        finished = len(list((out / 'work').glob('*.json')))
        assert finished >= 2
        told = []
        prepare(str(source), out, workers=1, progress=lambda done, whole, told=told: told.append(done))
        assert len(told) <= len(sources.find(str(source)).tasks) - finished, 'finished shards are kept'
        assert tree(out) == tree(tmp_path / 'straight')


def test_two_at_once(tmp_path, small_tasks):
    source = write_corpus(tmp_path / 'in')
    got, errors = [], []

    def run():
        try:
            got.append(open_data(DataConfig(source=str(source), cache=str(tmp_path / 'cache'))))
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and len({c.hash for c in got}) == 1
    prepare(str(source), tmp_path / 'alone', workers=1)
    assert tree(got[0].folder) == tree(tmp_path / 'alone')


def test_a_finished_folder_is_left_alone(tmp_path):
    source = write_corpus(tmp_path / 'in')
    prepare(str(source), tmp_path / 'out')
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / 'out').iterdir()}
    time.sleep(0.01)
    prepare(str(source), tmp_path / 'out')
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / 'out').iterdir()} == before
    (source / 'part0.jsonl').write_text('{"text": "changed"}\n')
    with pytest.raises(UserError, match='already holds other prepared data'):
        prepare(str(source), tmp_path / 'out')


def test_foreign_folders_are_refused(tmp_path):
    source = write_corpus(tmp_path / 'in')
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'thesis.tex').write_text('mine')
    with pytest.raises(UserError, match="not empty .*'thesis.tex'") as caught:
        prepare(str(source), tmp_path / 'out')
    assert caught.value.exit_code == 2
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == ['thesis.tex']
    (tmp_path / 'half' / 'work').mkdir(parents=True)
    (tmp_path / 'half' / 'work' / 'key').write_text('other')
    with pytest.raises(UserError, match='unfinished work on other data'):
        prepare(str(source), tmp_path / 'half')


def test_unwritable_folder_is_a_storage_error(tmp_path):
    source = write_corpus(tmp_path / 'in')
    (tmp_path / 'file').write_text('')
    with pytest.raises(StorageError) as caught:
        prepare(str(source), tmp_path / 'file' / 'out')
    assert caught.value.exit_code == 74


FULL_DISK = """
import resource, signal, sys
from spannorm_jax.data import prepare
from spannorm_jax.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    prepare(sys.argv[1], sys.argv[2], workers=1)
except StorageError as e:
    print('storage error:', e)
"""


@pytest.mark.parametrize('limit', [10_000, 100_000])
def test_full_disk_is_a_storage_error_and_rerunning_mends_it(tmp_path, limit):
    source = write_corpus(tmp_path / 'in', files=2, lines=1500)
    command = [sys.executable, '-c', FULL_DISK, str(source), str(tmp_path / 'out'), str(limit)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert run.stdout.startswith('storage error:'), run.stderr
    assert not (tmp_path / 'out' / 'meta.json').exists()
    prepare(str(source), tmp_path / 'out', workers=1)
    prepare(str(source), tmp_path / 'straight', workers=1)
    assert tree(tmp_path / 'out') == tree(tmp_path / 'straight')


def test_an_error_in_a_worker_keeps_its_place_and_kind(tmp_path, small_tasks):
    source = write_corpus(tmp_path / 'in')
    with open(source / 'part3.jsonl', 'a') as f:
        f.write('{"text": 5}\n')
    with pytest.raises(BadData, match=r"part3.jsonl' line 61: field 'text' is int"):
        prepare(str(source), tmp_path / 'out', workers=2)
    assert not (tmp_path / 'out' / 'meta.json').exists()


@pytest.mark.parametrize('limit', [4, 5, 7, 64])
@pytest.mark.parametrize('text', ['', 'abc', 'one\ntwo\nthree\r\nfour', 'é日\U0001f600' * 9, '\n' * 20, 'x' * 64])
def test_cut_loses_nothing(text, limit):
    data = text.encode()
    parts = list(cut(io.BytesIO(data).read, limit))
    assert b''.join(parts) == data
    assert all(0 < len(p) <= limit for p in parts)
    for p in parts:
        p.decode()  # never inside a character
    assert len(data) > limit or parts == [data] * bool(data)
    lines = [] if '\n\n' in text else text.splitlines(keepends=True)
    if all(len(line.encode()) <= limit for line in lines) and '\r' not in text:
        assert all(p.endswith(b'\n') for p in parts[:-1])


@pytest.mark.parametrize(
    ('text', 'parts'),
    [
        ('a\nb\n\nc\nd\ne', ['a\nb\n\n', 'c\nd\ne']),  # a blank line before a later line end
        ('a\r\n\r\nb\nc\nd', ['a\r\n\r\n', 'b\nc\nd']),
        ('a\n\nb\n\ncccc', ['a\n\nb\n\n', 'cccc']),  # the last one that fits
        ('aaaaaa\n\nbb', ['aaaaaa\n', '\nbb']),  # one that does not fit is not a blank line yet
    ],
)
def test_cut_prefers_blank_lines(text, parts):
    assert list(cut(io.BytesIO(text.encode()).read, 7)) == [p.encode() for p in parts]


def play(kb: int, seed: int = 0) -> str:
    """Speeches of a few lines, blank lines between them."""
    rng, speeches, size = np.random.default_rng(seed), [], 0
    while size < kb * 1000:
        lines = [' '.join(f'word{w}' for w in rng.integers(0, 500, 7)) for _ in range(rng.integers(1, 9))]
        speeches.append('\n'.join(['SPEAKER:', *lines]))
        size += len(speeches[-1]) + 2
    return '\n\n'.join(speeches)


def test_one_text_file_fills_every_split(tmp_path):
    text = play(400)
    (tmp_path / 'input.txt').write_text(text)
    c = open_data(DataConfig(source=str(tmp_path / 'input.txt'), cache=str(tmp_path / 'cache')))
    assert all(c.splits[s].documents > 5 for s in ('train', 'validation', 'test')), c.splits
    assert sum(s.bytes for s in c.splits.values()) == len(text) and c.meta.duplicates == 0
    assert c.meta.cut == len(text) // 256 == json.loads((c.folder / 'meta.json').read_text())['cut']
    documents = stored(c.folder)
    assert max(map(len, documents)) <= c.meta.cut and all(d.decode() in text for d in documents)
    assert sum(d.endswith(b'\n\n') for d in documents) == len(documents) - 1, 'cut between speeches'
    for split in ('validation', 'test'):
        assert len(list(c.eval_batches(split, 4, 64, 8192).batches())) > 0
    assert c.rows(64) > 5000


def test_few_text_files_give_the_same_bytes_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'TASK_BYTES', 50_000)
    (tmp_path / 'in').mkdir()
    for i in range(3):
        (tmp_path / 'in' / f'{i}.txt').write_text(play(100, seed=i))
    one, two = (prepare(str(tmp_path / 'in'), tmp_path / f'out{n}', workers=n) for n in (1, 2))
    assert len(one.splits['train'].shards) == 3, 'the case must have several tasks'
    assert one == two and tree(tmp_path / 'out1') == tree(tmp_path / 'out2')


def test_too_little_text_says_what_to_do(tmp_path):
    (tmp_path / 'input.txt').write_text(play(2))
    c = open_data(DataConfig(source=str(tmp_path / 'input.txt'), cache=str(tmp_path / 'cache')))
    with pytest.raises(BadData, match=r"split of 'input.txt' is empty: .* there are only [2-4]; give more text") as caught:
        for split in ('validation', 'test'):
            c.eval_batches(split, 1, 8)
    assert caught.value.exit_code == 65


LIMITED = """
import resource, sys
from spannorm_jax.data import prepare
prepare(sys.argv[1], sys.argv[2], workers=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_rss_kb(source: Path, out: Path) -> int:
    run = subprocess.run(
        [sys.executable, '-c', LIMITED, str(source), str(out)], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A text file without line ends and a gzipped one, 2 and 24 times the bound of a document."""
    for name, opener in (('a.txt', open), ('b.txt.gz', gzip.open)):
        for times in (2, 24):
            (tmp_path / str(times)).mkdir(exist_ok=True)
            with opener(tmp_path / str(times) / name, 'wb') as f:
                for i in range(times):
                    f.write(bytes([97 + i]) * DOCUMENT_BYTES)
    small, large = (peak_rss_kb(tmp_path / str(t), tmp_path / f'out{t}') for t in (2, 24))
    assert read_meta(tmp_path / 'out24').splits['train'].documents > 20
    assert large - small < 24_000, (small, large)  # kB; the larger source has 48 MB of text, 96 MB of tokens


@pytest.mark.full
def test_memory_is_flat_at_200_mb(tmp_path):
    for mb in (60, 200):
        (tmp_path / str(mb)).mkdir()
        with open(tmp_path / str(mb) / 'x.txt', 'wb') as f:
            for i in range(mb):
                f.write((f'{i:09d} ' * 100_000).encode())
    small, large = (peak_rss_kb(tmp_path / str(mb), tmp_path / f'out{mb}') for mb in (60, 200))
    # kB; the larger source has 140 MB more of text. ArrayRecord keeps about 200 bytes per block of 4096 tokens until it closes a file.
    assert large - small < 30_000, (small, large)


def test_stdlib_is_the_contracts_corpus():
    root = Path(sysconfig.get_paths()['stdlib'])
    without = ('test', 'idlelib', 'turtledemo', 'site-packages')
    want = [
        p
        for p in root.rglob('*.py')
        if p.relative_to(root).parts[0] not in without and not any(x[0] == '.' for x in p.relative_to(root).parts)
    ]
    got = [Path(piece.path) for task in sources.find('stdlib').tasks for piece in task]
    assert sorted(got) == sorted(want) and sources.find('stdlib').cut == DOCUMENT_BYTES
    assert all(p.stat().st_size < DOCUMENT_BYTES for p in got), 'a module would be cut'


@pytest.mark.parametrize(
    ('name', 'error'),
    [('nothing', MissingInput), ('*.nothing', MissingInput), ('tfds', MissingInput), ('no/such/place.jsonl', MissingInput)],
)
def test_missing_sources(tmp_path, name, error):
    with pytest.raises(error) as caught:
        prepare(str(tmp_path / name), tmp_path / 'out')
    assert caught.value.exit_code == 66 and not (tmp_path / 'out').exists()
