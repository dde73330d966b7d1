"""`spannorm diagnose`: runs and configurations to one folder of JSON, pictures and a page."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spannorm_jax import gallery, page, sharding
from spannorm_jax.checkpoint import Checkpoints, disk_errors
from spannorm_jax.compare import labels
from spannorm_jax.config import HOW_NOT_WHAT, Config, MeshConfig, edit, to_dict
from spannorm_jax.data import check_vocab, open_data
from spannorm_jax.diagnostics import DIAGNOSTICS, Probe
from spannorm_jax.errors import MissingInput, UserError, nearest
from spannorm_jax.gallery import Group
from spannorm_jax.host import use_compilation_cache
from spannorm_jax.load import load_config, names, read_config
from spannorm_jax.program import program
from spannorm_jax.resume import NEVER, diff
from spannorm_jax.step import init_state
from spannorm_jax.track import plain, read_rows

LONGEST = 60  # letters of a label that lists what differs, where names would do
Tell = Callable[[str], None]


def diagnose(
    targets: Sequence[str],
    out: Path,
    only: Sequence[str] = (),
    rows: int = 8,
    tell: Tell = lambda text: None,
    configs: Sequence[Config] = (),
) -> dict[str, Any]:
    """Measure every target, write `diagnostics.json`, a PNG per diagnostic and `index.html` into `out`, and return what the JSON holds:
    {'runs': [{name, label, step, ...}], 'diagnostics': {name: [one object of numbers and lists for each run]}}.

    targets: runs (their newest checkpoint) and configurations (their initial values); only: some of DIAGNOSTICS; rows: of the probe batch,
    the first ones of the validation split; configs: of the targets, where they are not what the files say.

    Raises: UserError (unknown diagnostic), MissingInput, BadData, StorageError.
    """
    for name in only:
        if name not in DIAGNOSTICS:
            raise UserError(f'diagnose: unknown diagnostic {name!r}; {nearest(name, DIAGNOSTICS)}')
    if rows < 1:
        raise UserError(f'diagnose: --rows {rows} must be at least 1')
    chosen = {name: entry for name, entry in DIAGNOSTICS.items() if not only or name in only}
    use_compilation_cache()
    with disk_errors('write', out):
        out.mkdir(parents=True, exist_ok=True)
    runs, measured = [], {name: [] for name in chosen}
    configs = configs or [load_config(target) for target in targets]
    trained = [begun(target, cfg) is not None for target, cfg in zip(targets, configs, strict=True)]
    for target, cfg, (place, label) in zip(targets, configs, grouped(configs, trained), strict=True):
        probe, info = load(target, cfg, rows)
        for name, entry in chosen.items():
            tell(f'{label}: {entry.title.lower()}')
            measured[name].append(entry.measure(probe))
        info |= {'loss on the probe': probe.loss}
        runs.append({'name': target, 'label': label, 'place': place} | info)
    shown = {name: (chosen[name], groups_of(runs, found)) for name, found in measured.items()}
    told = ('label', 'loss on the probe', 'topology', 'layers', 'width', 'seed', 'step', 'tokens', 'text', 'place')
    listed = [{k: run[k] for k in told} | {'name': Path(run['name'].removesuffix('/config.json')).name} for run in runs]
    with disk_errors('write', out):
        for name, (entry, groups) in shown.items():
            fig = gallery.figure(entry.panels, groups, entry.title)
            if fig is not None:
                (out / f'{name}.png').write_bytes(gallery.png(fig))
        title = f'Diagnostics: {", ".join(dict.fromkeys(run["label"] for run in runs))}'
        (out / 'index.html').write_text(page.page(title, listed, shown), 'utf-8')
        result = {'runs': runs, 'diagnostics': measured}
        (out / 'diagnostics.json').write_text(json.dumps(as_json(result), indent=1, allow_nan=False) + '\n', 'utf-8')
    return result


def load(target: str, cfg: Config, rows: int) -> tuple[Probe, dict[str, Any]]:
    """The probe of a run's newest checkpoint or of a configuration's initial values, and what to say of it."""
    mesh = sharding.make_mesh(MeshConfig(devices=1, platform=cfg.mesh.platform))
    corpus = open_data(cfg.data)
    check_vocab(corpus.tokenizer, cfg.model.vocab)
    with corpus.eval_batches('validation', rows, cfg.data.seq, rows * cfg.data.seq).batches() as batches:
        batch = {k: jnp.asarray(v) for k, v in next(batches).items()}
    made = program(cfg, mesh)
    step, history = 0, []
    if run := begun(target, cfg):
        of_trained(run, cfg)
        with Checkpoints(run / 'checkpoints', read_only=True) as checkpoints:
            latest = checkpoints.latest()
            if latest is None:
                raise MissingInput(f'{target!r} has no whole checkpoint yet; train it first: spannorm train {run / "config.json"}')
            step = latest
            if checkpoints.has_optimizer(latest):
                state = checkpoints.restore(latest, made.abstract)
                params, moments = state.params, state.opt_state if step else None
            else:
                params, moments = checkpoints.restore_params(latest, made.abstract.params), None
        history = read_rows(run / 'metrics.jsonl', step)
    else:
        params, moments = init_state(cfg, made.lm, made.optimizer, made.places).params, None
    info = {
        'topology': cfg.model.topology, 'layers': cfg.model.layers, 'width': cfg.model.width, 'seed': cfg.run.seed, 'step': step,
        'text': corpus.hash[:12], 'tokens': int((batch['segments'] > 0).sum()), 'config': to_dict(cfg),
    }  # fmt: skip
    return Probe(cfg, params, batch, moments, history), info


def of_trained(run: Path, cfg: Config) -> None:
    """Refuse another model, or another optimizer's state, than the run's own. Raises: UserError, naming the fields."""
    own = read_config(run)
    other = [c for c in diff(own, cfg) if c.rule.kind == NEVER and c.field.startswith(('model.', 'optim.'))]
    if other:
        raise UserError(
            f'{str(run)!r} was trained, and its checkpoint holds no other; leave out {", ".join(map(str, other))}; or, to see how that '
            'model starts, copy config.json alone to another folder and diagnose the copy'
        )


def begun(target: str, cfg: Config) -> Path | None:
    """The folder of a run; None for a configuration, which is measured as it starts.

    Raises: MissingInput for a run that has no checkpoint.
    """
    if target in names() or target.endswith('.py') or not (cfg.run.dir or Path(target).is_dir()):
        return None
    run = Path(cfg.run.dir or target)
    if not (run / 'checkpoints').is_dir():
        raise MissingInput(f'{target!r} has no checkpoint yet; train it first: spannorm train {run / "config.json"}')
    return run


def grouped(configs: Sequence[Config], trained: Sequence[bool]) -> list[tuple[int, str]]:
    """For every configuration the number and label of its group: those that compute the same but for their seed are one, and a model at
    its start and a trained one are two."""
    usual = Config()
    same = {f'{section}.{name}': getattr(getattr(usual, section), name) for section, names in HOW_NOT_WHAT.items() for name in names}
    bare = [edit(cfg, same | {'name': 'run', 'run.seed': 0}) for cfg in configs]
    kinds = list(dict.fromkeys(bare))
    said, own = labels(kinds), [configs[bare.index(kind)].name for kind in kinds]
    if len(kinds) == 1 or (max(map(len, said)) > LONGEST and len(set(own)) == len(own)):
        said = own
    both = {cfg for cfg, done in zip(bare, trained, strict=True) if done} & {
        cfg for cfg, done in zip(bare, trained, strict=True) if not done
    }
    every = list(dict.fromkeys(zip(bare, trained, strict=True)))
    label = lambda cfg, done: said[kinds.index(cfg)] + (' at its start' if cfg in both and not done else '')  # noqa: E731
    return [(every.index(pair), label(*pair)) for pair in zip(bare, trained, strict=True)]


def groups_of(runs: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[Group]:
    """What one diagnostic measured, by group, in the order of the groups."""
    places = dict.fromkeys(run['place'] for run in runs)
    of = lambda place: [i for i, run in enumerate(runs) if run['place'] == place]  # noqa: E731
    return [Group(runs[of(p)[0]]['label'], tuple(as_numbers(found[i]) for i in of(p))) for p in places]


def as_numbers(found: dict[str, Any]) -> dict[str, Any]:
    """Arrays of no dimension as Python numbers."""
    return {k: v.item() if isinstance(v, np.generic | np.ndarray | jax.Array) and np.ndim(v) == 0 else v for k, v in found.items()}


def as_json(value: Any) -> Any:
    """A JSON value; what is not finite is null."""
    if isinstance(value, dict):
        return {k: as_json(v) for k, v in value.items()}
    return [as_json(v) for v in value] if isinstance(value, list | tuple) else plain(value)
