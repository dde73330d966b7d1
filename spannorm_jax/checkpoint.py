"""Checkpoints: weights, optimizer state and position of a run, written in the background by Orbax, visible only when whole.

<dir>/<step>/params         the parameter tree
<dir>/<step>/optim          optimizer state, one array per path
<dir>/<step>/meta           JSON: format, config, and the host's position (next batch, tokens, recent losses)
<dir>/<step>/manifest.json  sizes and checksums of these (manifest.py), written last; format 1 had none

Older ones are removed only once the disk holds the manifest of a newer one.
"""

import contextlib
import errno
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from spannorm_jax import distributed, layout, manifest
from spannorm_jax.errors import BadData, MissingInput, StorageError, UserError
from spannorm_jax.json_file import LARGE, read_json
from spannorm_jax.step import TrainState

FORMAT = 2
ITEMS = ('params', 'optim', 'meta')
ORBAX_TABLES = ('_METADATA', '_sharding', '_CHECKPOINT_METADATA', '.zarray')
MEND = '; to go on from the one before, remove that folder, or set run.torn previous'
NEVER_S = 10 * 365 * 86_400  # Orbax waits by the wall clock, which may be set; what hangs is the watchdog's to end
_DISK = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOTDIR, errno.EEXIST,
    errno.ENAMETOOLONG,
}  # fmt: skip
_DISK_WORDS = ('no space left', 'resource_exhausted', 'quota', 'read-only', 'permission', 'file too large', 'input/output error')


@contextlib.contextmanager
def disk_errors(action: str, path: Path) -> Iterator[None]:
    """Turn what a full, read-only or failing disk raises into StorageError; Orbax wraps some of it in ValueError or RuntimeError."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        number = getattr(e, 'errno', None)
        if number in _DISK or any(word in str(e).lower() for word in _DISK_WORDS):
            reason = (getattr(e, 'strerror', None) or str(e)).strip().splitlines()[0][:300]
            raise StorageError(f'cannot {action} {str(path)!r}: {reason}; free space or choose another run.dir, then run again') from e
        raise


class _Background(logging.Handler):
    """Hears of errors of Orbax's threads. Of several processes it only logs them, and waits long for the others, which wait for it."""

    def __init__(self, folder: Path):
        super().__init__(logging.ERROR)
        self.folder, self.error = folder, None

    def emit(self, record: logging.LogRecord) -> None:
        found = record.exc_info and record.exc_info[1]
        if isinstance(found, Exception) and self.error is None:
            try:
                with disk_errors('write a checkpoint to', self.folder):
                    raise found
            except Exception as e:
                self.error = e  # at once: the next step must not begin while it is looked for who is to blame
                self.error = distributed.blame(e)
                distributed.leave(self.error)


