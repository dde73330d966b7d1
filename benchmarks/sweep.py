"""How much sooner a sweep ends with its runs side by side: the same 12 nano runs with one worker, then with one per core.

python benchmarks/sweep.py [STEPS]   prints seconds of both and their ratio; 20 steps by default. Compiled programs are in the cache.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE = '''"""Twelve runs of the nano scale, cut short."""

from spannorm_jax.config import edit
from spannorm_jax.experiment import Verdict, product, sibling
from spannorm_jax.figures import panels

s = sibling('_shared')
QUESTION, CLAIM, CHIPS, CURVES = 'How long?', '', '', ()


def runs(scale):
    cfg = edit(s.base(scale), {'run.steps': STEPS})
    return product(cfg, {'model.topology': ('pre', 'post', 'span'), 'run.seed': (0, 1, 2, 3)})


def figure(rows):
    return panels('')[0]


def verdict(rows):
    return Verdict('cannot tell', f'{len(rows)} rows')
'''


def seconds(path: Path, root: Path, *jobs: str) -> float:
    begun = time.perf_counter()
    command = [sys.executable, '-m', 'spannorm_jax', 'experiment', str(path), '--root', str(root), '--results', str(root), *jobs]
    subprocess.run(command, check=True)
    return time.perf_counter() - begun


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / 'twelve.py'
        path.write_text(FILE.replace('STEPS', sys.argv[1] if sys.argv[1:] else '20'))
        seconds(path, folder / 'warm')
        one, side = seconds(path, folder / 'one', '--jobs', '1'), seconds(path, folder / 'side')
    print(f'one after another {one:.0f} s, side by side {side:.0f} s: {one / side:.2f} times sooner')
