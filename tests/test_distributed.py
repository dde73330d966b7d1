"""Several processes: what the launcher says, the roll call, agreement; then two real processes of four CPU devices each.

Two processes compute what one with eight devices does, and one that is killed or told to stop takes the other along.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from spannorm_jax import cli, distributed, launch
from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import MeshConfig, edit
from spannorm_jax.errors import ProcessLost, UserError
from spannorm_jax.launch import Place, find_place
from spannorm_jax.model import infos
from spannorm_jax.optim import make_optimizer
from spannorm_jax.rollcall import Line, Member, RollCall, named
from spannorm_jax.sharding import make_mesh, replicated
from spannorm_jax.step import abstract_state
from spannorm_jax.train import fit

LAUNCHERS = ('JAX_', 'SLURM_', 'OMPI_', 'TPU_', 'MEGASCALE_', 'KUBERNETES_', 'JOB_COMPLETION_INDEX', 'SPANNORM_')


@pytest.fixture
def env(monkeypatch):
    """The environment of a machine without a launcher, and a function that adds to it."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    return lambda **names: [monkeypatch.setenv(name, value) for name, value in names.items()]


def explicit(address='host0:1234', processes='4', process='3'):
    return {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': processes, 'JAX_PROCESS_ID': process}


SLURM = {
    'SLURM_JOB_ID': '4097', 'SLURM_STEP_NODELIST': 'node[07-08]', 'SLURM_NTASKS': '2', 'SLURM_PROCID': '1', 'SLURM_LOCALID': '0',
    'SLURM_STEP_NUM_NODES': '2',
}  # fmt: skip


@pytest.mark.parametrize(
    'names, place',
    [
        ({}, None),
        (explicit(), Place('host0:1234', 4, 3)),
        (explicit(address='localhost:1234'), Place('localhost:1234', 4, 3)),  # all on one host, for all that is known
        (explicit(processes='1', process='0'), None),
        ({'JAX_NUM_PROCESSES': '1'} | SLURM, None),
        (SLURM, Place('node07:61441', 2, 1, hosts=2)),  # 61440 + 4097 mod 4096
        (SLURM | {'JAX_COORDINATOR_ADDRESS': 'other:5'}, Place('other:5', 2, 1, hosts=2)),
        (SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}, None),
        ({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}, None),
        (explicit() | {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '0'}, Place('host0:1234', 4, 3)),
    ],
)
def test_place(env, names, place):
    env(**names)
    assert find_place() == place


@pytest.mark.parametrize(
    'names, words',
    [
        ({'JAX_COORDINATOR_ADDRESS': 'host0:1234'}, 'but not JAX_NUM_PROCESSES, JAX_PROCESS_ID, and no launcher'),
        (explicit(process='4'), 'JAX_PROCESS_ID = 4 is not one of 0 to 3'),
        (explicit(processes='four'), "JAX_NUM_PROCESSES = 'four': expected a whole number"),
        (explicit(address='host0'), "'host0': expected HOST:PORT"),
        (SLURM | {'JAX_COORDINATOR_ADDRESS': '127.0.0.1:5'}, r'127.0.0.1:5, which each host takes for itself, but .* 2 hosts'),
        (SLURM | {'JAX_COORDINATOR_ADDRESS': '[::1]:5'}, 'there are 2 hosts'),
        (SLURM | {'JAX_COORDINATOR_ADDRESS': 'LocalHost:5'}, 'there are 2 hosts'),
        (
            explicit(address='localhost:5') | {'OMPI_COMM_WORLD_SIZE': '4', 'OMPI_COMM_WORLD_LOCAL_SIZE': '2'},
            'there are 2 hosts',
        ),
    ],
)
def test_a_place_that_cannot_be_is_explained(env, names, words):
    env(**names)
    with pytest.raises(UserError, match=words):
        find_place()


def test_limits_are_positive_numbers(env):
    assert launch.seconds('SPANNORM_LOST_S') == 60
    env(SPANNORM_LOST_S='7.5')
    assert launch.seconds('SPANNORM_LOST_S') == 7.5
    for bad in ('0', '-1', 'nan', 'soon'):
        env(SPANNORM_LOST_S=bad)
        with pytest.raises(UserError, match=f"SPANNORM_LOST_S = '{bad}'"):
            launch.seconds('SPANNORM_LOST_S')


