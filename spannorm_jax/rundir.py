"""What a run directory says about its run: configuration, outcome, and the host's position in it."""

import contextlib
import dataclasses
import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spannorm_jax import distributed, load, manifest
from spannorm_jax.checkpoint import disk_errors
from spannorm_jax.config import Config, edit, from_dict, run_id, to_dict
from spannorm_jax.errors import BadData, ProcessLost, StorageError, UserError
from spannorm_jax.json_file import read_json
from spannorm_jax.model import count_params
from spannorm_jax.resume import FLAG, check_resumable

SMOOTHING = 20  # steps: a loss is judged by the mean of the last 20
WINDOW = 201  # steps: a spike stands out of the median of as many
SPIKE = 0.5  # nats
DIVERGED_BY = 0.5  # nats above its own earlier minimum
EXIT = {'completed': 0, 'diverged': 0, 'preempted': 75, 'failed': 1}
NONFINITE_EXIT = 70


@dataclass(frozen=True)
class Outcome:
    """How a run ended: outcome.json. `dir` is its directory, `message` one line for people."""

    status: str  # completed | diverged | preempted | failed
    step: int
    reason: str = ''
    first_nonfinite: str | None = None
    skipped: int = 0
    rollbacks: int = 0
    spikes: int = 0
    corpus: str = ''  # hash of the text
    dir: str = ''
    message: str = ''

    @property
    def exit_code(self) -> int:
        """0 done, also where the loss rose (divergence is a result); 70 stopped on non-finite; 75 interrupted after saving."""
        return NONFINITE_EXIT if self.nonfinite else EXIT[self.status]

    @property
    def nonfinite(self) -> bool:
        return self.status == 'diverged' and self.first_nonfinite is not None

    def save(self, folder: Path) -> None:
        tree = {k: v for k, v in dataclasses.asdict(self).items() if k not in ('dir', 'message')}
        write_json(folder / 'outcome.json', tree)

    def try_to_save(self, folder: Path) -> None:
        """Save, unless that fails: another error is on its way, and it matters more."""
        with contextlib.suppress(StorageError, OSError):
            self.save(folder)


@dataclass(frozen=True)
class Position:
    """What the host knows after `step` steps, saved with every checkpoint. `batch` is the next one of the data."""

    step: int = 0
    batch: int = 0
    tokens: int = 0
    skipped: int = 0
    rollbacks: int = 0
    recent: tuple[float | None, ...] = ()  # losses of the last 201 steps, None where a step was skipped
    lowest: float | None = None  # smallest mean of 20 so far
    spikes: int = 0  # steps whose `spike_score` was above SPIKE
    changed: tuple[str, ...] = ()  # what starts were allowed to change (run.accept), with the step

    def after(self, loss: float, tokens: int, applied: bool) -> 'Position':
        recent = (*self.recent, loss if applied else None)[-WINDOW:]
        now = smoothed(recent)
        return dataclasses.replace(
            self,
            step=self.step + 1,
            batch=self.batch + 1,
            tokens=self.tokens + tokens,
            skipped=self.skipped + (not applied),
            recent=recent,
            lowest=self.lowest if now is None else now if self.lowest is None else min(now, self.lowest),
            spikes=self.spikes + ((spike_score(recent) or 0) > SPIKE),
        )

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> 'Position':
        """Raises BadData where a field is missing or of another type; format 1 had neither spikes nor changes."""
        older = isinstance(meta, dict) and meta.get('format') == 1
        needed = [f.name for f in dataclasses.fields(cls) if f.name not in ('spikes', 'changed') or not older]
        return _parsed(cls, meta, needed, 'the position')


def smoothed(recent: tuple[float | None, ...]) -> float | None:
    """Mean of the last 20 losses; None before there are 20, or where all were skipped."""
    known = [x for x in recent[-SMOOTHING:] if x is not None]
    return sum(known) / len(known) if len(recent) >= SMOOTHING and known else None


def spike_score(recent: tuple[float | None, ...]) -> float | None:
    """Nats by which the last loss stands above the median of the last 201, its own included; None where it was skipped."""
    if not recent or recent[-1] is None:
        return None
    return recent[-1] - statistics.median(x for x in recent if x is not None)


def diverged(pos: Position, unigram: float) -> str:
    """Why a run that did all its steps counts as diverged, or ''. A run of fewer than 20 steps has no smoothed loss and never does."""
    if len(pos.recent) < SMOOTHING:
        return ''
    final = smoothed(pos.recent)
    if final is None:
        return f'the last {SMOOTHING} steps were all left out as not finite'
    if final > unigram:
        return f'the final smoothed loss {final:.3f} is above the unigram entropy {unigram:.3f}'
    if pos.lowest is not None and final > pos.lowest + DIVERGED_BY:
        return f'the final smoothed loss {final:.3f} is more than {DIVERGED_BY} above its earlier minimum {pos.lowest:.3f}'
    return ''


def model_line(cfg: Config) -> str:
    """What is trained on what, in a few words: `span, 12 x 96, 1.4M parameters, stdlib`."""
    m = cfg.model
    return f'{m.topology}, {m.layers} x {m.width}, {count_params(m) / 1e6:.3g}M parameters, {cfg.data.source}'


