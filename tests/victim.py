"""A program that trains, over and over, for tests that kill it: python victim.py, then a JSON object a line on stdin.

It imports everything once and forks for each run, so that a run starts in a second. {"config": {field: value}, "at": [point, n] or null,
"fault": name or null, "mark": file, "env": {}}: the n-th time that the run comes to `point` it makes the file `mark` and stays there,
until it is killed from outside. Prints `pid N`, and `end N` with the exit status (minus the signal's number where one ended it).
"""

import contextlib
import json
import os
import pathlib
import resource
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import conftest  # noqa: F401  (the compiler's options)
import jax
from fakes import TINY
from orbax.checkpoint._src.path import atomicity

from spannorm_jax import checkpoint, cli, commands, manifest, nonfinite, progress, rundir, score, track, train  # noqa: F401
from spannorm_jax.config import edit
from spannorm_jax.data.prepare import _Shard

WAIT_S = 600.0  # for a run to come to its point, on a machine that does much else
here: list = []  # the mark, how many more times to pass, and the point that counts


def reach() -> None:
    here[1] -= 1
    if here[1] == 0:
        pathlib.Path(here[0]).touch()
        time.sleep(3600)


def before(owner, name, when=lambda *a: True):
    """Come to the point at the beginning of a function, where its arguments are such."""
    real = getattr(owner, name)

    def wrapped(*a, **k):
        if when(*a):
            reach()
        return real(*a, **k)

    setattr(owner, name, wrapped)


def replaced(ends):
    before(pathlib.Path, 'replace', lambda self, target: str(target).endswith(ends))


def half_a_row():
    real = track.MetricsFile.write

    def write(self, row):
        if here[1] == 1:  # the last pass is the one that stays here
            self.file.write(track.dump_row({k: track.plain(v) for k, v in row.items()})[:40])
            self.file.flush()
        reach()
        real(self, row)

    track.MetricsFile.write = write


def half_removed():
    real = manifest.shutil.rmtree

    def rmtree(path, *a, **k):
        if str(path).endswith('.removing'):
            for _, file in list(manifest.walk(pathlib.Path(path)))[::2]:
                file.unlink()
            reach()
        return real(path, *a, **k)

    manifest.shutil.rmtree = rmtree


def within_evaluation():
    real = train.evaluate

    def evaluate(step, params, batches, *a):
        def seen():
            for i, batch in enumerate(batches):
                if i == 1:
                    reach()
                yield batch

        return real(step, params, seen(), *a)

    train.evaluate = evaluate


# In an order in which a run that is killed at each in turn comes to all of them.
POINTS = {
    'prepare: before a shard is in place': lambda: before(_Shard, 'commit'),
    'prepare: before meta.json': lambda: before(
        sys.modules['spannorm_jax.data.prepare'], 'write_whole', lambda path, text: path.name == 'meta.json'
    ),
    'compile': lambda: before(train, 'patiently'),
    'before a save': lambda: before(checkpoint.Checkpoints, 'save'),
    'array write': lambda: before(atomicity.AtomicRenameTemporaryPath, 'create'),
    'after the arrays, before the name': lambda: before(atomicity.AtomicRenameTemporaryPath, 'finalize'),
    'before the manifest': lambda: before(manifest, 'seal'),
    'within the manifest': lambda: replaced(manifest.NAME),
    'before retention': lambda: before(pathlib.Path, 'rename', lambda self, target: str(target).endswith('.removing')),
    'within retention': half_removed,
    'restore': lambda: before(checkpoint.Checkpoints, 'restore'),
    'metrics flush': half_a_row,
    'metrics replaced': lambda: replaced('metrics.jsonl'),
    'evaluation': within_evaluation,
    'before the outcome': lambda: before(rundir.Outcome, 'save'),
}
ONCE = ('prepare: before meta.json', 'compile', 'restore', 'before the outcome')  # a start comes to these no second time
EVERYWHERE = ('compile', 'before a save', 'restore', 'evaluation', 'before the outcome')  # to the others only the first process comes


def disk_full():
    """From the second save on no file can grow beyond 4 kB."""
    real, saves = checkpoint.Checkpoints.save, []

    def save(self, *a):
        saves.append(1)
        if len(saves) == 2:
            self.wait()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        real(self, *a)

    checkpoint.Checkpoints.save = save


