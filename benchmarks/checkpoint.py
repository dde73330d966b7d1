"""What a checkpoint costs: 50 steps with one against 50 steps without, in turn in one process; and how fast one is verified.

    python benchmarks/checkpoint.py [--layers 12] [--width 256] [--every 50] [--pairs 3]

Prints one JSON line: seconds of each kind of block, the cost of a checkpoint as a share of the time of its steps, and MB/s of verification
beside those of reading the same files without hashing.
"""

import argparse
import json
import statistics
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


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--layers', type=int, default=12)
    p.add_argument('--width', type=int, default=256)
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
    seconds = {'with': [], 'without': []}
    with tempfile.TemporaryDirectory() as scratch, jax.set_mesh(mesh), Checkpoints(Path(scratch) / 'checkpoints', keep=2) as checkpoints:
        step = made.step().lower(made.abstract, made.batch, made.peaks).compile()
        rates, state, done = made.rates(), init_state(cfg, made.lm, made.optimizer, made.places), 0

        def block(save):
            nonlocal state, done
            begun = time.perf_counter()
            if save:
                checkpoints.save(done, state, {'config': to_dict(cfg)})
            for _ in range(a.every):
                checkpoints.poll()
                state, metrics = step(state, batch, rates)
                jax.device_get(metrics)  # as the loop does, which keeps one step in flight
            done += a.every
            if save:
                checkpoints.wait()  # what is not done by now would be done within the next block
            return time.perf_counter() - begun

        block(True)  # everything once
        for _ in range(a.pairs):
            seconds['without'].append(block(False))
            seconds['with'].append(block(True))
        newest = checkpoints.folder / str(checkpoints.latest())
        files = [path for _, path in manifest.walk(newest)]
        size = sum(path.stat().st_size for path in files) / 1e6
        begun = time.perf_counter()
        for path in files:
            with path.open('rb', buffering=0) as f:
                while f.read(manifest.CHUNK):
                    pass
        read = time.perf_counter() - begun
        begun = time.perf_counter()
        manifest.check(newest)
        verified = time.perf_counter() - begun
    share = [w / wo - 1 for w, wo in zip(seconds['with'], seconds['without'], strict=True)]
    found = {'layers': a.layers, 'width': a.width, 'every': a.every, 'checkpoint_mb': size, 'seconds': seconds}
    found |= {'cost': statistics.median(share), 'cost_of_each_pair': share}
    print(json.dumps(found | {'read_mb_per_s': size / read, 'verify_mb_per_s': size / verified}))


if __name__ == '__main__':
    main()