def run_dir(cfg: Config) -> Path:
    return Path(cfg.run.dir) if cfg.run.dir else Path(cfg.run.root) / run_id(cfg)


def read_config(folder: Path) -> Config | None:
    """The configuration of a run directory, None where there is none yet."""
    return load.read_config(folder) if (folder / 'config.json').exists() else None


def write_config(folder: Path, cfg: Config) -> None:
    """config.json, whole and re-runnable: run.dir is left out, so a copy of it starts a run of its own, and what one start allowed."""
    write_json(folder / 'config.json', to_dict(edit(cfg, {'run.dir': None, 'run.accept': (), 'run.resume': 'auto', 'run.torn': 'stop'})))


def begin(folder: Path, cfg: Config) -> None:
    """Note the configuration of a run that begins or goes on; how an earlier start ended says nothing of it any more."""
    write_config(folder, cfg)
    if distributed.first():
        with disk_errors('write', folder):
            (folder / 'outcome.json').unlink(missing_ok=True)


def read_outcome(folder: Path) -> Outcome | None:
    """outcome.json; None where there is none. Raises BadData where it is damaged."""
    path = folder / 'outcome.json'
    if not path.is_file():
        return None
    try:
        outcome = _parsed(Outcome, read_json(path), ('status', 'step'), 'it')
        if outcome.status not in EXIT:
            raise BadData(f'status {outcome.status!r} is none of {", ".join(EXIT)}')
    except BadData as e:
        raise BadData(f'{str(path)!r} is damaged ({e}); remove it to go on from the newest checkpoint, or use another run.dir') from None
    return dataclasses.replace(outcome, dir=str(folder))


def _parsed(cls: type, tree: Any, needed: Iterable[str], what: str) -> Any:
    """A dataclass from JSON, without the fields it does not know. Raises BadData for a missing field or one of another type."""
    if not isinstance(tree, dict):
        raise BadData(f'{what} is {type(tree).__name__}, expected an object')
    if missing := [name for name in needed if name not in tree]:
        raise BadData(f'{what} lacks {", ".join(missing)}')
    known = {f.name for f in dataclasses.fields(cls)}
    try:
        return from_dict(cls, {k: v for k, v in tree.items() if k in known})
    except UserError as e:
        raise BadData(str(e)) from None


def finished(cfg: Config, folder: Path) -> Outcome | None:
    """The outcome of a run that has nothing left to do.

    A run whose last checkpoint is gone while an earlier one is there goes on from that; with run.torn = 'previous' also one whose last
    checkpoint is damaged. Where all are gone, they were removed for their room: the run is done.
    """
    done = read_outcome(folder)
    if done is None or done.status not in ('completed', 'diverged') or (done.step < cfg.run.steps and not done.nonfinite):
        return None
    checkpoints = folder / 'checkpoints'
    newest = max(manifest.steps(checkpoints), default=None)
    if newest is not None and not done.nonfinite:
        if newest < done.step or cfg.run.torn == 'previous' and manifest.damage(checkpoints / str(newest)):
            return None
    hint = '; to go on from its newest checkpoint, change a rate or run.nonfinite and name it in run.accept' if done.nonfinite else ''
    return dataclasses.replace(done, message=f'{folder} is already complete: {done.status} at step {done.step}{hint}')


def look(cfg: Config, folder: Path) -> Outcome | None:
    """The outcome of a run that has nothing left to do. Raises UserError where the folder holds a run of another configuration."""
    found = distributed.from_first('the look at the run', lambda: _look(cfg, folder))
    return None if found is None else Outcome(**found)


def _look(cfg: Config, folder: Path) -> dict[str, Any] | None:
    with disk_errors('read', folder):
        then = read_config(folder)
        changes = [] if then is None else check_resumable(then, cfg, folder)
        found = finished(cfg, folder)
        if found is None or found.nonfinite and any(c.rule.kind == FLAG for c in changes):  # accepted: what stopped it may be over
            return None
        return dataclasses.asdict(found)


def failed(error: Exception, step: int) -> Outcome:
    """The outcome of a run that an error ended; that another process was lost is no failure of its own."""
    if isinstance(error, ProcessLost) and error.exit_code == ProcessLost.exit_code:
        return Outcome('preempted', step, str(error)[:2000])
    return Outcome('failed', step, f'{type(error).__name__}: {error}'[:2000])


def interrupted_early(folder: Path) -> Outcome:
    """The outcome of a start that a signal ended before its first step: what was saved before stands."""
    step = max(manifest.steps(folder / 'checkpoints'), default=0)
    kept = f'the checkpoint of step {step} stands' if step else 'there is nothing to save'
    reason = f'interrupted before the first step, {kept}: run the same command again'
    return Outcome('preempted', step, reason, dir=str(folder), message=f'{folder}: preempted at step {step}: {reason}')


def write_json(path: Path, tree: Any) -> None:
    """All or nothing: a reader never sees half a file, nor does one after the power failed. Of several processes one writes."""
    if not distributed.first():
        return
    with disk_errors('write', path):
        part = path.with_suffix('.part')
        with part.open('w', encoding='utf-8') as f:
            f.write(json.dumps(tree, indent=1, allow_nan=False) + '\n')
            f.flush()
            os.fsync(f.fileno())
        part.replace(path)
