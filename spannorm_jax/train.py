"""`fit`: a configuration becomes a run directory. Trains, evaluates, saves, resumes, and says how it ended."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from spannorm_jax import attention, distributed, nonfinite, resume, rundir, sharding
from spannorm_jax.checkpoint import Checkpoints, disk_errors
from spannorm_jax.config import Config, to_dict
from spannorm_jax.data import check_vocab, open_data
from spannorm_jax.data.baselines import unigram_entropy
from spannorm_jax.errors import StorageError
from spannorm_jax.host import Clock, Feed, Interrupted, Signals, alone, patiently, use_compilation_cache
from spannorm_jax.ledger import Ledger, Profile
from spannorm_jax.nonfinite import Trouble
from spannorm_jax.program import Program, program
from spannorm_jax.restart import Progress, data_identity, resumable
from spannorm_jax.rundir import Outcome, Position
from spannorm_jax.step import TrainState, evaluate, init_state, leaf_names
from spannorm_jax.track import MetricsFile, Row, check_sinks, open_log, read_rows
from spannorm_jax.watchdog import Watchdog

MAX_ROLLBACKS = 3
EVALUATIONS = {'eval': 'validation', 'test': 'test'}  # group of metrics -> split


def fit(
    cfg: Config,
    progress: Progress | None = None,
    *,
    stop: Callable[[int], bool] | None = None,
    corpus: Any = None,
    profile: int = 0,
    share: Callable[[Program], Program] = lambda made: made,
) -> Outcome:
    """Train, or go on with, the run that `cfg` describes, in `rundir.run_dir(cfg)`. A finished run is left as it is.

    progress: told what happens (see Progress). stop(step): asked before each step; True saves and ends as 'preempted', as SIGTERM,
    SIGUSR1 and the first Ctrl-C do; before the first step a signal ends it at once, with nothing to save. corpus: used instead of the
    one that `cfg.data` names. profile: how many steps to trace, into `<run>/profile`. share: what is to be compiled -> what is compiled
    instead (batched.py).

    Raises: UserError (config, mesh, vocabulary, a config changed on resume), BadData, MissingInput, StorageError.
    """
    tell = progress if progress and distributed.first() else lambda kind, data: None
    with Signals() as signals:
        try:
            return _fit(cfg, tell, signals, stop, corpus, profile, share)
        except Interrupted as e:
            outcome = rundir.interrupted_early(rundir.run_dir(cfg))
            distributed.leave(e, outcome.exit_code)
            return outcome


def _fit(
    cfg: Config, tell: Progress, signals: Signals, stop: Callable[[int], bool] | None, corpus: Any, profile: int, share: Callable
) -> Outcome:
    folder = rundir.run_dir(cfg)
    distributed.same('the configurations', resume.flat(to_dict(cfg)), 'give every process the same command')
    if (done := rundir.look(cfg, folder)) is not None:
        return as_it_is(done, tell, profile)
    check_sinks(cfg.run.sinks)
    ledger = Ledger(folder)
    use_compilation_cache()
    mesh = sharding.make_mesh(cfg.mesh)
    distributed.check_mesh(mesh)
    sharding.check_batch(cfg, mesh)

    def prepared(done: int, total: int) -> None:
        signals.check()
        tell('prepare', {'done': done, 'all': total})

    if corpus is None:
        corpus = distributed.prepared_by_first('the prepared data', lambda: open_data(cfg.data, progress=prepared))
    distributed.same('the data', data_identity(corpus), 'give every host the same files')
    signals.check()
    check_vocab(corpus.tokenizer, cfg.model.vocab)
    for group in EVALUATIONS:
        eval_set(cfg, corpus, group)  # an empty split is better found now than at the end
    with disk_errors('write', folder):
        folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        distributed.check_shared(folder)
        if (done := rundir.look(cfg, folder)) is not None:  # again: another process may have begun here in the meantime
            return as_it_is(done, tell, profile)
        with jax.set_mesh(mesh), open_checkpoints(cfg, folder) as checkpoints:
            try:
                run = prepare(cfg, folder, corpus, mesh, checkpoints, tell, signals, stop, ledger, profile, share)
                with run.log, run.feed, run.watchdog, run.profile:
                    if distributed.any_of('the first step', signals.seen):
                        raise Interrupted('interrupted before the first step')
                    outcome = train(run)
                if profile and not run.profile.begun:
                    tell(
                        'message', {'text': f'nothing was profiled: {run.profile.launched} steps were left, a trace begins with the third'}
                    )
                if checkpoints.wait() != outcome.step and not outcome.nonfinite:
                    raise StorageError(
                        f'the checkpoint of step {outcome.step} did not reach {str(folder)!r}; look at the disk and run again'
                    )
            except Interrupted:
                rundir.interrupted_early(folder).try_to_save(folder)
                raise
            except Exception as e:
                why = distributed.blame(e)
                distributed.leave(why)
                rundir.failed(why, checkpoints.latest() or 0).try_to_save(folder)
                raise why from why.__cause__
            finally:
                ledger.try_to_save()
        outcome.save(folder)
        if outcome.status != 'preempted' and distributed.first():  # whoever interrupts is waiting
            draw(run)
    return outcome


def as_it_is(done: Outcome, tell: Progress, profile: int) -> Outcome:
    tell('message', {'text': done.message + ('; nothing is left to profile' if profile else '')})
    return done


def open_checkpoints(cfg: Config, folder: Path) -> Checkpoints:
    return Checkpoints(folder / 'checkpoints', cfg.run.keep, cfg.run.keep_every)


class Run(NamedTuple):
    """What stays the same while a run trains."""

    cfg: Config
    folder: Path
    corpus: Any
    mesh: jax.sharding.Mesh
    checkpoints: Checkpoints
    tell: Progress
    stopping: Callable[[int], bool]
    signalled: Callable[[], bool]
    signals: Signals
    watchdog: Watchdog
    log: MetricsFile
    feed: Feed
    clock: Clock
    ledger: Ledger
    profile: Profile
    names: list[str]  # of the gradients' leaves
    make_state: Callable[[], TrainState]
    abstract: TrainState
    rates: dict[str, Array]
    step: Any  # compiled; None for a run of no steps
    stats_step: Any
    eval_step: Callable
    probe: Callable


def prepare(cfg, folder, corpus, mesh, checkpoints, tell, signals, stop, ledger, profile, share) -> Run:
    """Shardings, compiled steps and open files of a run. Raises as `resumable` does, before anything is written."""
    for note in checkpoints.notes:
        tell('message', {'text': note})
    resumable(cfg, folder, corpus, checkpoints, tell)
    made = share(program(cfg, mesh))
    for note in made.notes:
        tell('message', {'text': f'sharding: {note}'})
    kernel, passed_over = attention.choose_kernel(cfg.model, cfg.data.seq)
    for note in [*passed_over, attention.verify_kernel(cfg.model, cfg.data.seq)]:
        tell('message', {'text': note or f'attention kernel {kernel}'})

    def compiled(jitted, *shapes):
        return patiently(jitted.lower(*shapes).compile, signals.check)

    def step_of(stats):
        return compiled(made.step(stats), made.abstract, made.batch, made.peaks)

    tell('message', {'text': f'compiling the step: {rundir.model_line(cfg)}'})
    begun = time.perf_counter()
    with ledger.during('compile'):
        step = step_of(False) if cfg.run.steps else None
        stats_step = step_of(True) if cfg.run.steps and cfg.run.stats_every else step
        # Here, not at the first evaluation: the watchdog sees no compilation, and what does not fit is better known now than hours later.
        eval_step = compiled(made.eval_step(), made.abstract.params, made.eval_batch)
    tell('message', {'text': f'step compiled in {time.perf_counter() - begun:.1f} s'})
    rundir.begin(folder, cfg)
    agreed = distributed.Agreement(mesh)
    begin = checkpoints.latest() or 0
    rows = read_rows(folder / 'metrics.jsonl', begin)
    ledger.back_to(begin, rows)
    if begin - (end := max((row['step'] for row in rows), default=0)) >= cfg.run.log_every:
        tell('message', {'text': f'metrics.jsonl ends at step {end}, the newest checkpoint is of step {begin}: the rows between are lost'})
    return Run(
        cfg=cfg,
        folder=folder,
        corpus=corpus,
        mesh=mesh,
        checkpoints=checkpoints,
        tell=tell,
        stopping=lambda step: agreed(signals.ask(stop, step)),
        signalled=lambda: agreed(signals.seen),
        signals=signals,
        watchdog=Watchdog(cfg.run.hang_s, folder, lambda why: rundir.failed(why, checkpoints.latest() or 0).try_to_save(folder)),
        log=open_log(folder, begin, cfg.run.sinks, to_dict(cfg)),
        feed=Feed(cfg, corpus, sharding.local_rows(mesh, cfg.data.batch)),
        clock=Clock(cfg, mesh),
        ledger=ledger,
        profile=Profile(folder / 'profile', profile),
        names=leaf_names(cfg.model, made.infos),
        make_state=lambda: init_state(cfg, made.lm, made.optimizer, made.places),
        abstract=made.abstract,
        rates=made.rates(),
        step=step,
        stats_step=stats_step,
        eval_step=eval_step,
        probe=jax.jit(nonfinite.make_probe(cfg, made.lm), out_shardings=sharding.replicated(mesh)),
    )


def restore(run: Run) -> tuple[TrainState, Position]:
    """The newest checkpoint, or the beginning. Raises as `resumable` does; BadData for a torn array."""
    pos = resumable(run.cfg, run.folder, run.corpus, run.checkpoints, lambda kind, data: None)
    if pos is None:
        run.tell('message', {'text': 'no checkpoint: beginning at step 0'})
        with run.watchdog.paused('drawing the weights'):
            return run.make_state(), Position()
    state = run.checkpoints.restore(pos.step, run.abstract)
    run.checkpoints.retire()
    step, stopped = jax.device_put((jnp.int32(pos.step), jnp.zeros((), bool)), run.abstract.step.sharding)
    run.tell('message', {'text': f'going on from the checkpoint of step {pos.step}'})
    return state._replace(step=step, stopped=stopped), pos


def train(run: Run) -> Outcome:
    """From boundary to boundary (evaluation, checkpoint, end, interruption). At a boundary all launched steps are accounted for."""
    cfg, saved = run.cfg.run, run.checkpoints.latest()
    state, pos = restore(run)
    row = run.log.last(pos.step)
    while True:
        end, interrupted = pos.step >= cfg.steps, run.stopping(pos.step)
        groups = ('eval', 'test') if end else ('eval',) if due(cfg.eval_every, pos.step) else ()
        for group in groups:
            if not interrupted and f'{group}/loss' not in row:
                with run.ledger.during('eval'):
                    found = held_out(run, state.params, group)
                row, interrupted = row | found, not found
        write_row(run, row, always=bool(groups))
        if saved != pos.step and (end or interrupted or due(cfg.checkpoint_every, pos.step)):
            with run.ledger.during('checkpoint'):
                run.log.sync()  # first the rows, then the checkpoint that says they are there
                run.checkpoints.save(pos.step, state, {'config': to_dict(run.cfg)} | data_identity(run.corpus) | dataclasses.asdict(pos))
            run.ledger.save()
            saved = pos.step
        if interrupted:
            return ended(run, 'preempted', pos, 'interrupted: run the same command again to go on')
        if end:
            why = rundir.diverged(pos, unigram_entropy(run.corpus.meta.unigram))
            return ended(run, 'diverged' if why else 'completed', pos, why)
        with run.ledger.during('step'):
            state, pos, row, bad = advance(run, state, pos)
        if bad is not None:
            trouble = blame(run, state, pos, bad)
            if cfg.nonfinite == 'stop' or pos.rollbacks == MAX_ROLLBACKS:
                run.log.write(row)
                return ended(run, 'diverged', pos, str(trouble), trouble.first)
            run.tell('message', {'text': f'{trouble}; going back, and leaving out the data up to here'})
            leave_out, rollbacks = pos.batch + 1, pos.rollbacks + 1
            state, pos = restore(run)
            run.ledger.back_to(pos.step)
            pos = dataclasses.replace(pos, batch=leave_out, rollbacks=rollbacks)
            run.log.truncate(pos.step)
            row, saved = run.log.last(pos.step), run.checkpoints.latest()


def advance(run: Run, state: TrainState, pos: Position) -> tuple[TrainState, Position, Row, dict[str, Any] | None]:
    """At least one step, and on to the next boundary. Rows are written, but for the last, to which an evaluation may add.

    Nothing waits for the step just launched: its metrics are fetched once the next one is under way. The last result is the metrics
    of a step that was not finite, where the policy is not to skip it; no step after it has been applied.
    """
    cfg, pending, offset = run.cfg.run, None, pos.batch - pos.step
    row, bad = {'step': pos.step}, None
    begin, target = pos.step, min([cfg.steps, *(pos.step // n * n + n for n in (cfg.eval_every, cfg.checkpoint_every) if n)])
    run.clock.restart()
    for launched in range(begin, target):
        if launched > begin and run.stopping(launched):
            break
        run.checkpoints.poll()
        run.watchdog.beat(f'the batch of step {launched + 1} was asked for')
        try:
            with run.signals.heard_at_once(), run.ledger.during('data', unless=functools.partial(busy, pending)):
                batch = run.feed.take(launched + offset)
        except Interrupted:
            if pending is None:
                return state, pos, run.log.last(pos.step), None
            break
        step = run.stats_step if due(cfg.stats_every, launched + 1) else run.step
        with run.profile.step(launched + 1):
            state, metrics = step(state, sharding.put_batch(batch, run.mesh, run.cfg.data.batch), run.rates)
        if pending is not None:
            pos, row, bad = settle(run, pos, pending)
            if bad is not None:
                return state, pos, row, bad
            write_row(run, row)
        pending = metrics
    return state, *settle(run, pos, pending)


def busy(metrics: Any) -> bool:
    """Whether the step that gives them is still under way."""
    return metrics is not None and not all(x.is_ready() for x in jax.tree.leaves(metrics))


def settle(run: Run, pos: Position, metrics: Any) -> tuple[Position, Row, dict[str, Any] | None]:
    """Fetch the metrics of one step: the position after it and its row, or its metrics where it was not finite."""
    m = jax.device_get(metrics)
    run.watchdog.beat(f'step {pos.step + 1} was done')
    applied, loss, tokens = bool(m.pop('applied')), float(m['loss']), int(m.pop('tokens'))
    bad = m if not applied and run.cfg.run.nonfinite != 'skip' else None
    new = pos.after(loss, tokens, applied)
    row = {'step': new.step} | {k if '/' in k else f'train/{k}': v for k, v in m.items() if k != 'bad'} | {'train/tokens': new.tokens}
    row['train/spike'] = rundir.spike_score(new.recent)
    if run.cfg.run.nonfinite == 'skip':
        row['train/skipped'] = new.skipped
        if not applied:
            nonfinite.record(run.folder, nonfinite.examine(run.cfg, run.names, new.step, pos.batch, m))
    run.ledger.done((new if bad is None else pos).step, tokens, applied)
    row |= run.clock.lap(tokens)
    run.tell('step', {'step': new.step, 'steps': run.cfg.run.steps, 'loss': loss})
    return (new if bad is None else pos), row, bad


def write_row(run: Run, row: Row, always: bool = False) -> None:
    cfg, step = run.cfg.run, row['step']
    if len(row) > 1 and (always or due(cfg.log_every, step) or due(cfg.stats_every, step)):
        run.log.write(row)
        run.clock.restart()
        run.tell('row', row)


def held_out(run: Run, params: Any, group: str) -> Row:
    """Metrics of one evaluation; empty where a signal came in between."""
    data = eval_set(run.cfg, run.corpus, group)
    run.tell('message', {'text': f'evaluating {data.tokens:,} tokens of the {EVALUATIONS[group]} split'})
    batches = data.batches(sharding.local_rows(run.mesh, data.batch))

    def stop() -> bool:
        run.watchdog.beat(f'a batch of the {EVALUATIONS[group]} split')
        return run.signalled()

    try:
        found = evaluate(run.eval_step, params, (sharding.put_batch(b, run.mesh, data.batch) for b in batches), data.bytes, stop)
    finally:
        batches.close()
    return {} if found is None else {f'{group}/loss': found.loss, f'{group}/bits_per_byte': found.bits_per_byte}


def eval_set(cfg: Config, corpus: Any, group: str) -> Any:
    """Held-out data in batches as large as a micro-batch. Raises BadData for an empty split."""
    return corpus.eval_batches(EVALUATIONS[group], cfg.data.batch // cfg.optim.accumulate, cfg.data.seq, cfg.run.eval_tokens)


def blame(run: Run, state: TrainState, pos: Position, bad: dict[str, Any]) -> Trouble:
    """Where a step that was not finite went wrong. Its update was not applied, so the weights are those it began with."""
    batch = sharding.put_batch(run.feed.take(pos.batch), run.mesh, run.cfg.data.batch)
    with run.watchdog.paused('looking for what is not finite'):
        outputs = jax.device_get(run.probe(state.params, batch))
    trouble = nonfinite.examine(run.cfg, run.names, pos.step + 1, pos.batch, bad, state.params, outputs)
    nonfinite.record(run.folder, trouble)
    return trouble


def ended(run: Run, status: str, pos: Position, reason: str, first: str | None = None) -> Outcome:
    text = f'{run.folder}: {status} at step {pos.step}' + (f': {reason}' if reason else '')
    last = {k: v for row in run.log.rows[-1:] for k, v in row.items() if k in ('train/loss', 'eval/loss', 'test/loss') and v is not None}
    text += ''.join(f', {k} {v:.4f}' for k, v in last.items())
    return Outcome(status, pos.step, reason, first, pos.skipped, pos.rollbacks, pos.spikes, run.corpus.hash, str(run.folder), text)


def draw(run: Run) -> None:
    from spannorm_jax import plot  # Matplotlib takes a second to load, which a start need not wait for

    baselines = {'unigrams': unigram_entropy(run.corpus.meta.unigram)}
    with disk_errors('write', run.folder):
        plot.save_loss_figure(run.folder / 'loss.png', run.log.rows, run.folder.name, baselines)


def due(every: int, step: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
