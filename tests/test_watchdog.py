"""What keeps a run from waiting for ever, or from not hearing that it should end."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from test_distributed import free_port

from spannorm_jax import cli, errors, watchdog
from spannorm_jax.commands import preempted_early
from spannorm_jax.host import Interrupted, Signals, patiently
from spannorm_jax.progress import Progress
from spannorm_jax.watchdog import Watchdog

pytestmark = pytest.mark.reliability


def test_the_watchdog_barks_at_silence_and_at_nothing_else(tmp_path, monkeypatch):
    now, barked = [100.0], threading.Event()
    monkeypatch.setattr(watchdog.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(Watchdog, '_end', lambda self, why: (said.append(str(why)), barked.set()))
    said = []
    with Watchdog(1.0, tmp_path) as dog:
        for _ in range(3):
            now[0] += 0.9
            assert not barked.wait(0.25)  # two looks
            dog.beat('step 7 was done')
        now[0] += 1.1
        assert barked.wait(10) and said[0].startswith('no sign of life for 1 s (run.hang_s) since step 7 was done; run again')
    barked.clear()
    with Watchdog(1.0, tmp_path) as dog:
        with dog.paused('compiling'):
            now[0] += 1e9
            assert not barked.wait(0.25)
        now[0] += 1.1
        assert barked.wait(10) and 'since compiling' in said[-1]
    barked.clear()
    with Watchdog(0.0, tmp_path):
        now[0] += 1e9
        assert not barked.wait(0.25)


def test_the_end_is_71_with_the_stacks(tmp_path):
    code = f"""
import pathlib, time
from spannorm_jax.watchdog import Watchdog
def stuck():
    time.sleep(600)
with Watchdog(0.2, pathlib.Path({str(tmp_path)!r}), lambda why: print('last words', flush=True)):
    stuck()
"""
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (71, 'last words\n')
    assert 'no sign of life for 0.2 s' in done.stderr and 'in stuck' in done.stderr and 'in stuck' in (tmp_path / 'hang.txt').read_text()


def test_a_signal_before_a_run_begins_ends_with_75(tmp_path):
    """Here one of two processes waits for the other, which never comes."""
    port = free_port()
    env = os.environ | {'JAX_COORDINATOR_ADDRESS': f'localhost:{port}', 'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '0'}
    run = [sys.executable, '-m', 'spannorm_jax', 'train', 'debug', '--run.dir', str(tmp_path / 'run')]
    process = subprocess.Popen(run, env=env, stderr=subprocess.PIPE, text=True)
    for _ in range(600):  # until it listens for the other
        with contextlib.suppress(OSError), socket.create_connection(('localhost', port), 1):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75 and 'interrupted before the run began' in said
    assert not (tmp_path / 'run').exists()


def test_a_signal_is_heard_where_the_main_thread_does_not_wake():
    """As in a call into C++, or where it comes just before a wait: Python runs a handler only once that is over."""
    code = """
import os, signal, threading, time
from spannorm_jax.commands import preempted_early
with preempted_early():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # of this thread alone: another one takes it
    time.sleep(600)
"""
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 75 and 'interrupted before the run began' in done.stderr


def test_a_signal_that_the_run_has_taken_over_does_not_end_it():
    with preempted_early(), Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        assert signals.seen


def test_work_that_lasts_is_left_for_a_signal():
    release = threading.Event()
    with Signals() as signals:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted):
            patiently(lambda: release.wait(60), signals.check)
    release.set()
    assert patiently(lambda: 7, lambda: None) == 7
    for error in (ValueError('the compiler is out of memory'), TimeoutError('its own')):

        def fail(error=error):
            raise error

        with pytest.raises(type(error), match=str(error)):
            patiently(fail, lambda: None)


def test_a_wait_for_data_hears_a_signal_and_other_places_do_not_raise():
    with Signals() as signals:
        with pytest.raises(Interrupted), signals.heard_at_once():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            time.sleep(60)
        assert signals.seen
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)  # here it is only noted
        with pytest.raises(Interrupted), signals.heard_at_once():  # one that came before counts too
            pytest.fail('went on')


@contextlib.contextmanager
def deaf():
    """stderr, as Python's stream and as a file descriptor, is a pipe whose reader is gone."""
    (end, begin), kept, before = os.pipe(), os.dup(2), sys.stderr
    os.close(end)
    os.dup2(begin, 2)
    try:
        with os.fdopen(begin, 'w', buffering=1) as sys.stderr:
            yield
    finally:
        sys.stderr = before
        os.dup2(kept, 2)
        os.close(kept)


def test_nothing_ends_because_nobody_reads_what_it_says():
    with deaf():
        with pytest.raises(BrokenPipeError):
            os.write(2, b'x')
        errors.say('nobody hears this')
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)  # its handler says that it was heard
            assert signals.seen
        with Progress() as progress:
            for step in (1, 2, 3):
                progress('step', {'step': step, 'steps': 3, 'loss': 1.0})
                progress('message', {'text': 'x' * 100_000})
        assert cli.main(['train', 'no-such-config']) == 2
        print('more', file=sys.stderr)  # as at the end of a program: Python's own flush must not change the exit code


def test_an_exit_code_does_not_depend_on_who_reads_the_result(monkeypatch):
    end, begin = os.pipe()
    os.close(end)
    with os.fdopen(begin, 'w') as stream:
        monkeypatch.setattr(sys, 'stdout', stream)
        monkeypatch.setattr(cli, 'dispatch', lambda argv: print('preempted at step 3') or 75)
        assert cli.main([]) == 75
