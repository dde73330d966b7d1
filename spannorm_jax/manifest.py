"""The manifest of a checkpoint: names, sizes and checksums of its files. It is written last, and without it a checkpoint does not count.

<step>/manifest.json   {"version": 2, "files": {"params/manifest.ocdbt": [bytes, CRC-32], ...}, "sha256": that of `files` as written}

Checksums find what a disk or a copy did, not what a forger did: CRC-32 misses one damaged file in 2**32, and is read faster than disks
are; SHA-256, which version 1 had, is not. Names in a manifest open nothing: the files that are there are walked, and looked up in it.
"""

import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spannorm_jax.errors import BadData, MissingInput
from spannorm_jax.json_file import LARGE, read_json

NAME = 'manifest.json'
META = 'meta/metadata'
VERSION = 2
CHUNK = 1 << 20  # bytes of a file in memory at a time, per thread
LEFT = ('.removing', '.orbax-checkpoint-tmp')  # ends of names of folders that are on their way out, or in
THREADS = 4  # checksums let go of the interpreter; the disk is then the limit


def seal(folder: Path) -> None:
    """Have the disk hold every file of a checkpoint, then its manifest, in one move. Raises OSError."""
    names = [name for name, path in walk(folder) if path is not None]
    files = dict(zip(names, _each(lambda name: _entry(folder / name, Crc32, durable=True), names), strict=True))
    for inner in (folder, *(p for p in folder.rglob('*') if p.is_dir())):
        sync_folder(inner)
    part = folder / f'{NAME}.part'
    with part.open('w', encoding='utf-8') as f:
        json.dump({'version': VERSION, 'files': files, 'sha256': _of_table(files)}, f)
        f.flush()
        os.fsync(f.fileno())
    part.replace(folder / NAME)
    sync_folder(folder)
    sync_folder(folder.parent)


def sealed(folder: Path) -> bool:
    return (folder / NAME).is_file()


def check(folder: Path, part: str = '') -> None:
    """Raise BadData where a checkpoint, or what lies below its folder `part`, is not what its manifest says; names the first such file.

    Memory: a few MiB per thread, however large the files.
    """
    if problems := faults(folder, part):
        more = f' (and {len(problems) - 1} more)' if len(problems) > 1 else ''
        raise BadData(f'checkpoint {str(folder)!r} is damaged: {problems[0]}{more}')


def damage(folder: Path, part: str = '') -> str | None:
    """What `check` would raise, or None. Raises OSError."""
    try:
        check(folder, part)
    except BadData as e:
        return str(e)


def faults(folder: Path, part: str = '') -> list[str]:
    """What differs from the manifest, a sentence per file; sizes first, and checksums only where all sizes hold. Without one
    (format 1) all that can be told is whether the meta can be read.

    Raises: BadData where the manifest itself cannot be used, OSError.
    """
    if not sealed(folder):
        return _unreadable(folder)
    version, files = _read(folder)
    said = {name: entry for name, entry in files.items() if name.startswith(part)}
    found = {name: path for name, path in walk(folder) if name.startswith(part)}
    problems = [f'{name!r} is missing' for name in sorted(said.keys() - found.keys())]
    problems += [f'{name!r} is no file of it' for name in sorted(found.keys() - said.keys())]
    both = sorted(said.keys() & found.keys())
    for name in both:
        path, expected = found[name], said[name][0]
        actual = None if path is None else path.stat().st_size
        if actual != expected:
            problems.append(f'{name!r} is no plain file' if path is None else f'{name!r} has {actual} bytes, expected {expected}')
    if problems:
        return problems
    if META in both and (step := _step_of(folder)) not in (None, folder.name):
        return [f'it is the checkpoint of step {step}, under another name']
    now = _each(lambda name: _entry(folder / name, hashlib.sha256 if version == 1 else Crc32), both)
    return [f'{name!r} has other content than was written' for name, entry in zip(both, now, strict=True) if entry != said[name]]


def _step_of(folder: Path) -> str | None:
    """The step that a checkpoint's meta names, as a name of a folder; None where it names none."""
    try:
        meta = read_json(folder / META, LARGE)
    except BadData:
        return None  # the checksums tell
    return str(meta['step']) if isinstance(meta, dict) and type(meta.get('step')) is int else None


