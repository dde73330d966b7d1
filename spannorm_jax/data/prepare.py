"""`prepare`: any source -> a folder of tokens (store.py), in parallel, resumable, the same bytes however many workers.

The source is cut into tasks that depend on the source alone. A task writes its own shards and then, in one rename, its
result file; a rerun skips tasks that have one. meta.json is written last, so a folder with it is complete.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import numpy as np

from spannorm_jax.data import sources
from spannorm_jax.data.meta import SPLITS, VERSION, Meta, SplitMeta, is_prepared, read_meta
from spannorm_jax.data.readers import Piece, documents
from spannorm_jax.data.store import BLOCK, BlockWriter, storage_error, write_whole
from spannorm_jax.data.tokenizer import Tokenizer, load_tokenizer
from spannorm_jax.errors import BadData, StorageError, UserError

WORK = 'work'  # half-finished work, gone once meta.json is there
Progress = Callable[[int, int], None]


def prepare(
    source: str,
    out_dir: str | os.PathLike,
    *,
    tokenizer: str = 'bytes',
    text_field: str = 'text',
    workers: int | None = None,
    progress: Progress | None = None,
) -> Meta:
    """Tokenise a source into `out_dir` and return its Meta; at once when that was already done.

    workers: processes, None for one per CPU; a single one works in this process. progress(done, all) is told bytes of the
    source. Killed at any moment, the same call goes on where it was and ends in the same folder.

    Raises: UserError (out_dir holds something else; unknown tokenizer), MissingInput, BadData, StorageError.
    """
    folder, tok, found = Path(out_dir), load_tokenizer(tokenizer), sources.find(source)
    key = identity(found, tok, text_field)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            _claim(folder, key)
            if not is_prepared(folder):
                results = _run_tasks(folder, found, tokenizer, text_field, workers, progress)
                _finish(folder, found, tok, key, results)
            shutil.rmtree(folder / WORK, ignore_errors=True)
            return read_meta(folder)
    except OSError as e:
        raise storage_error(f'write the prepared data to {str(folder)!r}', e) from None


def identity(found: sources.Source, tok: Tokenizer, text_field: str) -> str:
    """What a prepared folder is made of, as one hash: content and layout of the source, field, tokenizer, format."""
    layout = [[dataclasses.astuple(p)[0:1] + dataclasses.astuple(p)[2:] for p in task] for task in found.tasks]
    parts = [found.identity, layout, text_field, tok.fingerprint, VERSION, BLOCK]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares this folder. The lock goes with its holder, however that ends."""
    import fcntl

    path = folder / '.lock'
    while True:
        f = open(path, 'w')
        fcntl.flock(f, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(f.fileno()), os.stat(path)):
                break
        except FileNotFoundError:
            pass
        f.close()  # the holder before took the file away with it: stand in line for the new one
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        f.close()


def _claim(folder: Path, key: str) -> None:
    """Make the folder ours: empty, our half-finished work, or our finished result; anything else is refused."""
    mark = folder / WORK / 'key'
    if is_prepared(folder):
        if read_meta(folder).key == key:
            return
        raise UserError(f'{str(folder)!r} already holds other prepared data (source, field or tokenizer differ); choose another folder')
    if mark.is_file():
        if mark.read_text() == key:
            return
        raise UserError(f'{str(folder)!r} holds unfinished work on other data (or the source has changed since); delete it first')
    others = sorted(p.name for p in folder.iterdir() if p.name not in ('.lock', WORK))
    if others:
        raise UserError(f'{str(folder)!r} is not empty (it has {others[0]!r}); choose an empty or a new folder')
    (folder / WORK).mkdir(exist_ok=True)
    write_whole(mark, key)


