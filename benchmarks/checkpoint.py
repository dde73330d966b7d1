"""What a checkpoint costs beside the steps between two of them, and how fast one is verified.

    python benchmarks/checkpoint.py [--layers 12] [--width 256] [--every 50] [--rounds 8]

Prints one JSON line: seconds of a step and of a checkpoint (medians of rounds, a step and a checkpoint in turn); the share of the latter in
--every steps; the seconds that the loop itself waits for it; MB/s of verification beside those of reading the same files without hashing,
both from the disk. The checkpoint is waited for, so that nothing of it hides behind a step: the share is the most that it can be. Figures
are pairs: by the clock, and in processor time of all threads, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from spannorm_jax import manifest, sharding
from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import Config, edit, to_dict
from spannorm_jax.program import program
from spannorm_jax.step import init_state


def now() -> np.ndarray:
    """Seconds by the clock, and of the processor."""
    return np.array([time.perf_counter(), time.process_time()])


def forget(paths: list[Path]) -> None:
    """Have the system read files from the disk the next time."""
    for path in paths:
        with path.open('rb') as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(paths: list[Path]) -> None:
    """All of them, as many at a time as verification does."""

    def one(path: Path) -> None:
        with path.open('rb', buffering=0) as f:
            while f.read(manifest.CHUNK):
                pass

    manifest._each(one, paths)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--layers', type=int, default=12)
    p.add_argument('--width', type=int, default=256)
    p.add_argument('--every', type=int, default=50)
    p.add_argument('--rounds', type=int, default=8)
    a = p.parse_args()
    cfg = edit(Config(), {'model.layers': a.layers, 'model.width': a.width, 'model.topology': 'pre', 'mesh.devices': 1})
    mesh = sharding.make_mesh(cfg.mesh)
    made = program(cfg, mesh)
    draw = np.random.default_rng(0)
    shape = cfg.data.batch, cfg.data.seq
    tokens = draw.integers(0, 257, shape, dtype=np.int32)
    batch = {
        'tokens': tokens,
        'targets': tokens,
        'segments': np.ones(shape, np.int32),
        'positions': np.tile(np.arange(shape[1]), (shape[0], 1)),
    }
    batch = sharding.put_batch({k: v.astype(np.int32) for k, v in batch.items()}, mesh, cfg.data.batch)
    spent = {'step': [], 'checkpoint': [], 'waiting': []}
    with tempfile.TemporaryDirectory() as scratch, jax.set_mesh(mesh), Checkpoints(Path(scratch) / 'checkpoints', keep=2) as checkpoints:
        step = made.step().lower(made.abstract, made.batch, made.peaks).compile()
        rates, state = made.rates(), init_state(cfg, made.lm, made.optimizer, made.places)
        for i in range(a.rounds + 1):
            begun = now()
            state, metrics = step(state, batch, rates)
            jax.device_get(metrics)
            stepped = now()
            checkpoints.save(i, state, {'config': to_dict(cfg)})
            handed = now()
            checkpoints.wait()
            for kind, seconds in (('step', stepped - begun), ('checkpoint', now() - stepped), ('waiting', handed - stepped)):
                spent[kind].append(seconds)
        newest = checkpoints.folder / str(checkpoints.latest())
        files = [path for _, path in manifest.walk(newest)]
        size, speed = sum(path.stat().st_size for path in files) / 1e6, {}
        for name, work in (('read', lambda: read(files)), ('verify', lambda: manifest.check(newest))):
            forget(files)
            begun = now()
            work()
            speed[f'{name}_mb_per_s'] = (size / (now() - begun)).tolist()
    found = {'layers': a.layers, 'width': a.width, 'every': a.every, 'measured': ['clock', 'processor'], 'checkpoint_mb': size}
    median = {kind: np.median(seconds[1:], 0) for kind, seconds in spent.items()}  # without the first, which does everything once
    found |= {f'{kind}_s': seconds.tolist() for kind, seconds in median.items()}
    print(json.dumps(found | {'cost': (median['checkpoint'] / (a.every * median['step'])).tolist()} | speed))


if __name__ == '__main__':
    main()