def remove(path: Path) -> None:
    """A checkpoint, or what is left of one; of a link to one only the link."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


def walk(folder: Path) -> Iterator[tuple[str, Path | None]]:
    """(name, path) of every file below a checkpoint's folder but the manifest, in order; no path for what is not a plain file."""
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files + [f for f in folders if os.path.islink(os.path.join(at, f))]):
            path = Path(at, name)
            relative = path.relative_to(folder).as_posix()
            if relative not in (NAME, f'{NAME}.part'):
                yield relative, path if path.is_file() and not path.is_symlink() else None


def sync_folder(folder: Path) -> None:
    """Have the disk hold the names in a folder, where the system can."""
    if os.name != 'posix':
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(folder: Path) -> tuple[int, dict[str, list]]:
    """(version, files) of a manifest that holds together."""
    path = folder / NAME
    tree = read_json(path, LARGE)
    wrong = BadData(f'{str(path)!r} is damaged')
    if not isinstance(tree, dict) or type(tree.get('version')) is not int or tree['version'] < 1:
        raise wrong
    if tree['version'] > VERSION:
        raise BadData(f'{str(path)!r} has version {tree["version"]}, this package reads 1 to {VERSION}: upgrade spannorm_jax')
    files = tree.get('files')
    if not isinstance(files, dict) or not all(_is_entry(entry) for entry in files.values()) or tree.get('sha256') != _of_table(files):
        raise wrong
    return tree['version'], files


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str)


def _of_table(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class Crc32:
    """CRC-32 (that of zip and PNG) with the methods of hashlib."""

    def __init__(self):
        self.value = 0

    def update(self, data: bytes) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f'{self.value:08x}'


def _entry(path: Path, checksum: Callable[[], Any], durable: bool = False) -> list:
    """[bytes, checksum] of a file."""
    digest, total = checksum(), 0
    with path.open('rb', buffering=0) as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
            total += len(chunk)
        if durable:
            os.fsync(f.fileno())
    return [total, digest.hexdigest()]


def _each(work: Callable[[str], Any], names: list[str]) -> list[Any]:
    with ThreadPoolExecutor(max(1, min(THREADS, os.cpu_count() or 1))) as pool:
        return list(pool.map(work, names))


def steps(checkpoints: Path) -> list[int]:
    """Committed steps in a folder of checkpoints, in order: those with a manifest, and those of format 1, which had none."""
    return sorted(step for step, path in _numbered(checkpoints) if sealed(path) or not _unfinished(path))


def leftovers(checkpoints: Path) -> list[Path]:
    """What saves and removals that were cut short have left there."""
    cut_short = [path for _, path in _numbered(checkpoints) if not sealed(path) and _unfinished(path)]
    return cut_short + sorted(p for end in LEFT for p in checkpoints.glob(f'*{end}*'))


def _numbered(checkpoints: Path) -> list[tuple[int, Path]]:
    return [(int(p.name), p) for p in checkpoints.glob('*') if re.fullmatch('0|[1-9][0-9]*', p.name) and p.is_dir()]


def _unreadable(path: Path) -> list[str]:
    try:
        read_json(path / META, LARGE)
    except (BadData, FileNotFoundError, NotADirectoryError) as e:
        return [f'{META!r} cannot be read ({e})']
    return []


def _unfinished(path: Path) -> bool:
    """Whether a checkpoint without a manifest should have had one. What cannot be read is not called so: nothing unknown is removed."""
    try:
        meta = read_json(path / META, LARGE)
    except (BadData, OSError):
        return False
    return isinstance(meta, dict) and type(meta.get('format')) is int and meta['format'] > 1


def verify(run: Path) -> dict[str, Any]:
    """{run, ok, checkpoints: [{step, status, files, bytes, problems}], leftovers, seconds} of a run; status: ok, damaged, no manifest.

    Raises: MissingInput where there is no checkpoint.
    """
    folder, begun, rows = run / 'checkpoints', time.perf_counter(), []
    for step in steps(folder):
        path = folder / str(step)
        try:
            problems = faults(path)
        except BadData as e:
            problems = [str(e)]
        status = 'damaged' if problems else 'ok' if sealed(path) else 'no manifest'
        files = [p.stat().st_size for _, p in walk(path) if p is not None]
        rows.append({'step': step, 'status': status, 'files': len(files), 'bytes': sum(files), 'problems': problems})
    if not rows:
        raise MissingInput(f'{str(run)!r} has no whole checkpoint')
    return {
        'run': str(run),
        'ok': not any(row['problems'] for row in rows),
        'checkpoints': rows,
        'leftovers': [p.name for p in leftovers(folder)],
        'seconds': time.perf_counter() - begun,
    }
