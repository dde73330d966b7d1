"""Sweeps: what is stopped or killed goes on and changes no number; what is done is skipped; what fails is told; rows, lists, launchers."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from spannorm_jax import cli, experiment, launchers, sweep
from spannorm_jax.config import edit
from spannorm_jax.data import open_data
from spannorm_jax.errors import BadData, CheckFailed, UserError
from spannorm_jax.experiment import load_experiment, load_rows, result_path
from spannorm_jax.load import load_config
from spannorm_jax.rundir import Outcome, run_dir
from spannorm_jax.train import fit

ROOT = pathlib.Path(__file__).parent.parent
FILE = '''"""A tiny experiment."""

from spannorm_jax.config import edit
from spannorm_jax.experiment import Verdict, product
from spannorm_jax.figures import against, finish, panels
from spannorm_jax.load import load_config

QUESTION, CLAIM, CHIPS, CURVES = 'Is it done?', 'It is.', 'v5e:4x4', ('train/loss', 'layer/rms')
SMALL = {
    'model.layers': 1, 'model.width': 16, 'model.heads': 2, 'data.seq': 16, 'data.batch': 2, 'data.source': 'SOURCE', 'data.cache': 'CACHE',
    'run.steps': STEPS, 'run.eval_tokens': 64, 'run.eval_every': 0, 'run.checkpoint_every': 400, 'run.keep': 1,
    'optim.warmup_steps': 1, 'mesh.devices': 1, 'mesh.platform': 'cpu',
}


def runs(scale):
    return product(edit(load_config('debug'), SMALL), {'model.topology': ('span',), 'run.seed': SEEDS})


def measure(cfg, folder):
    return {'seed/measured': 10 + cfg.run.seed}


def figure(rows):
    fig, axes = panels('it')
    against(axes[0], rows, 'run.seed', 'eval/loss', 'span', 'k')
    finish(axes, 'seed', 'loss')
    return fig


def verdict(rows):
    return Verdict('reproduced', f'{len(rows)} rows')
'''


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder with text, a cache, and environment for workers: quick to compile, as the tests' own process."""
    folder = tmp_path_factory.mktemp('sweep')
    (folder / 'text').mkdir()
    for i in range(80):
        (folder / 'text' / f'{i}.txt').write_text(f'document {i} ' * 20)
    with pytest.MonkeyPatch.context() as m:
        m.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
        m.setenv('JAX_COMPILATION_CACHE_DIR', jax.config.values['jax_compilation_cache_dir'])
        m.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
        m.chdir(folder)
        yield folder


def file(place, name, steps, seeds=(0, 1)):
    path, words = place / f'{name}.py', {'SOURCE': place / 'text', 'CACHE': place / 'cache', 'STEPS': steps, 'SEEDS': seeds}
    text = FILE
    for word, value in words.items():
        text = text.replace(word, str(value))
    path.write_text(text)
    return str(path)


def started(place, path, *options):
    command = [sys.executable, '-m', 'spannorm_jax', 'experiment', path, '--scale', 'smoke', '--jobs', '2', *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=place)


def wait_until(test, process, seconds=400.0):
    until = time.monotonic() + seconds
    while not test():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, 'it did not come to that'
        time.sleep(0.05)


def numbers(folder):
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith('perf/')} for row in rows]


