"""What a person sees while something runs, on stderr: a bar on a terminal, a line every few seconds elsewhere."""

import contextlib
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from spannorm_jax.errors import unheard

EVERY_SECONDS = 5.0


class Unheard(Console):
    """A console that falls silent when its reader goes away; rich would end the program, and a run must not end with its log."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        unheard(self.file.fileno())


class Progress:
    """Called as `train.Progress`: progress(kind, data). Use as a context manager; leaving it takes the bar away."""

    def __init__(self, console: Console | None = None):
        self.console = console or Unheard(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.bar: Bar | None = None
        self.tasks: dict[str, Any] = {}
        self.begun: dict[str, tuple[float, int]] = {}  # per kind: when, and at how much, the first sign came
        self.said = float('-inf')
        self.tokens_per_s: float | None = None

    def __enter__(self) -> 'Progress':
        if self.console.is_terminal:
            columns = (
                TextColumn('{task.description}'),
                BarColumn(),
                TextColumn('{task.percentage:>3.0f}%'),
                TextColumn('{task.fields[note]}'),
            )
            self.bar = Bar(*columns, console=self.console, transient=True)
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        if kind == 'message':
            self.say(data['text'])
        elif kind == 'prepare':
            size = f'{data["done"] / 1e6:,.1f} of {data["all"] / 1e6:,.1f} MB'
            self.advance('prepare', 'preparing text', data['done'], data['all'], size)
        elif kind == 'step':
            speed = '' if self.tokens_per_s is None else f'  {self.tokens_per_s:,.0f} tokens/s'
            note = f'step {data["step"]}/{data["steps"]}  loss {data["loss"]:.4f}{speed}'
            self.advance('step', 'training', data['step'], data['steps'], note)
        elif kind == 'row':
            self.tokens_per_s = data.get('perf/tokens_per_s') or self.tokens_per_s
            for group, split in (('eval', 'validation'), ('test', 'test')):
                if f'{group}/bits_per_byte' in data:
                    self.say(f'step {data["step"]}  {split} {data[f"{group}/bits_per_byte"]:.4f} bits/byte')

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone, a log on a disk that is full
            self.console.print(text)

    def advance(self, kind: str, title: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        began, at = self.begun.setdefault(kind, (now, done))
        if at < done < total:
            left = round((total - done) * (now - began) / (done - at))
            note += f'  {left // 60}:{left % 60:02d} left'
        if self.bar is not None:
            if kind not in self.tasks:
                self.tasks[kind] = self.bar.add_task(title, total=total, note=note)
            self.bar.update(self.tasks[kind], completed=done, note=note, visible=done < total)
        elif now - self.said >= EVERY_SECONDS or done >= total:
            self.said = now
            self.say(f'{title}: {note}')
