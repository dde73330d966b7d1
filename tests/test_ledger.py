"""Time by cause, on a clock of our own; restarts, crashes and rollbacks; the words of the summary; a trace read back."""

import json
import math

import jax
import pytest
from fakes import TINY, FakeCorpus
from test_train import Poisoned

from spannorm_jax import cli, ledger, program, score
from spannorm_jax.config import edit
from spannorm_jax.ledger import CAUSES, COUNTS, Ledger, goodput, read
from spannorm_jax.train import fit


@pytest.fixture
def clock(monkeypatch):
    """`clock(s)` lets s seconds go by."""
    now = [100.0]
    monkeypatch.setattr(ledger.time, 'perf_counter', lambda: now[0])

    def go_by(seconds):
        now[0] += seconds

    return go_by


def test_the_innermost_cause_counts(tmp_path, clock):
    book = Ledger(tmp_path)
    clock(1)
    with book.during('step'):
        clock(2)
        with book.during('data'):
            clock(4)
        with book.during('data', unless=lambda: True):  # the devices were busy: nothing was waited for
            clock(8)
        clock(16)
    with pytest.raises(KeyError), book.during('eval'):
        clock(32)
        raise KeyError
    clock(64)
    book.save()
    assert read(tmp_path)['seconds'] == {'step': 26, 'lost': 0, 'data': 4, 'compile': 0, 'eval': 32, 'checkpoint': 0, 'other': 65}
    useful, others = goodput(read(tmp_path))
    assert useful == 26 / 127 and list(others)[:3] == ['other', 'eval', 'data'] and useful + sum(others.values()) == pytest.approx(1)
    assert set(others) | {'step'} == set(CAUSES)


def steps(book, clock, first, last, applied=True):
    for step in range(first, last + 1):
        with book.during('step'):
            clock(10)
        book.done(step, 5, applied)


def test_what_is_thrown_away_is_lost(tmp_path, clock):
    """A rollback from 6 to 4; a start after a crash at 9, of which time.json knows 8 and the rows tell of 9; a batch left out."""
    book = Ledger(tmp_path)
    steps(book, clock, 1, 6)
    book.back_to(4)
    assert (book.seconds['step'], book.seconds['lost'], book.steps, book.tokens) == (40, 20, 4, 20)
    steps(book, clock, 5, 8)
    book.save()
    again = Ledger(tmp_path)
    assert again.starts == 2
    again.back_to(6, [{'step': 5, 'perf/step_ms': 1e9}, {'step': 9, 'perf/step_ms': 7000.0}, {'step': 10}])
    assert again.seconds['lost'] == 20 + 20 + 7 and (again.seconds['step'], again.steps, again.reached) == (60, 6, 6)
    again.back_to(6, [{'step': 6, 'perf/step_ms': 1.0}])
    assert again.seconds['lost'] == 47
    steps(again, clock, 7, 7, applied=False)
    assert (again.seconds['step'], again.seconds['lost'], again.steps, again.reached) == (60, 57, 6, 7)


ENDLESS = json.dumps(dict.fromkeys(COUNTS, 10**400) | {'seconds': {'step': math.inf}})


@pytest.mark.parametrize('text', ['', '[]', '{"seconds": 3}', '{"seconds": {}, "steps": 1}', '{"seconds": {"step": "x"}}', ENDLESS])
def test_a_file_that_cannot_be_read_is_begun_anew(text, tmp_path):
    (tmp_path / 'time.json').write_text(text)
    assert read(tmp_path) is None and Ledger(tmp_path).starts == 1


