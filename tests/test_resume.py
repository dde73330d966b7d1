"""A run that was interrupted is, to the last bit, the run that was not."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fakes import TINY, FakeCorpus

from spannorm_jax import manifest
from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import edit
from spannorm_jax.errors import BadData, UserError
from spannorm_jax.track import MetricsFile
from spannorm_jax.train import fit

pytestmark = pytest.mark.usefixtures('compiled_once')
# An epoch is 10 rows, a batch 4: steps 3, 5 and 8 are the first of an epoch or cross its edge. Two micro-batches per step, and dropout.
CFG = edit(TINY, {'run.steps': 9, 'optim.accumulate': 2, 'model.dropout': 0.2, 'run.checkpoint_every': 4, 'run.eval_every': 3})


def rows_of(folder, perf=False):
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if perf or not k.startswith('perf/')} for row in rows]


def arrays(folder):
    """All arrays of the last checkpoint, and the host's position."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # whatever devices and processes wrote it
    with Checkpoints(folder / 'checkpoints') as ckpt:
        step, item = ckpt.latest(), ocp.args.StandardRestore(fallback_sharding=here)
        found = ckpt.manager.restore(step, args=ocp.args.Composite(params=item, optim=item))
        meta = {k: v for k, v in ckpt.meta(step).items() if k != 'config'}
    return jax.tree.map(np.asarray, {'params': found['params'], 'optim': found['optim']}), meta


def same(a, b):
    (x, x_meta), (y, y_meta) = arrays(a), arrays(b)
    assert x_meta == y_meta and x_meta['step'] == 9
    assert len(jax.tree.leaves(x['optim'])) == 2 * len(jax.tree.leaves(x['params'])) + 1  # two moments each, and a count
    jax.tree.map(np.testing.assert_array_equal, x, y)
    assert rows_of(a) == rows_of(b)


def at(*steps):
    return lambda step: step in steps


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp('straight') / 'run'
    assert fit(edit(CFG, {'run.dir': str(folder)}), corpus=FakeCorpus()).status == 'completed'
    return folder


@pytest.mark.parametrize('first, second', [(2, 5), (3, 8), *(pytest.param(*p, marks=pytest.mark.full) for p in ((1, 2), (4, 4)))])
def test_two_interruptions_change_no_bit(straight, tmp_path, first, second):
    cfg = edit(CFG, {'run.dir': str(tmp_path / 'run')})
    for stop in (at(first), at(second)):
        outcome = fit(cfg, corpus=FakeCorpus(), stop=stop)
        assert (outcome.status, outcome.exit_code) == ('preempted', 75)
    assert fit(cfg, corpus=FakeCorpus()).status == 'completed'
    same(straight, tmp_path / 'run')


def test_a_signal_within_an_evaluation(straight, tmp_path):
    """The row of step 3 is written without its evaluation, which the next start adds: no hole, and no row twice."""
    cfg, corpus = edit(CFG, {'run.dir': str(tmp_path / 'run')}), FakeCorpus()

    def eval_batches(*args):
        if (tmp_path / 'run' / 'metrics.jsonl').exists():  # not when fit looks at the splits before it begins
            os.kill(os.getpid(), signal.SIGTERM)
        return FakeCorpus().eval_batches(*args)

    corpus.eval_batches = eval_batches
    assert fit(cfg, corpus=corpus).step == 3
    assert 'eval/loss' not in rows_of(tmp_path / 'run')[-1]
    fit(cfg, corpus=FakeCorpus(), stop=at(9))
    assert 'eval/loss' in rows_of(tmp_path / 'run')[2] and 'test/loss' not in rows_of(tmp_path / 'run')[-1]
    assert fit(cfg, corpus=FakeCorpus()).status == 'completed'
    same(straight, tmp_path / 'run')


def test_a_crash_between_checkpoints_repeats_the_steps_and_not_the_rows(straight, tmp_path):
    cfg, corpus = edit(CFG, {'run.dir': str(tmp_path / 'run')}), FakeCorpus()
    make = corpus.make

    def broken(rows, *a):
        if len(broken.seen) == 7:
            raise RuntimeError('the machine went away')
        broken.seen.append(1)
        return make(rows, *a)

    broken.seen = []
    corpus.make = broken
    # Seven batches are made for training before the eighth fails; evaluations use up two each.
    corpus.eval_batches = FakeCorpus().eval_batches
    with pytest.raises(RuntimeError, match='went away'):
        fit(cfg, corpus=corpus)
    folder = tmp_path / 'run'
    assert json.loads((folder / 'outcome.json').read_text())['status'] == 'failed'
    assert [r['step'] for r in rows_of(folder)] == [1, 2, 3, 4, 5, 6]  # beyond the checkpoint of step 4
    with (folder / 'metrics.jsonl').open('a') as f:
        f.write('{"step": 7, "train/lo')  # a line the crash cut short
    assert fit(cfg, corpus=FakeCorpus()).status == 'completed'
    same(straight, folder)


