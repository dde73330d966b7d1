"""What the loop needs from the machine: signals, time, batches, the compilation cache."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from spannorm_jax import distributed
from spannorm_jax.chips import PEAK_FLOPS
from spannorm_jax.config import Config
from spannorm_jax.errors import UserError, say
from spannorm_jax.model import flops_per_token

T = TypeVar('T')

try:
    import fcntl
except ImportError:
    fcntl = None


def peak_flops(device: Any) -> float | None:
    """Peak of one device, None where it is not known (every CPU)."""
    return next((peak for kind, peak in PEAK_FLOPS.items() if kind in device.device_kind), None)


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR or the program itself names another."""
    if jax.config.values['jax_compilation_cache_dir'] is None:
        base = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
        jax.config.update('jax_compilation_cache_dir', str(base / 'spannorm_jax' / 'xla'))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a run directory against other processes of this machine; a process that dies lets go of it.

    Raises: UserError where another one holds it.
    """
    if fcntl is None or not distributed.first():  # Windows has no flock, and cannot open a folder; one process holds it for all of a run
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f'another process is training in {str(folder)!r}; wait for it, or give another run.dir') from None
        yield
    finally:
        os.close(handle)


class Interrupted(KeyboardInterrupt):
    """A signal came before the first step. No Exception, so that nothing on its way takes it for a failure."""


class Signals:
    """While entered: SIGTERM, SIGUSR1 and the first Ctrl-C set `seen`; a second Ctrl-C leaves at once with code 130.

    Only the main thread of a program can take signals; in any other, `seen` is set by `ask` alone.
    """

    def __init__(self):
        self.seen, self.breaking = False, False
        names = [name for name in ('SIGTERM', 'SIGINT', 'SIGUSR1') if hasattr(signal, name)]
        self.numbers = [getattr(signal, n) for n in names] if threading.current_thread() is threading.main_thread() else []
        self.before: dict[int, Any] = {}

    def ask(self, stop: Callable[[int], bool] | None, step: int) -> bool:
        """Whether to stop; once it is so, it stays so."""
        self.seen = self.seen or bool(stop is not None and stop(step))
        return self.seen

    def check(self) -> None:
        """Raise Interrupted if a signal has come, ProcessLost where another process has ended the run."""
        distributed.check()
        if self.seen:
            raise Interrupted('interrupted before the first step')

    @contextlib.contextmanager
    def heard_at_once(self) -> Iterator[None]:
        """While entered, in a run of one process, a signal raises Interrupted: for a wait that nothing else ends, such as for data."""
        if distributed.several():  # the others would wait for this one in the next step
            yield
            return
        self.breaking = True
        try:
            if self.seen:
                raise Interrupted('interrupted')
            yield
        finally:
            self.breaking = False

    def __enter__(self) -> 'Signals':
        for number in self.numbers:
            self.before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.seen and number == signal.SIGINT:
            os._exit(130)
        if number == signal.SIGINT:  # a step or a compilation can last: say that it was heard
            say('\ninterrupted: saving and stopping; Ctrl-C again leaves at once, without saving')
        self.seen = True
        if self.breaking:
            raise Interrupted('interrupted')

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def patiently(work: Callable[[], T], check: Callable[[], None]) -> T:
    """What `work` gives, or raises: in a thread, for XLA's compiler hears no signal. `check`, which may raise, is asked meanwhile."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as e:
            found.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    while True:
        check()
        try:
            return found.result(0.1)
        except TimeoutError:
            if found.done():  # the work's own
                raise


class Clock:
    """Speed since `restart`: what was compiled, evaluated or saved before it does not count."""

    def __init__(self, cfg: Config, mesh: jax.sharding.Mesh):
        self.flops = flops_per_token(cfg.model, cfg.data.seq)
        peak = peak_flops(mesh.devices.flat[0])
        self.peak = None if peak is None else peak * mesh.size
        self.restart()

    def restart(self) -> None:
        self.begun, self.steps, self.tokens = time.perf_counter(), 0, 0

    def lap(self, tokens: int) -> dict[str, float | None]:
        """One more step is done: tokens/s, ms per step, and MFU = tokens/s * flops_per_token / peak, since `restart`."""
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        seconds = max(time.perf_counter() - self.begun, 1e-9)
        speed = self.tokens / seconds
        mfu = None if self.peak is None else speed * self.flops / self.peak
        return {'perf/tokens_per_s': speed, 'perf/step_ms': 1000 * seconds / self.steps, 'perf/mfu': mfu}


class Feed:
    """Training batches by index; opened at the first one asked for, and again wherever the next is not the one after the last."""

    def __init__(self, cfg: Config, corpus: Any, mine: Sequence[int] | None = None):
        self.cfg, self.corpus, self.mine, self.batches, self.k = cfg, corpus, mine, None, -1

    def take(self, k: int) -> dict[str, np.ndarray]:
        """This process's rows (`mine`) of global batch k."""
        if k != self.k or self.batches is None:
            self.close()
            data = self.cfg.data
            self.batches = self.corpus.train_batches(data.batch, data.seq, self.cfg.run.seed, k, self.mine, data.workers)
        self.k = k + 1
        return next(self.batches)

    def close(self) -> None:
        if self.batches is not None:
            self.batches.close()
        self.batches = None

    def __enter__(self) -> 'Feed':
        return self

    def __exit__(self, *_) -> None:
        self.close()
