"""What an experiment is: a file of experiments/, as data and four functions; and its rows, one plain dict per run.

QUESTION    what is asked, CLAIM what the paper (or its review) says, CHIPS a slice for `spannorm plan`, CURVES metrics kept over the steps
runs        (scale) -> {name: Config}
HERE        True where what is measured is of the machine that measures it, and not to be taken from another's rows (optional)
more        (scale, rows) -> {name: Config}: runs that depend on what the first ones gave (optional)
measure     (cfg, folder) -> {metric: value} of a finished run (optional)
table       (rows) -> lines of a table, as dicts (optional; without it rows are grouped by what differs)
figure      (rows) -> Figure, from rows alone
verdict     (rows) -> Verdict, by a rule that was there before the runs
"""

import dataclasses
import importlib.util
import itertools
import json
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from matplotlib.figure import Figure

from spannorm_jax import load, rundir
from spannorm_jax.checkpoint import disk_errors
from spannorm_jax.config import HOW_NOT_WHAT, Config, edit, to_dict
from spannorm_jax.errors import BadData, MissingInput, UserError, nearest
from spannorm_jax.resume import flat
from spannorm_jax.rundir import run_dir
from spannorm_jax.stats import Row, count_spikes
from spannorm_jax.track import read_rows

SCALES = ('smoke', 'nano', 'gpu', 'paper')
POINTS, LAYER_POINTS = 60, 6  # kept of a curve, of a curve of lists
COST = 'cost.json'
HIDDEN = {'name', *(f'{section}.{name}' for section, names in HOW_NOT_WHAT.items() for name in names)}  # fields that change no number
LAST = ('eval/loss', 'eval/bits_per_byte', 'test/loss', 'test/bits_per_byte')


class Verdict(NamedTuple):
    status: Literal['reproduced', 'not reproduced', 'cannot tell']
    reason: str


@dataclass(frozen=True)
class Experiment:
    id: str
    title: str
    question: str
    claim: str
    chips: str
    curves: tuple[str, ...]
    path: Path
    root: str
    runs: Callable[[str], dict[str, Config]]
    figure: Callable[[list[Row]], Figure]
    verdict: Callable[[list[Row]], Verdict]
    more: Callable[[str, list[Row]], dict[str, Config]] | None = None
    measure: Callable[[Config, Path], dict[str, Any]] | None = None
    table: Callable[[list[Row]], list[dict[str, Any]]] | None = None
    here: bool = False
    kept: dict[str, Row] = dataclasses.field(default_factory=dict)
    """Rows of results that hold all that is asked of a run, by the run: see `with_kept`."""

    def all_runs(self, scale: str) -> dict[str, Config]:
        """The runs known so far: those of `runs`, and what `more` asks for, given the rows of the finished ones.

        What is asked for depends on rows alone, so a sweep that was killed asks for the same again.
        """
        known, new = {}, self.runs(scale)
        while new:
            known |= {name: edit(cfg, {'run.root': self.root, 'name': title(scale, cfg)}) for name, cfg in new.items()}
            rows = self.rows(known) if self.more else []
            new = {k: v for k, v in self.more(scale, rows).items() if k not in known} if self.more and len(rows) == len(known) else {}
        return known

    def done(self, cfg: Config) -> bool:
        return self.at_hand(cfg) or run_dir(cfg).name in self.kept

    def at_hand(self, cfg: Config) -> bool:
        folder = run_dir(cfg)
        return rundir.finished(cfg, folder) is not None and (self.measure is None or self.measured(folder).exists())

    def measured(self, folder: Path) -> Path:
        """Where `measure` is kept: by the name of a function that experiments share, else by the experiment."""
        name = self.measure.__name__ if self.measure else ''
        return folder / f'measured-{self.id if name == "measure" else name}.json'

    def rows(self, runs: dict[str, Config]) -> list[Row]:
        """A row for each run that is done."""
        found = []
        for name, cfg in runs.items():
            folder = run_dir(cfg)
            if self.at_hand(cfg):
                found.append(row_of(name, cfg, folder, self.curves) | (read_json(self.measured(folder)) if self.measure else {}))
            elif row := self.kept.get(folder.name):
                found.append(row | {'name': name})
        return found


