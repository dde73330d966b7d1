"""The step and the loop: accumulation, what is not finite, statistics, evaluation, rows, outcomes."""

import contextlib
import json
import math
import os
import signal
import threading
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import POISON, TINY, B, FakeCorpus, T, V

from spannorm_jax import plot, program, resume, rundir, sharding, train
from spannorm_jax.config import Config, edit, from_dict
from spannorm_jax.errors import BadData, StorageError, UserError
from spannorm_jax.host import alone
from spannorm_jax.model import LM, infos, unstack
from spannorm_jax.optim import make_optimizer
from spannorm_jax.rundir import Outcome, Position
from spannorm_jax.step import backward_order, evaluate, init_state, leaf_names, make_eval_step, make_step
from spannorm_jax.topology import TOPOLOGIES
from spannorm_jax.train import fit

pytestmark = pytest.mark.usefixtures('compiled_once')


class Poisoned(LM):
    """A model whose features are NaN for a batch that holds POISON."""

    def features(self, params, tokens, *args, **kw):
        x, extras = super().features(params, tokens, *args, **kw)
        return jnp.where((tokens == POISON).any(), jnp.nan, x), extras


def parts(cfg, lm=None):
    lm, tree = lm or LM(cfg.model), infos(cfg.model)
    opt = make_optimizer(cfg, tree)
    return lm, tree, opt


def batches(n, size=B):
    feed = FakeCorpus().train_batches(size, T, 0)
    return [jax.tree.map(jnp.asarray, next(feed)) for _ in range(n)]


def run_steps(cfg, feed, stats=False):
    lm, tree, opt = parts(cfg)
    step = jax.jit(make_step(cfg, lm, opt, tree, stats))
    state, rows = init_state(cfg, lm, opt), []
    for batch in feed:
        state, metrics = step(state, batch)
        rows.append(metrics)
    return state, rows


def close(a, b, tol=1e-5):
    """Each tensor within tol of its norm."""
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=tol * max(np.linalg.norm(b[name]), 1e-3), err_msg=name)


def test_accumulated_micro_batches_are_the_big_batch():
    cfg = edit(TINY, {'optim.z_loss': 0.01, 'optim.clip': 0.5, 'optim.eps': 1e-6})
    feed = batches(2, 8)
    counts = np.asarray((feed[0]['segments'] > 0).sum(1))
    assert len({int(counts[i::4].sum()) for i in range(4)}) > 1  # micro-batches with unequal tokens: a mean of means would be wrong
    whole, rows = run_steps(edit(cfg, {'data.batch': 8}), feed)
    split, split_rows = run_steps(edit(cfg, {'data.batch': 8, 'optim.accumulate': 4}), feed)
    assert float(rows[0]['grad_norm']) > 0.5  # so that clipping takes part
    for key in ('loss', 'z_loss', 'grad_norm', 'update_norm', 'tokens', 'lr'):
        np.testing.assert_allclose([r[key] for r in rows], [r[key] for r in split_rows], rtol=1e-5, err_msg=key)
    close(unstack(cfg.model, split.params), unstack(cfg.model, whole.params))


def test_loss_is_cross_entropy_alone_and_update_norm_is_what_moved():
    cfg = edit(TINY, {'optim.z_loss': 0.5})
    lm, _, opt = parts(cfg)
    batch = batches(1)[0]
    start = init_state(cfg, lm, opt)
    logits = lm.apply(start.params, batch['tokens'], batch['segments'], batch['positions'])
    logp = jax.nn.log_softmax(np.asarray(logits, np.float64))
    real = np.asarray(batch['segments']) > 0
    nats = -np.take_along_axis(np.asarray(logp), np.asarray(batch['targets'])[..., None], -1)[..., 0][real]
    end, (m,) = run_steps(cfg, [batch])
    np.testing.assert_allclose(m['loss'], nats.mean(), rtol=1e-5)
    np.testing.assert_allclose(m['z_loss'], 0.5 * (jax.nn.logsumexp(logits, -1)[real] ** 2).mean(), rtol=1e-5)
    moved = jax.tree.map(lambda a, b: np.square(np.asarray(a, np.float64) - b).sum(), end.params, start.params)
    np.testing.assert_allclose(m['update_norm'], math.sqrt(sum(jax.tree.leaves(moved))), rtol=1e-4)
    assert int(m['tokens']) == real.sum() and int(end.step) == 1


