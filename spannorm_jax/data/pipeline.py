"""Batches out of a prepared folder. Axis letters: B rows, T positions, R rows of one batch on one host.

Row r of an epoch is stream[rT : rT + T]. Global batch k is a pure function of (corpus, seq, batch, seed, k), so the state
of the whole iterator is the integer k: nothing is packed, buffered or skipped that a restart would have to repeat.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from spannorm_jax.config import DataConfig
from spannorm_jax.data import sources
from spannorm_jax.data.meta import SPLITS, Meta, is_prepared, read_meta
from spannorm_jax.data.prepare import Progress, identity, prepare
from spannorm_jax.data.shuffle import row_of
from spannorm_jax.data.store import Stream
from spannorm_jax.data.tokenizer import Tokenizer, load_tokenizer
from spannorm_jax.errors import BadData, MissingInput, UserError

Batch = dict[str, np.ndarray]
GROUP_TOKENS = 1 << 15  # made at a time


def open_data(cfg: DataConfig, progress: Progress | None = None) -> 'Corpus':
    """The corpus that `cfg` names; a raw source is first prepared into the cache, once.

    Raises: UserError (tokenizer that does not match a prepared folder), MissingInput, BadData, StorageError.
    """
    folder = Path(cfg.source)
    if not is_prepared(folder):
        if (folder / 'work' / 'key').is_file():
            raise MissingInput(f'{cfg.source!r} is half prepared; run the same `spannorm prepare` again to finish it')
        tok, found = load_tokenizer(cfg.tokenizer), sources.find(cfg.source)
        folder = _cache(cfg) / identity(found, tok, cfg.text_field)[:32]
        if not (folder / 'meta.json').is_file():
            prepare(cfg.source, folder, tokenizer=cfg.tokenizer, text_field=cfg.text_field, progress=progress)
    corpus = Corpus(folder, read_meta(folder))
    made_with = corpus.meta.tokenizer
    same_name = made_with['file'] is None or cfg.tokenizer == 'mistral'
    if not (same_name and cfg.tokenizer == made_with['name']) and load_tokenizer(cfg.tokenizer).fingerprint != made_with['fingerprint']:
        raise UserError(
            f'{cfg.source!r} was prepared with tokenizer {made_with["name"]!r}, data.tokenizer is {cfg.tokenizer!r}; '
            f'set data.tokenizer to {str(folder / made_with["file"]) if made_with["file"] else made_with["name"]!r}'
        )
    return corpus


def tokenizer_of(cfg: DataConfig) -> Tokenizer:
    """The tokenizer of a run, without its data: that of the prepared folder where `cfg` names one."""
    folder = Path(cfg.source)
    return Corpus(folder, read_meta(folder)).tokenizer if is_prepared(folder) else load_tokenizer(cfg.tokenizer)


def _cache(cfg: DataConfig) -> Path:
    if cfg.cache:
        return Path(cfg.cache)
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'spannorm_jax'


@dataclass(frozen=True)
class Corpus:
    """A prepared folder: `meta`, `hash` (of its text), `tokenizer`, training batches and evaluation sets."""

    folder: Path
    meta: Meta

    @property
    def hash(self) -> str:
        return self.meta.hash

    @property
    def splits(self) -> dict:
        return self.meta.splits

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded from the folder itself, so that it is there wherever the folder is. Raises: BadData (not the one of meta.json)."""
        file, name = self.meta.tokenizer['file'], self.meta.tokenizer['name']
        tok = load_tokenizer(str(self.folder / file) if file else name)
        tok.name = name
        for field in ('fingerprint', 'vocab', 'bos', 'eos'):
            if getattr(tok, field) != self.meta.tokenizer[field]:
                raise BadData(
                    f'{str(self.folder / "meta.json")!r}: tokenizer.{field} is {self.meta.tokenizer[field]!r}, that of '
                    f'{file or name} is {getattr(tok, field)!r}; prepare the folder again'
                )
        return tok

    def rows(self, seq: int) -> int:
        """Rows of an epoch of the train split: whole windows of `seq` tokens (a rest shorter than one is left out).

        Raises: BadData where not one row fits.
        """
        tokens = self.meta.splits['train'].tokens
        if tokens < seq:
            raise BadData(f'the train split of {self.meta.source!r} has {tokens} tokens, not one row of {seq}; lower data.seq or add text')
        return tokens // seq

    def epoch_of(self, k: int, batch: int, seq: int) -> int:
        """Epoch in which global batch k begins."""
        return k * batch // self.rows(seq)

    def train_batches(
        self,
        batch: int,
        seq: int,
        seed: int,
        start: int = 0,
        mine: Sequence[int] | None = None,
        workers: int = 0,
    ) -> 'Batches':
        """Endless batches of dict(tokens, targets, segments, positions), int32 (rows, seq) each, from global batch `start`.

        Every epoch is its own permutation of all rows. mine: the rows of each global batch, of 0..batch-1, that this process makes; None
        makes them all. workers: reader processes (spawned); 0 reads in threads. Neither changes the order.

        Raises: BadData (from here or from `next`, naming the place).
        """
        make = _TrainRows(Stream(self.folder, 'train', self.meta), self.rows(seq), seq, seed)
        return Batches(make, batch, range(batch) if mine is None else mine, start, sys.maxsize, workers)

    def eval_batches(self, split: str, batch: int, seq: int, max_tokens: int | None = None) -> 'EvalSet':
        """The first whole documents of a split, up to `max_tokens` tokens (at least one document, however long).

        Raises: UserError (unknown split), BadData (empty split).
        """
        if split not in SPLITS:
            raise UserError(f'unknown split {split!r}: expected one of {", ".join(SPLITS)}')
        stream = Stream(self.folder, split, self.meta)
        table = stream.documents()
        if not len(table):
            raise BadData(
                f'the {split} split of {self.meta.source!r} is empty: documents go to splits by their hash (90/5/5 per cent) and there are '
                f'only {sum(s.documents for s in self.meta.splits.values())}; give more text (a plain file from about 200 KB on fills '
                f'every split), or the same text as more, shorter documents (JSONL lines)'
            )
        upto = len(table) if max_tokens is None else max(1, int(np.searchsorted(table[:, 0], max_tokens, 'right')))
        ends, lengths = table[:upto].T
        if ends[0] < 1 or (np.diff(ends) < 1).any() or ends[-1] > stream.tokens or lengths.min() < 1:
            path = str(self.folder / f'{split}.documents')
            raise BadData(f'{path!r} is damaged: its ends do not rise within {stream.tokens} tokens; prepare the folder again')
        return EvalSet(stream, batch, seq, int(ends[-1]), int(lengths.sum()), upto)


