"""Where a run goes on: its newest checkpoint that can be trusted, and whether this configuration and this data may go on from there."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spannorm_jax import distributed, resume
from spannorm_jax.checkpoint import MEND, Checkpoints
from spannorm_jax.config import Config, from_dict
from spannorm_jax.errors import BadData, MissingInput, UserError
from spannorm_jax.rundir import Position

Progress = Callable[[str, dict[str, Any]], None]
"""progress(kind, data): 'prepare' {done, all}; 'message' {text}; 'step' {step, steps, loss}; 'row' a row of metrics.jsonl."""


def resumable(cfg: Config, folder: Path, corpus: Any, checkpoints: Checkpoints, tell: Progress) -> Position | None:
    """Where the newest sound checkpoint stands, None where there is none.

    Raises: BadData (torn, and run.torn is 'stop'), MissingInput (none, and run.resume is 'must'), UserError (begun with another
    configuration, whatever config.json says by now, or with other data).
    """
    latest = newest_sound(cfg, checkpoints, tell)
    if latest is None:
        if cfg.run.resume == 'must':
            raise MissingInput(f"there is no checkpoint in {str(folder)!r}, and run.resume = 'must'; begin a run with run.resume auto")
        return None
    meta, where = checkpoints.meta(latest), str(folder / 'checkpoints' / str(latest))
    try:
        pos = Position.from_meta(meta)
    except UserError as e:
        raise BadData(f'the meta of checkpoint {where!r} is damaged ({e}){MEND}') from None
    try:
        then = from_dict(Config, meta['config'])
    except UserError as e:  # its checksum holds: it is as it was written
        raise BadData(
            f'checkpoint {where!r} was written by another version of spannorm_jax, or by other hands ({e}); '
            'go on with the version that wrote it (pip install --upgrade spannorm_jax), or use another run.dir'
        ) from None
    if changes := resume.check_resumable(then, cfg, folder):
        tell(
            'message', {'text': f'going on with another configuration than that of step {latest}:\n{resume.table(changes, cfg.run.accept)}'}
        )
        asked = tuple(f'step {latest}: {c}' for c in changes if c.rule.kind == resume.FLAG)
        pos = dataclasses.replace(pos, changed=(*pos.changed, *asked))
    distributed.same('the newest checkpoints', dataclasses.asdict(pos), 'put run.root on storage that all hosts share')
    if meta.get('text') == '':
        raise UserError(
            f'{str(folder)!r} was imported: it holds weights, and no optimizer state to go on with; evaluate, sample or export it, '
            f'or train a run of your own in another run.dir'
        )
    for what, found in data_identity(corpus).items():
        if meta.get(what) != found:
            raise UserError(
                f'the {what} has changed since step {latest} of {str(folder)!r}; give another run.dir, or the data it began with'
            )
    return pos


def newest_sound(cfg: Config, checkpoints: Checkpoints, tell: Progress) -> int | None:
    """The newest checkpoint that is what its manifest says; under run.torn = 'previous' damaged ones are set aside."""
    while (latest := checkpoints.wait()) is not None:
        damage = checkpoints.damage(latest)
        if damage is None:
            return latest
        if cfg.run.torn == 'stop':
            raise BadData(damage + MEND)
        if distributed.from_first('the older checkpoints', checkpoints.steps)[:1] == [latest]:
            raise BadData(f'{damage}; there is none before it: use another run.dir')
        tell('message', {'text': f'{damage}; moved to {str(checkpoints.set_aside(latest))!r}, going on from the one before'})
    return None


def data_identity(corpus: Any) -> dict[str, str]:
    return {'text': corpus.hash, 'tokenizer': corpus.tokenizer.fingerprint}