def test_processes_that_see_the_same_accelerators_take_one_each(env):
    a, b = Member(0, 'x', '0,1'), Member(1, 'x', '0,1')
    assert [launch.own_devices(m, [a, b]) for m in (a, b)] == [[0], [1]]
    assert launch.own_devices(a, [a, Member(1, 'y', '0,1')]) is None  # alone on its host
    assert launch.own_devices(a, [a, Member(1, 'x', '2,3')]) is None  # the launcher has dealt them out
    isolated = Member(0, 'x', '0'), Member(1, 'x', '0')  # each has one of its own, which the launcher calls 0 in both
    assert [launch.own_devices(m, [*isolated]) for m in isolated] == [None, None]
    env(JAX_LOCAL_DEVICE_IDS='1')
    assert launch.own_devices(a, [a, b]) is None


def free_port():
    with socket.socket() as s:
        s.bind(('', 0))
        return s.getsockname()[1]


class Calls:
    """Several ends of one roll call in this process, a thread each."""

    def __init__(self, members, count, start_s=5.0, lost_s=2.0, address='localhost', **kwargs):
        self.at = f'{address}:{free_port()}'
        self.said, self.errors, self.ends = {}, {}, {}
        self.heard = threading.Event()

        def answer(member):
            def on_end(*what):
                self.said[member.process] = what
                if len(self.said) == len(members) - 1:
                    self.heard.set()

            try:
                self.ends[member.process] = RollCall(member, count, self.at, start_s, lost_s, on_end, **kwargs)
            except UserError as e:
                self.errors[member.process] = str(e)

        self.threads = [threading.Thread(target=answer, args=[m]) for m in members]
        for t in self.threads:
            t.start()

    def join(self):
        for t in self.threads:
            t.join(10)
        return self

    def close(self):
        for end in self.ends.values():
            end.close()


def test_all_are_told_who_is_there_and_what_process_0_notes():
    members = [Member(i, f'host{i}', '0') for i in range(3)]
    calls = Calls(members[::-1], 3, note=lambda all: {'port': len(all)}).join()
    assert not calls.errors and [calls.ends[i].members for i in range(3)] == [members] * 3
    assert [calls.ends[i].note for i in range(3)] == [{'port': 3}] * 3
    calls.close()
    time.sleep(0.2)
    assert not calls.said  # leaving in peace is no loss


def test_a_process_that_does_not_come_is_named_to_all_within_the_bound():
    begun = time.monotonic()
    calls = Calls([Member(0, 'a'), Member(2, 'c')], 4, start_s=1.0).join()
    assert time.monotonic() - begun < 3
    assert set(calls.errors) == {0, 2}
    for said in calls.errors.values():
        assert 'processes 1, 3 of 4 did not come within 1 s; present: process 0 (host a), process 2 (host c)' in said


def test_process_0_that_does_not_come_is_named():
    begun = time.monotonic()
    calls = Calls([Member(1, 'b')], 2, start_s=1.0).join()
    assert time.monotonic() - begun < 4
    assert f'process 0 did not answer at {calls.at} in 1 s' in calls.errors[1]


def test_numbers_that_do_not_fit_are_explained_to_all():
    same = Calls([Member(0, 'a'), Member(1, 'b'), Member(1, 'c')], 3).join()
    assert all('two processes have the number 1: on ' in said for said in same.errors.values()) and 0 in same.errors
    port = free_port()
    first = threading.Thread(target=lambda: pytest.raises(UserError, RollCall, Member(0, 'a'), 2, f'localhost:{port}', 3, 2, print))
    first.start()
    with pytest.raises(UserError, match=r'process 1 \(host b\) was told of 3 processes, process 0 \(host a\) of 2'):
        RollCall(Member(1, 'b'), 3, f'localhost:{port}', 3, 2, print)
    first.join()


def test_a_port_in_use_is_explained():
    with socket.create_server(('', 0)) as taken, pytest.raises(UserError, match='process 0 cannot listen on port'):
        RollCall(Member(0, 'a'), 2, f'localhost:{taken.getsockname()[1]}', 1, 1, print)