class Batches(Iterator[Batch]):
    """Iterator over global batches start, start + 1, ... below stop; prefetches in a thread, or in worker processes.

    `k` is the global batch that `next` will give: all there is to save. Close it, or use it as a context manager.
    """

    def __init__(self, make: 'MakeRows', batch: int, mine: Sequence[int], start: int, stop: int, workers: int = 0):
        # Imported here: it takes seconds, which `prepare`, its workers and `--help` need not wait for.
        import grain
        from absl import flags

        self.k = start
        group = max(1, GROUP_TOKENS // (batch * make.seq))
        groups = grain.MapDataset.range(-(-(stop - start) // group)).map(_Group(make, batch, mine, start, stop, group))
        # One thread keeps ahead of any model; more of them only contend for the interpreter lock.
        data = groups.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
        if workers:
            if not flags.FLAGS.is_parsed():  # grain reads absl flags, which a program without absl never parses
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
            data = data.mp_prefetch(options, worker_init_fn=_keep_off_devices)
        self.groups, self.ready = iter(data), iter(())

    def __next__(self) -> Batch:
        batch = next(self.ready, None)
        if batch is None:
            group = next(self.groups)
            self.ready = (dict(zip(group, arrays, strict=True)) for arrays in zip(*group.values(), strict=True))
            batch = next(self.ready)
        self.k += 1
        return batch

    def close(self) -> None:
        self.groups.close()

    def __enter__(self) -> 'Batches':
        return self

    def __exit__(self, *_) -> None:
        self.close()


@dataclass
class _Group:
    """j -> batches start + j group, ... stacked, (group, b, T): small batches would cost more to hand over than to make."""

    make: 'MakeRows'
    batch: int
    mine: Sequence[int]
    start: int
    stop: int
    group: int

    def __call__(self, j: int) -> Batch:
        first = self.start + j * self.group
        batches = range(first, min(first + self.group, self.stop))
        rows = [k * self.batch + r for k in batches for r in self.mine]
        return {name: a_RT.reshape(len(batches), -1, self.make.seq) for name, a_RT in self.make(rows).items()}


def _keep_off_devices(index: int, count: int) -> None:
    os.environ['JAX_PLATFORMS'] = 'cpu'  # a reader never computes; were JAX started there, it must not take the accelerator


class MakeRows(Protocol):
    """Places in the endless order of rows -> those rows, (R, seq) each."""

    seq: int

    def __call__(self, rows: list[int]) -> Batch: ...


@dataclass
class _TrainRows:
    stream: Stream
    per_epoch: int
    seq: int
    seed: int

    def __call__(self, rows: list[int]) -> Batch:
        n = self.per_epoch
        starts = [row_of(self.seed, i // n, i % n, n) * self.seq for i in rows]
        return make_batch(self.stream.windows(starts, self.seq + 1), self.stream.meta)


def make_batch(window_RT1: np.ndarray, meta: Meta) -> Batch:
    """Windows of T + 1 stream tokens -> tokens, targets, segments, positions, int32 (R, T) each.

    targets are the next tokens, bos replaced by eos; segments count 1 + the bos seen in the row; positions restart at each.
    """
    bos, eos = meta.tokenizer['bos'], meta.tokenizer['eos']
    tokens_RT, targets_RT = np.ascontiguousarray(window_RT1[:, :-1]), window_RT1[:, 1:]
    begins_RT = tokens_RT == bos
    index_T = np.arange(tokens_RT.shape[1], dtype=np.int32)
    return {
        'tokens': tokens_RT,
        'targets': np.where(targets_RT == bos, np.int32(eos), targets_RT),
        'segments': 1 + np.cumsum(begins_RT, axis=1, dtype=np.int32),
        'positions': index_T - np.maximum.accumulate(np.where(begins_RT, index_T, 0), axis=1),
    }


@dataclass(frozen=True)
class EvalSet:
    """Whole documents as rows in stream order: `tokens` = predictions that count, `bytes` of text, `documents`.

    Bits per byte = sum of nats over segments > 0 / ln 2 / bytes. The end of a document is predicted and counted, and adds no byte.
    """

    stream: Stream
    batch: int
    seq: int
    tokens: int
    bytes: int
    documents: int

    def __len__(self) -> int:
        return -(-self.tokens // (self.batch * self.seq))

    def batches(self, mine: Sequence[int] | None = None) -> Batches:
        """The same batches each time, (rows, seq), of the rows `mine`, None for all; what the last one lacks has segments and targets 0."""
        make = _EvalRows(self.stream, self.seq, self.tokens)
        return Batches(make, self.batch, range(self.batch) if mine is None else mine, 0, len(self))

    def texts(self) -> Iterator[np.ndarray]:
        """The ids of one document after the other, int32: bos, its text, eos."""
        lo = 0
        for hi, _ in self.stream.documents()[: self.documents].tolist():
            ids = self.stream.windows([lo], hi - lo + 1)[0]
            ids[-1], lo = self.stream.meta.tokenizer['eos'], hi
            yield ids


@dataclass
class _EvalRows:
    stream: Stream
    seq: int
    tokens: int

    def __call__(self, rows: list[int]) -> Batch:
        window_RT1 = np.zeros((len(rows), self.seq + 1), np.int32)
        real_RT = np.arange(self.seq) < self.tokens - self.seq * np.array(rows)[:, None]
        for r, count in enumerate(real_RT.sum(axis=1).tolist()):
            if count:
                window_RT1[r, : count + 1] = self.stream.windows([rows[r] * self.seq], count + 1)[0]
        return {name: np.where(real_RT, a_RT, 0) for name, a_RT in make_batch(window_RT1, self.stream.meta).items()}
