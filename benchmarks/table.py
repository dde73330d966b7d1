"""The table of docs/performance.md, by one command: each line measured here and now, two sides of it in turn.

    python benchmarks/table.py [LINE ...] [--torch 'python peer_torch.py --compile'] [--maxtext 'peer_maxtext.sh train'] [--rounds 3]

Lines: torch, maxtext (each wants its peer's command), span, depth, start, data, memory, sweep; all by default. Prints Markdown rows: what,
the reading, what it should be. Ratios have 95% intervals over rounds. Nothing else should run meanwhile, or the intervals say so.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from peers import SHAPE, last_json, options

from spannorm_jax.bench import WARM_UP
from spannorm_jax.stats import t_interval

SPANNORM = [sys.executable, '-m', 'spannorm_jax']
SHAPES = {  # layers, width, heads, ffn, rows, positions
    '12 x 256, 8 x 256 tokens': (12, 256, 8, 682, 8, 256),
    '64 x 64, 8 x 128 tokens': (64, 64, 4, 170, 8, 128),
    '512 x 32, 4 x 128 tokens, 300 steps with start and compilation': (512, 32, 2, 85, 4, 128),
}
RUN = 300  # steps of a run whose start and compilation count
Row = tuple[str, str, str]


def bench(*given: str) -> dict:
    return last_json([*SPANNORM, 'bench', 'debug', *given, '--json'])


def ours(shape: tuple[int, ...], steps: int, topology: str) -> list[str]:
    layers, width, heads, ffn, rows, positions = shape
    fields = {'layers': layers, 'width': width, 'heads': heads, 'ffn': ffn, 'vocab': 257, 'topology': topology}
    changes = [f'model.{k}={v}' for k, v in fields.items()] + [f'data.seq={positions}', f'data.batch={rows}']
    return [*SPANNORM, 'bench', 'debug', *options(changes), '--rounds', str(steps), '--json']


def tokens_per_s(command: list[str]) -> float:
    return last_json(command)['tokens_per_s']


def ratio(pairs: list[tuple[float, ...]]) -> str:
    """Geometric mean of the first over the second, with its interval."""
    logs = t_interval(np.log([a / b for a, b in pairs]))
    mean, low, high = (float(np.exp(v)) for v in (logs.mean, logs.low, logs.high))
    return f'{mean:.2f} [{low:.2f}, {high:.2f}]'


def in_turn(commands: dict[str, list[str]], rounds: int, speed: dict[str, Callable[[list[str]], float]]) -> list[tuple[float, ...]]:
    """The speed of each command, a tuple for each round; the order turns round from one to the next."""
    found = []
    for i in range(rounds):
        seen = {name: speed[name](commands[name]) for name in (reversed(commands) if i % 2 else commands)}
        found.append(tuple(seen[name] for name in commands))
    return found


def whole_run(done: int) -> Callable[[list[str]], float]:
    """Steps of a run of RUN steps per second, start and compilation included, from a process that makes `done` of them."""

    def speed(command: list[str]) -> float:
        begun, found = time.perf_counter(), last_json(command)
        step = found['step_ms'] / 1000 if 'step_ms' in found else found['step_s']
        return RUN / (time.perf_counter() - begun + (RUN - done) * step)

    return speed


def torch(a: argparse.Namespace) -> Iterator[Row]:
    steps = 8
    for title, shape in SHAPES.items():
        flags = [f'--{k}={v}' for k, v in zip(('layers', 'width', 'heads', 'ffn', 'batch', 'seq'), shape, strict=True)]
        commands = {'ours': ours(shape, steps, 'span'), 'peer': [*shlex.split(a.torch), *flags, '--topology=span', f'--steps={steps}']}
        speed = {'ours': tokens_per_s, 'peer': tokens_per_s}
        if 'start' in title:
            speed = {'ours': whole_run(steps + WARM_UP), 'peer': whole_run(steps + 3)}  # the peer's own steps that do not count
        pairs = in_turn(commands, a.rounds, speed)
        yield f'speed over torch.compile, SpanNorm, {title}', f'{ratio(pairs)} ({each(pairs)})', '1.0'


def maxtext(a: argparse.Namespace) -> Iterator[Row]:
    commands = {'ours': ours(SHAPES['12 x 256, 8 x 256 tokens'], 8, 'pre'), 'peer': shlex.split(a.maxtext)}
    pairs = in_turn(commands, a.rounds, dict.fromkeys(commands, tokens_per_s))
    yield 'speed over MaxText, PreNorm, 12 x 256, 8 x 256 tokens', f'{ratio(pairs)} ({each(pairs)})', '1.6'


def each(pairs: list[tuple[float, ...]]) -> str:
    return ' and '.join(', '.join(f'{v:.4g}' for v in side) for side in zip(*pairs, strict=True))


def span(a: argparse.Namespace) -> Iterator[Row]:
    for kind, given in (('dense', []), ('8 experts', ['model.experts=8', 'model.first_dense=1'])):
        found = bench(*options([*SHAPE, 'model.topology=pre', *given]), '--vs', 'model.topology=span', '--rounds', str(8 * a.rounds))
        other = found['variants'][0]
        speed = ' [{1:.3f}, {2:.3f}]'.format(*(other['speed'][k] for k in ('mean', 'low', 'high')))
        yield (
            f'SpanNorm over PreNorm, {kind}: time of a step',
            f'{1 / other["speed"]["mean"]:.3f} (speed {other["speed"]["mean"]:.3f}{speed})',
            '1.02',
        )
        yield f'SpanNorm over PreNorm, {kind}: peak memory as compiled', f'{other["peak_bytes"] / found["peak_bytes"]:.3f}', '1.02'


def depth(a: argparse.Namespace) -> Iterator[Row]:
    depths, remats = (8, 64, 512, 1024), ('full', 'sqrt')
    base = [
        'model.width=32',
        'model.heads=2',
        'model.topology=span',
        'model.remat=full',
        'data.seq=128',
        'data.batch=4',
        f'model.layers={depths[0]}',
    ]
    vs = [f'model.layers={n}' for n in depths[1:]] + [f'model.layers={depths[-1]},model.remat={remats[1]}']
    found = bench(*options(base), *(word for v in vs for word in ('--vs', v)), '--rounds', str(2 * a.rounds))
    *rows, root = [found, *found['variants']]
    a_layer = [row['step_ms'] / n for row, n in zip(rows, depths, strict=True)]
    compiled = [row['compile_s'] for row in rows]
    yield f'ms of a step per layer at {depths} layers', ', '.join(f'{v:.2f}' for v in a_layer), 'flat within 10%'
    yield f'compile seconds at {depths} layers', ', '.join(f'{v:.1f}' for v in compiled), 'within 1.3x'
    kept = (rows[-1]['peak_bytes'] - rows[-2]['peak_bytes']) / (depths[-1] - depths[-2])
    a_block = 12 * 32 * 32 * 4 * 4  # four float32 numbers for each weight
    yield (
        'bytes a further layer takes with full remat, weights and moments apart',
        f'{kept - a_block:,.0f}',
        f'{4 * 128 * 32 * 4:,} (one block input)',
    )
    yield f'peak memory at {depths[-1]} layers, sqrt over full', f'{root["peak_bytes"] / rows[-1]["peak_bytes"]:.3f}', 'below 1'


def start(a: argparse.Namespace) -> Iterator[Row]:
    yield 'import spannorm_jax', f'{timed([sys.executable, "-c", "import spannorm_jax"]):.2f} s', '2 s'
    with tempfile.TemporaryDirectory() as name:
        timed([*SPANNORM, 'bench', 'debug', '--rounds', '2'])  # the text is prepared
        cold, warm, resumed = (first_row(Path(name, folder), f'{name}/cache') for folder in 'abb')
        yield (
            'from the command to the first step of nano: nothing compiled, all compiled, resumed',
            f'{cold:.1f} s, {warm:.1f} s, {resumed:.1f} s',
            '12 s, 5 s, 5 s',
        )
        causes = json.loads(Path(name, 'b', 'time.json').read_text())['seconds']
        yield 'of the last two processes, by cause', ', '.join(f'{k} {v:.1f}' for k, v in causes.items() if v >= 0.05), ''


def first_row(folder: Path, cache: str) -> float:
    """Seconds until a process that trains nano has done a step more than `folder` tells of; then it is asked to save and stop."""
    rows = folder / 'metrics.jsonl'
    before, begun = rows.read_bytes().count(b'\n') if rows.exists() else 0, time.perf_counter()
    process = subprocess.Popen(
        [*SPANNORM, 'train', 'nano', '--run.dir', str(folder)],
        env=os.environ | {'JAX_COMPILATION_CACHE_DIR': cache},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not rows.exists() or rows.read_bytes().count(b'\n') <= before:
        if process.poll() is not None:
            raise SystemExit(f'{process.args} ended with {process.returncode}')
        time.sleep(0.02)
    seconds = time.perf_counter() - begun
    process.terminate()
    process.wait()
    return seconds


def timed(command: list[str], env: dict[str, str] | None = None) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=os.environ | (env or {}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def data(a: argparse.Namespace) -> Iterator[Row]:
    found = last_json([sys.executable, str(Path(__file__).with_name('data.py')), '--mb', '10'])
    nano = last_json([*SPANNORM, 'bench', 'nano', '--rounds', '4', '--json'])['tokens_per_s']
    share = 100 * nano / found['tokens']['8x128']['per_s']
    yield "reading batches at 100 times the speed of nano, beside the steps: of one core's time", f'{share:.1%}', 'nobody waits below 100%'


def memory(a: argparse.Namespace) -> Iterator[Row]:
    def peak(layers: int) -> tuple[int, int]:
        """Of a process that trains: resident bytes at most, and what the compiler planned."""
        given = [f'model.layers={layers}', 'model.width=256', 'model.heads=8', 'model.ffn=682', 'data.seq=256', 'data.batch=8']
        code = (
            'import json, resource, sys; from spannorm_jax import cli; cli.main(sys.argv[1:]); '
            "print(json.dumps({'rss': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))"
        )
        words = ['bench', 'debug', *options(given), '--rounds', '2', '--json']
        out = subprocess.run([sys.executable, '-c', code, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
        told, _, rss = out.strip().rpartition('\n')
        return json.loads(rss)['rss'], json.loads(told[told.index('{') :])['peak_bytes']

    (small, planned_small), (large, planned) = peak(2), peak(24)
    yield (
        'growth of resident memory over growth of the plan, 2 to 24 blocks of width 256',
        f'{(large - small) / (planned - planned_small):.3f}',
        'within 10% of 1',
    )


def sweep(a: argparse.Namespace) -> Iterator[Row]:
    out = subprocess.run([sys.executable, str(Path(__file__).with_name('sweep.py'))], check=True, stdout=subprocess.PIPE, text=True).stdout
    yield '12 nano runs', out.strip().splitlines()[-1], '1.5 times sooner'


LINES = {f.__name__: f for f in (torch, maxtext, span, depth, start, data, memory, sweep)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('lines', nargs='*', metavar='LINE')
    p.add_argument('--torch', help='command of a peer that takes --layers, --width, ... and prints tokens_per_s and step_s as JSON')
    p.add_argument('--maxtext', help='command of a peer of its own shape, 12 x 256, that prints tokens_per_s')
    p.add_argument('--rounds', type=int, default=3)
    a = p.parse_args()
    if unknown := set(a.lines) - set(LINES):
        p.error(f'no line {sorted(unknown)[0]!r}; there are {", ".join(LINES)}')
    print('| | measured | to reach |\n|---|---|---|', flush=True)
    for name in a.lines or LINES:
        if name in ('torch', 'maxtext') and not getattr(a, name):
            print(f'| {name} | not measured: no --{name} | |', flush=True)
            continue
        for row in LINES[name](a):
            print('| ' + ' | '.join(row) + ' |', flush=True)


if __name__ == '__main__':
    main()
