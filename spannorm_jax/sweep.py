"""Runs what an experiment lacks, several runs side by side, each in a process of its own on a core of its own; then rows and figure.

On an accelerator one process trains several runs of one shape as one program (batched.py).

Runs are found by their folder, which the hash of the configuration names: what is finished is skipped, what was cut goes on, and a run
that two experiments share is trained once. So is one whose row the results hold already.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spannorm_jax import rundir
from spannorm_jax.batched import groups
from spannorm_jax.checkpoint import disk_errors
from spannorm_jax.config import Config
from spannorm_jax.data import open_data
from spannorm_jax.errors import CheckFailed
from spannorm_jax.experiment import Experiment, result_path, save_rows, with_kept
from spannorm_jax.host import Signals
from spannorm_jax.stats import Row

ON_CPU = ('smoke', 'nano')  # scales whose runs each take one core; at the others a run takes all devices
FLOPS_PER_CORE_SECOND = 1.8e10  # measured: see docs/experiments.md
EXPERTS_SLOWER = 3.3  # measured likewise: products as small as those of an expert run at a lower rate
TOGETHER = 8  # runs of one shape in one process, at scale gpu
START_SECONDS = 20.0  # of one run: imports, evaluation, and compilation where no run before it had the same program
EVERY_SECONDS = 0.2
INTERRUPTED = 75
Tell = Callable[[float, float, str], None]
"""tell(done, all, note): seconds of processor time, estimated."""


def cores() -> list[int | None]:
    """Cores this process may use; None for each where the system cannot pin."""
    return [*sorted(os.sched_getaffinity(0))] if hasattr(os, 'sched_getaffinity') else [None] * (os.cpu_count() or 1)


def core_seconds(cfg: Config) -> float:
    """Estimated processor time of a run on one core: FLOPs of its matrix products over a measured rate, and its start.

    Validation and test read eval_tokens each, forward alone, which is a third of a training step.
    """
    m, tokens = cfg.model, cfg.run.steps * cfg.data.batch * cfg.data.seq + 2 * (cfg.run.eval_tokens or 0) / 3
    ffn = m.resolved_ffn if not m.experts else m.resolved_expert_ffn * (m.experts_per_token + m.shared_experts)
    weights = m.layers * m.width * (4 * m.width + (3 if m.gated else 2) * ffn) + m.width * m.vocab
    rate = FLOPS_PER_CORE_SECOND / (EXPERTS_SLOWER if m.experts else 1)
    return START_SECONDS + tokens * 6 * (weights + m.layers * m.width * cfg.data.seq) / rate


def missing(exp: Experiment, runs: dict[str, Config]) -> dict[Path, Config]:
    """Folder -> configuration of the runs that are not done, the longest first, so that no core waits for one at the end."""
    todo = {rundir.run_dir(cfg): cfg for cfg in runs.values() if not exp.done(cfg)}
    return dict(sorted(todo.items(), key=lambda item: -core_seconds(item[1])))


def write_configs(todo: dict[Path, Config]) -> list[Path]:
    """config.json in the folder of each run: what a worker, or `spannorm train`, reads."""
    paths = []
    for folder, cfg in todo.items():
        with disk_errors('write', folder):
            folder.mkdir(parents=True, exist_ok=True)
        if rundir.read_config(folder) is None:
            rundir.write_config(folder, cfg)
        paths.append(folder / 'config.json')
    return paths


def run(exp: Experiment, scale: str, results: Path, jobs: int | None, tell: Tell, together: int | None = None) -> list[Row] | None:
    """Runs what is missing, round after round where runs depend on others, and writes results/<scale>/<id>.json and .png.

    None where a signal came: all runs have saved and stopped, and the same command goes on.

    Raises: CheckFailed, naming the runs that ended with an error and their logs; the others were run all the same.
    """
    exp = with_rows(exp, results, scale)
    while todo := missing(exp, exp.all_runs(scale)):
        jobs = jobs or (len(cores()) if scale in ON_CPU else 1)
        failed = side_by_side(exp, todo, jobs, scale in ON_CPU, tell, together or (TOGETHER if scale == 'gpu' else 1))
        if failed is None:
            return None
        if failed:
            lines = '\n'.join(f'  {folder}: {why}' for folder, why in failed.items())
            raise CheckFailed(f'{exp.id}: {len(failed)} of {len(todo)} runs failed; mend the cause and run the same command again\n{lines}')
    rows = exp.rows(exp.all_runs(scale))
    path = result_path(results, scale, exp.id)
    save_rows(path, exp, scale, rows)
    draw(exp, rows, path.with_suffix('.png'))
    return rows


def with_rows(exp: Experiment, results: Path, scale: str) -> Experiment:
    """The experiment with those kept rows that a run of now may stand beside: of the same text, and not measured of a machine."""
    found, first = with_kept(exp, results, scale), exp.all_runs(scale).values()
    if exp.here or not any(rundir.run_dir(cfg).name in found.kept for cfg in first):
        return exp
    texts = {open_data(data).hash for data in {cfg.data for cfg in first}}
    return replace(exp, kept={run: row for run, row in found.kept.items() if row['corpus'] in texts})


def draw(exp: Experiment, rows: list[Row], path: Path) -> None:
    with disk_errors('write', path):
        exp.figure(rows).savefig(path, metadata={'Software': None})


@dataclass
class Job:
    """One process and its runs, which are of one shape."""

    runs: dict[Path, Config]
    process: subprocess.Popen
    core: int | None

    @property
    def name(self) -> str:
        first, *more = self.runs
        return first.name + (f' and {len(more)} more' if more else '')

    @property
    def log(self) -> Path:
        return log_of(self.runs)

    def share(self) -> float:
        return sum(share(folder, cfg) for folder, cfg in self.runs.items()) / len(self.runs)


def share(folder: Path, cfg: Config) -> float:
    """Of its steps, those that a run has done."""
    return steps_done(folder / 'metrics.jsonl') / max(cfg.run.steps, 1)


def log_of(runs: Iterable[Path]) -> Path:
    return next(iter(runs)) / 'log.txt'


def side_by_side(exp: Experiment, todo: dict[Path, Config], jobs: int, pin: bool, tell: Tell, together: int) -> dict[Path, str] | None:
    """Every run once, at most `jobs` processes at a time, each with up to `together` runs of one shape. {folder: why} of those that failed;
    None where a signal stopped them."""
    write_configs(todo)
    free: list[int | None] = (cores() * jobs)[:jobs] if pin else [None] * jobs
    queue = [{rundir.run_dir(cfg): cfg for cfg in runs} for runs in groups(todo.values(), together)]
    live, failed = list[Job](), dict[Path, str]()
    cost = {folder: core_seconds(cfg) for folder, cfg in todo.items()}
    done, total, said = 0.0, sum(cost.values()), ''
    begun = {folder: share(folder, cfg) for folder, cfg in todo.items()}
    with Signals() as signals:
        while live or (queue and not signals.seen):
            while queue and free and not signals.seen:
                runs = queue.pop(0)
                live.append(Job(runs, start(exp, runs, cpu=pin), free.pop(0)))
                if live[-1].core is not None:
                    os.sched_setaffinity(live[-1].process.pid, {live[-1].core})  # threads that it starts later inherit it
            for job in [job for job in live if job.process.poll() is not None]:
                live.remove(job)
                stop([job])
                free.append(job.core)
                done += sum(cost[folder] for folder in job.runs)
                if not (signals.seen and job.process.returncode in (INTERRUPTED, -signal.SIGTERM)):
                    why = f'exit code {job.process.returncode}: {last_line(job.log)}'
                    failed |= {folder: why for folder, cfg in job.runs.items() if not exp.done(cfg)}
            shares = [(job, job.share()) for job in live]
            now = done + sum(cost[folder] * part for job, part in shares for folder in job.runs)
            now += sum(cost[folder] * begun[folder] for runs in queue for folder in runs)
            left = sum(map(len, queue)) + sum(len(job.runs) for job in live)
            note = f'{len(todo) - left}/{len(todo)} runs; {", ".join(f"{job.name} {part:.0%}" for job, part in shares)}'
            if note != said:
                tell(min(now, total), total, said := note)
            if signals.seen:
                stop(live)
            time.sleep(EVERY_SECONDS)
        return None if signals.seen else failed


def start(exp: Experiment, runs: Iterable[Path], cpu: bool) -> subprocess.Popen:
    """A worker in a session of its own: a Ctrl-C at the terminal reaches the sweep alone, which passes it on once."""
    environment: dict[str, Any] = {**os.environ, **({'JAX_PLATFORMS': 'cpu'} if cpu else {})}
    command = [sys.executable, '-m', 'spannorm_jax.worker', str(exp.path), *(str(folder / 'config.json') for folder in runs)]
    with disk_errors('write', log_of(runs).parent), log_of(runs).open('a') as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )  # fmt: skip


def stop(jobs: Iterable[Job]) -> None:
    """Close what the workers listen to: those that still run take it for SIGTERM."""
    for job in jobs:
        if job.process.stdin is not None:
            job.process.stdin.close()


def steps_done(path: Path) -> int:
    """The last step in a metrics file, from its end alone."""
    if not path.is_file():
        return 0
    with path.open('rb') as f:
        f.seek(max(0, path.stat().st_size - (1 << 16)))
        found = re.findall(rb'^\{"step": (\d+)', f.read(), re.M)
    return int(found[-1]) if found else 0


def last_line(path: Path) -> str:
    lines = [line for line in path.read_text('utf-8', 'replace').splitlines() if line.strip()] if path.is_file() else []
    return f'{lines[-1][:300] if lines else "no output"} (log: {path})'


def state(exp: Experiment, scale: str, results: Path) -> dict[str, Any]:
    """{id, title, question, scale, runs, finished, minutes_spent, minutes_left, state}: minutes of one core, those left estimated.

    state: done (every run that is asked for, in its folder or as a row of the results), 3 of 12 runs, or not run.
    """
    exp = with_kept(exp, results, scale)
    runs = exp.all_runs(scale)
    todo, rows = missing(exp, runs), exp.rows(runs)
    word = f'{len(rows)} of {len(runs)} runs' if todo and rows else 'not run' if todo else 'done'
    return {
        'id': exp.id, 'title': exp.title, 'question': exp.question, 'scale': scale, 'runs': max(len(runs), len(rows)),
        'finished': len(rows), 'minutes_spent': round(sum(row['minutes'] for row in rows), 1),
        'minutes_left': round(sum(map(core_seconds, todo.values())) / 60, 1), 'state': word,
    }  # fmt: skip
