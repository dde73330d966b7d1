"""Runs of one shape in one program: each gives what it gives alone, whatever becomes of the others."""

import itertools
import json
import pathlib
import signal
import threading

import jax
import numpy as np
import pytest
from fakes import TINY, FakeCorpus

from spannorm_jax import batched, checkpoint
from spannorm_jax.batched import fit_batched, groups, room, shape
from spannorm_jax.config import edit
from spannorm_jax.program import program
from spannorm_jax.sharding import make_mesh
from spannorm_jax.topology import TOPOLOGIES
from spannorm_jax.train import fit

pytestmark = pytest.mark.usefixtures('compiled_once')
KINDS = {
    'dense': {},
    'experts': {'model.experts': 4, 'model.experts_per_token': 2, 'model.expert_ffn': 8, 'model.first_dense': 1, 'model.layers': 3},
    'muon': {'optim.optimizer': 'muon', 'optim.muon_lr': 5e-3},
    'dropout': {'model.dropout': 0.2},
    'micro-batches': {'optim.accumulate': 2},
}
QUICK = [('span', 'dense'), ('span', 'experts')]
MORE = [(t, k) for t in TOPOLOGIES for k in ('dense', 'experts')] + [('span', k) for k in KINDS]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in dict.fromkeys(MORE) if case not in QUICK)]


def variants(cfg, root, **changes):
    """Three runs that differ in seed and rate."""
    seeds = (0, 0, 0) if cfg.model.dropout else (0, 1, 2)
    return [
        edit(cfg, {'run.dir': str(root / str(i)), 'run.seed': seed, 'optim.lr_peak': rate, 'run.checkpoint_every': 4, **changes})
        for i, (seed, rate) in enumerate(zip(seeds, (3e-3, 1e-2, 2e-2), strict=True))
    ]


def rows_of(cfg):
    return [json.loads(line) for line in (pathlib.Path(cfg.run.dir) / 'metrics.jsonl').read_text().splitlines()]


def numbers(row):
    return {k: np.asarray(v, float) for k, v in row.items() if not k.startswith('perf/')}


def same_rows(got, expected):
    assert [r['step'] for r in got] == [r['step'] for r in expected]
    for a, b in zip(map(numbers, got), map(numbers, expected), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-4, atol=2e-6, err_msg=name)


def last_state(cfg):
    with checkpoint.Checkpoints(pathlib.Path(cfg.run.dir) / 'checkpoints') as saved:
        state = saved.restore(saved.latest(), program(cfg, make_mesh(cfg.mesh)).abstract)
    return jax.device_get((state.params, state.opt_state))