def test_a_run_tells_its_time(tmp_path, monkeypatch):
    """Interrupted, gone on with, rolled back once: all steps are accounted for, no second is missing, and the summary says it."""
    monkeypatch.setattr(program, 'LM', Poisoned)
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.nonfinite': 'rollback', 'run.steps': 9, 'run.checkpoint_every': 4})
    corpus = FakeCorpus(poison=[5])
    begun = ledger.time.perf_counter()
    fit(cfg, corpus=corpus, stop=lambda step: step == 2)
    first = read(tmp_path / 'r')
    outcome = fit(cfg, corpus=corpus)
    wall = ledger.time.perf_counter() - begun
    told = read(tmp_path / 'r')
    assert (first['starts'], first['steps'], first['reached'], first['seconds']['lost']) == (1, 2, 2, 0)
    assert (outcome.status, outcome.rollbacks, told['starts'], told['steps'], told['reached']) == ('completed', 1, 2, 9, 9)
    assert all(told['seconds'][cause] > 0 for cause in CAUSES) and 0.7 * wall < sum(told['seconds'].values()) < wall
    monkeypatch.setattr(score, '_bigram', lambda cfg: '')
    text = score.summary(cfg, outcome)
    useful, others = goodput(told)
    assert f'goodput {useful:.0%} (' in text and f'compile {others["compile"]:.0%}' in text and 'MFU' not in text
    peak = 1e6
    monkeypatch.setattr(score, 'peak_flops', lambda device: peak)
    mfu = told['tokens'] / told['seconds']['step'] * score.flops_per_token(cfg.model, 12) / peak
    assert f'MFU {mfu:.1%}' in score.summary(cfg, outcome)


# Python 3.12's word on a type of jaxlib's; raised as an error inside C++ it aborts the process.
@pytest.mark.filterwarnings('ignore:builtin type .* has no __module__:DeprecationWarning')
def test_a_trace_of_some_steps(tmp_path):
    """XProf's file has the steps that were asked for, by number, from the third of this start on, and what the device did in them."""
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.eval_every': 0, 'run.checkpoint_every': 0})
    said = []
    tell = lambda kind, data: said.append(data.get('text', ''))  # noqa: E731
    few = edit(cfg, {'run.steps': 2, 'run.dir': str(tmp_path / 'few')})
    fit(few, tell, corpus=FakeCorpus(), profile=3)
    assert 'nothing was profiled: 2 steps were left, a trace begins with the third' in said
    fit(few, tell, corpus=FakeCorpus(), profile=3)
    assert 'nothing is left to profile' in said[-1] and not (tmp_path / 'few' / 'profile').exists()
    said.clear()
    fit(cfg, tell, corpus=FakeCorpus(), profile=3)
    assert not [text for text in said if 'profile' in text]
    (file,) = (tmp_path / 'r' / 'profile').rglob('*.xplane.pb')
    data = jax.profiler.ProfileData.from_file(str(file))  # planes, lines and events do not outlive what they are of
    events = [(e.name, dict(e.stats)) for plane in data.planes for line in plane.lines for e in line.events]
    marks = {stats['step_num'] for name, stats in events if name == 'train'}
    assert {3, 4, 5} <= marks <= {3, 4, 5, 6} and len(events) > 100
    assert len(list((tmp_path / 'r' / 'profile').rglob('*.trace.json.gz'))) == 1


def test_a_trace_of_a_run_that_is_too_short(tmp_path):
    """It ends with the run, and the next run can be traced."""
    cfg = edit(TINY, {'run.dir': str(tmp_path / 'r'), 'run.eval_every': 0, 'run.checkpoint_every': 0, 'run.steps': 3})
    fit(cfg, corpus=FakeCorpus(), profile=9)
    assert len(list((tmp_path / 'r' / 'profile').rglob('*.xplane.pb'))) == 1
    fit(edit(cfg, {'run.dir': str(tmp_path / 'none')}), corpus=FakeCorpus())
    assert not (tmp_path / 'none' / 'profile').exists()


def test_command(monkeypatch):
    asked = []
    monkeypatch.setattr('spannorm_jax.train.fit', lambda cfg, progress, profile: asked.append(profile) or exit(0))
    for line in (['train', 'debug', '--profile'], ['train', 'debug']):
        with pytest.raises(SystemExit):
            cli.main(line)
    assert asked == [4, 0]