class Checkpoints:
    """The checkpoints of one run. Use as a context manager; leaving it waits for what is being written.

    keep: newest ones that stay, with every multiple of `keep_every`. `notes` says what was found half done, and removed.
    read_only: nothing in the folder is made, removed or cleaned, so that a training may go on writing there; the folder must exist.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_every: int = 0, read_only: bool = False):
        self.folder, self.keep, self.keep_every = folder.absolute(), keep, keep_every
        self.written: int | None = None  # handed to Orbax, and not yet whole
        self.sealing: Future | None = None
        self.sound: set[int] = set()  # steps that agree with their manifest
        self.notes: list[str] = []
        logging.getLogger('absl').setLevel(logging.ERROR)  # Orbax reports every save at INFO and WARNING
        if read_only:
            if not self.folder.is_dir():
                raise MissingInput(f'there are no checkpoints: {str(self.folder)!r} is not a folder')
            options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
        else:
            background = ocp.AsyncOptions(timeout_secs=NEVER_S, create_directories_asynchronously=False)
            options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, enable_async_checkpointing=True, async_options=background)
        with disk_errors('read' if read_only else 'create', self.folder):
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._clear()
                distributed.gather('the checkpoints')  # nobody else looks while something is removed
            self.background = _Background(self.folder)
            if distributed.several() and not read_only:
                logging.getLogger('absl').addHandler(self.background)
            self.manager = ocp.CheckpointManager(self.folder, options=options, item_names=ITEMS)
        self.worker = ThreadPoolExecutor(1, 'seal')

    def _clear(self) -> None:
        """Remove what saves and removals that were cut short have left."""
        if not distributed.first():
            return
        for path in manifest.leftovers(self.folder):
            what = 'removal' if path.name.endswith(manifest.LEFT[0]) else 'save'
            self.notes.append(f'the {what} of step {path.name.partition(".")[0]} had been cut short; removed what it left')
            manifest.remove(path)

    def steps(self) -> list[int]:
        """Committed steps, in order, as the disk has them."""
        return manifest.steps(self.folder)

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Copy the state to the host, write it in the background. Raises StorageError for this save or the one before."""
        self._save(step, meta, params=state.params, optim=_by_path(state.opt_state))

    def save_params(self, step: int, params: Any, meta: dict[str, Any]) -> None:
        """Weights without optimizer state, of a model that was trained elsewhere."""
        self._save(step, meta, params=params)

    def _save(self, step: int, meta: dict[str, Any], **trees: Any) -> None:
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        args = ocp.args.Composite(**items, meta=ocp.args.JsonSave({'format': FORMAT, 'step': step, **meta}))
        self._finish()
        with disk_errors('write a checkpoint to', self.folder):
            if not self.manager.save(step, args=args):
                raise RuntimeError(f'Orbax did not save step {step} after {self.manager.all_steps()}')
        self.written = step

    def poll(self) -> None:
        """Raise what a background write ran into, at once rather than at the next save; see to the manifest of one that is whole."""
        with disk_errors('write a checkpoint to', self.folder):
            self.manager.check_for_errors()
        if self.background.error is not None:
            raise self.background.error
        self._seal_if_whole()
        if self.sealing is not None and self.sealing.done():
            self._join()

    def wait(self) -> int | None:
        """Wait until all is on disk; the newest committed step, as the disk has it."""
        self._finish()
        return distributed.from_first('the end of a checkpoint', self.latest)

    def _finish(self) -> None:
        with disk_errors('write a checkpoint to', self.folder):
            self.manager.wait_until_finished()
        self._seal_if_whole()
        self._join()

    def _seal_if_whole(self) -> None:
        """Orbax gives a checkpoint its name, in one move, when all processes have written their part."""
        if self.written is None or not (self.folder / str(self.written)).is_dir():
            return
        if distributed.first():
            self.sealing = self.worker.submit(self._seal, self.written)
        self.written = None

    def _seal(self, step: int) -> None:
        manifest.seal(self.folder / str(step))
        self._retire()

    def retire(self) -> None:
        """Remove what is older than the newest `keep`, where whoever sealed these was stopped before it did. The newest must have been
        restored: where it is torn, the one before is needed."""
        if distributed.first():
            with disk_errors('remove a checkpoint from', self.folder):
                self._retire()

    def _retire(self) -> None:
        for old in self.steps()[: -self.keep]:
            if not (self.keep_every and old % self.keep_every == 0):
                # A new name first: at no moment does a checkpoint that counts lack a file.
                manifest.remove((self.folder / str(old)).rename(self.folder / f'{old}{manifest.LEFT[0]}'))

    def _join(self) -> None:
        sealing, self.sealing = self.sealing, None
        if sealing is not None:
            with disk_errors('write a checkpoint to', self.folder):
                sealing.result()

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a checkpoint, None where its manifest holds (format 1 had none: its meta is read).

        Of several processes one reads them, all get the answer.
        """
        if step not in self.sound:
            found = distributed.from_first(f'the check of checkpoint {step}', lambda: self._damage(step))
            if found is not None:
                return found
            self.sound.add(step)
        return None

    def _damage(self, step: int, part: str = '') -> str | None:
        path = self.folder / str(step)
        with disk_errors('read', path):
            return manifest.damage(path, part)

    def set_aside(self, step: int) -> Path:
        """Move a damaged checkpoint out of the way, to `<dir>.damaged`."""
        there = self.folder.with_name(f'{self.folder.name}.damaged')
        place = there / str(step)
        with disk_errors('move a checkpoint to', there):
            if distributed.first():
                there.mkdir(exist_ok=True)
                while place.exists():
                    place = place.with_name(f'{place.name}+')
                (self.folder / str(step)).rename(place)
            distributed.gather('a damaged checkpoint')
            self.manager.reload()
        return place

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON part of a checkpoint. Raises BadData where it is damaged or of a newer version."""
        with self._reading(step):
            if damage := self._damage(step, 'meta/'):
                raise BadData(damage + MEND)
            try:
                meta = read_json(self.folder / str(step) / manifest.META, LARGE)
            except BadData as e:
                raise BadData(f'checkpoint {self._name(step)} is damaged: {e}{MEND}') from None
        known = isinstance(meta, dict) and type(meta.get('format')) is int and isinstance(meta.get('config'), dict)
        if not known or not meta['config']:
            raise BadData(
                f'checkpoint {self._name(step)} was not written by spannorm_jax, or its meta is damaged; '
                'remove that folder to go on from the one before, or use another run.dir'
            )
        if meta['format'] > FORMAT:
            raise BadData(f'checkpoint {self._name(step)} has format {meta["format"]}, this package reads {FORMAT}: upgrade spannorm_jax')
        return meta

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a step as arrays placed like `like` (ShapeDtypeStructs with shardings, on any mesh).

        Raises: BadData where it is torn or of another model.
        """
        found = self._restore(step, {'params': like.params, 'optim': _by_path(like.opt_state)})
        leaves = [found['optim'][path] for path in _by_path(like.opt_state)]
        opt_state = jax.tree.unflatten(jax.tree.structure(like.opt_state), leaves)
        return like._replace(params=found['params'], opt_state=opt_state)

    def has_optimizer(self, step: int) -> bool:
        """Whether it holds the moments too; a model that was trained elsewhere has none."""
        return (self.folder / str(step) / 'optim').is_dir()

    def restore_params(self, step: int, like: Any) -> Any:
        """The parameters alone, for evaluation and sampling."""
        return self._restore(step, {'params': like})['params']

    def _restore(self, step: int, like: dict[str, Any]) -> Any:
        """Items of a checkpoint; one of an older layout is read as it is, and its arrays are then those of today."""
        old = layout.split_first(self.meta(step))
        asked = like
        if old:
            parts = {item: layout.before(_by_path(tree)) for item, tree in like.items()}
            flat = {item: {path: s for made in of_item.values() for path, s in made.items()} for item, of_item in parts.items()}
            asked = flat | {'params': layout.nested(flat['params'])}
        with self._reading(step):
            if damage := self.damage(step):
                raise BadData(damage + MEND)
            self._check_tables(step)
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore(tree) for item, tree in asked.items()})
            found = self.manager.restore(step, args=args)
            if old:
                joined = {item: layout.join(_by_path(tree), _by_path(found[item])) for item, tree in like.items()}
                return joined | {'params': layout.nested(joined['params'])}
            return found

    def _check_tables(self, step: int) -> None:
        """Orbax reads its own JSON without a limit. Raises BadData for one that is longer than that of any checkpoint."""
        for name, path in manifest.walk(self.folder / str(step)):
            if path is not None and Path(name).name in ORBAX_TABLES and path.stat().st_size > LARGE:
                raise BadData(f'checkpoint {self._name(step)}: {name!r} is longer than {LARGE >> 20} MiB, not a table that Orbax wrote')

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        if step not in self.steps():
            raise MissingInput(f'there is no checkpoint {self._name(step)}')
        try:
            yield
        except UserError:
            raise
        except Exception as e:  # Orbax and tensorstore have no common error for a file that is damaged or missing
            if isinstance(lost := distributed.blame(e), UserError):
                raise lost from e
            reason = str(e).strip().splitlines()[0][:300] if str(e).strip() else type(e).__name__
            raise BadData(f'checkpoint {self._name(step)} is damaged or of another model ({reason}){MEND}') from e

    def _name(self, step: int) -> str:
        return repr(str(self.folder / str(step)))

    def close(self) -> None:
        logging.getLogger('absl').removeHandler(self.background)
        self.worker.shutdown()
        self.manager.close()

    def __enter__(self) -> 'Checkpoints':
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.wait()
            self.close()
        else:  # what is being written may still land; the error that is on its way matters more than one from here
            for end in (self._finish, self.close):
                with contextlib.suppress(Exception):
                    end()


def _by_path(tree: Any) -> dict[str, Any]:
    """Leaves by path, so that a checkpoint does not depend on the Python classes of the optimizer."""
    return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