def title(scale: str, cfg: Config) -> str:
    """The first part of a run's folder. It follows from what is run alone, so that experiments share runs."""
    return f'{scale}-{cfg.model.topology}-L{cfg.model.layers}-d{cfg.model.width}'


def product(base: Config, axes: dict[str, Sequence[Any]]) -> dict[str, Config]:
    """Every combination of the values of some fields; a run's name says its own: `topology=span lr_peak=0.002 seed=0`."""
    runs = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        name = ' '.join(
            f'{field.split(".")[-1]}={v:g}' if isinstance(v, float) else f'{field.split(".")[-1]}={v}' for field, v in chosen.items()
        )
        runs[name] = edit(base, chosen)
    return runs


def row_of(name: str, cfg: Config, folder: Path, curves: tuple[str, ...] = ()) -> Row:
    """`name`, every configuration field by its dotted name, how the run ended, its last metrics, and `curves`: {metric: [[step, value]]}.

    train/final: mean of the last 20 training losses. minutes: processor time of all its starts that ended.
    """
    outcome = rundir.read_outcome(folder)
    if outcome is None:
        raise MissingInput(f'{str(folder)!r} has no outcome.json yet: run the experiment again to finish it')
    metrics = read_rows(folder / 'metrics.jsonl', outcome.step + outcome.nonfinite)  # a step that was not finite has a row too
    losses = [m['train/loss'] for m in metrics if m.get('train/loss') is not None]
    last = losses[-rundir.SMOOTHING :]
    row: Row = {'name': name} | {k: v for k, v in flat(to_dict(cfg)).items() if k not in HIDDEN}
    row |= {'run': folder.name, 'status': outcome.status, 'step': outcome.step, 'reason': outcome.reason, 'corpus': outcome.corpus}
    row |= {'train/final': sum(last) / len(last) if last else None, 'spikes': count_spikes(losses)}
    for m in metrics:
        row |= {k: m[k] for k in LAST if k in m}
    row['minutes'] = round(core_seconds(folder) / 60, 3)
    row['curves'] = {k: curve(metrics, k) for k in curves}
    return row


def curve(metrics: list[Row], key: str) -> list[list[Any]]:
    """At most 60 points (6 where each is a list) of a metric: train/loss as the mean since the point before, others as they are."""
    points = [[m['step'], m[key]] for m in metrics if m.get(key) is not None]
    most = LAYER_POINTS if points and isinstance(points[0][1], list) else POINTS
    ends = sorted({round((i + 1) * len(points) / most) for i in range(most)} - {0}) if len(points) > most else range(1, len(points) + 1)
    kept, lo = [], 0
    for hi in ends:
        step, v = points[hi - 1]
        if key == 'train/loss':
            v = sum(p[1] for p in points[lo:hi]) / (hi - lo)
        kept.append([step, short(v)])
        lo = hi
    return kept


def short(v: Any) -> Any:
    """Numbers, lists and dicts of them with five digits, enough to draw; what is not finite is None."""
    if isinstance(v, dict):
        return {k: short(x) for k, x in v.items()}
    if isinstance(v, list):
        return [short(x) for x in v]
    return v if not isinstance(v, float) else float(f'{v:.5g}') if math.isfinite(v) else None


def core_seconds(folder: Path) -> float:
    path = folder / COST
    return float(read_json(path)['core_s']) if path.exists() else 0.0


def read_json(path: Path) -> dict[str, Any]:
    with disk_errors('read', path):
        try:
            return json.loads(path.read_text('utf-8'))
        except ValueError as e:
            raise BadData(f'{str(path)!r} is not JSON ({e}); remove it and run the experiment again') from None


def result_path(results: Path, scale: str, id: str) -> Path:
    return results / scale / f'{id}.json'


def save_rows(path: Path, exp: Experiment, scale: str, rows: list[Row]) -> None:
    """Rows as JSON small enough for git: fields that all rows share stand once."""
    common = {k: v for k, v in rows[0].items() if k not in ('name', 'curves') and all(r.get(k) == v for r in rows)} if rows else {}
    with disk_errors('write', path):
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({'id': exp.id, 'scale': scale, 'common': common})[:-1]
        lines = ',\n'.join(json.dumps({k: v for k, v in r.items() if k not in common}, allow_nan=False) for r in rows)
        part = path.with_suffix('.part')
        part.write_text(f'{head}, "rows": [\n{lines}\n]}}\n', 'utf-8')
        part.replace(path)


