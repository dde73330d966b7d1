"""Checkpoints: round trip, retention, other meshes, damage."""

import gc
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY
from jax.sharding import NamedSharding, PartitionSpec

from spannorm_jax import manifest
from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import MeshConfig
from spannorm_jax.errors import BadData, MissingInput, StorageError
from spannorm_jax.score import restore_params
from spannorm_jax.sharding import make_mesh
from spannorm_jax.step import TrainState

META = {'config': {'model': {}}, 'batch': 3, 'lowest': 0.1 + 0.2}


def state(seed=0, place=None):
    put = lambda x: jax.device_put(x, place)  # noqa: E731
    w = jax.random.normal(jax.random.key(seed), (8, 4))
    params = {'embed': put(w), 'stack': {'gain': put(w[0])}}
    return TrainState(jnp.int32(3), params, ((jnp.int32(7),), {'mu': {'embed': put(w * 2)}}), jnp.zeros((), bool))


def like(s, place=None):
    place = place or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), s)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, (a.params, a.opt_state), (b.params, b.opt_state))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoints')
    with Checkpoints(folder) as ckpt:
        ckpt.save(2, state(2), META)
        ckpt.save(3, state(3), META)
    return folder


@pytest.fixture
def copy(written, tmp_path):
    return pathlib.Path(shutil.copytree(written, tmp_path / 'c'))


def test_round_trip_is_exact(written):
    with Checkpoints(written) as ckpt:
        assert ckpt.latest() == 3
        equal(ckpt.restore(3, like(state())), state(3))
        equal(ckpt.restore(2, like(state())), state(2))
        meta = ckpt.meta(3)
        assert meta['lowest'] == 0.1 + 0.2 and meta['step'] == 3  # floats come back to the last bit
        params = ckpt.restore_params(2, like(state()).params)
        np.testing.assert_array_equal(params['embed'], state(2).params['embed'])


def test_the_copy_is_taken_at_save_though_the_arrays_are_then_donated(tmp_path):
    with Checkpoints(tmp_path) as ckpt:
        s = state(5)
        ckpt.save(1, s, META)
        jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(s.params))
        ckpt.wait()
        equal(ckpt.restore(1, like(state())), state(5))


def test_newest_and_every_nth_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, state(), META)
        assert ckpt.wait() == 7
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [4, 6, 7]


@pytest.mark.parametrize('data, fsdp', [(8, 1), (2, 2), (1, 1)])
def test_restores_on_another_mesh(tmp_path, data, fsdp):
    whole = make_mesh(MeshConfig(data=1, fsdp=8))
    small = make_mesh(MeshConfig(data=data, fsdp=fsdp, devices=data * fsdp))
    with Checkpoints(tmp_path) as ckpt:
        s = state(1)
        ckpt.save(1, s._replace(params=jax.device_put(s.params, NamedSharding(whole, PartitionSpec()))), META)
        ckpt.wait()
        found = ckpt.restore(1, like(s, NamedSharding(small, PartitionSpec())))
    equal(found, s)
    assert found.params['embed'].sharding.mesh == small


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Orbax drops the reads that are under way
def test_a_torn_array_is_named(copy):
    for path in (copy / '3' / 'params').rglob('d/*'):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with Checkpoints(copy) as ckpt:
        with pytest.raises(BadData, match=r"checkpoint '.*/3' is damaged"):
            ckpt.restore(3, like(state()))
        equal(ckpt.restore(2, like(state())), state(2))
    gc.collect()


def test_a_torn_position_is_named(copy):
    path = copy / '3' / 'meta' / 'metadata'
    path.write_text(path.read_text()[:40])
    with Checkpoints(copy) as ckpt, pytest.raises(BadData, match="/3' is damaged"):
        ckpt.meta(3)


def test_a_newer_format_is_refused(copy):
    path = copy / '3' / 'meta' / 'metadata'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'format': 99}))
    manifest.seal(copy / '3')
    with Checkpoints(copy) as ckpt, pytest.raises(BadData, match='format 99, this package reads 2: upgrade'):
        ckpt.meta(3)


