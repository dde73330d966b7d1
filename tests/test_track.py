"""Trackers get what metrics.jsonl has: TensorBoard's files and W&B's offline ones are read back and compared."""

import json
import math
import struct
import sys
import time
import types

import numpy as np
import pytest
from fakes import TINY, FakeCorpus

from spannorm_jax.config import edit, to_dict
from spannorm_jax.errors import UserError
from spannorm_jax.track import MetricsFile, TensorBoard, WandB, plain, read_rows, scalars
from spannorm_jax.train import fit

ROWS = [
    {'step': 1, 'train/loss': 3.5, 'layer/rms': [1.0, 2.0], 'perf/mfu': None, 'moe/load': [[0.25, 0.75], [0.5, 0.5]]},
    {'step': 2, 'train/loss': float('nan'), 'layer/rms': [3.0, math.inf], 'train/tokens': 96},
]
FLAT = {
    (1, 'train/loss'): 3.5, (1, 'layer/rms/0'): 1.0, (1, 'layer/rms/1'): 2.0, (1, 'moe/load/0/0'): 0.25, (1, 'moe/load/0/1'): 0.75,
    (1, 'moe/load/1/0'): 0.5, (1, 'moe/load/1/1'): 0.5, (2, 'layer/rms/0'): 3.0, (2, 'train/tokens'): 96.0,
}  # fmt: skip


def events(folder):
    """(step, name) -> value of TensorBoard's files in a folder, each there once; and steps from which on earlier files do not count.

    A record is its length, 8 bytes, and 4 of checksum, the event, and 4 more.
    """
    pb = pytest.importorskip('tensorboardX.proto.event_pb2')
    found, restarts = {}, []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (n,) = struct.unpack('<Q', data[:8])
            event = pb.Event.FromString(data[12 : 12 + n])
            data = data[16 + n :]
            if event.HasField('session_log'):
                restarts.append(event.step)
                found = {key: v for key, v in found.items() if key[0] < event.step}
            for v in event.summary.value:
                assert (event.step, v.tag) not in found, 'twice'
                found[event.step, v.tag] = v.simple_value
    return found, restarts


def test_tensorboard(tmp_path):
    pytest.importorskip('tensorboardX')
    with MetricsFile(tmp_path / 'metrics.jsonl', sinks=[TensorBoard(tmp_path / 'tb')]) as log:
        for row in ROWS:
            log.write(row)
    found, _ = events(tmp_path / 'tb')
    assert found == pytest.approx(FLAT)
    assert [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()] == [
        ROWS[0], ROWS[1] | {'train/loss': None, 'layer/rms': [3.0, None]},
    ]  # fmt: skip


def test_a_rollback_in_tensorboard(tmp_path):
    """What was left out does not count, however soon the file of what takes its place begins."""
    pytest.importorskip('tensorboardX')
    row = lambda step, loss: {'step': step, 'train/loss': loss}  # noqa: E731
    with MetricsFile(tmp_path / 'metrics.jsonl', sinks=[TensorBoard(tmp_path / 'tb')]) as log:
        for step in (1, 2, 3):
            log.write(row(step, 10.0 + step))
        log.truncate(1)
        log.write(row(2, 22.0))
        log.truncate(2)
        log.write(row(2, 22.0) | {'eval/loss': 5.0})
        log.write(row(3, 23.0))
    found, restarts = events(tmp_path / 'tb')
    assert found == {(1, 'train/loss'): 11.0, (2, 'train/loss'): 22.0, (2, 'eval/loss'): 5.0, (3, 'train/loss'): 23.0}
    assert restarts == [1, 2, 3]