def workers(place):
    """Processes of this test's workers, by their command line."""
    found = subprocess.run(['pgrep', '-f', f'spannorm_jax.worker {place}'], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


@pytest.mark.skipif(not hasattr(os, 'sched_getaffinity'), reason='pins as on Linux')
@pytest.mark.parametrize(
    'seeds, signals', [(1, [signal.SIGKILL]), pytest.param(2, [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], marks=pytest.mark.full)]
)
def test_stopped_and_killed_and_started_again(place, capsys, seeds, signals):
    """SIGTERM and SIGINT: exit 75, all saved. SIGKILL of the sweep alone: its workers save and end by themselves. Then to the end, and no
    number is another than that of a run that nothing cut."""
    name, most = f'cut{seeds}', 400 * len(signals)
    path = file(place, name, most, tuple(range(seeds)))
    exp = load_experiment(path, str(place / 'runs'))
    runs = exp.all_runs('smoke')
    folders = [run_dir(cfg) for cfg in runs.values()]
    steps = lambda: [sweep.steps_done(f / 'metrics.jsonl') for f in folders]  # noqa: E731

    for i, number in enumerate(signals):
        before, sweeping = steps(), started(place, path)
        wait_until(lambda before=before: all(now > then + 20 for now, then in zip(steps(), before, strict=True)), sweeping)
        sweeping.send_signal(number)
        out, err = sweeping.communicate()
        assert out == '' and all(step < most for step in steps())
        if number != signal.SIGKILL:
            assert sweeping.returncode == 75 and 'run the same command again' in err and workers(place) == [], err
            assert all(list((f / 'checkpoints').glob('[0-9]*')) for f in folders), i
        assert (
            not result_path(place / 'results', 'smoke', name).exists()
            and sweep.state(exp, 'smoke', place / 'results')['state'] == 'not run'
        )
    assert cli.main(['experiment', path, '--scale', 'smoke', '--jobs', '2']) == 0  # at once: it waits for the workers that are still saving
    out, err = capsys.readouterr()
    assert f'reproduced: {seeds} rows' in out and f'{seeds}/{seeds} runs' in err, err

    for folder, cfg in zip(folders, runs.values(), strict=True):
        assert (folder / 'log.txt').read_text().count('going on from the checkpoint') == len(signals)
        alone = edit(cfg, {'run.dir': str(place / 'straight' / folder.name)})
        assert fit(alone).status == 'completed'
        assert numbers(folder) == numbers(place / 'straight' / folder.name)

    rows = load_rows(result_path(place / 'results', 'smoke', name))
    assert [row['seed/measured'] for row in rows] == [10, 11][:seeds] and [row['run.seed'] for row in rows] == [0, 1][:seeds]
    assert all(row['minutes'] > 0 and len(row['corpus']) == 64 for row in rows)
    state = sweep.state(exp, 'smoke', place / 'results')
    assert (state['state'], state['runs'], state['finished'], state['minutes_left']) == ('done', seeds, seeds, 0)

    assert cli.main(['experiment', path, '--scale', 'smoke']) == 0  # all is done: nothing runs
    drawn = (place / 'results/smoke' / f'{name}.png').read_bytes()
    assert cli.main(['experiment', path, '--scale', 'smoke', '--root', 'elsewhere']) == 0  # nor on a machine that has the rows alone
    assert not (place / 'elsewhere').exists() and load_rows(result_path(place / 'results', 'smoke', name)) == rows
    assert cli.main(['experiment', path, '--scale', 'smoke', '--redraw', '--root', 'elsewhere']) == 0  # no run is at hand
    assert (place / 'results/smoke' / f'{name}.png').read_bytes() == drawn and len(drawn) > 1000
    assert f'reproduced: {seeds} rows' in capsys.readouterr().out


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_every_worker_and_starts_no_more(place, monkeypatch, number):
    """Workers in name only: each waits for the end of its input, as a real one does, and then ends as one that has saved."""
    exp = load_experiment(file(place, f'signal{number}', 3, (0, 1, 2)), str(place / f'signal{number}'))
    started, told = [], []

    def start(exp, runs, cpu):
        started.append(subprocess.Popen([sys.executable, '-c', 'import os; os.read(0, 1); raise SystemExit(75)'], stdin=subprocess.PIPE))
        return started[-1]

    def tell(done, total, note):
        told.append(note)
        if len(told) == 1:  # a second Ctrl-C would leave at once
            os.kill(os.getpid(), number)

    monkeypatch.setattr(sweep, 'start', start)
    assert sweep.run(exp, 'smoke', place / 'results', 2, tell) is None
    assert [p.poll() for p in started] == [75, 75] and told[0].startswith('0/3 runs')
    assert not result_path(place / 'results', 'smoke', exp.id).exists()


def test_one_process_trains_runs_of_one_shape(place):
    """Their rows are those of runs that were trained alone, but for rounding."""
    path, root = file(place, 'shape', 3), place / 'together'
    assert cli.main(['experiment', path, '--scale', 'smoke', '--together', '8', '--root', str(root), '--results', str(root)]) == 0
    assert len([*root.glob('*/log.txt')]) == 1
    together = load_rows(result_path(root, 'smoke', 'shape'))
    for row, cfg in zip(together, load_experiment(path, str(place / 'alone')).all_runs('smoke').values(), strict=True):
        fit(cfg)
        losses = [row['train/loss'] for row in map(json.loads, (run_dir(cfg) / 'metrics.jsonl').read_text().splitlines())]
        np.testing.assert_allclose([loss for _, loss in row['curves']['train/loss']], losses, rtol=1e-5)
        assert row['run.seed'] == cfg.run.seed and row['seed/measured'] == 10 + cfg.run.seed and row['minutes'] > 0


def test_a_run_that_fails_is_told_and_the_others_run(place, monkeypatch):
    """Workers in name only: one fails, one does its run."""
    exp = load_experiment(file(place, 'fails', 3), str(place / 'failing'))
    todo = sweep.missing(exp, exp.all_runs('smoke'))
    bad, good = todo

    def start(exp, runs, cpu):
        (folder,) = runs
        if folder == good:
            assert fit(todo[good]).status == 'completed'
            exp.measured(good).write_text('{}')
        (folder / 'log.txt').write_text('much\nspannorm: why it failed\n\n')
        return subprocess.Popen([sys.executable, '-c', f'raise SystemExit({65 * (folder == bad)})'], stdin=subprocess.PIPE)

    monkeypatch.setattr(sweep, 'start', start)
    with pytest.raises(CheckFailed) as e:
        sweep.run(exp, 'smoke', place / 'results', 1, lambda *now: None)
    assert f'{bad}: exit code 65: spannorm: why it failed (log: {bad / "log.txt"})' in str(e.value) and str(good) not in str(e.value)
    assert exp.done(todo[good]) and not exp.done(todo[bad]) and list(sweep.missing(exp, exp.all_runs('smoke'))) == [bad]


def test_rows_of_results_are_not_trained_again(place):
    """Those of the experiment and of another that measures the same and kept its curves; of another text none is compared with."""
    exp = load_experiment('table2', str(place / 'none'))
    runs, done = exp.all_runs('smoke'), place / 'rows'
    rows = [
        {'name': name, 'run': run_dir(cfg).name, 'status': 'completed', 'corpus': 'h', 'minutes': 1.0, 'test/loss': float(i)}
        | {'eval/loss': float(i), 'optim.lr_peak': cfg.optim.lr_peak, 'run.seed': 0, 'model.topology': cfg.model.topology, 'curves': {}}
        for i, (name, cfg) in enumerate(runs.items())
    ]
    experiment.save_rows(result_path(done, 'smoke', 'table2'), exp, 'smoke', rows)
    for id, shared in {'table2': len(rows), 'T10': len(rows), 'table1': 0, 'fig07': 0}.items():  # table1 measures, fig07 has curves
        other = experiment.with_kept(load_experiment(id, str(place / 'none')), done, 'smoke')
        found = other.rows(other.all_runs('smoke'))
        assert len(found) == shared and [row['run'] for row in found] == [row['run'] for row in rows][:shared], id
        assert (sweep.state(other, 'smoke', done)['state'] == 'done') == (shared > 0), id
    t4 = load_experiment('T4', str(place / 'none'))
    some = experiment.with_kept(t4, done, 'smoke')
    found = some.rows(some.all_runs('smoke'))
    # The rows name few fields, as those of an earlier version do: the others have their defaults.
    assert 0 < len(found) < len(rows) and {row['model.block_end'] for row in found} == {'norm'}
    grown = dataclasses.replace(load_experiment('table2'), curves=('train/loss',))  # it has come to ask for more than the rows hold
    assert experiment.with_kept(grown, done, 'smoke').kept == {}
    result_path(done, 'smoke', 'T10').write_text('{')
    assert experiment.with_kept(t4, done, 'smoke').kept == some.kept
    with pytest.raises(BadData):
        experiment.with_kept(load_experiment('T10'), done, 'smoke')


def test_what_is_of_a_machine_is_measured_there():
    exp = load_experiment('fig13')
    assert exp.here and experiment.with_kept(exp, ROOT / 'results', 'nano').kept
    assert sweep.with_rows(exp, ROOT / 'results', 'nano').kept == {} and sweep.state(exp, 'nano', ROOT / 'results')['state'] == 'done'


def test_the_step_that_was_not_finite_is_in_the_row(tmp_path):
    """It was not applied, so the run stands one step before it; a torn line after it is not read."""
    rows = [{'step': k, 'train/loss': 5.0 + k, 'train/grad_norm': None if k == 3 else 1.0} for k in (1, 2, 3)]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows) + '{"ste\n')
    for first, losses in (('layers.0.ffn.down', [[1, 6.0], [2, 7.0], [3, 8.0]]), (None, [[1, 6.0], [2, 7.0]])):
        Outcome('diverged', 2, 'why', first).save(tmp_path)
        assert experiment.row_of('x', load_config('debug'), tmp_path, ('train/loss',))['curves']['train/loss'] == losses


