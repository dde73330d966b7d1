"""The prepared folder: what is in it, how it is written and read. docs/data.md is the specification of the format.

meta.json                     written last: its presence says that the folder is complete
<split>-<shard>.array_record  blocks of the token stream, little endian, Meta.block tokens each, the shard's last one shorter
<split>.documents             int64 (documents, 2): end of each document in the split's stream, and its length in bytes
"""

import contextlib
import itertools
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from spannorm_jax.data.meta import Meta
from spannorm_jax.errors import BadData, StorageError

BLOCK = 4096  # tokens; a random row of 128 reads 8 kB, a row of 2048 reads one or two blocks
# One block per group makes any block readable alone. Uncompressed: tokens of 16 bits hold little air, and reads are a third faster.
WRITE_OPTIONS = 'group_size:1,uncompressed'
READ_OPTIONS = 'readahead_buffer_size:0,max_parallelism:0'
READ_BUFFER_BYTES = 1 << 14  # the default of 1 MiB would be read anew for every block


class BlockWriter:
    """Appends token arrays to one ArrayRecord file as blocks of BLOCK tokens; `counts` is how often each id was written."""

    def __init__(self, path: Path, dtype: str, vocab: int):
        self.dtype, self.held, self.held_tokens, self.tokens = dtype, [], 0, 0
        self.counts = np.zeros(vocab, np.int64)
        self.path, self.out = path, ArrayRecordWriter(str(path), WRITE_OPTIONS)

    def append(self, ids: np.ndarray) -> None:
        self.held.append(ids.astype(self.dtype))
        self.held_tokens += len(ids)
        if self.held_tokens >= 16 * BLOCK:
            self._flush(self.held_tokens // BLOCK * BLOCK)

    def _flush(self, upto: int) -> None:
        stream = np.concatenate(self.held) if self.held else np.zeros(0, self.dtype)
        self.counts += np.bincount(stream[:upto], minlength=len(self.counts))
        with self._failing_as_storage():
            for lo in range(0, upto, BLOCK):
                self.out.write(stream[lo : min(lo + BLOCK, upto)].tobytes())
        self.held, self.held_tokens = [stream[upto:]], self.held_tokens - upto
        self.tokens += upto

    def close(self) -> int:
        """Writes what is held and returns the number of tokens in the file."""
        self._flush(self.held_tokens)
        with self._failing_as_storage():
            self.out.close()
        return self.tokens

    @contextlib.contextmanager
    def _failing_as_storage(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # what the library raises where Python would raise OSError
            raise StorageError(f'cannot write {str(self.path)!r}: {e}; free space or choose another folder') from None


class Stream:
    """The token stream of one split, read at any place; every process opens its own files, so it pickles as a path."""

    def __init__(self, folder: Path, name: str, meta: Meta):
        self.folder, self.name, self.meta = folder, name, meta
        split = meta.splits[name]
        self.tokens = split.tokens
        self.files = [file for file, _ in split.shards]
        self.starts = list(itertools.accumulate((n for _, n in split.shards), initial=0))
        self.readers: dict[int, ArrayRecordReader] = {}

    def __getstate__(self):
        return self.__dict__ | {'readers': {}}

    def _open(self, shard: int) -> ArrayRecordReader:
        path = self.folder / self.files[shard]
        if not path.is_file():
            raise BadData(f'{str(path)!r}, a shard of a prepared folder, is missing; prepare the folder again')
        try:
            reader = ArrayRecordReader(str(path), READ_OPTIONS, file_reader_buffer_size=READ_BUFFER_BYTES)
            blocks = reader.num_records()
        except Exception as e:  # pybind turns absl statuses into several types
            raise BadData(f'{str(path)!r} is damaged ({e}); prepare the folder again') from None
        if blocks != -(-(self.starts[shard + 1] - self.starts[shard]) // self.meta.block):
            raise BadData(f'{str(path)!r} has {blocks} blocks, not as many as meta.json says; prepare the folder again')
        self.readers[shard] = reader
        return reader

    def _from_shard(self, shard: int, lo: int, hi: int) -> np.ndarray:
        """Tokens [lo, hi) of one shard."""
        block = self.meta.block
        first, last = lo // block, (hi - 1) // block
        reader = self.readers.get(shard) or self._open(shard)
        try:
            raw = reader.read(list(range(first, last + 1)))
        except Exception as e:
            where = f'blocks {first}-{last} of {str(self.folder / self.files[shard])!r}'
            raise BadData(f'{where} cannot be read ({e}); prepare the folder again') from None
        ids = np.frombuffer(raw[0] if first == last else b''.join(raw), self.meta.dtype)[lo - first * block : hi - first * block]
        if len(ids) != hi - lo:
            raise BadData(f'{str(self.folder / self.files[shard])!r} is shorter than meta.json says; prepare the folder again')
        return ids

    def _read(self, lo: int, hi: int) -> np.ndarray:
        shard = bisect_right(self.starts, lo) - 1
        start, end = self.starts[shard], self.starts[shard + 1]
        if hi <= end:
            return self._from_shard(shard, lo - start, hi - start)
        rest = self._read(end, hi) if end < self.tokens else np.full(hi - end, self.meta.tokenizer['bos'], self.meta.dtype)
        return np.concatenate([self._from_shard(shard, lo - start, end - start), rest])

    def windows(self, starts: Sequence[int], length: int) -> np.ndarray:
        """Rows stream[lo : lo + length], int32 (R, length).

        Behind the end of the stream stands one more BOS, so that the last document too has an end to predict.
        """
        window_RT = np.empty((len(starts), length), np.int32)
        for r, lo in enumerate(starts):
            window_RT[r] = self._read(lo, lo + length)
        if window_RT.max() >= self.meta.tokenizer['vocab'] or window_RT.min() < 0:
            r, t = np.argwhere((window_RT >= self.meta.tokenizer['vocab']) | (window_RT < 0))[0].tolist()
            raise BadData(
                f'token {window_RT[r, t]} at position {starts[r] + t} of {self.name} in {str(self.folder)!r} is outside the vocabulary '
                f'of {self.meta.tokenizer["vocab"]}; prepare the folder again'
            )
        return window_RT

    def documents(self) -> np.ndarray:
        """Memory-mapped int64 (documents, 2): end position and length in bytes."""
        path, n = self.folder / f'{self.name}.documents', self.meta.splits[self.name].documents
        if n == 0:
            return np.zeros((0, 2), np.int64)
        if not path.is_file() or path.stat().st_size != 16 * n:
            raise BadData(f'{str(path)!r} does not hold {n} documents; prepare the folder again')
        return np.memmap(path, '<i8', 'r', shape=(n, 2))


def write_whole(path: Path, text: str) -> None:
    """All of the text or none of it."""
    temporary = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        with open(temporary, 'w') as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def storage_error(action: str, e: OSError) -> StorageError:
    return StorageError(f'cannot {action}: {e.strerror or e} ({e.filename or "no file named"}); free space or choose another folder')
