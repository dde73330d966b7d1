"""Where a configuration comes from: a bare name, a Python file with `get()`, or the config.json of a run. Imports no jax."""

import os
import runpy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spannorm_jax.config import Config, edit, from_dict
from spannorm_jax.errors import MissingInput, UserError, nearest
from spannorm_jax.json_file import read_json

TOKENIZER = 'tokenizer'  # folder of a run where an import puts its model's tokenizer


def folder(kind: str) -> Path:
    """The folder `configs` or `experiments`: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / kind
    return inside if inside.is_dir() else package.parent / kind


def names(kind: str = 'configs') -> dict[str, Path]:
    """The files of that folder by bare name."""
    return {p.stem: p for p in sorted(folder(kind).glob('*.py')) if not p.stem.startswith('_')}


def load_config(text: str) -> Config:
    """The configuration that `text` names: a file of configs/ (`nano`), a path to such a file, or a run's config.json or folder.

    A run's configuration points at that run's own folder, wherever it was moved to, so that training it goes on there; a copy of the
    file alone, with none of what a run leaves behind, begins a run of its own.

    Raises: UserError (a file that does not give a Config; wrong fields), MissingInput (no such file), BadData (not JSON).
    """
    path, known = Path(text), names()
    if text in known:  # first: a folder that happens to have a config's name must not hide it
        return _call(known[text])
    if path.suffix == '.py':
        if not path.is_file():
            raise MissingInput(f'config file {text!r} does not exist')
        return _call(path)
    if path.name == 'config.json' or path.is_dir():
        run = find_run(text)
        begun = any((run / name).exists() for name in ('metrics.jsonl', 'checkpoints', 'outcome.json'))
        return edit(read_config(run), {'run.dir': str(run)} if begun else {})
    if path.suffix == '.json' or len(path.parts) > 1:
        raise MissingInput(f'config {text!r} does not exist; expected a name ({", ".join(known)}), a .py file with get(), or a config.json')
    raise UserError(f'unknown config {text!r}; {nearest(text, known)} (a file of your own is named by its path, ending in .py)')


def find_run(text: str) -> Path:
    """The folder of a run, from its own path or that of its config.json.

    Raises: MissingInput, naming the runs that lie beside it.
    """
    path = Path(text)
    run = path.parent if path.name == 'config.json' else path
    if (run / 'config.json').is_file():
        return run
    beside = sorted(p.parent.name for p in run.parent.glob('*/config.json')) if run.parent.is_dir() else []
    known = f'; runs in {str(run.parent)!r}: {", ".join(beside[:8])}' if beside else ''
    raise MissingInput(f'{text!r} is not a run (no {str(run / "config.json")!r}){known}')


def read_config(run: Path) -> Config:
    """The config.json of a run. A tokenizer that lies in the run's own folder is found there, wherever the folder was moved to."""
    path = run / 'config.json'
    tree = read_json(path)
    if isinstance(tree, dict) and 'model_type' in tree:
        raise UserError(f'{path} is of a Hugging Face layout, not of a run; make a run of it first: spannorm import {run} runs/imported')
    try:
        cfg = from_dict(Config, tree)
    except UserError as e:
        raise type(e)(f'{path}: {e}') from None
    own = run / TOKENIZER / Path(cfg.data.tokenizer).name
    # Unlike Path's, os.path's takes a name that no file can have.
    return edit(cfg, {'data.tokenizer': str(own.absolute())}) if os.path.isfile(own) else cfg


def define(file: str) -> None:
    """Run a Python file for what it adds to the table of topologies. Raises: MissingInput, UserError (an error in it, with its line)."""
    if not Path(file).is_file():
        raise MissingInput(f'topology file {file!r} does not exist')
    _run(Path(file), lambda names: None)


def _call(path: Path) -> Config:
    """get() of a config file."""
    cfg = _run(path, lambda names: names['get']() if callable(names.get('get')) else None)
    if not isinstance(cfg, Config):
        raise UserError(f'{path}: expected a function get() that returns a spannorm_jax Config')
    return cfg


def _run(path: Path, then: Callable[[dict[str, Any]], Any]) -> Any:
    """Run a Python file, and `then` with its names. Raises: UserError for whatever goes wrong in it, with the line."""
    try:
        return then(runpy.run_path(str(path)))
    except UserError as e:
        raise type(e)(f'{path}: {e}') from None
    except (Exception, SystemExit) as e:
        at = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
        line = e.lineno if isinstance(e, SyntaxError) else at[-1] if at else '?'
        raise UserError(f'{path}, line {line}: {type(e).__name__}: {e}') from None