def test_layer_statistics():
    cfg = edit(TINY, {'model.topology': 'span', 'model.layers': 3})  # two runs of blocks
    _, (m,) = run_steps(cfg, batches(1), stats=True)
    layer = {k.removeprefix('layer/'): np.asarray(v) for k, v in m.items() if k.startswith('layer/')}
    kinds = ('sigma_', 'branch_var/', 'branch_skip_corr/', 'branch_skip_ratio/')
    want = {'rms', 'attn_entropy', 'attn_sink', 'attn_logit_max'} | {f'{kind}{at}' for kind in kinds for at in ('attn', 'ffn')}
    want |= {f'{kind}/{role}' for kind in ('grad_rms', 'update_ratio', 'update_visible') for role in ('read', 'write', 'gain')}
    assert set(layer) == want and all(v.shape == (3,) and np.isfinite(v).all() for v in layer.values())

    lm, tree, opt = parts(cfg)
    state, batch = init_state(cfg, lm, opt), batches(1)[0]

    def loss(p):
        logp = jax.nn.log_softmax(lm.apply(p, batch['tokens'], batch['segments'], batch['positions']))
        real = batch['segments'] > 0
        return -(jnp.take_along_axis(logp, batch['targets'][..., None], -1)[..., 0] * real).sum() / real.sum()

    grads = unstack(cfg.model, jax.jit(jax.grad(loss))(state.params))
    for l in range(3):
        g = np.concatenate([np.ravel(v) for k, v in grads.items() if k in (f'layers.{l}.attn.o', f'layers.{l}.ffn.down')])
        np.testing.assert_allclose(layer['grad_rms/write'][l], np.sqrt(np.square(g).mean()), rtol=1e-4)
    # AdamW's first step has size lr wherever there is a gradient, so the ratio is lr / rms(w), up to decay
    w = np.concatenate([np.ravel(v) for k, v in unstack(cfg.model, state.params).items() if k in ('layers.1.attn.o', 'layers.1.ffn.down')])
    np.testing.assert_allclose(layer['update_ratio/write'][1], 0.005 / np.sqrt(np.square(w).mean()), rtol=1e-2)
    np.testing.assert_allclose(layer['update_visible/write'][1], (np.abs(w) < 0.005 * 256).mean(), atol=1e-2)


def test_a_step_with_statistics_is_the_step_without():
    cfg = edit(TINY, {'model.topology': 'residual', 'model.layers': 3})
    plain, _ = run_steps(cfg, batches(2))
    looked_at, _ = run_steps(cfg, batches(2), stats=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain.params, looked_at.params)


EVERY = [n if n in ('span', 'siamese') else pytest.param(n, marks=pytest.mark.full) for n in sorted(TOPOLOGIES)]


@pytest.mark.parametrize('topology', EVERY)
@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_scanned_layers_train_as_unrolled_ones(topology, optimizer):
    cfg = edit(TINY, {'model.topology': topology, 'optim.optimizer': optimizer, 'model.layers': 3, 'optim.eps': 1e-5})
    feed = batches(3)
    scanned, _ = run_steps(cfg, feed)
    unrolled, _ = run_steps(edit(cfg, {'model.scan_unroll': 0}), feed)
    close(unstack(cfg.model, unrolled.params), unstack(cfg.model, scanned.params))


