"""JSON that may come from anyone: read in bounded memory, and what is wrong with it in words. Imports no jax."""

import json
import math
import os
from pathlib import Path
from typing import Any

from spannorm_jax.errors import BadData

SMALL = 1 << 20  # bytes: a configuration, an outcome
LARGE = 64 << 20  # a table with a line per file, or a number per id of a vocabulary


def read_json(path: Path, most: int = SMALL) -> Any:
    """What a JSON file holds; of a file of n bytes, Python objects take at most some 25 n.

    Raises: BadData (longer than `most` bytes, not UTF-8, not JSON, nested too deeply), OSError.
    """
    return parse_json(read_bytes(path, most), repr(str(path)))


def read_bytes(path: Path, most: int) -> bytes:
    """All of a file. Raises: BadData (longer than `most` bytes), OSError."""
    with path.open('rb') as f:
        data = f.read(min(os.fstat(f.fileno()).st_size, most) + 1)  # read(n) takes n bytes of memory, however short the file
    if len(data) > most:
        raise BadData(f'{str(path)!r} is damaged: longer than {most >> 20} MiB')
    return data


def _no_number(name: str) -> None:
    raise ValueError(f'{name} is no number of JSON')


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        _no_number(text)
    return number


def parse_json(data: bytes, where: str) -> Any:
    """Raises BadData, which begins with `where`."""
    try:
        return json.loads(data.decode('utf-8'), parse_constant=_no_number, parse_float=_number)
    except RecursionError:
        raise BadData(f'{where} is not JSON that anyone wrote: nested too deeply') from None
    except ValueError as e:
        raise BadData(f'{where} is not JSON: {e}') from None