def test_a_torn_newest_checkpoint_stops_the_resume_and_is_named(tmp_path):
    cfg = edit(CFG, {'run.dir': str(tmp_path / 'run')})
    fit(cfg, corpus=FakeCorpus(), stop=at(5))
    path = tmp_path / 'run' / 'checkpoints' / '5' / 'meta' / 'metadata'
    path.write_text(path.read_text()[:50])
    rows = (tmp_path / 'run' / 'metrics.jsonl').read_text()
    with pytest.raises(BadData, match="checkpoints/5' is damaged: 'meta/metadata' has 50 bytes.*go on from the one before, remove that"):
        fit(cfg, corpus=FakeCorpus())
    assert (tmp_path / 'run' / 'metrics.jsonl').read_text() == rows


def test_a_checkpoint_of_another_model_is_named(straight, tmp_path):
    cfg = edit(CFG, {'run.dir': str(tmp_path / 'run'), 'model.width': 32})
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'checkpoints').symlink_to(straight / 'checkpoints')
    with pytest.raises(UserError, match=r'model.width +16 +32 +forbidden: other parameters'):
        fit(cfg, corpus=FakeCorpus())
    assert not (tmp_path / 'run' / 'config.json').exists() and not (tmp_path / 'run' / 'metrics.jsonl').exists()


def test_the_checkpoint_guards_the_configuration_where_config_json_is_gone(tmp_path):
    cfg, folder = edit(CFG, {'run.dir': str(tmp_path / 'run')}), tmp_path / 'run'
    fit(cfg, corpus=FakeCorpus(), stop=at(2))
    (folder / 'config.json').unlink()
    rows = rows_of(folder, perf=True)
    with pytest.raises(UserError, match=r'optim.lr_peak +0.01 +0.5 +needs run.accept: another rate'):
        fit(edit(cfg, {'optim.lr_peak': 0.5, 'optim.schedule': 'constant'}), corpus=FakeCorpus())
    assert not (folder / 'config.json').exists() and rows_of(folder, perf=True) == rows


@pytest.mark.parametrize(
    'meta', ['{"format": "a", "config": {}}', '{"format": 1, "config": {}}', '{"format": 1, "config": {"model": {}}}', '[]']
)
def test_a_meta_of_a_wrong_shape_is_named(straight, tmp_path, meta):
    shutil.copytree(straight, tmp_path / 'run')
    (tmp_path / 'run' / 'outcome.json').unlink()
    (tmp_path / 'run' / 'checkpoints' / '9' / 'meta' / 'metadata').write_text(meta)
    manifest.seal(tmp_path / 'run' / 'checkpoints' / '9')
    with pytest.raises(BadData, match="checkpoints/9'.*remove that folder"):
        fit(edit(CFG, {'run.dir': str(tmp_path / 'run')}), corpus=FakeCorpus())


def test_rows_stay_though_they_would_not_be_logged_now(tmp_path):
    cfg, folder = edit(CFG, {'run.dir': str(tmp_path / 'run'), 'run.log_every': 1}), tmp_path / 'run'
    fit(cfg, corpus=FakeCorpus(), stop=at(2))
    before = (folder / 'metrics.jsonl').read_text()
    assert before.count('\n') == 2
    fit(edit(cfg, {'run.log_every': 1000}), corpus=FakeCorpus(), stop=at(2))
    assert (folder / 'metrics.jsonl').read_text() == before


