"""What `DataConfig.source` may name, turned into an ordered list of pieces that does not depend on who reads them."""

import glob
import hashlib
import os
import platform
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spannorm_jax.data.meta import is_prepared
from spannorm_jax.data.readers import DOCUMENT_BYTES, PACKED, Piece, parquet_file
from spannorm_jax.errors import BadData, MissingInput, UserError

# Left out of the default corpus: test data in odd encodings, applications, and whatever happens to be installed.
STDLIB_WITHOUT = frozenset({'test', 'idlelib', 'turtledemo', 'site-packages', 'dist-packages'})
TASK_BYTES = 16 << 20  # work of one task in a small corpus ...
TASKS = 256  # ... and the number of tasks (so of shards a split) in a large one
MANY_FILES = 200  # with so many documents a split of 5 per cent is empty once in 28,000 corpora: 0.95^200
PART_BYTES = 1 << 10, 16 << 10  # the least and the most that a text in fewer files is cut into ...
PARTS = 256  # ... and how many parts it has between them
HASHED_BYTES = 256 << 20  # sources up to this size are known by their content, larger ones by file sizes and times


@dataclass(frozen=True)
class Source:
    """A raw source: display name, tasks (lists of pieces) in order, identity of the content, files that were passed over.

    `cut`: a text longer than so many bytes becomes several documents.
    """

    name: str
    tasks: list[list[Piece]]
    identity: str
    skipped: int
    cut: int = DOCUMENT_BYTES


def find(source: str) -> Source:
    """Resolve `stdlib`, `tfds:NAME/CONFIG`, or a file, folder or glob of text, JSONL and Parquet.

    Raises: MissingInput (nothing there), BadData (nothing in it, or a file that is not regular), UserError (.json, a prepared folder).
    """
    if source.startswith('tfds:'):
        pieces, identity = _tfds_pieces(source)
        return Source(source, _tasks(pieces), identity, 0)
    if source == 'stdlib':
        root = sysconfig.get_paths()['stdlib']
        files = [p for p in _walk(root, STDLIB_WITHOUT) if p.endswith('.py')]
        name, skipped = f'stdlib of Python {platform.python_version()}', 0
    else:
        root, files, skipped = _files(source)
        name = os.path.basename(os.path.abspath(source))
    sizes = [_regular(path) for path in files]
    if not sum(sizes):
        raise BadData(f'source {source!r} holds no data: {len(files)} files, all empty')
    target = max(TASK_BYTES, sum(sizes) // TASKS)
    cut = _cut(files, sizes)
    pieces = [piece for path, size in zip(files, sizes, strict=True) for piece in _pieces(path, size, target, cut)]
    return Source(name, _tasks(pieces), _identity(root, files, sizes), skipped, cut)


def _files(source: str) -> tuple[str, list[str], int]:
    """(folder that names are relative to, files in order, number of files passed over) of a path or glob."""
    if os.path.isdir(source):
        if is_prepared(Path(source)):
            raise UserError(f'{source!r} is a prepared folder already: give it as data.source')
        files = _walk(source)
        if not files:
            raise BadData(f'folder {source!r} holds no files (hidden ones do not count)')
        # Beside records a folder's README is not a document, nor beside texts its metadata.json.
        records = [f for f in files if _kind(f) in ('jsonl', 'parquet')]
        chosen = records or [f for f in files if _kind(f) != 'json']
        if not chosen:
            raise _json(files[0])
        return source, chosen, len(files) - len(chosen)
    if os.path.lexists(source):
        if _kind(source) == 'json':
            raise _json(source)
        return os.path.dirname(source) or '.', [source], 0
    files = sorted((f for f in glob.glob(source, recursive=True) if not os.path.isdir(f)), key=os.fsencode)
    if not files:
        what = 'matches no file' if glob.has_magic(source) else 'does not exist'
        raise MissingInput(f'data source {source!r} {what}; expected stdlib, tfds:NAME/CONFIG, a file, a folder or a glob')
    for path in files:
        if _kind(path) == 'json':  # a glob says that it is meant, a folder does not
            raise _json(path)
    return os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in files]), files, 0


def _walk(root: str, without: frozenset[str] = frozenset()) -> list[str]:
    """All files below root that are not hidden, folder by folder in the order of their names' bytes.

    Links are followed, but no real folder is entered twice. `without` names folders of root to leave out.
    """
    found, seen = [], set()

    def enter(folder: str) -> None:
        real = os.path.realpath(folder)
        if real in seen:  # a loop, or a second link to the same folder
            return
        seen.add(real)
        try:
            names = sorted(os.listdir(folder), key=os.fsencode)
        except OSError as e:
            raise MissingInput(f'cannot read folder {folder!r}: {e.strerror}') from None
        for name in names:
            path = os.path.join(folder, name)
            if not name.startswith('.') and not (folder == root and name in without):
                enter(path) if os.path.isdir(path) else found.append(path)

    enter(root)
    return found


