"""Checkpoints: weights, optimizer state and position of a run, written in the background by Orbax, visible only when whole.

<dir>/<step>/params    the parameter tree
<dir>/<step>/optim     optimizer state, one array per path
<dir>/<step>/meta      JSON: format, config, and the host's position (next batch, tokens, recent losses)
"""

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from spannorm_jax import distributed
from spannorm_jax.errors import BadData, MissingInput, StorageError, UserError
from spannorm_jax.step import TrainState

FORMAT = 1
ITEMS = ('params', 'optim', 'meta')
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
                self.error = e
                distributed.leave(e)


class Checkpoints:
    """The checkpoints of one run. Use as a context manager; leaving it waits for what is being written.

    read_only: nothing in the folder is made, removed or cleaned, so that a training may go on writing there; the folder must exist.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_every: int = 0, read_only: bool = False):
        self.folder = folder.absolute()
        logging.getLogger('absl').setLevel(logging.ERROR)  # Orbax reports every save at INFO and WARNING
        if read_only:
            if not self.folder.is_dir():
                raise MissingInput(f'there are no checkpoints: {str(self.folder)!r} is not a folder')
            options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=keep, keep_period=keep_every or None, cleanup_tmp_directories=True, enable_async_checkpointing=True
            )
        with disk_errors('read' if read_only else 'create', self.folder):
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
            self.background = _Background(self.folder)
            if distributed.several() and not read_only:
                logging.getLogger('absl').addHandler(self.background)
            self.manager = ocp.CheckpointManager(self.folder, options=options, item_names=ITEMS)

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Copy the state to the host, write it in the background. Raises StorageError for this save or the one before."""
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            optim=ocp.args.StandardSave(_by_path(state.opt_state)),
            meta=ocp.args.JsonSave({'format': FORMAT, 'step': step, **meta}),
        )
        with disk_errors('write a checkpoint to', self.folder):
            self.manager.save(step, args=args)

    def save_params(self, step: int, params: Any, meta: dict[str, Any]) -> None:
        """Weights without optimizer state, of a model that was trained elsewhere."""
        args = ocp.args.Composite(params=ocp.args.StandardSave(params), meta=ocp.args.JsonSave({'format': FORMAT, 'step': step, **meta}))
        with disk_errors('write a checkpoint to', self.folder):
            self.manager.save(step, args=args)

    def poll(self) -> None:
        """Raise what a background write ran into, at once rather than at the next save."""
        with disk_errors('write a checkpoint to', self.folder):
            self.manager.check_for_errors()
        if self.background.error is not None:
            raise self.background.error

    def wait(self) -> int | None:
        """Wait until all is on disk; the newest committed step, as the disk has it."""
        with disk_errors('write a checkpoint to', self.folder):
            self.manager.wait_until_finished()
            distributed.gather('the end of a checkpoint')
            self.manager.reload()
        return self.latest()

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON part of a checkpoint. Raises BadData where it is damaged or of a newer version."""
        with self._reading(step):
            meta = self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
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
        args = ocp.args.Composite(params=ocp.args.StandardRestore(like.params), optim=ocp.args.StandardRestore(_by_path(like.opt_state)))
        with self._reading(step):
            found = self.manager.restore(step, args=args)
        leaves = [found['optim'][path] for path in _by_path(like.opt_state)]
        opt_state = jax.tree.unflatten(jax.tree.structure(like.opt_state), leaves)
        return like._replace(params=found['params'], opt_state=opt_state)

    def restore_params(self, step: int, like: Any) -> Any:
        """The parameters alone, for evaluation and sampling."""
        with self._reading(step):
            return self.manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(like)))['params']

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        if step not in self.manager.all_steps():
            raise MissingInput(f'there is no checkpoint {self._name(step)}')
        try:
            yield
        except UserError:
            raise
        except Exception as e:  # Orbax and tensorstore have no common error for a file that is damaged or missing
            reason = str(e).strip().splitlines()[0][:300] if str(e).strip() else type(e).__name__
            raise BadData(
                f'checkpoint {self._name(step)} is damaged or of another model ({reason}); remove that folder to go on from the one before'
            ) from e

    def _name(self, step: int) -> str:
        return repr(str(self.folder / str(step)))

    def close(self) -> None:
        logging.getLogger('absl').removeHandler(self.background)
        self.manager.close()

    def __enter__(self) -> 'Checkpoints':
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.wait()
            self.close()
        else:  # what is being written may still land; the error that is on its way matters more than one from here
            with contextlib.suppress(Exception):
                self.close()


def _by_path(tree: Any) -> dict[str, Any]:
    """Leaves by path, so that a checkpoint does not depend on the Python classes of the optimizer."""
    return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