def test_a_row_of_another_text_is_trained_again(place, monkeypatch):
    exp, found = load_experiment(file(place, 'text', 3), str(place / 'of_texts')), []
    (first, cfg), (second, other) = exp.all_runs('smoke').items()
    text = open_data(cfg.data).hash
    started = lambda exp, todo, *_: found.append(sorted(cfg.run.seed for cfg in todo.values()))  # noqa: E731
    monkeypatch.setattr(sweep, 'side_by_side', started)
    monkeypatch.setattr(sweep, 'save_rows', lambda *_: pytest.fail('rows of two texts'))
    row = lambda name, cfg, corpus: {'name': name, 'run': run_dir(cfg).name, 'corpus': corpus, 'curves': {k: [] for k in exp.curves}}  # noqa: E731
    for rows, want in (
        ([row(first, cfg, text)], [1]),
        ([row(first, cfg, 'other')], [0, 1]),
        ([row(first, cfg, 'other'), row(second, other, 'other')], [0, 1]),  # nothing seems to be missing
    ):
        experiment.save_rows(result_path(place / 'of_texts', 'smoke', 'text'), exp, 'smoke', rows)
        assert sweep.run(exp, 'smoke', place / 'of_texts', 1, lambda *now: None) is None and found.pop() == want


def test_row(place):
    """From a run directory made by hand: the last 20 losses, spikes, held-out numbers, thinned curves."""
    exp = load_experiment(file(place, 'row', 300))
    (name, cfg), *_ = exp.all_runs('smoke').items()
    folder = place / 'by_hand'
    folder.mkdir()
    (folder / 'outcome.json').write_text(json.dumps({'status': 'diverged', 'step': 300, 'reason': 'rose', 'corpus': 'h'}))
    metrics = [{'step': i, 'train/loss': 3.0 - i / 300} | ({'layer/rms': [i, None]} if i % 20 == 0 else {}) for i in range(1, 301)]
    metrics[-1] |= {'test/loss': 2.5}
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(m) + '\n' for m in metrics))
    (folder / 'cost.json').write_text('{"core_s": 90}')
    row = experiment.row_of(name, cfg, folder, exp.curves)
    assert (row['model.layers'], row['optim.lr_peak'], row['name']) == (cfg.model.layers, cfg.optim.lr_peak, name)
    assert not {'run.root', 'mesh.devices', 'run.stats_every', 'model.remat'} & row.keys()
    assert (row['status'], row['step'], row['reason'], row['test/loss'], row['minutes'], row['spikes']) == (
        'diverged',
        300,
        'rose',
        2.5,
        1.5,
        0,
    )
    np.testing.assert_allclose(row['train/final'], np.mean([3.0 - i / 300 for i in range(281, 301)]))
    curve = row['curves']['train/loss']
    assert len(curve) == 60 and curve[-1][0] == 300
    np.testing.assert_allclose([v for _, v in curve], [3.0 - (i - 2) / 300 for i in range(5, 301, 5)], rtol=1e-4)
    assert row['curves']['layer/rms'] == [[i, [i, None]] for i in (40, 100, 160, 200, 240, 300)]  # of 15, each 2.5th, rounded to even


