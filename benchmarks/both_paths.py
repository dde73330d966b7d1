"""A run through both paths into lm-evaluation-harness: python benchmarks/both_paths.py RUN

Exports the run, opens the export in transformers by the harness's own backend, and compares every number on task files made of the run's
held-out text (experiments/_tasks.py) with those of `spannorm eval --tasks`; exit 1 where two are further apart than 1e-4 of themselves.
Needs the extra `eval` and what the harness's own backend wants: pip install 'lm_eval[hf]'. Nothing is fetched.
"""

import os
import sys
import tempfile
from pathlib import Path

from spannorm_jax import cli, experiment
from spannorm_jax.config import MeshConfig
from spannorm_jax.data import open_data
from spannorm_jax.score import load_run

NEAR = 1e-4
TOKENS = 1 << 15  # of the test split that examples are taken from


def theirs(model_dir: Path, seq: int, files: list[str]) -> dict[str, dict[str, float]]:
    """Metrics by task. A rolling text has its beginning from that backend; the others need it from the export's tokenizer."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    found: dict[str, dict[str, float]] = {}
    for file in files:
        bos = False if Path(file).stem == 'pages' else None
        model = HFLM(str(model_dir), device='cpu', dtype='float32', batch_size=4, max_length=seq, add_bos_token=bos, trust_remote_code=True)
        manager = lm_eval.tasks.TaskManager(include_defaults=False)
        results = lm_eval.simple_evaluate(model, tasks=[file], task_manager=manager, num_fewshot=0, bootstrap_iters=0)['results']
        for name, row in results.items():  # a standard error that it did not ask for is the text N/A
            found[name] = {key.removesuffix(',none'): value for key, value in row.items() if isinstance(value, int | float)}
    return found


def main(run: Path) -> int:
    loaded = load_run(run, MeshConfig(devices=1))
    texts = open_data(loaded.cfg.data).eval_batches('test', 1, loaded.cfg.data.seq, TOKENS).texts()
    tasks = experiment.sibling('_tasks')
    made = tasks.examples([loaded.tokenizer.decode(ids) for ids in texts], loaded.cfg.data.seq // 2)
    with tempfile.TemporaryDirectory() as at:
        os.environ['HF_MODULES_CACHE'] = f'{at}/modules'  # read when transformers is imported, as the harness does
        from spannorm_jax.harness import offline, run_tasks

        files = tasks.write(made, Path(at))
        if code := cli.main(['export', str(run), f'{at}/export']):
            return code
        with offline():
            ours, hers = run_tasks(loaded, files)['tasks'], theirs(Path(at) / 'export', loaded.cfg.data.seq, files)
    worst = 0.0
    for task, row in ours.items():
        for name, value in row['metrics'].items():
            if name in hers[task]:
                apart = abs(value - hers[task][name]) / max(abs(value), 1e-30)
                worst = max(worst, apart)
                print(f'{task:12} {row["examples"]:3} examples  {name:16} {value:16.9g} {hers[task][name]:16.9g}  apart {apart:.1e}')
    print(f'largest difference {worst:.1e} of {NEAR}')
    return int(worst > NEAR)


if __name__ == '__main__':
    sys.exit(main(Path(sys.argv[1])))