def test_backward_order_runs_from_head_to_embedding():
    cfg = edit(TINY, {'model.topology': 'span', 'model.final_norm': True})
    names = leaf_names(cfg.model, infos(cfg.model))
    order = [names[i] for i in backward_order(names)]
    assert order[0] == 'head' and order[1] == 'norm_final.gain' and set(order[-2:]) == {'embed', 'norm_embed.gain'}
    assert [int(n.split('.')[1]) for n in order[2:-2]] == sorted((int(n.split('.')[1]) for n in order[2:-2]), reverse=True)


def test_evaluation_is_exact_whatever_the_batch():
    cfg = TINY
    lm = LM(cfg.model)
    params = lm.init(jax.random.key(0))
    step = jax.jit(make_eval_step(cfg, lm))
    data = FakeCorpus().eval_batches('validation', B, T)
    rows = [jax.tree.map(jnp.asarray, b) for b in data.batches()]
    found = evaluate(step, params, rows, data.bytes)
    nats = 0.0
    for b in rows:
        logp = jax.nn.log_softmax(jnp.asarray(lm.apply(params, b['tokens'], b['segments'], b['positions'])))
        nll = -np.take_along_axis(np.asarray(logp, np.float64), np.asarray(b['targets'])[..., None], -1)[..., 0]
        nats += nll[np.asarray(b['segments']) > 0].sum()
    assert found.tokens == data.tokens
    want = [nats, nats / data.tokens, nats / math.log(2) / data.bytes]
    np.testing.assert_allclose([found.nats, found.loss, found.bits_per_byte], want, rtol=1e-6)
    assert evaluate(step, params, rows, data.bytes, stop=lambda: True) is None


# ---------------------------------------------------------------------- the loop


def rows_of(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    """One whole run with statistics, and what it reported."""
    folder, told = tmp_path_factory.mktemp('straight'), []
    cfg = edit(TINY, {'run.dir': str(folder / 'run'), 'run.stats_every': 4})
    return cfg, folder / 'run', fit(cfg, lambda kind, data: told.append((kind, data)), corpus=FakeCorpus()), told


def test_a_run_leaves_what_the_contract_names(straight):
    cfg, folder, outcome, told = straight
    assert (outcome.status, outcome.step, outcome.exit_code) == ('completed', 8, 0)
    assert {p.name for p in folder.iterdir()} == {'config.json', 'metrics.jsonl', 'checkpoints', 'outcome.json', 'time.json', 'loss.png'}
    assert from_dict(Config, json.loads((folder / 'config.json').read_text())) == edit(cfg, {'run.dir': None})
    assert json.loads((folder / 'outcome.json').read_text()) == {
        'status': 'completed', 'step': 8, 'reason': '', 'first_nonfinite': None, 'skipped': 0, 'rollbacks': 0, 'spikes': 0,
        'corpus': 'fake',
    }  # fmt: skip
    assert (folder / 'loss.png').read_bytes().startswith(b'\x89PNG')
    rows = rows_of(folder)
    assert [row['step'] for row in rows] == list(range(1, 9)) and all(next(iter(row)) == 'step' for row in rows)
    train_keys = {f'train/{k}' for k in ('loss', 'z_loss', 'aux_loss', 'grad_norm', 'update_norm', 'lr', 'tokens', 'spike')}
    perf = {'perf/tokens_per_s', 'perf/step_ms', 'perf/mfu'}
    assert set(rows[0]) == {'step'} | train_keys | perf and rows[0]['perf/mfu'] is None
    assert [r['step'] for r in rows if 'eval/loss' in r] == [3, 6, 8] and [r['step'] for r in rows if 'test/bits_per_byte' in r] == [8]
    assert [r['step'] for r in rows if 'layer/rms' in r] == [4, 8] and len(rows[3]['layer/rms']) == 2
    counts = [int((b['segments'] > 0).sum()) for b in batches(8)]
    assert [r['train/tokens'] for r in rows] == np.cumsum(counts).tolist()
    assert rows[7]['train/loss'] < rows[0]['train/loss'] - 0.3
    assert [d['step'] for kind, d in told if kind == 'row'] == list(range(1, 9))


def test_a_finished_run_is_left_alone(straight):
    cfg, folder, _, _ = straight
    before, told = {p: p.stat().st_mtime_ns for p in folder.rglob('*')}, []
    outcome = fit(cfg, lambda *a: told.append(a), corpus=FakeCorpus())
    assert outcome.status == 'completed' and 'already complete' in outcome.message and told == [('message', {'text': outcome.message})]
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob('*')}


