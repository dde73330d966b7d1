"""Documents out of raw files, in pieces of bounded size, every refusal naming its place.

Nothing here holds more than one record of at most RECORD_BYTES. A long text becomes several documents, cut after a blank
line or a line end where there is one, so that a file of any length is read with the same memory.
"""

import gzip
import io
import itertools
import json
import os
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from spannorm_jax.errors import BadData, UserError

DOCUMENT_BYTES = 1 << 20  # longer than any module of the standard library, so those stay whole
RECORD_BYTES = 64 << 20  # a JSONL line, a Parquet value or a TFDS record above this is refused
GROUP_BYTES = 2 << 30  # so is a larger row group of Parquet, which its reader may hold at once
PACKED = ('.gz', '.zst')
BOM = b'\xef\xbb\xbf'


@dataclass(frozen=True)
class Piece:
    """A part of the source that one worker reads: bytes, row groups or records [lo, hi) of a file."""

    kind: str  # text | jsonl | parquet | tfds
    path: str
    lo: int
    hi: int
    size: int  # bytes, to share out the work
    cut: int = DOCUMENT_BYTES  # a longer text file becomes several documents of at most so many bytes


@dataclass(frozen=True)
class Document:
    """Text, its UTF-8 bytes, and where it stands; ask for the place before the next document is taken."""

    text: str
    data: bytes
    where: Callable[[], str]


def documents(piece: Piece, text_field: str) -> Iterator[Document]:
    """The documents of a piece, in order.

    Raises: BadData (naming file and byte offset, line, row or record), UserError (an extra is not installed).
    """
    return _READERS[piece.kind](piece, text_field)


def cut(read: Callable[[int], bytes], limit: int) -> Iterator[bytes]:
    """Parts of at most `limit` bytes of a byte stream: up to the last blank line that fits, else line end, else character."""
    held = b''
    while True:
        held += read(limit + 1 - len(held))
        if len(held) <= limit:  # `read` gave less than it was asked for: this is the end
            break
        ends = [held.rfind(mark, 0, limit) + len(mark) for mark in (b'\n\n', b'\n\r\n') if mark in held[:limit]]
        end = max(ends, default=held.rfind(b'\n', 0, limit) + 1)
        if not end:
            end = limit
            while end > limit - 3 and held[end] & 0xC0 == 0x80:  # inside a UTF-8 sequence
                end -= 1
        yield held[:end]
        held = held[end:]
    if held:
        yield held


@contextmanager
def opened(path: str) -> Iterator[io.BufferedIOBase]:
    """The (decompressed) bytes of a file; damage inside a .gz or .zst becomes BadData."""
    with open(path, 'rb') as raw:
        try:
            if path.lower().endswith('.gz'):
                with gzip.GzipFile(fileobj=raw) as f:
                    yield f  # its read(n) is short at the end only
            elif path.lower().endswith('.zst'):
                yield io.BufferedReader(_ZstdFile(raw), 1 << 20)
            else:
                yield raw
        except (EOFError, zlib.error, gzip.BadGzipFile, _Torn) as e:
            raise BadData(f'{path!r} is damaged or cut short: {e}') from None


class _Torn(Exception):
    pass


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of one or more zstd frames. zstandard's own stream reader takes a cut file for a finished one."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            raise UserError("reading .zst needs zstandard: pip install 'spannorm-jax[text]'") from None
        self.raw, self.error = raw, zstandard.ZstdError
        self.new_frame = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self.frame, self.fed, self.out = self.new_frame(), False, memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.out:
            chunk = b''
            if self.frame.eof:
                chunk, self.frame, self.fed = self.frame.unused_data, self.new_frame(), False
            chunk = chunk or self.raw.read(1 << 11)  # small: one kB of a repetitive file can open to 30 MB
            if not chunk:
                if self.fed:
                    raise _Torn('the last zstd frame has no end')
                return 0
            self.fed = True
            try:
                self.out = memoryview(self.frame.decompress(chunk))
            except self.error as e:
                raise _Torn(str(e)) from None
        n = min(len(buffer), len(self.out))
        buffer[:n], self.out = self.out[:n], self.out[n:]
        return n


def _text(piece: Piece, text_field: str) -> Iterator[Document]:
    with opened(piece.path) as f:
        at = 0
        for data in cut(f.read, piece.cut):
            if at == 0 and data.startswith(BOM):  # an encoding mark, not text
                at, data = len(BOM), data[len(BOM) :]
            if (nul := data.find(b'\0')) >= 0:
                raise BadData(f'{piece.path!r} is not text: NUL byte at offset {at + nul}; take binary files out of the source')
            try:
                yield Document(data.decode('utf-8'), data, lambda at=at: f'{piece.path!r} byte {at}')
            except UnicodeDecodeError as e:
                hint = 'looks like UTF-16; ' if data[:2] in (b'\xff\xfe', b'\xfe\xff') else ''
                raise BadData(f'{piece.path!r} is not UTF-8 at byte offset {at + e.start}; {hint}convert it to UTF-8') from None
            at += len(data)
        if at == 0:
            yield Document('', b'', lambda: repr(piece.path))  # counted, not stored


