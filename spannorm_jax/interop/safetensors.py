"""Safetensors files, read and written array by array: 8 bytes with the length of a JSON header, the header, the data. No code is run.

Source: the format's description, github.com/huggingface/safetensors.
"""

import json
import math
import re
import reprlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from spannorm_jax import json_file
from spannorm_jax.errors import BadData, MissingInput

DTYPES: dict[str, Any] = {
    'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16, 'I64': np.int64, 'I32': np.int32, 'BOOL': np.bool_,
}  # fmt: skip
MOST_HEADER = 100 << 20  # bytes; what the format's own reader allows
MOST_AXES = 32  # numbers of a shape are multiplied, and a header has room for a million
INDEX = 'model.safetensors.index.json'
WHOLE = 'model.safetensors'


class Entry(NamedTuple):
    """Where an array lies."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: Any

    def read(self) -> np.ndarray:
        """The array as a view of the file: only what is used of it is loaded."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, 'r', self.offset, self.shape)


def entries(path: Path) -> dict[str, Entry]:
    """The arrays of one file by name. Raises: BadData where the file is cut off, or is not what its header says."""
    try:
        size = path.stat().st_size
        with path.open('rb') as file:
            (length,) = struct.unpack('<Q', file.read(8))
            if length > min(size - 8, MOST_HEADER):
                raise ValueError(f'its header is said to have {length} bytes, the file has {size}')
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError('its header is not an object')
        header.pop('__metadata__', None)
        found = {name: _entry(path, 8 + length, size, name, facts) for name, facts in header.items()}
    except FileNotFoundError:
        raise MissingInput(f'{str(path)!r} does not exist') from None
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as e:
        raise BadData(f'{str(path)!r} is not a whole safetensors file: {e}; copy or download it again') from None
    return found


def _entry(path: Path, start: int, size: int, name: str, facts: Any) -> Entry:
    said, short = reprlib.repr(name), reprlib.repr
    if facts['dtype'] not in DTYPES:
        raise ValueError(f'{said} is of dtype {short(facts["dtype"])}, expected one of {", ".join(DTYPES)}')
    dtype, shape, (lo, hi) = DTYPES[facts['dtype']], tuple(facts['shape']), facts['data_offsets']
    if len(shape) > MOST_AXES or not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, lo, hi)):
        raise ValueError(f'{said} has shape {short(shape)} at {short(lo)} to {short(hi)}')
    if hi - lo != math.prod(shape) * np.dtype(dtype).itemsize or start + hi > size:
        raise ValueError(f'{said} of shape {shape} lies at {lo} to {hi} of {size - start} bytes')
    return Entry(path, start + lo, shape, dtype)


def folder_entries(folder: Path) -> dict[str, Entry]:
    """The arrays of a model's folder, in one file or in the shards of its index.

    Raises: MissingInput, BadData (an index that names a file outside the folder, or an array that is not in its file).
    """
    index = folder / INDEX
    if not index.is_file():
        return entries(folder / WHOLE)
    tree = read_json(index)
    where = tree.get('weight_map')
    if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
        raise BadData(f'{str(index)!r} has no weight_map of names to files')
    shards = {}
    for file in dict.fromkeys(where.values()):
        if not re.fullmatch(r'[\w.-]{1,200}\.safetensors', file, re.ASCII):
            raise BadData(f'{str(index)!r} names {reprlib.repr(file)}; expected the name of a .safetensors file beside it')
        shards[file] = entries(folder / file)
    for name, file in where.items():
        if name not in shards[file]:
            raise BadData(f'{str(index)!r} says that {reprlib.repr(name)} is in {file!r}, where it is not')
    return {name: shards[file][name] for name, file in where.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Raises: MissingInput, BadData."""
    try:
        tree = json_file.read_json(path, json_file.LARGE)  # an index has a line per weight
    except FileNotFoundError:
        raise MissingInput(f'{str(path)!r} does not exist') from None
    if not isinstance(tree, dict):
        raise BadData(f'{str(path)!r} is a {type(tree).__name__}, expected an object')
    return tree


def write_folder(folder: Path, arrays: dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]], most: int) -> None:
    """Float32 arrays, given by name as (shape, how to make it), in files of at most `most` bytes (or one array). One exists at a time."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, (shape, _) in arrays.items():
        size = 4 * math.prod(shape)
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    n = len(shards)
    files = [WHOLE] if n == 1 else [f'model-{i:05}-of-{n:05}.safetensors' for i in range(1, n + 1)]
    for file, names in zip(files, shards, strict=True):
        _write(folder / file, {name: arrays[name] for name in names})
    if n > 1:
        total = sum(4 * math.prod(shape) for shape, _ in arrays.values())
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        (folder / INDEX).write_text(json.dumps({'metadata': {'total_size': total}, 'weight_map': where}, indent=1) + '\n', 'utf-8')


def _write(path: Path, arrays: dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]) -> None:
    header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
    at = 0
    for name, (shape, _) in arrays.items():
        end = at + 4 * math.prod(shape)
        header[name] = {'dtype': 'F32', 'shape': list(shape), 'data_offsets': [at, end]}
        at = end
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)  # data begins at a multiple of 8
    with path.open('wb') as file:
        file.write(struct.pack('<Q', len(text)) + text)
        for data in _arrays(arrays):
            file.write(data.data if data.size else b'')


def _arrays(arrays: dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]) -> Iterator[np.ndarray]:
    for shape, make in arrays.values():
        data = np.ascontiguousarray(make(), '<f4').reshape(shape)
        yield data
        del data