def load_rows(path: Path) -> list[Row]:
    """The rows of a result. Raises MissingInput, BadData."""
    if not path.is_file():
        raise MissingInput(f'{str(path)!r} does not exist: the experiment has not been run at this scale')
    tree = read_json(path)
    if not isinstance(tree, dict) or not {'common', 'rows'} <= tree.keys():
        raise BadData(f'{str(path)!r} is not a result: expected an object with common and rows')
    return [tree['common'] | row for row in tree['rows']]


def known() -> dict[str, Path]:
    """The experiments' files by id, in the order of the paper: figures, tables, open questions, others."""
    files = load.names('experiments')

    def place(id: str):
        stem, order = id.rstrip('0123456789'), ('fig', 'table', 'T')
        return (order.index(stem) if stem in order else len(order)), int(id[len(stem) :] or 0), id

    return {id: files[id] for id in sorted(files, key=place)}


def load_experiment(text: str, root: str = 'runs') -> Experiment:
    """The experiment of an id (any case) or of the path of a .py file; its runs lie in folders under `root`.

    Raises: UserError (unknown id, with the nearest; a file that lacks something), MissingInput (no such file).
    """
    files = known()
    path = {id.lower(): file for id, file in files.items()}.get(text.lower(), Path(text))
    if path.suffix != '.py':
        raise UserError(f'unknown experiment {text!r}; {nearest(text, files)}')
    if not path.is_file():
        raise MissingInput(f'experiment file {text!r} does not exist')
    module = run_file(path)
    names = ('QUESTION', 'CLAIM', 'CHIPS', 'CURVES', 'runs', 'figure', 'verdict')
    if missing := [n for n in names if not hasattr(module, n)]:
        raise UserError(f'{path}: an experiment needs {", ".join(missing)} (see experiments/README.md)')
    fields = {f.name for f in dataclasses.fields(Experiment)}
    given = {k.lower(): v for k, v in vars(module).items() if k.lower() in fields and not k.startswith('_')}
    title = (module.__doc__ or path.stem).splitlines()[0].rstrip('.')
    return Experiment(**given | {'id': path.stem, 'title': title, 'path': path, 'root': root})


def with_kept(exp: Experiment, results: Path, scale: str) -> Experiment:
    """The experiment with the runs of which results/<scale>/ holds all that it asks: its own rows, and those of experiments with the same
    measurement that kept its curves. So a sweep goes on from committed rows on a machine that has none of their run folders.

    Fields that a row is older than have their defaults, as in `run_id`.
    """
    kept: dict[str, Row] = {}
    usual = {k: v for k, v in flat(to_dict(Config())).items() if k not in HIDDEN}
    for id in (*(id for id in known() if id != exp.id), exp.id):
        path = result_path(results, scale, id)
        if not path.is_file():
            continue
        try:
            other = exp if id == exp.id else load_experiment(id)
            rows = load_rows(path) if other.measured(Path()) == exp.measured(Path()) else []
        except UserError:
            if id == exp.id:
                raise
            continue  # what is wrong with the rows of another is told where they are asked for
        for row in rows:
            if set(exp.curves) <= row['curves'].keys():
                kept[row['run']] = usual | row | {'curves': {k: row['curves'][k] for k in exp.curves}}
    return dataclasses.replace(exp, kept=kept)


def sibling(name: str) -> ModuleType:
    """A file of experiments/ that several experiments share."""
    return run_file(load.folder('experiments') / f'{name}.py')


_LOADED: dict[Path, ModuleType] = {}


def run_file(path: Path) -> ModuleType:
    if path not in _LOADED:
        spec = importlib.util.spec_from_file_location(f'spannorm_experiment_{path.stem}', path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except UserError as e:
            raise type(e)(f'{path}: {e}') from None
        except Exception as e:
            at = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
            raise UserError(f'{path}, line {at[-1] if at else "?"}: {type(e).__name__}: {e}') from None
        _LOADED[path] = module
    return _LOADED[path]
