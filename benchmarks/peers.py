"""One training step here beside a peer's, in turn, as processes of their own.

    python benchmarks/peers.py --peer 'python peer_torch.py --compile' [--rounds 3] [--set model.layers=12 model.width=256 ...]

A peer is any command that prints, as its last line, a JSON object with `tokens_per_s`, or a line with `tokens_per_s N` for each step; give
it the same shape by its own options. Ours is `spannorm bench --json` of a plain dense model in float32. Prints one JSON line: medians, and
the ratio of tokens per second, ours over the peer's, as a geometric mean over the rounds with a 95% t interval.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable

import numpy as np

from spannorm_jax.stats import t_interval

SHAPE = (  # 12 blocks of width 256 over 8 rows of 256 bytes
    'model.layers=12', 'model.width=256', 'model.heads=8', 'model.ffn=682', 'model.vocab=257', 'data.seq=256', 'data.batch=8',
)  # fmt: skip


def last_json(command: list[str]) -> dict:
    """What a process says of itself: its last line as JSON, or all lines; or the median of `tokens_per_s N` over the later half."""
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if speeds := re.findall(r'tokens_per_s ([0-9.]+)', out):
        return {'tokens_per_s': statistics.median(map(float, speeds[len(speeds) // 2 :]))}
    return json.loads(out[out.index('{') :] if out.startswith('{') else out.splitlines()[-1])


def options(changes: Iterable[str]) -> list[str]:
    """NAME=VALUE as words of a command line."""
    return [word for item in changes for word in ('--' + item.partition('=')[0], item.partition('=')[2])]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--peer', required=True)
    p.add_argument('--rounds', type=int, default=3)
    p.add_argument('--steps', type=int, default=8)
    p.add_argument('--set', nargs='*', default=SHAPE)
    a = p.parse_args()
    ours = [sys.executable, '-m', 'spannorm_jax', 'bench', 'debug', *options(a.set), '--rounds', str(a.steps), '--json']
    speed, compiling = {'ours': [], 'peer': []}, []
    for i in range(a.rounds):
        for name in ('ours', 'peer') if i % 2 else ('peer', 'ours'):
            found = last_json(ours if name == 'ours' else shlex.split(a.peer))
            speed[name].append(found['tokens_per_s'])
            compiling += [found['compile_s']] if name == 'ours' else []
    logs = t_interval(np.log(np.array(speed['ours']) / np.array(speed['peer'])))
    print(
        json.dumps(
            {
                'ours_over_peer': [round(float(np.exp(v)), 3) for v in (logs.mean, logs.low, logs.high)],
                'tokens_per_s': {name: [round(v, 1) for v in values] for name, values in speed.items()},
                'compile_s': round(statistics.median(compiling), 1), 'rounds': a.rounds, 'shape': list(a.set),
            }
        )
    )  # fmt: skip


if __name__ == '__main__':
    main()