def test_what_may_not_change_on_resume_is_shown(straight):
    cfg, folder, _, _ = straight
    changed = edit(cfg, {'optim.lr_peak': 0.02, 'model.topology': 'span', 'run.keep': 5})
    with pytest.raises(UserError) as e:
        fit(changed, corpus=FakeCorpus())
    lines = [line.split() for line in str(e.value).splitlines()]
    assert ['model.topology', '"pre"', '"span"', 'forbidden:', 'other', 'parameters'] in lines
    assert ['run.keep', '2', '5', 'safe:'] in [line[:4] for line in lines] and 'run.steps' not in str(e.value)
    with pytest.raises(UserError, match='the schedule of the new length from here on\n.* add --run.accept run.steps; or'):
        resume.check_resumable(cfg, edit(cfg, {'run.steps': 9}), folder)
    constant = edit(cfg, {'optim.schedule': 'constant'})
    resume.check_resumable(constant, edit(constant, {'run.steps': 99, 'run.eval_every': 1, 'mesh.devices': 4, 'data.workers': 3}), folder)


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setattr(program, 'LM', Poisoned)


def test_stop_on_nonfinite_applies_nothing_and_names_the_leaf(tmp_path, poisoned):
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.checkpoint_every': 3, 'run.eval_every': 0})
    outcome = fit(cfg, corpus=FakeCorpus(poison=[4]))
    assert (outcome.status, outcome.step, outcome.exit_code, outcome.first_nonfinite) == ('diverged', 4, 70, 'head')
    assert 'step 5 (batch 4): loss nan' in outcome.reason
    rows = rows_of(tmp_path / 'r')
    assert [r['step'] for r in rows] == [1, 2, 3, 4, 5] and rows[-1]['train/loss'] is None
    assert sorted(p.name for p in (tmp_path / 'r' / 'checkpoints').iterdir() if p.name.isdigit()) == ['3']
    assert 'already complete' in fit(cfg, corpus=FakeCorpus(poison=[4])).message


def test_no_step_after_a_nonfinite_one_is_applied():
    cfg = edit(TINY, {'run.nonfinite': 'stop'})
    lm, tree, opt = parts(cfg, Poisoned(TINY.model))
    step, state = jax.jit(make_step(cfg, lm, opt, tree)), init_state(cfg, lm, opt)
    good, bad = batches(1)[0], jax.tree.map(jnp.asarray, next(FakeCorpus(poison=[0]).train_batches(B, T, 0)))
    first, _ = step(state, good)
    for batch, applied in ((bad, False), (good, False)):  # the second is finite, but was in flight
        new, m = step(first, batch)
        assert bool(m['applied']) is applied and int(new.step) == 1 and bool(new.stopped)
        jax.tree.map(np.testing.assert_array_equal, (new.params, new.opt_state), (first.params, first.opt_state))
        first = new


