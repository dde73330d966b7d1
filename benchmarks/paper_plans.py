"""Compiles every program of every experiment at the paper's size for the slice that its file names.

python benchmarks/paper_plans.py [ID ...]   one line per program; goes on where it was stopped, and ends with 1 where one does not fit.

Programs are the same where their runs differ in initial values, rates, steps and seeds alone; of those that differ in depth alone the
deepest stands for all, for they are one loop over blocks and it holds the most. Rows are kept in results/plans.json; one whose
configuration has changed since is planned again. Needs the extra `tpu`.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from spannorm_jax import __version__
from spannorm_jax.config import Config, DataConfig, OptimConfig, RunConfig, edit, to_dict
from spannorm_jax.experiment import known, load_experiment
from spannorm_jax.rundir import run_id, write_config, write_json

KEPT = Path(__file__).resolve().parents[1] / 'results' / 'plans.json'
VALUES = {'model.init': 'common', 'model.init_std': None, 'model.embed_std': None, 'model.scale_init': 'none'}


def program(cfg: Config) -> Config:
    """What is left of a configuration without all that leaves its compiled step as large as it is."""
    cfg = replace(
        edit(cfg, VALUES),
        name='plan',
        data=DataConfig(seq=cfg.data.seq, batch=cfg.data.batch),
        optim=OptimConfig(optimizer=cfg.optim.optimizer, accumulate=cfg.optim.accumulate, loss_chunk=cfg.optim.loss_chunk),
        run=RunConfig(steps=100),
    )
    return cfg


def programs(ids: list[str]) -> dict[str, tuple[Config, str, list[str]]]:
    """(deepest program, slice, experiments) by a name that changes with program and slice."""
    found: dict[tuple[Config, str], tuple[Config, list[str]]] = {}
    for id in ids:
        exp = load_experiment(id)
        for cfg in exp.runs('paper').values():
            cfg = program(cfg)
            alike = edit(cfg, {'model.layers': 2}), exp.chips
            deepest, users = found.get(alike, (cfg, []))
            found[alike] = max(deepest, cfg, key=lambda c: c.model.layers), list(dict.fromkeys([*users, id]))
    return {f'{run_id(cfg)} {chips}': (cfg, chips, users) for (_, chips), (cfg, users) in found.items()}


def plan(cfg: Config, chips: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), cfg)
        command = [sys.executable, '-m', 'spannorm_jax', 'plan', str(Path(folder) / 'config.json'), '--chips', chips, '--json']
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def row(name: str, cfg: Config, made: dict) -> dict:
    m = cfg.model
    kept = ('chips', 'mesh', 'remat', 'params', 'tokens_per_step', 'fits', 'hbm_bytes', 'bytes', 'compile_s', 'floor_s', 'why')
    return {
        'program': name, 'version': __version__, 'topology': m.topology, 'layers': m.layers, 'width': m.width, 'attention': m.attention,
        'experts': m.experts, 'model': to_dict(m), **{k: made[k] for k in kept},
    }  # fmt: skip


def main(ids: list[str]) -> int:
    rows = {r['program']: r for r in json.loads(KEPT.read_text())} if KEPT.is_file() else {}
    wanted = programs(ids or list(known()))
    for name, (cfg, chips, users) in wanted.items():
        if name not in rows:
            rows[name] = row(name, cfg, plan(cfg, chips))
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            write_json(KEPT, list(rows.values()))
        r = rows[name]
        held = r['bytes']['peak'] / 2**30
        print(
            f'{r["topology"]:<8} {r["layers"]:>4} x {r["width"]:<5} {r["chips"]}  {held:6.2f} of {r["hbm_bytes"] / 2**30:.1f} GiB a chip, '
            f'compiled in {r["compile_s"]:.0f} s, floor {r["floor_s"]:.3f} s  {"fits" if r["fits"] else "TOO LARGE"}  {" ".join(users)}',
            flush=True,
        )
    return 0 if all(rows[name]['fits'] for name in wanted) else 1


if __name__ == '__main__':
    raise SystemExit(main(sys.argv[1:]))
