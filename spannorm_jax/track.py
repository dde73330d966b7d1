"""Where metrics go: metrics.jsonl always, TensorBoard and Weights & Biases where asked for."""

import contextlib
import importlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from spannorm_jax import distributed
from spannorm_jax.checkpoint import disk_errors
from spannorm_jax.errors import BadData, UserError
from spannorm_jax.json_file import parse_json

Row = dict[str, Any]
LINE_BYTES = 16 << 20  # a row with lists over a few hundred layers has some 100 kB


@runtime_checkable
class Sink(Protocol):
    def write(self, row: Row) -> None:
        """A row, or what has been added to the last one."""

    def back_to(self, step: int) -> None:
        """The rows after `step` do not count: others of these steps follow."""

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one flat JSON object a line, `step` first; what is not finite is null. Sinks get every row too.

    Opening it for a run that goes on at `step` drops later rows and a last line that a crash cut short: steps are never twice in it.
    """

    def __init__(self, path: Path, step: int = 0, sinks: Iterable[Sink] = ()):
        self.path, self.sinks = path, list(sinks)
        self.truncate(step)

    def truncate(self, step: int) -> None:
        """Forget all rows after `step`."""
        again = hasattr(self, 'file')
        self._close_file()
        with disk_errors('write', self.path):
            self.rows = read_rows(self.path, step)
            old = self.path.stat().st_size if self.path.exists() else 0
            if old != sum(len(dump_row(row)) for row in self.rows):
                self._replace()
            self.file = self.path.open('a', encoding='utf-8')
        for sink in self.sinks if again else ():
            sink.back_to(step)

    def last(self, step: int) -> Row:
        """The row of `step` if it is the last one, else a new row: to add what an interruption left out. It stays in the file.

        Of several processes all get that of the file.
        """
        found = dict(self.rows[-1]) if self.rows and self.rows[-1]['step'] == step else {'step': step}
        return distributed.from_first('the last row', lambda: found)

    def write(self, row: Row) -> None:
        """Append a row; one of the same step as the last takes its place, in one move, so that no moment is without it."""
        row = {k: plain(v) for k, v in row.items()}
        again = bool(self.rows) and self.rows[-1]['step'] == row['step']
        if again and self.rows[-1] == row:
            return
        known = self.rows[-1] if again else {}
        self.rows[len(self.rows) - again :] = [row]
        with disk_errors('write', self.path):
            if again:
                self.file.close()
                self._replace()
                self.file = self.path.open('a', encoding='utf-8')
            else:
                self.file.write(dump_row(row))
                self.file.flush()
        for sink in self.sinks:
            sink.write({k: v for k, v in row.items() if k == 'step' or k not in known or known[k] != v})

    def _replace(self) -> None:
        """The file anew from `rows`: a crash leaves the old one or the new one."""
        part = self.path.with_suffix('.part')
        with part.open('w', encoding='utf-8') as f:
            f.writelines(map(dump_row, self.rows))
            f.flush()
            os.fsync(f.fileno())
        part.replace(self.path)

    def sync(self) -> None:
        """Have the disk hold every row, before a checkpoint that relies on them."""
        with disk_errors('write', self.path):
            os.fsync(self.file.fileno())

    def _close_file(self) -> None:
        if hasattr(self, 'file'):
            with disk_errors('write', self.path):
                self.file.close()

    def __enter__(self) -> 'MetricsFile':
        return self

    def __exit__(self, *_) -> None:
        self._close_file()
        for sink in self.sinks:
            sink.close()


class UnwrittenMetrics(MetricsFile):
    """What a process that leaves the writing to another has in its place: the newest row, in memory."""

    def __init__(self):
        self.rows, self.sinks = [], []

    def truncate(self, step: int) -> None:
        self.rows = []

    def write(self, row: Row) -> None:
        self.rows = [row]

    def sync(self) -> None:
        pass

    def _close_file(self) -> None:
        pass


def dump_row(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + '\n'


def read_rows(path: Path, to: int | None = None) -> list[Row]:
    """Rows of a metrics file, none where there is no such file. A last line without its end is left out.

    to: only rows up to this step count; the first bad line that none of them follows is the end. Raises: BadData, with the line's number.
    """
    if not path.is_file():
        return []
    with path.open('rb') as f:
        rows, lines = [], iter(lambda: f.readline(LINE_BYTES + 1), b'')
        for i, line in enumerate(lines, 1):
            where = f'{str(path)!r}, line {i}'
            if len(line) > LINE_BYTES:
                raise BadData(f'{where}: longer than {LINE_BYTES >> 20} MiB, not a row of metrics')
            if not line.endswith(b'\n'):  # the last one, cut short
                break
            try:
                rows.append(_row(line, where))
            except BadData:
                if to is None or any(_is_row(later, to) for later in lines):
                    raise
                break
    return [row for row in rows if to is None or row['step'] <= to]


def _row(line: bytes, where: str) -> Row:
    row = parse_json(line, where)
    if not isinstance(row, dict) or type(row.get('step')) is not int:
        raise BadData(f'{where}: not a row of metrics (an object whose step is a whole number)')
    return row


def _is_row(line: bytes, to: int) -> bool:
    """Whether a line is a row of a step up to `to`."""
    with contextlib.suppress(BadData):
        return _row(line, '')['step'] <= to
    return False


def plain(value: Any) -> Any:
    """A JSON value: numbers and lists of numbers, None for what is not finite."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    array = np.asarray(value)
    if array.ndim:
        return [plain(v) for v in array.tolist()]
    number = array.item()
    return number if not isinstance(number, float) or math.isfinite(number) else None


