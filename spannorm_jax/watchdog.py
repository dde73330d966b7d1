"""A run that no longer moves says where it stands, and ends: exit code 71, so that whoever started it can start it again."""

import contextlib
import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from spannorm_jax import distributed
from spannorm_jax.errors import Hung, say

LAST_WORDS_S = 5.0  # for what is written on the way out: the disk may be what hangs


class Watchdog:
    """While entered: where no `beat` comes for `limit_s`, stacks of all threads go to stderr and <folder>/hang.txt, `last` is called, and
    the process ends, whatever it waits for. 0 never does.

    The clock is the monotonic one: neither a jump of the wall clock nor a suspended machine counts.
    """

    def __init__(self, limit_s: float, folder: Path, last: Callable[[Hung], None] = lambda why: None):
        self.limit_s, self.folder, self.last = limit_s, folder, last
        self.over = threading.Event()
        self.beat('the start')

    def beat(self, what: str) -> None:
        self.heard = time.monotonic(), what

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """While entered nothing counts as silence: for what lasts and cannot beat, as a compilation."""
        self.heard = math.inf, what
        try:
            yield
        finally:
            self.beat(what)

    def __enter__(self) -> 'Watchdog':
        self.beat('the start')
        if self.limit_s:
            threading.Thread(target=self._watch, name='watchdog', daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(min(self.limit_s / 10, 1.0)):
            at, what = self.heard
            if time.monotonic() - at > self.limit_s:
                self._end(
                    Hung(f'no sign of life for {self.limit_s:g} s (run.hang_s) since {what}; run again to go on from the last checkpoint')
                )

    def _end(self, why: Hung) -> None:
        say(f'\nspannorm: {why}; where every thread stands:')
        faulthandler.dump_traceback(file=2, all_threads=True)
        words = threading.Thread(target=self._write, args=[why], daemon=True)
        words.start()
        words.join(LAST_WORDS_S)
        distributed.leave(why)
        os._exit(why.exit_code)

    def _write(self, why: Hung) -> None:
        with (self.folder / 'hang.txt').open('w') as f:
            f.write(f'{why}\n')
            f.flush()
            faulthandler.dump_traceback(file=f, all_threads=True)
        self.last(why)