def same_runs(got, expected):
    for a, b in zip(got, expected, strict=True):
        same_rows(rows_of(a), rows_of(b))
        for x, y in zip(jax.tree.leaves(last_state(a)), jax.tree.leaves(last_state(b)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('topology, kind', CASES)
def test_batched_runs_give_what_they_give_alone(tmp_path, topology, kind):
    """Rows, statistics, evaluations, weights and moments, at different seeds and rates."""
    cfg = edit(TINY, {'model.topology': topology, 'run.stats_every': 3 * (kind == 'dense'), **KINDS[kind]})
    alone, together = variants(cfg, tmp_path / 'alone'), variants(cfg, tmp_path / 'together')
    for one in alone:
        fit(one, corpus=FakeCorpus())
    outcomes = fit_batched(together, corpus=FakeCorpus())
    assert [o.status for o in outcomes] == ['completed'] * 3
    same_runs(together, alone)


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    runs = variants(edit(TINY, {'model.topology': 'span'}), tmp_path_factory.mktemp('straight'))
    for cfg in runs:
        fit(cfg, corpus=FakeCorpus())
    return runs


def test_a_run_that_diverges_or_fails_leaves_the_others_as_they_are(tmp_path, straight):
    runs = variants(edit(TINY, {'model.topology': 'span'}), tmp_path)
    wild = edit(runs[0], {'optim.lr_peak': 1e30, 'run.dir': str(tmp_path / 'wild')})
    (tmp_path / 'file').write_text('')
    failing = edit(runs[0], {'run.dir': str(tmp_path / 'file')})
    first, diverged, failed, *rest = fit_batched([runs[0], wild, failing, *runs[1:]], corpus=FakeCorpus())
    assert diverged.status == 'diverged' and diverged.exit_code == 70
    assert isinstance(failed, Exception) and str(tmp_path / 'file') in str(failed)
    assert [o.status for o in (first, *rest)] == ['completed'] * 3
    same_runs(runs, straight)


def test_a_step_that_fails_fails_in_every_run_that_waits_for_it(tmp_path, monkeypatch):
    def broken(self, made, stats):
        return jax.jit(lambda *args: jax.pure_callback(lambda: 1 / 0, jax.ShapeDtypeStruct((), 'float32')))

    monkeypatch.setattr(batched.Meeting, 'step', broken)
    outcomes = fit_batched(variants(TINY, tmp_path), corpus=FakeCorpus())
    assert len(outcomes) == 3 and all(isinstance(o, Exception) and 'ZeroDivision' in str(o) for o in outcomes)


def test_a_signal_stops_all_and_they_go_on_together_or_alone(tmp_path, straight, monkeypatch):
    runs, asked = variants(edit(TINY, {'model.topology': 'span'}), tmp_path), itertools.count()
    meet, main = batched.meet, threading.main_thread().ident

    def meet_with_signal(cfgs, progress, stop, corpus):
        def stop_later(step):
            if next(asked) == 7:  # the third step of one of them
                signal.pthread_kill(main, signal.SIGTERM)
            return stop(step)

        return meet(cfgs, progress, stop_later, corpus)

    monkeypatch.setattr(batched, 'meet', meet_with_signal)
    stopped = fit_batched(runs, corpus=FakeCorpus())
    assert [o.status for o in stopped] == ['preempted'] * 3 and all(0 < o.step < 8 for o in stopped)
    fit(runs[0], corpus=FakeCorpus())  # they need not be at the same step
    assert [o.status for o in fit_batched(runs, corpus=FakeCorpus())] == ['completed'] * 3
    same_runs(runs, straight)


def test_what_is_one_shape():
    a, b = edit(TINY, {'run.seed': 1}), edit(TINY, {'optim.lr_peak': 0.1, 'run.dir': 'elsewhere', 'name': 'other'})
    deeper, longer, dropping = (edit(TINY, change) for change in ({'model.layers': 3}, {'run.steps': 9}, {'model.dropout': 0.1}))
    assert shape(a) == shape(b) == shape(TINY) and len({*map(shape, (TINY, deeper, longer, dropping))}) == 4
    assert shape(dropping) != shape(edit(dropping, {'run.seed': 1})), 'dropout draws from the seed inside the step'
    assert groups([TINY, deeper, a, b, longer], 2) == [[TINY, a], [deeper], [b], [longer]]
    assert groups([TINY, a], 1) == [[TINY], [a]]


def test_runs_take_turns_where_memory_or_a_mesh_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(batched, 'room', lambda cfg: 2)
    sizes, meet = [], batched.meet
    monkeypatch.setattr(batched, 'meet', lambda cfgs, *rest: sizes.append(len(cfgs)) or meet(cfgs, *rest))
    runs = variants(edit(TINY, {'run.steps': 1}), tmp_path)
    assert [o.status for o in fit_batched(runs, corpus=FakeCorpus())] == ['completed'] * 3 and sizes == [2, 1]


def test_how_many_fit(monkeypatch):
    assert room(TINY) > 1000, 'the CPU does not tell'
    assert room(edit(TINY, {'mesh.devices': 2})) == 1
    made = program(TINY, make_mesh(TINY.mesh))
    with jax.set_mesh(made.mesh):
        need = made.step().lower(made.abstract, made.batch, made.peaks).compile().memory_analysis()
    one = 3 * need.argument_size_in_bytes + need.temp_size_in_bytes
    for limit, expected in ((0, 1), (one, 1), (one * 10, 9)):
        monkeypatch.setattr(batched, 'memory', lambda device, limit=limit: limit)
        assert room(TINY) == expected