def _run_tasks(folder, found: sources.Source, tokenizer, text_field, workers, progress: Progress | None) -> list[dict]:
    """Results of all tasks in order, running those that have none yet."""
    work = folder / WORK
    todo = [i for i in range(len(found.tasks)) if not (work / f'{i:05d}.json').is_file()]
    sizes = [sum(p.size for p in task) for task in found.tasks]
    done = sum(sizes) - sum(sizes[i] for i in todo)
    workers = min(workers or os.cpu_count() or 1, len(todo))
    jobs = [(i, str(folder), found.tasks[i], tokenizer, text_field) for i in todo]
    for i in _in_processes(jobs, workers) if workers > 1 else map(_run_task, jobs):
        done += sizes[i]
        if progress:
            progress(done, sum(sizes))
    return [json.loads((work / f'{i:05d}.json').read_text()) for i in range(len(found.tasks))]


def _in_processes(jobs: list, workers: int) -> Iterator[int]:
    """Indices of jobs as spawned workers finish them. The first error stops the others and is raised here."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), initializer=_worker) as pool:
        waiting = {pool.submit(_run_task, job) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise StorageError(
                'a worker of prepare died: out of memory (run again with fewer workers), or the calling script does its work '
                "outside `if __name__ == '__main__':`, which spawned processes need"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle

    parent = multiprocessing.parent_process()
    assert parent is not None, 'only a spawned process is a worker'

    def leave_with_parent() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def split_of(digest: bytes) -> str:
    """Split of a document from the sha256 of its bytes: 90, 5 and 5 per cent."""
    share = int.from_bytes(digest[:8], 'big') / 2**64
    return 'train' if share < 0.90 else 'validation' if share < 0.95 else 'test'


def _run_task(job: tuple[int, str, list[Piece], str, str]) -> int:
    index, folder, pieces, tokenizer, text_field = job
    out = _Shard(Path(folder), index, load_tokenizer(tokenizer))
    with contextlib.ExitStack() as stack:
        stack.callback(out.discard)
        for piece in pieces:
            for doc in documents(piece, text_field):
                out.add(doc)
        out.commit()
    return index


class _Shard:
    """Output of one task: up to one array_record a split, plus documents' (end, bytes) and hashes in the work folder."""

    def __init__(self, folder: Path, index: int, tok: Tokenizer):
        self.folder, self.index, self.tok = folder, index, tok
        self.dtype = '<u2' if tok.vocab <= 1 << 16 else '<u4'
        self.temporary = folder / WORK / f'{index:05d}.{os.getpid()}'
        self.temporary.mkdir(exist_ok=True)
        self.writers: dict[str, BlockWriter] = {}
        self.ends: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.counts = {split: {'documents': 0, 'tokens': 0, 'bytes': 0} for split in SPLITS}
        self.bos, self.specials, self.empty = np.array([tok.bos]), {tok.bos, tok.eos}, 0
        self.files = {name: open(self.temporary / name, 'wb') for name in (*SPLITS, 'hashes')}

    def add(self, doc) -> None:
        if not doc.data:
            self.empty += 1
            return
        digest = hashlib.sha256(doc.data).digest()
        split, ids = split_of(digest), self.tok.encode(doc.text)
        if len(ids) and (ids.max() >= self.tok.vocab or any((ids == special).any() for special in self.specials)):
            raise BadData(f'{doc.where()}: tokenizer {self.tok.name!r} made its own BOS or EOS, or an unknown id, out of text')
        if split not in self.writers:
            self.writers[split] = BlockWriter(self.temporary / f'{split}.array_record', self.dtype, self.tok.vocab)
        self.writers[split].append(self.bos)
        self.writers[split].append(ids)
        count = self.counts[split]
        count['documents'] += 1
        count['tokens'] += len(ids) + 1
        count['bytes'] += len(doc.data)
        self.files[split].write(struct.pack('<qq', count['tokens'], len(doc.data)))
        self.files['hashes'].write(digest)

    def commit(self) -> None:
        for split, writer in self.writers.items():
            writer.close()
            os.replace(self.temporary / f'{split}.array_record', self.folder / f'{split}-{self.index:05d}.array_record')
        for name, file in self.files.items():
            file.close()
            os.replace(self.temporary / name, self.folder / WORK / f'{self.index:05d}.{name}')
        train = self.writers.get('train')
        result = {'counts': self.counts, 'empty': self.empty, 'written': train.counts.tolist() if train else []}
        write_whole(self.folder / WORK / f'{self.index:05d}.json', json.dumps(result))

    def discard(self) -> None:
        for file in self.files.values():
            file.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _finish(folder: Path, found: sources.Source, tok: Tokenizer, key: str, results: list[dict]) -> None:
    """Join what the tasks left behind and write meta.json."""
    work = folder / WORK
    splits = {}
    for split in SPLITS:
        counts = [r['counts'][split] for r in results]
        totals = {name: sum(c[name] for c in counts) for name in ('documents', 'tokens', 'bytes')}
        shards = [(f'{split}-{i:05d}.array_record', c['tokens']) for i, c in enumerate(counts) if c['tokens']]
        splits[split] = SplitMeta(**totals, shards=shards)
        start = 0
        with open(folder / f'{split}.documents', 'wb') as out:
            for i, count in enumerate(counts):
                for table in _chunks(work / f'{i:05d}.{split}', '<i8', 2):
                    out.write((table + np.array([start, 0])).astype('<i8').tobytes())
                start += count['tokens']
    unigram = np.sum([r['written'] for r in results if r['written']] or [[0] * tok.vocab], axis=0)
    if tok.bos != tok.eos:  # as a target, a document's start is the end of the one before
        unigram[tok.eos], unigram[tok.bos] = unigram[tok.bos], 0
    total = sum(s.documents for s in splits.values())
    if not total:
        raise BadData(f'source {found.name!r} holds no text: every document is empty')
    digest, duplicates = _hashes([work / f'{i:05d}.hashes' for i in range(len(results))], work / 'sorted', total)
    for name, path in tok.files.items():
        shutil.copyfile(path, folder / name)
    meta = Meta(
        version=VERSION,
        key=key,
        source=found.name,
        hash=digest,
        tokenizer={
            'name': tok.name,
            'fingerprint': tok.fingerprint,
            'vocab': tok.vocab,
            'bos': tok.bos,
            'eos': tok.eos,
            'file': next(iter(tok.files), None),
        },
        dtype='<u2' if tok.vocab <= 1 << 16 else '<u4',
        block=BLOCK,
        duplicates=duplicates,
        empty=sum(r['empty'] for r in results),
        skipped_files=found.skipped,
        splits=splits,
        unigram=unigram.tolist(),
        cut=found.cut,
    )
    write_whole(folder / 'meta.json', meta.to_json())


def _chunks(path: Path, dtype: str, width: int) -> Iterator[np.ndarray]:
    with open(path, 'rb') as f:
        while data := f.read(1 << 20):  # a multiple of every row size used here
            yield np.frombuffer(data, dtype).reshape(-1, width)


def _hashes(files: Iterable[Path], scratch: Path, total: int) -> tuple[str, int]:
    """(sha256 of all documents' sha256 in order, how many documents repeat an earlier one), in flat memory."""
    digest = hashlib.sha256()
    table = np.memmap(scratch, '<u8', 'w+', shape=(total,))
    at = 0
    for file in files:
        for rows in _chunks(file, '<u8', 4):
            digest.update(rows.tobytes())
            table[at : at + len(rows)] = rows[:, 1]  # 64 bits of the hash, not those that chose the split
            at += len(rows)
    table.sort()  # in the mapped file, so the disk holds it, not memory
    step, repeats = 1 << 20, 0
    for lo in range(0, total - 1, step):
        hi = min(lo + step, total - 1)
        repeats += int((table[lo:hi] == table[lo + 1 : hi + 1]).sum())
    return digest.hexdigest(), repeats