def test_a_foreign_checkpoint_is_refused(copy):
    (copy / '3' / 'meta' / 'metadata').write_text('{"hello": 1}')
    manifest.seal(copy / '3')
    with Checkpoints(copy) as ckpt, pytest.raises(BadData, match='was not written by spannorm_jax'):
        ckpt.meta(3)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_another_shape_is_refused(written):
    wrong = like(state())
    wrong.params['embed'] = jax.ShapeDtypeStruct((8, 5), jnp.float32, sharding=wrong.params['embed'].sharding)
    with Checkpoints(written) as ckpt, pytest.raises(BadData, match='damaged or of another model'):
        ckpt.restore(3, wrong)
    gc.collect()


def test_a_step_that_is_not_there(written):
    with Checkpoints(written) as ckpt, pytest.raises(MissingInput, match="no checkpoint '.*/9'"):
        ckpt.restore(9, like(state()))


def test_unfinished_saves_are_not_seen_and_cleaned(copy):
    shutil.copytree(copy / '3', copy / '5.orbax-checkpoint-tmp')
    with Checkpoints(copy) as ckpt:
        assert ckpt.latest() == 3
        ckpt.save(4, state(4), META)  # old leftovers are removed in the background, at the latest before the next save
    assert not (copy / '5.orbax-checkpoint-tmp').exists()


def test_a_reader_leaves_what_is_being_written(copy):
    unfinished = pathlib.Path(shutil.copytree(copy / '3', copy / '5.orbax-checkpoint-tmp'))
    before = sorted(copy.rglob('*'))
    with Checkpoints(copy, read_only=True) as ckpt:
        assert ckpt.latest() == 3
        equal(ckpt.restore(3, like(state())), state(3))
    assert unfinished.is_dir() and sorted(copy.rglob('*')) == before


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_eval_opens_checkpoints_as_a_reader(copy, tmp_path):
    (tmp_path / 'checkpoints').symlink_to(copy)
    unfinished = pathlib.Path(shutil.copytree(copy / '3', copy / '5.orbax-checkpoint-tmp'))
    with pytest.raises(BadData, match='of another model'):
        restore_params(tmp_path, TINY, make_mesh(TINY.mesh))
    gc.collect()
    assert unfinished.is_dir()


def test_a_reader_makes_no_folder(tmp_path):
    with pytest.raises(MissingInput, match='no checkpoint yet'):
        restore_params(tmp_path / 'run', TINY, make_mesh(TINY.mesh))
    with pytest.raises(MissingInput, match='is not a folder'):
        Checkpoints(tmp_path / 'run' / 'checkpoints', read_only=True)
    assert not (tmp_path / 'run').exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(StorageError, match='cannot create'):
        Checkpoints(tmp_path / 'file' / 'c')


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), ValueError('RESOURCE_EXHAUSTED: No space left on device [x]')])
def test_what_a_background_write_ran_into_surfaces_as_a_storage_error(tmp_path, monkeypatch, error):
    def fail():
        raise error

    with Checkpoints(tmp_path) as ckpt:
        monkeypatch.setattr(ckpt.manager, 'check_for_errors', fail)
        with pytest.raises(StorageError, match="cannot write a checkpoint to '.*No space left on device.*free space"):
            ckpt.poll()


@pytest.mark.full
def test_a_file_that_cannot_grow_ends_in_a_storage_error(tmp_path):
    """RLIMIT_FSIZE stands for a full disk: every write beyond 16 kB fails."""
    code = f"""
import resource, signal, pathlib, jax, jax.numpy as jnp
from test_checkpoint import Checkpoints, META, state
from spannorm_jax.errors import StorageError
ckpt = Checkpoints(pathlib.Path({str(tmp_path)!r}))
ckpt.save(1, state(), META)
ckpt.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
try:
    ckpt.save(2, state()._replace(params={{'embed': jax.random.normal(jax.random.key(0), (300, 300))}}), META)
    ckpt.wait()
except StorageError as e:
    print('storage:', e, ckpt.latest())
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=300)
    assert 'storage: cannot write a checkpoint' in done.stdout, done.stdout + done.stderr
    with Checkpoints(tmp_path) as ckpt:
        equal(ckpt.restore(ckpt.latest(), like(state())), state())