def test_a_loopback_coordinator_is_refused_where_the_roll_call_finds_several_hosts():
    place = Place('127.0.0.1:1', 2, 0)
    one = [Member(0, 'a'), Member(1, 'a')]
    assert distributed._note(place, one)['port'] > 0
    calls = Calls([Member(0, 'a'), Member(1, 'b')], 2, note=lambda all: distributed._note(place, all)).join()
    for said in (calls.errors[0], calls.errors[1]):
        assert 'which each host takes for itself, but there are several hosts (a, b)' in said


def test_one_that_leaves_with_an_error_or_dies_ends_the_others():
    calls = Calls([Member(i, 'abc'[i]) for i in range(3)], 3).join()
    calls.ends[1].leave('process 1 (host b) ended: the disk is full', 74)
    assert calls.heard.wait(3)
    assert calls.said == dict.fromkeys((0, 2), ('process 1 (host b) ended: the disk is full', 74, True))
    calls.close()

    calls = Calls([Member(i, 'abc'[i]) for i in range(3)], 3).join()
    calls.ends[2].closing = True  # it will not hear of its own death
    calls.ends[2].lines[0].close()
    assert calls.heard.wait(3)
    assert calls.said == dict.fromkeys((0, 1), ('process 2 (host c) is gone: killed, or its host is', 75, True))
    calls.close()

    calls = Calls([Member(0, 'a'), Member(1, 'b')], 2).join()
    calls.ends[0].closing = True
    for line in list(calls.ends[0].lines.values()):  # its threads drop the lines that break
        line.close()
    assert calls.heard.wait(3) and calls.said[1] == ('process 0 (host a) is gone: killed, or its host is', 75, False)
    calls.close()


def test_a_host_without_power_is_missed_within_the_bound():
    """No word comes that it is gone, and none from it."""
    calls = Calls([Member(0, 'a')], 2, lost_s=0.8)
    for _ in range(50):
        try:
            sock = socket.create_connection(('localhost', int(calls.at.rpartition(':')[2])))
            break
        except OSError:
            time.sleep(0.05)
    line = Line(sock, 5)
    line.send({'member': Member(1, 'b')._asdict(), 'of': 2})
    calls.join()
    begun = time.monotonic()
    while 0 not in calls.said and time.monotonic() < begun + 5:
        time.sleep(0.05)
    assert calls.said[0][0].startswith('process 1 (host b) is gone') and time.monotonic() - begun < 2
    line.close()
    calls.close()


def test_names_of_processes():
    assert (named([3]), named([1, 2])) == ('process 3', 'processes 1, 2')
    assert named(list(range(12))) == 'processes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more'


class Store(dict):
    """jax's key-value store, as far as it is used."""

    def key_value_set(self, key, value):
        assert key not in self
        self[key] = value

    def key_value_dir_get(self, folder):
        assert folder.endswith('/')
        return [(k, v) for k, v in self.items() if k.startswith(folder)]


@pytest.fixture
def one_of_three(monkeypatch, env):
    """This process as number 1 of 3; what the others bring is put into the store beforehand."""
    jax.devices()  # of this process alone
    store = Store()
    monkeypatch.setattr(distributed, '_places', 0)
    monkeypatch.setattr(distributed, '_ended', None)
    monkeypatch.setattr(distributed.runtime, 'global_state', SimpleNamespace(client=store, num_processes=3, process_id=1))

    def bring(at, what, **values):
        for process, value in values.items():
            store[f'spannorm/{at}/{process[1:]}'] = json.dumps([what, value])

    return bring


def test_all_bring_something_and_get_everything(one_of_three):
    one_of_three(0, 'the start', _0='a', _2=[1.5, None])
    assert distributed.gather('the start', {'b': 1}) == ['a', {'b': 1}, [1.5, None]]
    one_of_three(1, 'a question', _0=False, _2=True)
    one_of_three(2, 'a question', _0=False, _2=False)
    assert distributed.any_of('a question', False) and not distributed.any_of('a question', False)
    one_of_three(3, 'a fact', _0=7, _2=None)
    assert distributed.from_first('a fact', lambda: pytest.fail('process 0 knows')) == 7
    one_of_three(4, 'data', _0=None, _2=None)
    assert distributed.prepared_by_first('data', lambda: 'read') == 'read'
    assert not distributed.first()


