"""Speed of the data path, one JSON line: reading prepared data on one core, and `prepare` at two sizes.

    python benchmarks/data.py [--mb 10 100] [--seconds 2]

tokens: one thread makes the batches that training gets, from a corpus that is in the page cache.
prepare_mb: generated JSONL of 2 kB documents, byte tokenizer, one worker; the two figures are close where time is linear in size.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from spannorm_jax.config import DataConfig
from spannorm_jax.data import open_data, prepare


def write_jsonl(path: Path, mb: float) -> int:
    """About `mb` million bytes of JSONL: documents of 2 kB of made-up words. Returns the exact size."""
    rng = np.random.default_rng(0)
    words = [''.join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(2, 9, 5000)]
    with open(path, 'w') as f:
        while f.tell() < mb * 1e6:
            f.write(json.dumps({'text': ' '.join(words[i] for i in rng.integers(0, 5000, 320))}) + '\n')
    return path.stat().st_size


def reading(folder: Path, seq: int, batch: int, seconds: float) -> dict[str, float]:
    """Tokens per second of wall time, and per second of CPU time (what a core gives that others do not share)."""
    corpus = open_data(DataConfig(source=str(folder)))
    with corpus.train_batches(batch, seq, seed=0) as batches:
        next(batches)
        wall, cpu, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - wall < seconds:
            next(batches)
            count += 1
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {'per_s': round(count * batch * seq / wall), 'per_cpu_s': round(count * batch * seq / cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--mb', type=float, nargs='+', default=[10, 100], help='sizes prepared, in million bytes')
    parser.add_argument('--seconds', type=float, default=2, help='time of each reading case')
    args = parser.parse_args()
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, whatever the machine has
    result: dict = {'cpus': os.cpu_count(), 'machine': platform.machine(), 'prepare_mb': {}, 'tokens': {}}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for mb in args.mb:
            source, folder = root / f'{mb:g}.jsonl', root / f'{mb:g}'
            size, wall, cpu = write_jsonl(source, mb), time.perf_counter(), time.process_time()
            prepare(str(source), folder, workers=1)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            result['prepare_mb'][f'{mb:g}'] = {'per_s': round(size / 1e6 / wall, 1), 'per_cpu_s': round(size / 1e6 / cpu, 1)}
        for seq, batch in ((128, 8), (128, 64), (2048, 8)):
            result['tokens'][f'{batch}x{seq}'] = reading(folder, seq, batch, args.seconds)
    print(json.dumps(result))


if __name__ == '__main__':
    main()
