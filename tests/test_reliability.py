"""Faults, from outside, on real processes: whatever ends a run, the next start goes on, and the run is in the end the one never touched.

`pytest -m reliability` runs a tour: one run is killed (SIGKILL) at some of the named points, in turn. With --full at all of them, the other
faults, and random points and moments, at least KILLS of them, of runs of one process and of two, dense and with experts; the seed and
the count are printed.
"""

import collections
import json
import os
import pathlib
import random
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from test_distributed import free_port
from test_resume import arrays, rows_of
from victim import EVERYWHERE, ONCE, POINTS, Victim

from spannorm_jax import manifest

pytestmark = pytest.mark.reliability
KILLS = int(os.environ.get('RELIABILITY_KILLS', 200))
SEED = int(os.environ.get('RELIABILITY_SEED', 20261130))
STEPS = 10
LOST_S = 30
SMALL = {
    'model.vocab': 257, 'model.dropout': 0.1, 'data.seq': 16, 'run.steps': STEPS,
    'run.checkpoint_every': 2, 'run.eval_every': 4, 'run.eval_tokens': 300, 'run.keep': 1,
}  # fmt: skip
QUICK = [
    'prepare: before meta.json',
    'after the arrays, before the name',
    'before retention',
    'within retention',
    'metrics flush',
    'evaluation',
]
MODELS = {
    'dense': {'model.topology': 'pre', 'model.layers': 1},
    'moe': {'model.topology': 'peri', 'model.layers': 2, 'model.experts': 4, 'model.first_dense': 1},
}


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp('text')
    for i in range(120):
        (folder / f'{i}.txt').write_text(f'document {i}: ' + 'some words, ' * (3 + i % 7))
    return folder


@pytest.fixture(scope='module')
def victim(tmp_path_factory):
    made = Victim(tmp_path_factory.mktemp('victim') / 'here')
    yield made
    made.close()


def config(text, folder, model='dense', **more):
    """Of a run whose prepared data is its own, so that preparing is killed too."""
    return SMALL | MODELS[model] | {'data.source': str(text), 'data.cache': f'{folder}.data', 'run.dir': str(folder)} | more


@pytest.fixture(scope='module')
def straight(tmp_path_factory, text, victim):
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp('straight') / 'dense'
    victim.start(config(text, folder))
    assert victim.end() == 0, victim.said()
    return folder


def same(a, b):
    """Bit for bit: parameters, moments, position in the data, and every row of metrics but for the speed."""
    (x, x_meta), (y, y_meta) = arrays(a), arrays(b)
    assert x_meta == y_meta and x_meta['step'] == STEPS
    assert jax.tree.structure(x) == jax.tree.structure(y)
    jax.tree.map(np.testing.assert_array_equal, x, y)
    assert rows_of(a) == rows_of(b) and [row['step'] for row in rows_of(a)] == list(range(1, STEPS + 1))
    assert manifest.steps(b / 'checkpoints') == [STEPS] and manifest.leftovers(b / 'checkpoints') == []
    assert json.loads((b / 'outcome.json').read_text())['status'] == 'completed'


def committed(folder):
    return manifest.steps(folder / 'checkpoints')


@pytest.mark.parametrize('points', [QUICK, pytest.param(list(POINTS), marks=pytest.mark.full)], ids=['quick', 'all'])
def test_killed_at_named_points_in_turn(tmp_path, text, victim, straight, points):
    folder, newest = tmp_path / 'run', 0
    for point in points:
        victim.start(config(text, folder), at=[point, 1])
        assert victim.signal_at_mark(signal.SIGKILL), f'never came to {point!r}: {victim.said()}'
        assert victim.end() == -signal.SIGKILL
        now = max(committed(folder), default=0)
        assert now >= newest, f'a committed checkpoint was lost at {point!r}'
        assert all(not manifest.faults(folder / 'checkpoints' / str(step)) for step in committed(folder)), point
        newest = now
    victim.start(config(text, folder))
    assert victim.end() == 0, victim.said()
    same(straight, folder)