def test_who_does_not_come_differs_or_does_something_else_is_named(one_of_three):
    one_of_three(0, 'the first step', _0=None)
    begun = time.monotonic()
    with pytest.raises(UserError, match='process 2 did not come to the first step within 0.3 s'):
        distributed.gather('the first step', limit=0.3)
    assert time.monotonic() - begun < 1
    one_of_three(1, 'the configurations', _0={'seed': 1, 'x': 2}, _2={'seed': 3, 'x': 2})
    with pytest.raises(UserError, match=r'the configurations of processes 0 and 2 differ \(seed: 1 and 3\); give'):
        distributed.same('the configurations', {'seed': 1, 'x': 2}, 'give every process the same command')
    one_of_three(2, 'the last row', _0=None, _2=None)
    with pytest.raises(UserError, match='do different things: the last row, the end, the last row'):
        distributed.gather('the end')


def test_a_wait_ends_when_another_process_has(one_of_three):
    threading.Timer(0.2, lambda: setattr(distributed, '_ended', distributed.Ended('process 0 ended: no', 74))).start()
    with pytest.raises(ProcessLost, match='process 0 ended: no') as error:
        distributed.gather('the first step', limit=20)
    assert error.value.exit_code == 74


GLOO = 'UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:404: Connection reset by peer'


def wrapped(error):
    try:
        try:
            raise error
        except Exception as e:
            raise RuntimeError('a library cannot save') from e
    except Exception as e:
        return e


@pytest.mark.parametrize(
    'error', [jax.errors.JaxRuntimeError(GLOO), ValueError(GLOO), wrapped(ValueError(GLOO))], ids=['ran', 'launched', 'wrapped']
)
def test_a_collective_that_fails_is_put_down_to_the_process_that_was_lost(one_of_three, tmp_path, error):
    """Whatever Python class XLA's error has: not to a bug (exit code 1), nor to the checkpoint that was being read (65)."""
    threading.Timer(0.2, lambda: setattr(distributed, '_ended', distributed.Ended('process 2 is gone', 75))).start()
    lost = distributed.blame(error)
    assert isinstance(lost, ProcessLost) and (str(lost), lost.exit_code) == ('process 2 is gone', 75) and distributed.blame(lost) is lost
    (tmp_path / '3' / 'meta').mkdir(parents=True)
    with pytest.raises(ProcessLost, match='process 2'), Checkpoints(tmp_path, read_only=True) as checkpoints, checkpoints._reading(3):
        raise error


@pytest.mark.parametrize('ended', [None, distributed.Ended('process 2 is gone', 75)], ids=['all are there', 'one is gone'])
def test_an_error_of_this_process_is_its_own_at_once(one_of_three, monkeypatch, ended):
    monkeypatch.setattr(distributed, '_ended', ended)
    for error in (
        UserError('no space is left'),
        ValueError('UNKNOWN field'),
        jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory'),
        KeyError('x'),
        wrapped(OSError(5)),
    ):
        begun = time.monotonic()
        assert distributed.blame(error) is error and time.monotonic() - begun < 1


def test_storage_that_is_not_shared_is_found(one_of_three, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, 'SEEN_S', 0.1)
    (tmp_path / 'mark').touch()
    for at, name, sees in ((0, 'mark', True), (3, 'unseen', False)):
        one_of_three(at, 'the storage', _0=name, _2=None)
        one_of_three(at + 1, 'the storage', _0=None, _2=None)
        one_of_three(at + 2, 'the storage', _0=True, _2=True)
        if sees:
            distributed.check_shared(tmp_path)
        else:
            with pytest.raises(UserError, match='process 1 cannot see .* put run.root'):
                distributed.check_shared(tmp_path)


def test_every_process_needs_a_device(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 3)
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=i) for i in (0, 2)]))
    with pytest.raises(UserError, match='no device of process 1; leave out mesh.devices'):
        distributed.check_mesh(mesh)


# Two real processes

STEPS = 400  # more than a test waits for
SHORT = 40
MESHES = {'data': '--mesh.data 8', 'fsdp_tensor': '--mesh.fsdp 4 --mesh.tensor 2', 'fsdp': '--mesh.fsdp 8'}