def test_skip_leaves_out_the_batch_and_goes_on(tmp_path, poisoned):
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.nonfinite': 'skip', 'run.eval_every': 0})
    outcome = fit(cfg, corpus=FakeCorpus(poison=[4]))
    assert (outcome.status, outcome.step, outcome.skipped) == ('completed', 8, 1)
    rows = rows_of(tmp_path / 'r')
    assert [r['train/skipped'] for r in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [r['step'] for r in rows if r['train/loss'] is None] == [5] and rows[7]['train/loss'] < rows[0]['train/loss']


def test_rollback_goes_back_and_leaves_the_data_out(tmp_path, poisoned):
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.nonfinite': 'rollback', 'run.eval_every': 0, 'run.checkpoint_every': 3})
    seen, corpus = [], FakeCorpus(poison=[4])
    make = corpus.train_batches
    corpus.train_batches = lambda batch, seq, seed, start=0, *a, **k: seen.append(start) or make(batch, seq, seed, start, *a, **k)
    outcome = fit(cfg, corpus=corpus)
    assert (outcome.status, outcome.step, outcome.rollbacks) == ('completed', 8, 1)
    assert seen == [0, 4]  # batch 5 was in flight; 4 once more, for the report; back at step 3, on with batch 5, the next
    rows = rows_of(tmp_path / 'r')
    assert [r['step'] for r in rows] == list(range(1, 9)) and all(r['train/loss'] is not None for r in rows)
    clean = FakeCorpus()
    clean.train_batches = lambda batch, seq, seed, start=0, *a, **k: make(batch, seq, seed, start if start < 3 else start + 2, *a, **k)
    expected = edit(cfg, {'run.dir': str(tmp_path / 'want')})
    fit(expected, stop=lambda step: step == 3, corpus=clean)
    fit(expected, corpus=clean)
    want = rows_of(tmp_path / 'want')
    assert [r['train/loss'] for r in rows] == [r['train/loss'] for r in want]


def test_rollback_is_bounded(tmp_path, poisoned):
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.nonfinite': 'rollback', 'run.eval_every': 0, 'run.checkpoint_every': 0})
    outcome = fit(cfg, corpus=FakeCorpus(poison=range(2, 10**4)))
    assert (outcome.status, outcome.rollbacks, outcome.exit_code) == ('diverged', train.MAX_ROLLBACKS, 70)


def test_a_weight_that_was_bad_before_is_named(tmp_path, monkeypatch):
    class Broken(LM):
        def init(self, *a, **k):
            params = super().init(*a, **k)
            q = params['stack']['blocks_0']['attn']['q']
            params['stack']['blocks_0']['attn']['q'] = jax.device_put(q.at[1, 0, 0, 0].set(jnp.inf), q.sharding)
            return params

    monkeypatch.setattr(program, 'LM', Broken)
    outcome = fit(edit(TINY, {'run.dir': str(tmp_path / 'r')}), corpus=FakeCorpus())
    assert outcome.first_nonfinite == 'layers.1.attn.q' and outcome.step == 0 and 'weight layers.1.attn.q' in outcome.reason


def test_no_steps(tmp_path):
    outcome = fit(edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.steps': 0}), corpus=FakeCorpus())
    assert (outcome.status, outcome.step) == ('completed', 0)
    (row,) = rows_of(tmp_path / 'r')
    assert set(row) == {'step', 'eval/loss', 'eval/bits_per_byte', 'test/loss', 'test/bits_per_byte'} and row['step'] == 0


def test_a_signal_saves_and_ends_as_preempted(tmp_path):
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r')})

    def send(kind, data):
        if kind == 'step' and data['step'] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    outcome = fit(cfg, send, corpus=FakeCorpus())
    assert (outcome.status, outcome.exit_code) == ('preempted', 75) and signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / 'r' / 'checkpoints' / str(outcome.step)).is_dir() and outcome.step in (4, 5)
    assert fit(cfg, corpus=FakeCorpus()).status == 'completed'
    assert [r['step'] for r in rows_of(tmp_path / 'r')] == list(range(1, 9))


def test_the_step_is_compiled_once_and_the_loop_traces_nothing(tmp_path):
    counted = []
    real = LM.features
    LM.features = lambda self, *a, **k: counted.append(1) or real(self, *a, **k)
    try:
        fit(edit(TINY, {'run.dir': str(tmp_path / 'r')}), corpus=FakeCorpus())
    finally:
        LM.features = real
    assert len(counted) == 2  # the step, and the evaluation


def test_a_full_disk_ends_the_run_with_its_cause(tmp_path):
    folder = tmp_path / 'r'
    folder.mkdir()
    (folder / 'metrics.jsonl').symlink_to('/dev/full')
    with pytest.raises(StorageError, match="cannot write '.*metrics.jsonl': No space left on device"):
        fit(edit(TINY, {'run.dir': str(folder)}), corpus=FakeCorpus())
    assert json.loads((folder / 'outcome.json').read_text())['status'] == 'failed'
    (tmp_path / 'file').write_text('')
    with pytest.raises(StorageError):
        fit(edit(TINY, {'run.dir': str(tmp_path / 'file' / 'r')}), corpus=FakeCorpus())


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(UserError, match='31 ids but model.vocab = 30'):
        fit(edit(TINY, {'run.dir': str(tmp_path / 'r'), 'model.vocab': V - 1}), corpus=FakeCorpus())
    assert not (tmp_path / 'r').exists()


def test_divergence_rule():
    def after(losses):
        pos = Position()
        for x in losses:
            pos = pos.after(x, 10, math.isfinite(x))
        return pos

    assert rundir.diverged(after([9.0] * 19), 3.0) == ''  # no mean of 20 yet
    assert 'above the unigram entropy 3.000' in rundir.diverged(after([3.01] * 20), 3.0)
    assert rundir.diverged(after([2.0] * 20 + [2.49] * 20), 3.0) == ''
    assert 'above its earlier minimum 2.000' in rundir.diverged(after([2.0] * 20 + [2.51] * 20), 3.0)
    skipped = after([2.0] * 20 + [math.nan] * 20)
    assert 'left out' in rundir.diverged(skipped, 3.0) and skipped.skipped == 20


def test_outcomes_have_the_documented_codes():
    code = lambda status, first=None: Outcome(status, 1, first_nonfinite=first).exit_code  # noqa: E731
    assert [code('completed'), code('diverged'), code('diverged', 'head'), code('preempted')] == [0, 0, 70, 75]


def test_an_empty_split_is_found_before_the_run_begins(tmp_path):
    corpus = FakeCorpus()
    real = corpus.eval_batches

    def eval_batches(split, *args):
        if split == 'test':
            raise BadData('the test split is empty')
        return real(split, *args)

    corpus.eval_batches = eval_batches
    with pytest.raises(BadData, match='test split is empty'):
        fit(edit(TINY, {'run.dir': str(tmp_path / 'r')}), corpus=corpus)
    assert not (tmp_path / 'r').exists()


def test_two_runs_do_not_share_a_folder(tmp_path):
    with alone(tmp_path), pytest.raises(UserError, match='another process is training in'):
        fit(edit(TINY, {'run.dir': str(tmp_path)}), corpus=FakeCorpus())
    with alone(tmp_path):  # free again
        pass


def test_damaged_run_files_are_named(tmp_path):
    (tmp_path / 'config.json').write_text('{"name": ')
    with pytest.raises(BadData, match="config.json' is not JSON"):
        fit(edit(TINY, {'run.dir': str(tmp_path)}), corpus=FakeCorpus())


@pytest.mark.parametrize(
    'text', ['[]', '{}', '[' * 100_000, '{"status": "completed"', '{"status": "done", "step": 1}', '{"status": "completed", "step": "1"}']
)
def test_a_damaged_outcome_is_named(tmp_path, text):
    (tmp_path / 'outcome.json').write_text(text)
    with pytest.raises(BadData, match=r"outcome.json' is damaged \(.*\); remove it to go on"):
        fit(edit(TINY, {'run.dir': str(tmp_path)}), corpus=FakeCorpus())


def test_a_signal_while_the_step_compiles_ends_at_once(tmp_path):
    def send(kind, data):
        if kind == 'message' and 'compiled' in data['text']:
            os.kill(os.getpid(), signal.SIGINT)

    outcome = fit(edit(TINY, {'run.dir': str(tmp_path)}), send, corpus=FakeCorpus())
    assert (outcome.status, outcome.step, outcome.exit_code) == ('preempted', 0, 75) and 'nothing to save' in outcome.message
    assert json.loads((tmp_path / 'outcome.json').read_text())['status'] == 'preempted'
    assert not any((tmp_path / 'checkpoints').iterdir())


def test_the_evaluation_is_compiled_with_the_step_and_a_signal_is_heard_there_too(tmp_path, monkeypatch):
    """At the first evaluation the watchdog would see a compilation as silence, and a signal would wait for its end."""
    seen, real, made, release = [], train.evaluate, train.program, threading.Event()
    monkeypatch.setattr(train, 'evaluate', lambda step, *rest: (seen.append(step), real(step, *rest))[1])
    assert fit(edit(TINY, {'run.dir': str(tmp_path / 'a')}), corpus=FakeCorpus()).status == 'completed'
    assert len(seen) == 4 and all(isinstance(step, jax.stages.Compiled) for step in seen)

    def compile():
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait(60)

    def endless(cfg, mesh):
        its = made(cfg, mesh)
        jitted = SimpleNamespace(lower=lambda *shapes: SimpleNamespace(compile=compile))
        return type('Endless', (type(its),), {'eval_step': lambda self: jitted})(*its)

    monkeypatch.setattr(train, 'program', endless)
    outcome = fit(edit(TINY, {'run.dir': str(tmp_path / 'b')}), corpus=FakeCorpus())
    release.set()
    assert (outcome.status, outcome.step, outcome.exit_code) == ('preempted', 0, 75)


def test_a_signal_while_data_is_prepared_ends_at_once(tmp_path, monkeypatch):
    def open_data(cfg, progress):
        os.kill(os.getpid(), signal.SIGTERM)
        progress(1, 9)
        raise AssertionError('went on')

    monkeypatch.setattr(train, 'open_data', open_data)
    outcome = fit(edit(TINY, {'run.dir': str(tmp_path / 'r')}))
    assert outcome.exit_code == 75 and 'nothing to save' in outcome.reason and not (tmp_path / 'r').exists()


def test_of_two_that_begin_in_one_folder_the_second_sees_the_first(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def late(folder):
        with alone(folder):  # while we waited for it, the other one began and died
            rundir.write_config(folder, edit(TINY, {'optim.lr_peak': 0.5}))
            yield

    monkeypatch.setattr(train, 'alone', late)
    with pytest.raises(UserError, match='optim.lr_peak +0.5 +0.01 '):
        fit(edit(TINY, {'run.dir': str(tmp_path)}), corpus=FakeCorpus())
    assert json.loads((tmp_path / 'config.json').read_text())['optim']['lr_peak'] == 0.5


def test_a_name_that_is_too_long_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match='File name too long'):
        fit(edit(TINY, {'run.dir': str(tmp_path / ('x' * 300))}), corpus=FakeCorpus())


@pytest.mark.parametrize(
    'losses', [[1e16] * 3, [3e38] * 30, [1e300, 2.0], [math.inf, math.nan, 2.0], [None] * 3, [math.inf], [2.0, 1e30] * 20]
)
def test_the_figure_of_a_diverged_run_warns_of_nothing(tmp_path, losses):
    rows = [{'step': i, 'train/loss': x, 'eval/loss': x} for i, x in enumerate(losses, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        plot.save_loss_figure(tmp_path / 'loss.png', rows, 'run', {'unigrams': 3.0})
    assert (tmp_path / 'loss.png').read_bytes().startswith(b'\x89PNG')


def test_a_spike_does_not_linger_in_the_mean():
    np.testing.assert_allclose(plot.trailing_mean(np.array([1.0, 1e30, 2.0, 3.0, 4.0]), 2), [1, 5e29, 5e29, 2.5, 3.5], rtol=1e-12)


def test_a_mesh_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match='does not make 8 devices'):
        fit(edit(TINY, {'run.dir': str(tmp_path / 'r'), 'mesh': edit(TINY.mesh, {'devices': None, 'fsdp': 3})}), corpus=FakeCorpus())
    assert not (tmp_path / 'r').exists() and sharding.make_mesh(TINY.mesh).size == 1