def test_rows_are_kept_whole(place):
    exp = load_experiment(file(place, 'kept', 3))
    rows = [{'name': 'a', 'x': 1, 'y': 2.5, 'curves': {}}, {'name': 'b', 'x': 1, 'y': None, 'curves': {'c': [[1, 2.0]]}}]
    path = result_path(place / 'kept', 'nano', 'kept')
    experiment.save_rows(path, exp, 'nano', rows)
    assert load_rows(path) == rows and json.loads(path.read_text())['common'] == {'x': 1}


def test_longest_first_and_shared_once(place):
    exp = load_experiment('fig02', str(place / 'none'))
    todo = sweep.missing(exp, exp.all_runs('nano'))
    depths = [cfg.model.layers for cfg in todo.values()]
    assert len(todo) == 55 and depths == sorted(depths, reverse=True)
    assert all(folder.parent == place / 'none' and folder.name.startswith('nano-') for folder in todo)


def test_cost_grows_as_the_work_does():
    exp = load_experiment('fig11')
    cfg = next(iter(exp.runs('nano').values()))
    work = lambda **changes: sweep.core_seconds(edit(cfg, {k.replace('__', '.'): v for k, v in changes.items()})) - sweep.START_SECONDS  # noqa: E731
    twice = work(run__steps=600, run__eval_tokens=1) / work(run__steps=300, run__eval_tokens=1)
    np.testing.assert_allclose(twice, 2, rtol=1e-4)
    assert 1.9 < work(model__layers=512) / work(model__layers=256) < 2