class Two:
    """`spannorm train` as two processes of four devices. The commands of docs/pods.md, section "On one machine"."""

    def __init__(self, tmp_path, name, mesh, steps=STEPS):
        self.folder = tmp_path / name
        text = tmp_path / 'text'
        if not text.exists():
            text.mkdir()
            for i in range(80):
                (text / f'{i}.txt').write_text(f'document {i} ' * 20)
        small = '--model.layers 1 --model.width 16 --model.heads 2 --data.seq 16 --data.batch 8 --run.eval-tokens 64 --run.eval-every 10'
        args = f'train debug {small} --run.checkpoint-every 8 --optim.warmup-steps 2 {MESHES[mesh]} --run.steps {steps}'.split()
        self.args = [*args, '--data.source', str(text), '--data.cache', str(tmp_path / 'cache'), '--run.dir', str(self.folder)]
        self.tmp = tmp_path

    def config(self):
        args = cli.parse('train', self.args[1:])
        assert args is not None
        return args.settings

    def start(self):
        port = free_port()
        common = {
            'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '4', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
            'JAX_COMPILATION_CACHE_DIR': jax.config.values['jax_compilation_cache_dir'],
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.05',
            'JAX_COORDINATOR_ADDRESS': f'localhost:{port}', 'JAX_NUM_PROCESSES': '2',
            'SPANNORM_START_S': '120', 'SPANNORM_LOST_S': '60', 'SPANNORM_WAIT_S': '120',
            'PYTHONPATH': str(pathlib.Path(distributed.__file__).parent.parent),
        }  # fmt: skip
        self.processes = []
        for i in range(2):
            with open(self.tmp / f'out{i}', 'wb') as out, open(self.tmp / f'err{i}', 'wb') as err:
                env = os.environ | common | {'JAX_PROCESS_ID': str(i)}
                self.processes.append(subprocess.Popen([sys.executable, '-m', 'spannorm_jax', *self.args], env=env, stdout=out, stderr=err))
        return self

    def until(self, step, seconds=180):
        """Wait for a row of this step or a later one."""
        end = time.monotonic() + seconds
        while True:
            rows = self.rows()
            if rows and rows[-1]['step'] >= step:
                return rows
            assert time.monotonic() < end and all(p.poll() is None for p in self.processes), self.said()
            time.sleep(0.05)

    def rows(self):
        path = self.folder / 'metrics.jsonl'
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [without_perf(json.loads(line)) for line in lines if line.endswith('\n')]

    def ended(self, seconds):
        try:
            return [p.wait(seconds) for p in self.processes]
        finally:
            for p in self.processes:
                p.kill()

    def said(self, i=None):
        return ''.join((self.tmp / f'err{k}').read_text() for k in range(2) if i in (None, k))

    def kill(self, process):
        self.processes[process].send_signal(signal.SIGKILL)

    def terminate(self, process):
        self.processes[process].send_signal(signal.SIGTERM)


def without_perf(row):
    return {k: v for k, v in row.items() if not k.startswith('perf/')}


def arrays(two, folder, step):
    """Weights and moments of a checkpoint, on the eight devices of this process, on whatever mesh it was written."""
    cfg, mesh = two.config(), make_mesh(MeshConfig())
    tree = infos(cfg.model)
    shapes = abstract_state(tree, make_optimizer(cfg, tree))
    whole = replicated(mesh)
    like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), shapes)
    with Checkpoints(folder / 'checkpoints', read_only=True) as checkpoints:
        state = checkpoints.restore(step, like)
    return jax.tree.map(np.asarray, (state.params, state.opt_state))


def outcome(folder):
    return json.loads((folder / 'outcome.json').read_text())


def killed_and_restarted(two, victim):
    """Kill one process, see the other end; start both again, and see them repeat what the killed ones had done since the checkpoint."""
    two.start().until(12)
    two.kill(victim)
    begun, codes = time.monotonic(), two.ended(60)
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 75), two.said()
    assert time.monotonic() - begun < 40
    assert f'process {victim} (host {socket.gethostname()}) is gone' in two.said(1 - victim), two.said()
    before = two.rows()
    two.start().until(before[-1]['step'] + 5)
    assert two.rows()[: len(before)] == before
    assert 'going on from the checkpoint of step' in two.said(0)