def _regular(path: str) -> int:
    """Size of a file in bytes."""
    try:
        status = os.stat(path)
    except OSError as e:  # a link to nowhere or to itself, a name that is too long
        raise MissingInput(f'cannot read {path!r}: {e.strerror}') from None
    if not stat.S_ISREG(status.st_mode):
        raise BadData(f'{path!r} is not a regular file; take it out of the source')
    if not os.access(path, os.R_OK):
        raise MissingInput(f'cannot read {path!r}: permission denied')
    return status.st_size


def _kind(path: str) -> str:
    """text | jsonl | parquet | json, by the ending in any case. json is no source: one document has no lines to take as texts."""
    if path.lower().endswith('.parquet'):
        return 'parquet'
    stem, ending = os.path.splitext(path.lower())
    name = stem if ending in PACKED else path.lower()
    return {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json'}.get(os.path.splitext(name)[1], 'text')


def _json(path: str) -> UserError:
    return UserError(f'{path!r}: .json is not read; write one object a line and name it .jsonl (lines already: rename the file)')


def _cut(files: list[str], sizes: list[int]) -> int:
    """Length of document at which text is cut: a book in one file must reach every split, a file among many is one document."""
    if len(files) >= MANY_FILES or any(_kind(f) != 'text' for f in files):
        return DOCUMENT_BYTES
    least, most = PART_BYTES
    return min(max(sum(sizes) // PARTS, least), most)


def _pieces(path: str, size: int, target: int, cut: int) -> Iterator[Piece]:
    kind = _kind(path)
    if kind == 'parquet':
        file = parquet_file(path)
        with file:
            groups = file.metadata.num_row_groups
            for g in range(groups):
                yield Piece(kind, path, g, g + 1, file.metadata.row_group(g).total_byte_size)
    elif kind == 'jsonl' and not path.lower().endswith(PACKED):
        for lo in range(0, size, target):
            yield Piece(kind, path, lo, min(lo + target, size), min(target, size - lo))
    else:
        yield Piece(kind, path, 0, -1, size, cut)


def _tasks(pieces: list[Piece]) -> list[list[Piece]]:
    """Neighbouring pieces put together until a task has its size."""
    target = max(TASK_BYTES, sum(p.size for p in pieces) // TASKS)
    tasks, room = [], 0
    for piece in pieces:
        if room <= 0:
            tasks.append([])
            room = target
        tasks[-1].append(piece)
        room -= piece.size
    return tasks


def _identity(root: str, files: list[str], sizes: list[int]) -> str:
    """sha256 over names and contents; over names, sizes and times of change where the content is large."""
    digest, small = hashlib.sha256(), sum(sizes) <= HASHED_BYTES
    for path, size in zip(files, sizes, strict=True):
        digest.update(os.fsencode(os.path.relpath(path, root)) + b'\0')
        if small:
            with open(path, 'rb') as f:
                digest.update(hashlib.file_digest(f, 'sha256').digest())
        else:
            digest.update(f'{os.path.abspath(path)} {size} {os.stat(path).st_mtime_ns}'.encode('utf-8', 'surrogateescape'))
    return digest.hexdigest()


def tfds_reader(folder: str) -> Any:
    """Read-only TFDS builder of a prepared data set. ArrayRecord is read without TensorFlow."""
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(folder)


def _tfds_pieces(source: str) -> tuple[list[Piece], str]:
    import tensorflow_datasets as tfds

    name = source.removeprefix('tfds:')
    try:
        builder = tfds.builder(name, try_gcs=False)
    except (ValueError, LookupError, OSError) as e:
        raise MissingInput(f'TFDS knows no data set {name!r}: {str(e).splitlines()[0]}') from None
    folder = str(builder.data_dir)
    if not os.path.isfile(os.path.join(folder, 'dataset_info.json')):
        raise MissingInput(
            f'{source!r} is not prepared in {folder!r}; run `tfds build {name} --file_format=array_record` '
            'or point TFDS_DATA_DIR to where it is'
        )
    splits = tfds_reader(folder).info.splits
    if 'train' not in splits:
        raise BadData(f'{source!r} has no split named train (it has {", ".join(splits)})')
    try:
        count = len(tfds_reader(folder).as_data_source(split='train'))
    except NotImplementedError:
        raise BadData(f'{folder!r} is not in ArrayRecord; prepare it with `--file_format=array_record`') from None
    size = splits['train'].num_bytes
    step = max(1, -(-count // min(TASKS, max(1, size // TASK_BYTES))))
    path = os.path.join(folder, 'train')
    pieces = [Piece('tfds', path, lo, min(lo + step, count), size * step // max(count, 1)) for lo in range(0, count, step)]
    if not pieces:
        raise BadData(f'{source!r} holds no records')
    info = Path(folder, 'dataset_info.json').read_bytes()
    return pieces, hashlib.sha256(name.encode() + info).hexdigest()