@pytest.mark.parametrize('id', [p.stem for p in sorted((ROOT / 'results' / 'nano').glob('*.json'))])
def test_cost_is_what_kept_results_cost(id):
    runs = load_experiment(id).runs('nano')
    rows = [
        r
        for r in load_rows(ROOT / 'results' / 'nano' / f'{id}.json')
        if r['name'] in runs and r.get('minutes') and runs[r['name']].run.steps
    ]
    estimate = sum(sweep.core_seconds(runs[r['name']]) for r in rows)
    assert not rows or 0.7 < 60 * sum(r['minutes'] for r in rows) / estimate < 1.6


class TestCommand:
    def test_list(self, place, capsys):
        assert cli.main(['experiment', '--json', '--root', str(place / 'none')]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [row['id'] for row in listed] == list(experiment.known())
        assert all(row['runs'] > 0 and row['minutes_left'] > 0 and row['state'] == 'not run' for row in listed)
        assert {'id', 'title', 'question', 'scale', 'runs', 'finished', 'minutes_spent', 'minutes_left', 'state'} == listed[0].keys()

    def test_configs_are_what_train_and_plan_read(self, place, capsys):
        assert cli.main(['experiment', 'T6', '--scale', 'smoke', '--configs', '--root', str(place / 'given')]) == 0
        paths = capsys.readouterr().out.split()
        exp = load_experiment('T6', str(place / 'given'))
        assert {cli.parse('train', [path]).settings for path in paths} == set(exp.all_runs('smoke').values())

    @pytest.mark.parametrize(
        'line, code, message',
        [
            ('fig2', 2, "did you mean 'fig"),
            ('fig02 --jobs 0', 2, '--jobs 0 must be at least 1'),
            ('fig02 --scale huge', 2, 'invalid choice'),
            ('fig02 --redraw --results nowhere', 66, 'has not been run at this scale'),
            ('fig02 --scale smoke --launcher skypilot', 2, 'needs a bucket'),
            ('fig02 --scale smoke --launcher skypilot --submit bucket', 2, 'must be KEY=VALUE'),
        ],
    )
    def test_mistakes(self, place, capsys, line, code, message):
        assert cli.main(['experiment', *line.split(), '--root', str(place / 'mistakes')]) == code
        assert message in capsys.readouterr().err


class TestLaunchers:
    def test_skypilot(self, place, capsys):
        line = 'experiment fig02 --scale smoke --launcher skypilot --submit bucket=gs://mine accelerators=H100:8 use_spot=true --root s'
        assert cli.main(line.split()) == 0
        task = json.loads((place / 'fig02-smoke.sky.yaml').read_text())
        assert task['resources'] == {'accelerators': 'H100:8', 'use_spot': True}
        assert task['file_mounts']['/spannorm'] == {'source': 'gs://mine', 'mode': 'MOUNT'}
        again = task['run'].split()
        assert again[:3] == ['spannorm', 'experiment', 'fig02'] and cli.parse('experiment', again[2:]).root == '/spannorm/runs'
        assert 'sky jobs launch fig02-smoke.sky.yaml' in capsys.readouterr().out

    def test_submitit(self, place, monkeypatch):
        """An array with one job per run, given absolute paths; without the package the extra is named."""
        seen = {}

        class Executor:
            def __init__(self, folder):
                seen['folder'] = folder

            def update_parameters(self, **options):
                seen['options'] = options

            def map_array(self, function, paths):
                seen['paths'] = paths
                return [types.SimpleNamespace(job_id=f'7_{i}') for i, _ in enumerate(paths)]

        configs = sweep.write_configs(sweep.missing(exp := load_experiment('T6', 'slurm'), exp.all_runs('smoke')))
        monkeypatch.setitem(sys.modules, 'submitit', None)
        with pytest.raises(UserError, match=r"pip install 'spannorm-jax\[launch\]'"):
            launchers.launch('submitit', 'T6', 'smoke', configs, ())
        monkeypatch.setitem(sys.modules, 'submitit', types.SimpleNamespace(AutoExecutor=Executor))
        said = launchers.launch('submitit', 'T6', 'smoke', configs, ('slurm_partition=gpu', 'timeout_min=60'))
        assert seen['options'] == {'name': 'spannorm-T6', 'slurm_partition': 'gpu', 'timeout_min': 60}
        assert seen['paths'] == [str(c.resolve()) for c in configs] and 'spannorm experiment T6 --scale smoke' in said and '7_0' in said

    def test_what_a_job_runs(self):
        command = launchers.train_command('runs/x/config.json')
        assert command[1:] == ['-m', 'spannorm_jax', 'train', 'runs/x/config.json']