def same_as_alone(two, tmp_path, step):
    """Rows and weights of the run up to `step` against one process with eight devices."""
    cfg = edit(two.config(), {'run.dir': str(tmp_path / 'alone'), 'mesh.data': 8, 'mesh.fsdp': 1, 'mesh.tensor': 1})
    assert fit(cfg, stop=lambda at: at == step < cfg.run.steps).step == step
    alone = [without_perf(json.loads(line)) for line in (tmp_path / 'alone' / 'metrics.jsonl').read_text().splitlines()]
    rows = two.rows()
    assert [r['step'] for r in rows] == [r['step'] for r in alone] == list(range(1, step + 1))
    assert any('eval/loss' in r for r in rows)
    for row, want in zip(rows, alone, strict=True):
        assert row.keys() == want.keys()
        for key in row:
            # A spike is a difference of losses, and as exact as they are.
            near = 1e-5 * want['train/loss'] if key == 'train/spike' else 0
            np.testing.assert_allclose(row[key], want[key], rtol=1e-5, atol=near, err_msg=f'{key} of step {row["step"]}')
    got, want = arrays(two, two.folder, step), arrays(two, tmp_path / 'alone', step)
    assert len(jax.tree.leaves(got[0])) > 10 and len(jax.tree.leaves(got[1])) > 20
    check = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1, np.linalg.norm(y)))  # noqa: E731
    jax.tree.map(check, got, want)


def test_killed_restarted_and_stopped_two_processes_are_one(tmp_path):
    two = Two(tmp_path, 'two', 'fsdp_tensor')
    killed_and_restarted(two, 1)
    two.terminate(1)
    assert two.ended(60) == [75, 75], two.said()
    end = outcome(two.folder)
    assert end['status'] == 'preempted' and 'interrupted' in end['reason']
    assert 'Traceback' not in two.said() and 'training' not in two.said(1)  # one of them speaks
    assert (tmp_path / 'out1').read_text() == '' and 'preempted at step' in (tmp_path / 'out0').read_text()
    same_as_alone(two, tmp_path, end['step'])


@pytest.mark.full
@pytest.mark.parametrize('mesh, victim', [('data', 0), ('fsdp', 1), ('fsdp_tensor', 0)])
def test_a_killed_and_restarted_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path, mesh, victim):
    """And that one is a single process's, up to rounding. Both run to their end; `spannorm eval` reads the result as two processes too."""
    straight, broken = (Two(tmp_path, name, mesh, SHORT) for name in ('straight', 'broken'))
    assert straight.start().ended(180) == [0, 0], straight.said()
    killed_and_restarted(broken, victim)
    assert broken.ended(180) == [0, 0], broken.said()
    assert outcome(broken.folder) == outcome(straight.folder) and outcome(broken.folder)['status'] in ('completed', 'diverged')
    assert broken.rows() == straight.rows() and 'test/loss' in broken.rows()[-1]
    jax.tree.map(np.testing.assert_array_equal, arrays(broken, broken.folder, SHORT), arrays(broken, straight.folder, SHORT))
    assert (broken.folder / 'loss.png').stat().st_size > 1000
    same_as_alone(broken, tmp_path, SHORT)

    assert broken.start().ended(60) == [0, 0], broken.said()  # complete: said by one
    assert 'already complete' in broken.said(0) and 'already complete' not in broken.said(1)
    broken.args = ['eval', str(broken.folder), '--split', 'test', '--tokens', '64', '--json']
    assert broken.start().ended(120) == [0, 0], broken.said()
    found = json.loads((tmp_path / 'out0').read_text())  # and nothing else on stdout
    np.testing.assert_allclose(found['loss'], broken.rows()[-1]['test/loss'], rtol=1e-6)


@pytest.mark.full
def test_an_error_of_one_process_ends_both_with_its_code(tmp_path):
    two = Two(tmp_path, 'two', 'data')
    two.start().until(9)
    (two.folder / 'checkpoints').rename(two.folder / 'elsewhere')
    (two.folder / 'checkpoints').touch()  # the next save of process 0 fails, on a disk that is no disk
    codes = two.ended(90)
    assert codes == [74, 74] and 'ended: ' in two.said(1), (codes, two.said())


@pytest.mark.full
def test_a_signal_before_the_first_step_ends_both(tmp_path):
    two = Two(tmp_path, 'two', 'data').start()
    while 'compiling the step' not in two.said(0):
        time.sleep(0.05)
    two.terminate(1)
    assert two.ended(90) == [75, 75], two.said()
    assert 'process 1 (host ' in two.said(0) and 'ended: interrupted before the first step' in two.said(0), two.said()