def read_only():
    """The run's folder belongs to somebody else."""
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def deaf():
    """Whoever read stderr is gone."""
    end, begin = os.pipe()
    os.close(end)
    os.dup2(begin, 2)


def slow_store():
    real = os.fsync
    os.fsync = lambda handle: (time.sleep(0.05), real(handle))[1]


def clock_jumps():
    real, calls = time.time, []
    time.time = lambda: real() + (len(calls) % 7 - 3) * 86_400 * bool(calls.append(1) is None)


def hang():
    def stuck(*a, **k):
        time.sleep(3600)

    train.evaluate = stuck


def slow_compile():
    real = train.patiently
    train.patiently = lambda work, check: real(lambda: time.sleep(3600), check)


def slow_data():
    """The sixth batch never comes."""
    real, taken = train.Feed.take, []

    def take(self, k):
        taken.append(k)
        if len(taken) == 6:
            pathlib.Path(here[0]).touch()
            time.sleep(3600)
        return real(self, k)

    train.Feed.take = take


FAULTS = {f.__name__: f for f in (disk_full, read_only, deaf, slow_store, clock_jumps, hang, slow_compile, slow_data)}


def run(order) -> int:
    for name, value in order.get('env', {}).items():
        os.environ[name] = value
    if order.get('env'):
        jax.config.update('jax_num_cpu_devices', 1)  # of each of several processes
    here[:] = [order['mark'], 0, None]
    train.draw = lambda run: None  # the figure takes longer than the ten steps
    if order.get('at'):
        point, here[1] = order['at']
        POINTS[point]()
    if order.get('fault'):
        FAULTS[order['fault']]()
    cli.dispatch = lambda argv: commands.train(SimpleNamespace(settings=edit(TINY, order['config']), profile=False))
    return cli.main([])


class Victim:
    """One process that trains when told to, and is killed when it has come far enough."""

    def __init__(self, mark):
        self.mark = pathlib.Path(mark)
        folder = pathlib.Path(__file__).parent
        env = os.environ | {'PYTHONPATH': f'{folder.parent}{os.pathsep}{os.environ.get("PYTHONPATH", "")}', 'PYTHONWARNINGS': 'ignore'}
        self.process = subprocess.Popen(
            [sys.executable, str(folder / 'victim.py')],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.pid = None

    def start(self, config, at=None, fault=None, env=None):
        if self.pid is not None:  # a test that failed left it
            self.kill(signal.SIGKILL)
            self.end()
        self.mark.unlink(missing_ok=True)
        pathlib.Path(f'{self.mark}.log').unlink(missing_ok=True)
        order = {'config': config, 'at': at, 'fault': fault, 'env': env or {}, 'mark': str(self.mark)}
        self.process.stdin.write(json.dumps(order) + '\n')
        self.process.stdin.flush()
        self.pid = self.read('pid')

    def read(self, word):
        said, number = self.process.stdout.readline().split()
        assert said == word
        return int(number)

    def kill(self, number):
        os.kill(self.pid, number)  # or its zombie, which its parent keeps until the next order

    def gone(self):
        return select.select([self.process.stdout], [], [], 0)[0] != []

    def signal_at_mark(self, number):
        """Send it once the run is where it should be; False where it ended before it got there."""
        deadline = time.monotonic() + WAIT_S
        while not self.mark.exists():
            if self.gone():
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)
        self.kill(number)
        return True

    def end(self):
        code, self.pid = self.read('end'), None
        return code

    def said(self):
        log = pathlib.Path(f'{self.mark}.log')
        return log.read_text() if log.exists() else ''

    def close(self):
        if self.pid is not None:
            self.kill(signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.process.stderr.close()


def main() -> None:
    ended = None
    for line in sys.stdin:
        order = json.loads(line)
        if ended is not None:
            os.waitpid(ended, 0)
        pid = os.fork()
        if pid == 0:
            code = 99
            with contextlib.suppress(BaseException):
                log = os.open(order['mark'] + '.log', os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.dup2(log, 1)
                os.dup2(log, 2)
                try:
                    code = run(order)
                except BaseException:
                    import traceback

                    traceback.print_exc()
            os._exit(code)
        print('pid', pid, flush=True)
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie: its number goes to nobody else for now
        assert status is not None
        print('end', status.si_status if status.si_code == os.CLD_EXITED else -status.si_status, flush=True)
        ended = pid


if __name__ == '__main__':
    main()