def _jsonl(piece: Piece, text_field: str) -> Iterator[Document]:
    with opened(piece.path) as f:
        if piece.lo:  # a line belongs to the piece it begins in
            f.seek(piece.lo - 1)
            while (part := f.readline(1 << 20)) and not part.endswith(b'\n'):
                pass
        first = at = f.tell() if piece.lo else 0
        number = 0

        def where() -> str:  # lines before `first` are counted only when a message asks
            return f'{piece.path!r} line {_count_lines(piece.path, first) + number}'

        while at < piece.hi or piece.hi < 0:
            line = f.readline(RECORD_BYTES + 1)
            if not line:
                break
            number += 1
            if len(line) > RECORD_BYTES:
                raise BadData(f'{where()} is longer than {RECORD_BYTES >> 20} MiB; split the record')
            start, at = at, at + len(line)
            if start == 0:
                line = line.removeprefix(BOM)
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode('utf-8'))
            except UnicodeDecodeError as e:
                raise BadData(f'{where()} is not UTF-8 at byte offset {start + e.start}') from None
            except (ValueError, RecursionError) as e:
                raise BadData(f'{where()} is not JSON: {e}') from None
            yield from _record(record, text_field, where)


def _count_lines(path: str, upto: int) -> int:
    with open(path, 'rb') as f:
        count = 0
        while upto > 0 and (chunk := f.read(min(upto, 1 << 20))):
            count, upto = count + chunk.count(b'\n'), upto - len(chunk)
        return count


def _some(names: Iterable[str]) -> str:
    """Names for a message: a record may have a million of them."""
    found = [reprlib.repr(name) for name in itertools.islice(names, 9)]
    return ', '.join(found[:8] + ['...'] * (len(found) > 8)) or 'none'


def _record(record: Any, text_field: str, where: Callable[[], str]) -> Iterator[Document]:
    """Documents of one record: its text field, cut when longer than DOCUMENT_BYTES."""
    if not isinstance(record, dict):
        raise BadData(f'{where()}: expected an object with the field {text_field!r}, got {type(record).__name__}')
    if text_field not in record:
        raise BadData(f'{where()} has no field {text_field!r} (it has {_some(record)}); set data.text_field')
    text = record[text_field]
    try:
        data = text if isinstance(text, bytes) else text.encode('utf-8')
        data.decode('utf-8')
    except AttributeError:
        raise BadData(f'{where()}: field {text_field!r} is {type(text).__name__}, expected text') from None
    except UnicodeError as e:  # bytes that are not UTF-8, or a lone surrogate escaped in JSON
        raise BadData(f'{where()}: field {text_field!r} is not text that UTF-8 can hold: {e}') from None
    if len(data) > RECORD_BYTES:
        raise BadData(f'{where()}: field {text_field!r} is longer than {RECORD_BYTES >> 20} MiB; split the record')
    parts = [data] if len(data) <= DOCUMENT_BYTES else cut(io.BytesIO(data).read, DOCUMENT_BYTES)
    for part in parts:
        yield Document(part.decode('utf-8'), part, where)


def parquet_file(path: str, dictionaries: Sequence[str] = ()):
    """The file; columns in `dictionaries` are not expanded, so that rows that share a long value do not each hold it."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError("reading Parquet needs pyarrow: pip install 'spannorm-jax[text]'") from None
    try:
        return parquet.ParquetFile(path, memory_map=False, buffer_size=1 << 20, read_dictionary=dictionaries)
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise BadData(f'{path!r} is not a Parquet file: {e}') from None


def _parquet(piece: Piece, text_field: str) -> Iterator[Document]:
    import pyarrow

    with parquet_file(piece.path) as file:
        if text_field not in file.schema_arrow.names:
            raise BadData(f'{piece.path!r} has no column {text_field!r} (it has {_some(file.schema_arrow.names)}); set data.text_field')
        kind, known = file.schema_arrow.field(text_field).type, pyarrow.types
        plain = known.is_string(kind) or known.is_large_string(kind) or known.is_binary(kind) or known.is_large_binary(kind)
    with parquet_file(piece.path, [text_field] if plain else []) as file:
        for group in range(piece.lo, piece.hi):
            # Of all columns: asked for a single one of a damaged file, pyarrow ends the process.
            size = file.metadata.row_group(group).total_byte_size
            if size > GROUP_BYTES:
                where = f'{piece.path!r} row group {group}'
                raise BadData(f'{where} holds {size >> 20} MiB; write row groups below {GROUP_BYTES >> 20} MiB')
            row = 0
            try:
                for batch in file.iter_batches(64, row_groups=[group], columns=[text_field], use_threads=False):
                    for value in batch.column(0):
                        place = f'{piece.path!r} row group {group} row {row}'
                        yield from _record({text_field: value.as_py()}, text_field, lambda place=place: place)
                        row += 1
            except (pyarrow.ArrowException, OSError, ValueError) as e:
                raise BadData(f'{piece.path!r} row group {group} after row {row} is damaged: {e}') from None


def _tfds(piece: Piece, text_field: str) -> Iterator[Document]:
    from spannorm_jax.data.sources import tfds_reader

    folder, split = os.path.split(piece.path)
    source = tfds_reader(folder).as_data_source(split=split)
    for i in range(piece.lo, piece.hi):
        yield from _record(dict(source[i]), text_field, lambda i=i: f'{folder!r} split {split} record {i}')


_READERS = {'text': _text, 'jsonl': _jsonl, 'parquet': _parquet, 'tfds': _tfds}