def test_a_row_is_on_disk_until_its_replacement_is(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    with MetricsFile(path) as log:
        log.write({'step': 1, 'train/loss': 2.0})
        log.write({'step': 2, 'train/loss': 1.0})
    with MetricsFile(path, 2) as log:
        row = log.last(2)
        assert [r['step'] for r in rows_of(tmp_path)] == [1, 2]
        log.write(row | {'eval/loss': 3.0})
        assert rows_of(tmp_path)[1:] == [{'step': 2, 'train/loss': 1.0, 'eval/loss': 3.0}]
        log.write({'step': 3})
    assert [r['step'] for r in rows_of(tmp_path)] == [1, 2, 3]


def test_other_data_is_refused(tmp_path):
    cfg, corpus = edit(CFG, {'run.dir': str(tmp_path / 'run')}), FakeCorpus()
    fit(cfg, corpus=FakeCorpus(), stop=at(1))
    corpus.hash = 'another text'
    with pytest.raises(UserError, match='the text has changed since step 1'):
        fit(cfg, corpus=corpus)


def test_steps_may_grow_under_a_constant_rate(tmp_path):
    cfg = edit(TINY, {'optim.schedule': 'constant', 'run.eval_every': 0})
    short, long = (edit(cfg, {'run.dir': str(tmp_path / n), 'run.steps': s}) for n, s in (('a', 4), ('b', 6)))
    fit(short, corpus=FakeCorpus())
    grown = edit(long, {'run.dir': short.run.dir})
    assert fit(grown, corpus=FakeCorpus()).step == 6
    fit(long, corpus=FakeCorpus())
    assert [r['train/loss'] for r in rows_of(tmp_path / 'a')] == [r['train/loss'] for r in rows_of(tmp_path / 'b')]
    assert json.loads((tmp_path / 'a' / 'config.json').read_text())['run']['steps'] == 6


PROGRAM = """
import sys
import jax
jax.config.update('jax_platforms', 'cpu')
from spannorm_jax.config import Config, edit
from spannorm_jax.train import fit
cfg = edit(Config(), {{'model.topology': 'pre', 'model.layers': 2, 'model.width': 16, 'model.heads': 2, 'model.dropout': 0.1,
    'data.seq': 32, 'data.batch': 4, 'data.source': {source!r},
    'data.cache': {cache!r}, 'data.workers': {workers}, 'run.steps': 40, 'run.eval_every': 15,
    'run.eval_tokens': 500, 'run.checkpoint_every': 7, 'run.dir': {folder!r}, 'mesh.devices': 1}})
if __name__ == '__main__':
    out = fit(cfg, lambda kind, data: print(kind, data.get('step'), flush=True))
    print(out)
    sys.exit(out.exit_code)
"""


def finish(run, code):
    out = run.communicate(timeout=300)
    assert run.returncode == code, out


@pytest.mark.full
def test_sigterm_and_worker_processes_on_real_data(tmp_path):
    """Straight with workers 0 == SIGTERM twice with workers 2, from other processes."""
    (tmp_path / 'text').mkdir()
    for i in range(80):
        (tmp_path / 'text' / f'{i}.txt').write_text(f'document {i}: ' + 'some words, ' * (5 + i % 7))
    cache = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'xla')}

    def start(name, workers):
        path = tmp_path / f'{name}.py'
        path.write_text(
            PROGRAM.format(source=str(tmp_path / 'text'), cache=str(tmp_path / 'cache'), workers=workers, folder=str(tmp_path / name))
        )
        return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cache)

    finish(start('straight', 0), 0)
    for upto in (10, 23):
        run = start('cut', 2)
        for line in run.stdout:
            if line.strip() == f'step {upto}':
                run.send_signal(signal.SIGTERM)
                break
        finish(run, 75)
    finish(start('cut', 0), 0)
    (x, x_meta), (y, y_meta) = arrays(tmp_path / 'straight'), arrays(tmp_path / 'cut')
    assert x_meta == y_meta and x_meta['step'] == 40
    jax.tree.map(np.testing.assert_array_equal, x, y)
    assert rows_of(tmp_path / 'straight') == rows_of(tmp_path / 'cut')


@pytest.mark.full
def test_a_second_interrupt_leaves_at_once(tmp_path):
    code = (
        'import time; from spannorm_jax.host import Signals\n'
        'with Signals() as s:\n print("ready", flush=True)\n while not s.seen: time.sleep(0.01)\n'
        ' print("seen", flush=True)\n time.sleep(60)'
    )
    run = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, cwd=pathlib.Path(__file__).parents[1])
    assert run.stdout.readline() == 'ready\n'
    run.send_signal(signal.SIGINT)
    assert run.stdout.readline() == 'seen\n'
    begun = time.monotonic()
    run.send_signal(signal.SIGINT)
    finish(run, 130)
    assert time.monotonic() - begun < 10