def scalars(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a value, each with its place in the name: x, x/3, x/3/7."""
    if isinstance(value, list):
        for i, v in enumerate(value):
            yield from scalars(f'{key}/{i}', v)
    elif value is not None:
        yield key, value


class TensorBoard:
    """Scalars as they are; lists of length L as one scalar per layer. What an earlier start wrote after `step` is not shown."""

    def __init__(self, folder: Path, step: int = 0):
        self.folder = folder
        self._open(step)

    def _open(self, step: int) -> None:
        from tensorboardX import SummaryWriter

        # Files count in the order of their names, which a second of time alone would not settle, nor keep apart.
        before = len(list(self.folder.iterdir())) if self.folder.is_dir() else 0
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1, filename_suffix=f'.{before:06}')

    def back_to(self, step: int) -> None:
        self.writer.close()
        self._open(step)

    def write(self, row: Row) -> None:
        for key, value in row.items():
            if key != 'step':
                for name, scalar in scalars(key, value):
                    self.writer.add_scalar(name, scalar, row['step'])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Rows as they are, over an axis `step` of our own: W&B's own steps never go back, and it would drop rows. What a rollback leaves out
    stays there, followed by what took its place. The run's id is its directory's name, so that a resumed run goes on in the same W&B run.
    """

    def __init__(self, name: str, config: dict[str, Any], folder: Path):
        import wandb

        with wandb_errors():
            self.run = wandb.init(id=name, name=name, config=config, dir=str(folder), resume='allow')
        self.run.define_metric('step')
        self.run.define_metric('*', step_metric='step')

    def back_to(self, step: int) -> None:
        pass

    def write(self, row: Row) -> None:
        self.run.log({k: v for k, v in row.items() if v is not None})

    def close(self) -> None:
        self.run.finish()


LIBRARIES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}


def check_sinks(names: Iterable[str]) -> None:
    """What sinks need is there: their library, and for W&B who you are. Asked before anything is computed.

    Raises: UserError, naming the extra that is missing, or what W&B says.
    """
    for name in names:
        library = LIBRARIES[name]
        try:
            importlib.import_module(library)
        except ImportError as e:
            raise UserError(f"run.sinks has {name!r}, which needs {library}: pip install 'spannorm-jax[track]'") from e
        if name == 'wandb' and distributed.first():
            import wandb

            with wandb_errors():
                wandb.login(verify=False)  # asks on a terminal; offline it does nothing


@contextlib.contextmanager
def wandb_errors() -> Iterator[None]:
    import wandb

    try:
        yield
    except wandb.Error as e:
        raise UserError(f"run.sinks has 'wandb', which did not start: {e} Or set WANDB_MODE=offline, and send the run later") from e


def open_sinks(names: Iterable[str], folder: Path, config: dict[str, Any], step: int = 0) -> list[Sink]:
    """The sinks a config asks for, of a run that goes on at `step`. Raises: UserError (W&B does not start)."""
    make = {'tensorboard': lambda: TensorBoard(folder / 'tensorboard', step), 'wandb': lambda: WandB(folder.name, config, folder)}
    return [make[name]() for name in names]


def open_log(folder: Path, step: int, sinks: Iterable[str], config: dict[str, Any]) -> MetricsFile:
    """metrics.jsonl of a run that goes on at `step`, with its sinks; of several processes one writes it."""
    return (
        MetricsFile(folder / 'metrics.jsonl', step, open_sinks(sinks, folder, config, step)) if distributed.first() else UnwrittenMetrics()
    )
