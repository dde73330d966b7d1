"""Runs of one shape in one program, for sweeps over seeds and learning rates: a small run alone leaves an accelerator idle.

`train.fit` trains each of them as ever, in a thread of its own: own folder, data order, checkpoints, metrics and policies. Only the
compiled step differs. There the runs meet, and one step, `jax.vmap`ped over them, serves all.
"""

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from spannorm_jax import sharding
from spannorm_jax.config import Config, DataConfig, RunConfig
from spannorm_jax.host import Signals
from spannorm_jax.program import Program, program
from spannorm_jax.restart import Progress
from spannorm_jax.rundir import Outcome
from spannorm_jax.step import make_step
from spannorm_jax.train import fit

HEADROOM = 0.9  # share of the device's memory that the runs may fill by the compiler's own account


def shape(cfg: Config) -> Config:
    """What is left of a configuration without all that its compiled step takes as an argument: where it is equal, runs can be batched."""
    seed = cfg.run.seed if cfg.model.dropout else 0  # dropout draws from the seed inside the step
    return replace(
        cfg,
        name='shape',
        data=DataConfig(seq=cfg.data.seq, batch=cfg.data.batch),
        optim=replace(cfg.optim, lr_peak=1.0, muon_lr=None),
        run=RunConfig(steps=cfg.run.steps, seed=seed, nonfinite=cfg.run.nonfinite),
    )


def groups(cfgs: Iterable[Config], size: int) -> list[list[Config]]:
    """In order of each group's first; at most `size` of one shape."""
    alike: dict[Config, list[list[Config]]] = {}
    every = []
    for cfg in cfgs:
        found = alike.setdefault(shape(cfg), [])
        if not found or len(found[-1]) == size:
            found.append([])
            every.append(found[-1])
        found[-1].append(cfg)
    return every


def fit_batched(cfgs: Sequence[Config], progress: Progress | None = None, *, corpus: Any = None) -> list[Outcome | Exception]:
    """`fit` for runs of one shape, as many at a time as there is memory for, on one device; on more, one run after the other.

    What each gives agrees with what it gives alone to the rounding of the matrix products. A run that ends early, or fails, does not keep
    the others. A signal stops all of them, as it stops one; none comes through while the step compiles.

    Returns: for each run its outcome, or what `fit` raised.
    """
    found: list[Outcome | Exception] = []
    with Signals() as signals:
        size = room(cfgs[0])
        for first in range(0, len(cfgs), size):
            if not signals.seen:
                found += meet(cfgs[first : first + size], progress, lambda step: signals.seen, corpus)
    return found


def room(cfg: Config) -> int:
    """How many runs fit on the device, by the compiler's account of one: each has its state brought, stacked and given back."""
    mesh = sharding.make_mesh(cfg.mesh)
    if mesh.size > 1:
        return 1
    limit = memory(mesh.devices.flat[0])
    if limit is None:
        return 1 << 30
    with jax.set_mesh(mesh):
        made = program(cfg, mesh)
        need = made.step().lower(made.abstract, made.batch, made.peaks).compile().memory_analysis()
    return max(1, int(HEADROOM * limit / (3 * need.argument_size_in_bytes + need.temp_size_in_bytes)))


def memory(device: Any) -> int | None:
    """Bytes; None where the device does not tell."""
    return (device.memory_stats() or {}).get('bytes_limit')


def meet(cfgs: Sequence[Config], progress: Progress | None, stop: Callable[[int], bool], corpus: Any) -> list[Outcome | Exception]:
    """All of them at once. `stop` is asked before each step of each run."""
    meeting = Meeting(len(cfgs))

    def one(i: int) -> Outcome:
        try:
            return fit(cfgs[i], progress, stop=stop, corpus=corpus, share=functools.partial(meeting.seated, i))
        finally:
            meeting.leave(i)

    with ThreadPoolExecutor(len(cfgs)) as pool:
        threads: list[Future[Outcome]] = [pool.submit(one, i) for i in range(len(cfgs))]
        while wait(threads, timeout=0.2).not_done:  # in slices: a signal is heard between them
            pass
    return [e if isinstance(e := t.exception(), Exception) else t.result() for t in threads]


class Meeting:
    """`count` runs, each in a thread, that take their steps together: run i brings (state, batch, peaks) and waits for all who go on."""

    def __init__(self, count: int):
        self.count, self.changed = count, threading.Condition()
        self.going = set(range(count))
        self.brought: dict[int, tuple[bool, Any]] = {}
        self.given: dict[int, Any] = {}
        self.made: dict[Any, Any] = {}
        self.making = threading.Lock()

    def seated(self, i: int, made: Program) -> Program:
        """The program of run i, with the meeting's steps in place of its own."""
        meeting = self

        class Seated(Program):
            def step(self, stats: bool = False) -> Any:
                take = functools.partial(meeting.take, i, stats)
                return meeting.compiled_once(('step', stats), meeting.step(made, stats), meeting.count, take)

            def eval_step(self) -> Any:
                return meeting.compiled_once('eval', made.eval_step())

        return Seated(*made)

    def compiled_once(self, key: Any, jitted: Any, copies: int | None = None, use: Callable | None = None) -> Any:
        """Stands for `jitted`, which the first run to come lowers and compiles, for `copies` of its arguments; it gives `use`, or that."""

        def once(what: str, make: Callable[[], Any]) -> Any:
            with self.making:
                if (key, what) not in self.made:
                    self.made[key, what] = make()
                return self.made[key, what]

        def lower(*shapes: Any) -> Any:
            args = shapes if copies is None else [(s,) * copies for s in shapes]
            lowered = once('lowered', lambda: jitted.lower(*args))

            def compile() -> Any:
                found = once('compiled', lowered.compile)
                return use or found

            return SimpleNamespace(compile=compile)

        return SimpleNamespace(lower=lower)

    def step(self, made: Program, stats: bool) -> Any:
        """Jitted: (states, batches, peaks), a tuple each -> ((state, metrics), ...)."""
        one = make_step(made.cfg, made.lm, made.optimizer, made.infos, stats)

        def step(*args: tuple) -> tuple:
            new = jax.vmap(one)(*(jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in args))
            return tuple(jax.tree.map(operator.itemgetter(i), new) for i in range(self.count))

        return jax.jit(step, out_shardings=((made.places, sharding.replicated(made.mesh)),) * self.count)

    def take(self, i: int, stats: bool, *args: Any) -> Any:
        """What run i's own step would give."""
        with self.changed:
            self.brought[i] = stats, args
            self._meet()
            self.changed.wait_for(lambda: i in self.given)
            given = self.given.pop(i)
        if isinstance(given, Exception):
            raise given
        state, metrics = given
        return state, metrics if stats else {k: v for k, v in metrics.items() if not k.startswith('layer/')}

    def leave(self, i: int) -> None:
        """Run i has ended, or failed: the others no longer wait for it."""
        with self.changed:
            self.going.discard(i)
            self._meet()

    def _meet(self) -> None:
        if not self.brought or self.brought.keys() != self.going:
            return
        stats = any(wanted for wanted, _ in self.brought.values())  # after a restart the runs may be at different steps
        anyone = next(iter(self.brought))
        args = [self.brought[i if i in self.brought else anyone][1] for i in range(self.count)]  # the program has a place for each still
        try:
            found = self.made[('step', stats), 'compiled'](*zip(*args, strict=True))
            self.given |= {i: found[i] for i in self.brought}
        except Exception as e:
            self.given |= dict.fromkeys(self.brought, e)
        self.brought = {}
        self.changed.notify_all()
