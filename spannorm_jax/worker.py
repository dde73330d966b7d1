"""A run of a sweep in a process of its own, or several of one shape: python -m spannorm_jax.worker EXPERIMENT_FILE CONFIG_JSON...

Standard input is a pipe whose other end the sweep holds. When the sweep is gone, however it ended, the pipe closes and the run saves and
stops, as on SIGTERM: a sweep that was killed leaves nothing behind that still computes.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from spannorm_jax.errors import UserError

PATIENCE_SECONDS = 120.0  # for a run of an earlier sweep that is still saving


def main(experiment_file: str, *config_json: str) -> int:
    threading.Thread(target=stop_with_the_sweep, daemon=True).start()
    from spannorm_jax import rundir
    from spannorm_jax.batched import fit_batched
    from spannorm_jax.experiment import load_experiment
    from spannorm_jax.load import load_config
    from spannorm_jax.progress import Progress
    from spannorm_jax.train import fit

    exp, runs = load_experiment(experiment_file), {Path(path).parent: load_config(path) for path in config_json}
    for folder in runs:
        wait_for(folder)
    try:
        with Progress() as progress:
            outcomes = fit_batched([*runs.values()], progress) if len(runs) > 1 else [fit(cfg, progress) for cfg in runs.values()]
        for (folder, cfg), outcome in zip(runs.items(), outcomes, strict=False):  # fewer where a signal came
            if exp.measure and not isinstance(outcome, Exception) and outcome.status in ('completed', 'diverged') and not exp.done(cfg):
                rundir.write_json(exp.measured(folder), exp.measure(cfg, folder))
    finally:
        for folder in runs:
            add_cost(folder, time.process_time() / len(runs))
    codes = [rundir.EXIT['preempted']] if len(outcomes) < len(runs) else []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        codes.append(outcome.exit_code)
    return max(codes)


def stop_with_the_sweep() -> None:
    # os.read, not sys.stdin: a thread that waits inside sys.stdin would hang the interpreter's end
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def wait_for(folder: Path) -> None:
    """Until no other process trains in this folder, within bounds: what is still in the way then, `fit` says."""
    from spannorm_jax.host import alone

    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        try:
            with alone(folder):
                return
        except UserError:
            time.sleep(0.5)


def add_cost(folder: Path, seconds: float) -> None:
    """Processor time of this start, added to that of the earlier ones."""
    from spannorm_jax import rundir
    from spannorm_jax.experiment import COST, core_seconds

    rundir.write_json(folder / COST, {'core_s': core_seconds(folder) + seconds})


if __name__ == '__main__':
    try:
        sys.exit(main(*sys.argv[1:]))
    except UserError as e:
        print(f'spannorm: {e}', file=sys.stderr)
        sys.exit(e.exit_code)
