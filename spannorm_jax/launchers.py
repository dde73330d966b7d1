"""Beyond this machine: the missing runs of an experiment go to a scheduler that exists. There is none of our own."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spannorm_jax.checkpoint import disk_errors
from spannorm_jax.errors import UserError


def launch(launcher: str, id: str, scale: str, configs: Sequence[Path], options: Sequence[str]) -> str:
    """Hands the runs of these config.json over, and says in words what was done and how to go on.

    Raises: UserError (an option that is not KEY=VALUE; the extra is missing; no bucket).
    """
    given = dict(map(parse, options))
    return submitit_array(id, scale, configs, given) if launcher == 'submitit' else skypilot_task(id, scale, configs, given)


def parse(option: str) -> tuple[str, Any]:
    """KEY=VALUE; a value that reads as JSON (8, true) is taken so."""
    key, equals, value = option.partition('=')
    if not equals or not key:
        raise UserError(f'experiment: --submit {option!r} must be KEY=VALUE, as in slurm_partition=gpu')
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def train_command(config: str) -> list[str]:
    return [sys.executable, '-m', 'spannorm_jax', 'train', config]


def train(config: str) -> int:
    """One job of the array. A job that SLURM preempts or cuts saves on SIGTERM or SIGUSR1, and goes on where it is started again."""
    return subprocess.run(train_command(config), check=False).returncode


def submitit_array(id: str, scale: str, configs: Sequence[Path], options: dict[str, Any]) -> str:
    """A SLURM array with one job per run, over a file system that all nodes share."""
    try:
        import submitit
    except ImportError as e:
        raise UserError("--launcher submitit needs submitit: pip install 'spannorm-jax[launch]'") from e
    executor = submitit.AutoExecutor(folder=configs[0].parent.parent / 'submitit')
    executor.update_parameters(name=f'spannorm-{id}', **options)
    jobs = executor.map_array(train, [str(c.resolve()) for c in configs])
    return f'{len(jobs)} jobs submitted, the first is {jobs[0].job_id}; when they are done: spannorm experiment {id} --scale {scale}'


def skypilot_task(id: str, scale: str, configs: Sequence[Path], options: dict[str, Any]) -> str:
    """A task file: one machine that works off the experiment, its runs and results in a bucket, so that a preempted one goes on.

    YAML is a superset of JSON, so the file needs no library.
    """
    bucket = options.pop('bucket', None)
    if bucket is None:
        raise UserError('--launcher skypilot needs a bucket for the runs: --submit bucket=gs://NAME accelerators=H100:8')
    again = shlex.join(['spannorm', 'experiment', id, '--scale', scale, '--root', '/spannorm/runs', '--results', '/spannorm/results'])
    task = {
        'name': f'spannorm-{id.lower()}-{scale}',
        'resources': options,
        'workdir': '.',
        'file_mounts': {'/spannorm': {'source': bucket, 'mode': 'MOUNT'}},
        'setup': "pip install '.[cuda]'",
        'run': again,
    }
    path = Path(f'{id}-{scale}.sky.yaml')
    with disk_errors('write', path):
        path.write_text(json.dumps(task, indent=2) + '\n', 'utf-8')
    return f'wrote {path} ({len(configs)} runs are missing here); start it with: sky jobs launch {path}'
