"""`spannorm bench`: what a training step costs on the devices at hand, and variants of it in the same run, their steps taken in turn."""

import ast
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from spannorm_jax import sharding
from spannorm_jax.config import Config, edit
from spannorm_jax.data import check_vocab, open_data
from spannorm_jax.errors import UserError
from spannorm_jax.host import Feed, peak_flops
from spannorm_jax.model import flops_per_token
from spannorm_jax.plan import memory
from spannorm_jax.program import program
from spannorm_jax.stats import Interval, t_interval
from spannorm_jax.step import init_state

MFU = 'mfu = tokens_per_s * flops_per_token / (peak FLOP/s of a device * devices)'
DATA_SECONDS = 1.0
WARM_UP = 2  # rounds that are not counted
BASE = 'base'


class Measured(NamedTuple):
    """One variant."""

    name: str
    tokens_per_s: float
    step_ms: float  # median of the rounds
    rounds_ms: list[float]
    compile_s: float  # tracing, lowering and compiling, without the compilation cache
    peak_bytes: int  # on each device, as the compiler planned it: arguments, results and temporaries
    mfu: float | None  # None where the peak of a device is not known (every CPU)
    flops_per_token: float
    data_tokens_per_s: float  # of reading batches alone
    speed: Interval | None  # tokens per second over the base's: geometric mean of the rounds' ratios, 95% t interval; None for the base


def variants(cfg: Config, given: tuple[str, ...]) -> dict[str, Config]:
    """{'base': cfg} and one variant per NAME=VALUE; several joined by commas change several fields.

    Raises: UserError for a text of another form, a field that does not exist or a value that it does not take.
    """
    made = {BASE: cfg}
    for text in given:
        pairs = [part.partition('=') for part in text.split(',')]
        if not all(name and equals for name, equals, _ in pairs):
            raise UserError(f'bench: --vs {text!r} is not NAME=VALUE, as in --vs model.topology=pre model.remat=full,data.batch=4')
        made[text] = edit(cfg, {name.replace('-', '_'): literal(value) for name, _, value in pairs})
    return made


def literal(text: str) -> Any:
    """4, 1e-3, None and True as Python reads them; everything else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def bench(cases: dict[str, Config], rounds: int, tell: Callable[[str], None]) -> list[Measured]:
    """Every case: compile, then `rounds` steps of each in turn, in an order that is reversed from round to round. The first case is the
    base. All states are in memory at once.

    Raises: UserError (fewer than two rounds, a mesh that does not fit the devices, a vocabulary too small), BadData, MissingInput.
    """
    if rounds < 2:
        raise UserError(f'bench: --rounds {rounds} must be at least 2')
    kept = jax.config.values['jax_enable_compilation_cache']
    jax.config.update('jax_enable_compilation_cache', False)  # what is measured is compiling, not reading a file
    try:
        made = {name: Case(cfg, name, tell) for name, cfg in cases.items()}
    finally:
        jax.config.update('jax_enable_compilation_cache', kept)
    ms = {name: [] for name in cases}
    for i in range(WARM_UP + rounds):
        tell(f'round {i + 1} of {WARM_UP + rounds}')
        for name in reversed(cases) if i % 2 else cases:
            took = made[name].step_ms()
            if i >= WARM_UP:
                ms[name].append(took)
    first = next(iter(made))
    base = made[first], ms[first]
    return [case.measured(ms[name], None if name == first else base) for name, case in made.items()]


class Case:
    """A configuration compiled, with its state and its batches."""

    def __init__(self, cfg: Config, name: str, tell: Callable[[str], None]):
        self.cfg, self.name = cfg, name
        self.mesh = sharding.make_mesh(cfg.mesh)
        corpus = open_data(cfg.data)
        check_vocab(corpus.tokenizer, cfg.model.vocab)
        self.data_tokens_per_s, self.batches = data_speed(cfg, corpus)
        self.tokens = cfg.data.batch * cfg.data.seq
        tell(f'compiling {name}')
        with jax.set_mesh(self.mesh):
            begun = time.perf_counter()
            made = program(cfg, self.mesh)
            self.step = made.step().lower(made.abstract, made.batch, made.peaks).compile()
            self.compile_s = time.perf_counter() - begun
            self.state, self.rates = init_state(cfg, made.lm, made.optimizer, made.places), made.rates()
        self.feed = iter(self)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        while True:
            for batch in self.batches:
                yield sharding.put_batch(batch, self.mesh)

    def step_ms(self) -> float:
        batch = next(self.feed)
        begun = time.perf_counter()
        self.state, metrics = self.step(self.state, batch, self.rates)
        jax.block_until_ready((self.state, metrics))
        return 1000 * (time.perf_counter() - begun)

    def measured(self, ms: list[float], base: tuple['Case', list[float]] | None) -> Measured:
        speed, flops, peak = 1000 * self.tokens / statistics.median(ms), flops_per_token(self.cfg.model, self.cfg.data.seq), None
        if (one := peak_flops(self.mesh.devices.flat[0])) is not None:
            peak = one * self.mesh.size
        ratio = None
        if base is not None:
            other, base_ms = base
            logs = t_interval(np.log(self.tokens / np.array(ms)) - np.log(other.tokens / np.array(base_ms)))
            ratio = Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)
        size = memory(self.step, 0, '').peak
        return Measured(
            self.name, speed, statistics.median(ms), ms, self.compile_s, size or 0, peak and speed * flops / peak, flops,
            self.data_tokens_per_s, ratio,
        )  # fmt: skip


def data_speed(cfg: Config, corpus: Any) -> tuple[float, list[dict[str, np.ndarray]]]:
    """Tokens per second of reading training batches alone, opening included, and the first few batches."""
    kept, n = [], 0
    with Feed(cfg, corpus) as feed:
        begun = time.perf_counter()
        while time.perf_counter() - begun < DATA_SECONDS:
            batch = feed.take(n)
            n += 1
            if len(kept) < 8:
                kept.append(batch)
        return n * cfg.data.batch * cfg.data.seq / (time.perf_counter() - begun), kept