@pytest.mark.full
@pytest.mark.parametrize('fault, code, words', [('disk_full', 74, 'File too large'), ('read_only', 74, 'Permission denied')])
def test_a_store_that_cannot_be_written(tmp_path, text, victim, straight, fault, code, words):
    """The run ends with its cause before the old checkpoint is touched, and goes on once there is room."""
    folder = tmp_path / 'run'
    victim.start(config(text, folder), at=['within the manifest', 2])  # so that there is a checkpoint
    assert victim.signal_at_mark(signal.SIGKILL) and victim.end() == -signal.SIGKILL
    before = committed(folder)
    if fault == 'read_only':
        for path in (tmp_path, *tmp_path.rglob('*')):
            path.chmod(0o555 if path.is_dir() else 0o444)
    victim.start(config(text, folder), fault=fault)
    assert (victim.end(), words in victim.said()) == (code, True), victim.said()
    if fault == 'read_only':
        for path in (tmp_path, *tmp_path.rglob('*')):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert before and max(committed(folder)) >= max(before)
    assert all(not manifest.faults(folder / 'checkpoints' / str(step)) for step in committed(folder))
    victim.start(config(text, folder))
    assert victim.end() == 0, victim.said()
    same(straight, folder)


@pytest.mark.full
@pytest.mark.parametrize('fault', ['slow_store', 'clock_jumps', 'deaf'])
def test_a_slow_store_a_jumping_clock_and_a_log_that_nobody_reads_change_nothing(tmp_path, text, victim, straight, fault):
    victim.start(config(text, tmp_path / 'run'), fault=fault)
    assert victim.end() == 0, victim.said()
    same(straight, tmp_path / 'run')


@pytest.mark.full
def test_a_run_that_hangs_says_where_and_ends_with_71(tmp_path, text, victim, straight):
    folder = tmp_path / 'run'
    # The longest silence of a run that moves is before its first batch: the weights' initialisation is traced and compiled, 1 s of a
    # processor, and several where others want it too.
    victim.start(config(text, folder, **{'run.hang_s': 15.0}), fault='hang')
    assert victim.end() == 71, victim.said()
    assert 'no sign of life for 15 s (run.hang_s) since' in victim.said() and 'in stuck' in (folder / 'hang.txt').read_text()
    assert json.loads((folder / 'outcome.json').read_text())['status'] == 'failed'
    victim.start(config(text, folder))
    assert victim.end() == 0, victim.said()
    same(straight, folder)


@pytest.mark.full
def test_signals_while_the_step_compiles_and_while_data_is_awaited(tmp_path, text, victim, straight):
    folder = tmp_path / 'run'
    victim.start(config(text, folder), fault='slow_compile')
    while 'compiling the step' not in victim.said():
        time.sleep(0.02)
    begun = time.monotonic()
    victim.kill(signal.SIGTERM)
    assert victim.end() == 75 and time.monotonic() - begun < 20 and committed(folder) == []
    victim.start(config(text, folder), fault='slow_data')
    assert victim.signal_at_mark(signal.SIGUSR1)
    assert victim.end() == 75 and committed(folder) == [5], victim.said()  # saved where it stood, between two checkpoints
    victim.start(config(text, folder))
    assert victim.end() == 0, victim.said()
    same(straight, folder)


def start_all(victims, of, at=None, hit=None, fault=None, **env):
    """One run of as many processes as there are victims; `hit` comes to the point `at`, or has the fault."""
    address = f'localhost:{free_port()}'
    for i, v in enumerate(victims):
        place = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(len(victims)), 'JAX_PROCESS_ID': str(i)}
        place |= {'SPANNORM_LOST_S': str(LOST_S)} | env
        mine = {'at': at, 'fault': fault} if v is hit else {}
        v.start(of, **mine, env=place if len(victims) > 1 else {})


@pytest.mark.full
def test_a_process_of_two_that_is_missing_or_stuck(tmp_path, text):
    """It is named, with the stated exit code, within the time that was set; afterwards the run goes on."""
    pair = [Victim(tmp_path / f'here{i}') for i in range(2)]
    of = {name: config(text, tmp_path / name, **{'mesh.devices': 2}) for name in ('straight', 'run')}
    ended = lambda: [v.end() for v in pair]  # noqa: E731
    try:
        start_all(pair, of['straight'])
        assert ended() == [0, 0], [v.said() for v in pair]

        alone = {'JAX_COORDINATOR_ADDRESS': f'localhost:{free_port()}', 'JAX_NUM_PROCESSES': '2', 'SPANNORM_START_S': '3'}
        for i, words in ((0, 'process 1 of 2 did not come within 3 s'), (1, 'process 0 did not answer at')):
            pair[i].start(of['run'], env=alone | {'JAX_PROCESS_ID': str(i)})
            assert pair[i].end() == 2 and words in pair[i].said(), pair[i].said()

        for hit, other in (pair, pair[::-1]):
            start_all(pair, of['run'], ['before a save', 2], hit, SPANNORM_LOST_S='15')
            assert hit.signal_at_mark(signal.SIGSTOP)
            code = other.end()
            assert code == 75 or hit is pair[0] and code == -signal.SIGABRT, other.said()
            assert f'process {pair.index(hit)} (host' in other.said() or code != 75, other.said()
            hit.kill(signal.SIGKILL)
            assert hit.end() == -signal.SIGKILL

        start_all(pair, of['run'] | {'run.hang_s': 20.0}, hit=pair[1], fault='hang')
        assert ended() == [71, 71] and 'in stuck' in pair[1].said(), [v.said() for v in pair]
        assert committed(tmp_path / 'run')
        start_all(pair, of['run'])
        assert ended() == [0, 0], [v.said() for v in pair]
        same(tmp_path / 'straight', tmp_path / 'run')
    finally:
        for v in pair:
            v.close()


