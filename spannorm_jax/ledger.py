"""Where a run's time goes: wall seconds by cause over all of its starts, in time.json; and a trace of a few steps."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from spannorm_jax.errors import BadData, StorageError
from spannorm_jax.json_file import read_json
from spannorm_jax.rundir import write_json
from spannorm_jax.track import Row

CAUSES = {
    'step': 'training steps whose work stands',
    'lost': 'training steps whose work was thrown away: gone back behind, or repeated after a crash',
    'data': 'waiting for the next batch while the devices had nothing to do',
    'compile': 'compiling the step and the evaluation',
    'eval': 'evaluation',
    'checkpoint': 'saving, as far as training waits for it',
    'other': 'all else: opening data, restoring, writing rows',
}
COUNTS = ('starts', 'steps', 'tokens', 'reached')  # steps and tokens whose work stands; the step up to which time was told
FILE = 'time.json'


class Ledger:
    """Seconds by cause since this start, and before it what time.json says. `during` may be nested: the innermost cause counts."""

    def __init__(self, folder: Path):
        self.folder, self.cause, self.since = folder, 'other', time.perf_counter()
        before = read(folder) or {}
        self.starts, self.steps, self.tokens, self.reached = (before.get(name, 0) for name in COUNTS)
        self.starts += 1
        self.seconds = {cause: float(before.get('seconds', {}).get(cause, 0)) for cause in CAUSES}

    def _turn(self, cause: str) -> None:
        now = time.perf_counter()
        self.seconds[cause] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def during(self, cause: str, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """While entered, time goes into `cause`; afterwards into what it went into before, as does this time too if `unless()` then."""
        self._turn(self.cause)
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self._turn(before if unless() else cause)
            self.cause = before

    def done(self, step: int, tokens: int, applied: bool) -> None:
        """One more step, after which the run stands at `step`; one that was not applied is lost."""
        self.steps, self.tokens, self.reached = self.steps + 1, self.tokens + tokens, step
        if not applied:
            self._lose(1)

    def back_to(self, step: int, rows: Sequence[Row] = ()) -> None:
        """The run goes on from `step`: what was done after it is lost. `rows` may tell of steps that a crash kept from being told here."""
        known = max(step, self.reached)
        if beyond := [row for row in rows if row['step'] > known and row.get('perf/step_ms')]:
            self.seconds['lost'] += (beyond[-1]['step'] - known) * beyond[-1]['perf/step_ms'] / 1000
        self._lose(known - step)
        self.reached = step

    def _lose(self, steps: int) -> None:
        """So many steps at the average of all; their tokens too."""
        share = min(steps / self.steps, 1.0) if self.steps else 0.0
        lost = share * self.seconds['step']
        self.seconds['step'], self.seconds['lost'] = self.seconds['step'] - lost, self.seconds['lost'] + lost
        self.steps, self.tokens = self.steps - round(share * self.steps), self.tokens - round(share * self.tokens)

    def save(self) -> None:
        self._turn(self.cause)
        write_json(self.folder / FILE, {name: getattr(self, name) for name in COUNTS} | {'seconds': self.seconds})

    def try_to_save(self) -> None:
        """Save, unless that fails or there is no folder yet: an error may be on its way, and it matters more."""
        with contextlib.suppress(StorageError, OSError):
            if self.folder.is_dir():
                self.save()


def read(folder: Path) -> dict[str, Any] | None:
    """time.json; None where there is none that can be read, for no run hangs on it."""
    with contextlib.suppress(BadData, OSError):
        tree = read_json(folder / FILE)
        seconds = tree.get('seconds') if isinstance(tree, dict) else None
        if isinstance(seconds, dict) and all(_plausible(x) for x in (*seconds.values(), *map(tree.get, COUNTS))):
            return tree
    return None


def _plausible(x: Any) -> bool:
    return isinstance(x, int | float) and 0 <= x < 1e18


def goodput(told: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Share of the wall time that went into steps whose work stands, and of each other cause, the largest first."""
    total = sum(told['seconds'].values()) or 1.0
    shares = {cause: seconds / total for cause, seconds in told['seconds'].items()}
    return shares.pop('step', 0.0), dict(sorted(shares.items(), key=lambda item: -item[1]))


class Profile:
    """A trace of `steps` training steps in `folder`, which XProf, TensorBoard's profiler and Perfetto open; 0 traces nothing.

    It begins with the third step of this start: the first ones pay for what is done once.
    """

    WARM_UP = 2

    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps, self.launched, self.begun, self.running = folder, steps, 0, False, False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the launch of training step `number`."""
        if not self.steps:
            yield
            return
        if self.launched == self.WARM_UP:
            jax.profiler.start_trace(str(self.folder))
            self.begun = self.running = True
        # One step is always under way: when the second one after the last is launched, that one is done.
        if self.launched == self.WARM_UP + self.steps + 1:
            self.close()
        with jax.profiler.StepTraceAnnotation('train', step_num=number) if self.running else contextlib.nullcontext():
            yield
        self.launched += 1

    def close(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
        self.running = False

    def __enter__(self) -> 'Profile':
        return self

    def __exit__(self, *_) -> None:
        self.close()