def test_a_run_in_tensorboard_across_a_restart(tmp_path):
    """Interrupted and gone on with: every number of metrics.jsonl, none of another step."""
    pytest.importorskip('tensorboardX')
    cfg = edit(TINY, {'run.root': str(tmp_path), 'run.sinks': ('tensorboard',), 'run.steps': 6})
    corpus = FakeCorpus()
    assert fit(cfg, stop=lambda step: step == 3, corpus=corpus).status == 'preempted'
    outcome = fit(cfg, corpus=corpus)
    assert (outcome.status, outcome.step) == ('completed', 6)
    (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    rows = read_rows(folder / 'metrics.jsonl')
    want = {(r['step'], name): x for r in rows for key, value in r.items() if key != 'step' for name, x in scalars(key, value)}
    found, restarts = events(folder / 'tensorboard')
    assert restarts == [1, 4] and len(rows) == 6 and (6, 'test/bits_per_byte') in want
    assert found == pytest.approx(want, rel=1e-6)


def wandb_records(data):
    """Messages of a .wandb file: 7 bytes, then parts in blocks of 32 KiB, each after a checksum, its length, and 1 (whole) to 4 (last)."""
    at, held = 7, b''
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, n, kind = struct.unpack('<IHB', data[at : at + 7])
        if len(part := data[at + 7 : at + 7 + n]) < n:
            return  # still being written
        held += part
        at += 7 + n
        if kind in (1, 4):
            yield held
            held = b''


def test_wandb_offline(tmp_path, monkeypatch):
    """Rows in W&B's own file, under the run's name, with its configuration."""
    pytest.importorskip('wandb')
    pb = pytest.importorskip('wandb.proto.wandb_internal_pb2')
    for name, value in {'WANDB_MODE': 'offline', 'WANDB_SILENT': 'true', 'WANDB_DIR': str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    sink = WandB('tiny-1234', to_dict(TINY), tmp_path)
    for row in ROWS:
        sink.write({k: plain(v) for k, v in row.items()})
    sink.close()
    (file,) = tmp_path.rglob('*.wandb')
    until, records = time.monotonic() + 60, []
    while time.monotonic() < until and not any(record.HasField('exit') for record in records):  # another process writes it
        time.sleep(0.1)
        records = [pb.Record.FromString(data) for data in wandb_records(file.read_bytes())]
    history, config, ids = [], {}, set()
    for record in records:
        if record.HasField('run'):
            ids.add(record.run.run_id)
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField('history'):
            history.append({item.key or '/'.join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    assert ids == {'tiny-1234'} and config['model']['topology'] == 'pre' and config['run']['steps'] == 8
    kept = [{k: plain(v) for k, v in row.items() if plain(v) is not None} for row in ROWS]
    assert [{k: v for k, v in row.items() if not k.startswith('_')} for row in history] == kept


@pytest.mark.parametrize(('name', 'library'), [('tensorboard', 'tensorboardX'), ('wandb', 'wandb')])
def test_a_tracker_that_is_not_installed(name, library, tmp_path, monkeypatch):
    """It is said before anything is computed or written."""
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"needs {library}: pip install 'spannorm-jax\[track\]'"):
        fit(edit(TINY, {'run.root': str(tmp_path), 'run.sinks': (name,)}), corpus=FakeCorpus())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('where', ['login', 'init'])
def test_a_tracker_that_does_not_start(where, tmp_path, monkeypatch):
    """W&B's own word for it, and what to do; without credentials before anything is computed."""
    fake = types.ModuleType('wandb')
    fake.Error = type('Error', (Exception,), {})

    def refuse(**kwargs):
        raise fake.Error('No API key configured.')

    fake.login = fake.init = lambda **kwargs: None
    setattr(fake, where, refuse)
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    with pytest.raises(UserError, match='No API key configured. Or set WANDB_MODE=offline'):
        fit(edit(TINY, {'run.root': str(tmp_path), 'run.sinks': ('wandb',)}), corpus=FakeCorpus())
    assert bool(list(tmp_path.iterdir())) == (where == 'init')


def test_plain_values():
    assert plain(np.float32(1.5)) == 1.5 and plain(np.array([[1, 2]])) == [[1, 2]] and plain(np.int64(3)) == 3
    assert plain(np.array([1.0, np.nan])) == [1.0, None] and plain(-math.inf) is None and plain('x') == 'x'
    assert list(scalars('a', [[1.0, None], 2.0])) == [('a/0/0', 1.0), ('a/1', 2.0)]