def kill_at_random(draw, victims, of, folder, lasts):
    """One start that a signal ends: SIGKILL at a named point or at any moment of the seconds that a run lasts, or a signal that saves.
    (number, where); None where it came too late."""
    prepared = pathlib.Path(of['data.cache']).is_dir() and any(pathlib.Path(of['data.cache']).rglob('meta.json'))
    hit = draw.choice(victims)
    passed = POINTS if hit is victims[0] else EVERYWHERE
    points = [p for p in passed if not (prepared and p.startswith('prepare')) and (p != 'restore' or committed(folder))]
    point = draw.choice([*points, None, None, None])
    number = signal.SIGKILL if point else draw.choice([signal.SIGKILL] * 3 + [signal.SIGTERM, signal.SIGUSR1])
    start_all(victims, of, [point, 1 if point in ONCE else draw.randint(1, 2)] if point else None, hit)
    if point:
        sent = hit.signal_at_mark(number)
    else:
        deadline = time.monotonic() + draw.uniform(0.5, lasts)
        while time.monotonic() < deadline and not hit.gone():
            time.sleep(0.01)
        sent = not hit.gone()
        if sent:
            hit.kill(number)
    codes = [v.end() for v in victims]
    for v, code in zip(victims, codes, strict=True):
        assert code in (0, 75, 130, -signal.SIGKILL, -signal.SIGABRT), (point, codes, v.said()[-3000:])
    return number if sent else None, point or 'any moment'


@pytest.mark.full
@pytest.mark.parametrize('processes, model, share', [(1, 'dense', 0.4), (1, 'moe', 0.3), (2, 'dense', 0.15), (2, 'moe', 0.15)])
def test_random_kills(tmp_path, text, processes, model, share, capsys):
    draw = random.Random(f'{SEED} {processes} {model}')
    victims = [Victim(tmp_path / f'here{i}') for i in range(processes)]
    more = {'mesh.devices': 2} if processes == 2 else {}
    wanted, counts, runs, where = round(KILLS * share), collections.Counter(), 0, collections.Counter()

    def finish(folder):
        begun = time.monotonic()
        start_all(victims, config(text, folder, model, **more))
        assert [v.end() for v in victims] == [0] * processes, [v.said()[-3000:] for v in victims]
        return time.monotonic() - begun

    try:
        finish(tmp_path / 'compiled')  # and with it the cache filled
        lasts = finish(tmp_path / 'straight')
        while counts[signal.SIGKILL] < wanted:
            folder = tmp_path / f'run{runs}'
            for _ in range(draw.randint(5, 12)):
                newest = max(committed(folder), default=0)
                number, at = kill_at_random(draw, victims, config(text, folder, model, **more), folder, lasts)
                counts[number] += 1
                where[at] += number == signal.SIGKILL
                assert max(committed(folder), default=0) >= newest, f'lost at {at}'
                if number is None and committed(folder) == [STEPS]:
                    break
            finish(folder)
            same(tmp_path / 'straight', folder)
            shutil.rmtree(folder)
            runs += 1
            with capsys.disabled():
                said = f'{counts[signal.SIGKILL]} kills and {counts[signal.SIGTERM] + counts[signal.SIGUSR1]} signals over {runs} runs'
                print(f'\nseed {SEED}, {processes} process(es), {model}: {said}, none lost', flush=True)
    finally:
        for v in victims:
            v.close()
    with capsys.disabled():
        print(dict(where))
