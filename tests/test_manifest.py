"""Manifests: what they say of a checkpoint, every kind of damage, hostile contents, memory; and `spannorm verify`."""

import binascii
import hashlib
import json
import os
import random
import tracemalloc

import pytest

from spannorm_jax import cli, manifest
from spannorm_jax.config import Config, to_dict
from spannorm_jax.errors import BadData, MissingInput

pytestmark = pytest.mark.reliability


@pytest.fixture
def step(tmp_path):
    """A run with the sealed checkpoint of step 7, in two levels of folders."""
    (tmp_path / 'config.json').write_text(json.dumps(to_dict(Config())))
    folder = tmp_path / 'checkpoints' / '7'
    (folder / 'params' / 'd').mkdir(parents=True)
    (folder / 'meta').mkdir()
    (folder / 'params' / 'd' / 'a').write_bytes(random.Random(0).randbytes(3 * manifest.CHUNK + 17))
    (folder / 'params' / 'empty').write_bytes(b'')
    (folder / 'meta' / 'metadata').write_text('{"format": 2}')
    manifest.seal(folder)
    return folder


def test_the_manifest_names_every_file_with_its_size_and_crc32(step):
    tree = json.loads((step / manifest.NAME).read_text())
    want = {}
    for name in ('meta/metadata', 'params/d/a', 'params/empty'):
        data = (step / name).read_bytes()
        want[name] = [len(data), f'{binascii.crc32(data):08x}']
    assert tree['files'] == want and tree['version'] == 2
    assert manifest.faults(step) == []


def test_a_manifest_of_version_1_is_checked_by_its_sha256(step):
    files = {name: [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()] for name, path in manifest.walk(step)}
    (step / manifest.NAME).write_text(json.dumps({'version': 1, 'files': files, 'sha256': manifest._of_table(files)}))
    assert manifest.faults(step) == []
    flip(step / 'params' / 'd' / 'a', 12345)
    assert manifest.faults(step) == ["'params/d/a' has other content than was written"]


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_flip_of_any_bit_is_found(step):
    """Of a large file at random places; of the small one and of the manifest itself, every bit."""
    large, small, own = step / 'params' / 'd' / 'a', step / 'meta' / 'metadata', step / manifest.NAME
    draw = random.Random(1)
    places = [(large, draw.randrange(8 * large.stat().st_size)) for _ in range(8)]
    places += [(path, bit) for path in (small, own) for bit in range(8 * path.stat().st_size)]
    for path, bit in places:
        flip(path, bit)
        with pytest.raises(BadData, match='manifest.json' if path == own else f'{path.relative_to(step)}. has other content'):
            manifest.check(step)
        flip(path, bit)
    manifest.check(step)


@pytest.mark.parametrize(
    'damage, said',
    [
        (lambda s: os.truncate(s / 'params/d/a', 5), "'params/d/a' has 5 bytes, expected 3145745"),
        (lambda s: (s / 'params/empty').unlink(), "'params/empty' is missing"),
        (lambda s: (s / 'params/other').write_text(''), "'params/other' is no file of it"),
        (lambda s: ((s / 'params/empty').unlink(), (s / 'params/empty').symlink_to('/etc/hostname')), "'params/empty' is no plain file"),
        (lambda s: ((s / 'params/empty').unlink(), os.mkfifo(s / 'params/empty')), "'params/empty' is no plain file"),
        (lambda s: (s / 'params/up').symlink_to('/etc', target_is_directory=True), "'params/up' is no file of it"),
        (lambda s: (s / manifest.NAME).write_text('[' * 100_000), 'nested too deeply'),
        (lambda s: (s / manifest.NAME).write_text('{"version": 1, "files": {"a": [1]}, "sha256": ""}'), "manifest.json' is damaged"),
        (lambda s: (s / manifest.NAME).write_text('{"version": 9}'), 'has version 9, this package reads 1 to 2: upgrade'),
    ],
)
def test_damage_is_named(step, damage, said):
    damage(step)
    with pytest.raises(BadData) as e:
        manifest.check(step)
    assert said in str(e.value)


def test_names_in_a_manifest_open_nothing(step, tmp_path):
    """A manifest that names files outside, as they are: they count as missing, for only what lies in the folder is looked at."""
    outside = tmp_path / 'secret'
    outside.write_text('x')
    tree = json.loads((step / manifest.NAME).read_text())
    tree['files'] |= {name: [1, f'{binascii.crc32(b"x"):08x}'] for name in ('../../secret', str(outside))}
    (step / manifest.NAME).write_text(json.dumps(tree | {'sha256': manifest._of_table(tree['files'])}))
    assert manifest.faults(step) == [f'{name!r} is missing' for name in sorted(('../../secret', str(outside)))]


def test_memory_does_not_grow_with_the_file(step):
    with (step / 'params' / 'd' / 'big').open('wb') as f:
        f.truncate(256 << 20)
    tracemalloc.start()
    manifest.seal(step)
    manifest.check(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * (manifest.THREADS + 1) * manifest.CHUNK


def test_what_counts_as_a_checkpoint(step):
    """A manifest makes one; format 1 had none; without one a newer format is unfinished, and what cannot be read is nobody's to remove."""
    folder = step.parent
    for name, meta in (('8', '{"format": 2}'), ('3', '{"format": 1}'), ('4', '{"format"'), ('x9', '{"format": 2}')):
        (folder / name / 'meta').mkdir(parents=True)
        (folder / name / 'meta' / 'metadata').write_text(meta)
    (folder / '007').symlink_to('7')
    (folder / '5.removing').mkdir()
    (folder / '9.orbax-checkpoint-tmp').mkdir()
    assert manifest.steps(folder) == [3, 4, 7]
    assert [p.name for p in manifest.leftovers(folder)] == ['8', '5.removing', '9.orbax-checkpoint-tmp']


def test_verify_reports_and_exits_65_naming_step_and_file(step, capsys):
    run = step.parent.parent
    assert cli.main(['verify', str(run)]) == 0
    assert 'step        7  ok               3 files        3,145,758 bytes' in capsys.readouterr().out
    flip(step / 'params' / 'd' / 'a', 0)
    (step.parent / '9.orbax-checkpoint-tmp').mkdir()
    assert cli.main(['verify', str(run), '--json']) == 65
    said = capsys.readouterr()
    found = json.loads(said.out)
    problem = "'params/d/a' has other content than was written"
    assert found['checkpoints'] == [{'step': 7, 'status': 'damaged', 'files': 3, 'bytes': 3145758, 'problems': [problem]}]
    assert found['ok'] is False and found['leftovers'] == ['9.orbax-checkpoint-tmp']
    assert f'step 7 of {str(run)!r} is damaged: {problem}' in said.err


@pytest.mark.parametrize('meta', ['', '{"format"', None])
def test_without_a_manifest_the_meta_has_to_be_readable(step, meta):
    """A machine that lost its power can have kept the names of files, and not what was in them."""
    (step / manifest.NAME).unlink()
    (step / manifest.META).unlink()
    if meta is not None:
        (step / manifest.META).write_text(meta)
    found = manifest.verify(step.parent.parent)
    assert not found['ok'] and "'meta/metadata' cannot be read" in found['checkpoints'][0]['problems'][0]


def test_verify_of_a_run_without_checkpoints(tmp_path):
    with pytest.raises(MissingInput, match='no whole checkpoint'):
        manifest.verify(tmp_path)
    assert cli.main(['verify', str(tmp_path / 'none')]) == 66
