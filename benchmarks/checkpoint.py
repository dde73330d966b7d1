"""What a checkpoint costs: some steps with one against as many without, in turn in one process; and how fast one is verified.

    python benchmarks/checkpoint.py [--layers 12] [--width 256] [--steps 50] [--every 50] [--pairs 3]

Prints one JSON line: seconds of a step and, of each pair of blocks of --steps, of a checkpoint; the median as a share of --every steps; and
MB/s of verification beside those of reading the same files without hashing, both from the disk. Each figure is a pair: by the clock, and in
processor time of all threads. Other work on the machine disturbs the latter less, and in it what is written in the background counts whole.
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
    p.add_argument('--steps', type=int, default=50)
    p.add_argument('--every', type=int, default=50)
    p.add_argument('--pairs', type=int, default=3)
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
    spent = {'without': [], 'with': []}
    with tempfile.TemporaryDirectory() as scratch, jax.set_mesh(mesh), Checkpoints(Path(scratch) / 'checkpoints', keep=2) as checkpoints:
        step = made.step().lower(made.abstract, made.batch, made.peaks).compile()
        rates, state, done = made.rates(), init_state(cfg, made.lm, made.optimizer, made.places), 0

        def block(save, steps):
            nonlocal state, done
            begun = now()
            if save:
                checkpoints.save(done, state, {'config': to_dict(cfg)})
            for _ in range(steps):
                checkpoints.poll()
                state, metrics = step(state, batch, rates)
                jax.device_get(metrics)  # as the loop does, which keeps one step in flight
            done += steps
            if save:
                checkpoints.wait()  # what is not done by now would be done within the next block
            return now() - begun

        block(True, 1)  # everything once
        for _ in range(a.pairs):
            for kind, of in spent.items():
                of.append(block(kind == 'with', a.steps))
        newest = checkpoints.folder / str(checkpoints.latest())
        files = [path for _, path in manifest.walk(newest)]
        size, speed = sum(path.stat().st_size for path in files) / 1e6, {}
        for name, work in (('read', lambda: read(files)), ('verify', lambda: manifest.check(newest))):
            forget(files)
            begun = now()
            work()
            speed[f'{name}_mb_per_s'] = (size / (now() - begun)).tolist()
    one, checkpoint = np.median(spent['without'], 0) / a.steps, np.array(spent['with']) - np.array(spent['without'])
    found = {'layers': a.layers, 'width': a.width, 'steps': a.steps, 'every': a.every, 'measured': ['clock', 'processor']}
    found |= {'checkpoint_mb': size, 'step_s': one.tolist(), 'checkpoint_s': checkpoint.tolist()}
    print(json.dumps(found | {'cost': (np.median(checkpoint, 0) / (a.every * one)).tolist()} | speed))


if __name__ == '__main__':
    main()
