"""A start explains itself: the table of what may change, the difference it makes, torn checkpoints, policies, old checkpoints."""

import dataclasses
import json
import os
import pathlib
import shutil
import tarfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fakes import TINY, FakeCorpus

from spannorm_jax import manifest, resume, rundir
from spannorm_jax.checkpoint import FORMAT, Checkpoints
from spannorm_jax.config import HOW_NOT_WHAT, Config, edit, from_dict, run_id, to_dict
from spannorm_jax.errors import BadData, MissingInput, UserError
from spannorm_jax.load import read_config
from spannorm_jax.program import program
from spannorm_jax.rundir import Position, spike_score
from spannorm_jax.sharding import make_mesh
from spannorm_jax.track import read_rows
from spannorm_jax.train import fit

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures('compiled_once')]
GOLDEN = sorted((pathlib.Path(__file__).parent / 'golden_checkpoints').glob('*.tar.xz'))
CFG = edit(TINY, {'run.steps': 6, 'run.checkpoint_every': 2, 'run.eval_every': 0, 'model.layers': 1})


def at(step):
    return lambda s: s == step


def rows_of(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
    """A run stopped at step 5: checkpoints of 4 and 5."""
    folder = tmp_path_factory.mktemp('begun') / 'run'
    assert fit(edit(CFG, {'run.dir': str(folder)}), corpus=FakeCorpus(), stop=at(5)).step == 5
    return folder


@pytest.fixture
def copy(begun, tmp_path):
    """(folder, configuration) of a copy of it."""
    folder = pathlib.Path(shutil.copytree(begun, tmp_path / 'run'))
    return folder, edit(CFG, {'run.dir': str(folder)})


def losses(folder):
    return [row['train/loss'] for row in rows_of(folder)]


@pytest.fixture(scope='module')
def whole(begun, tmp_path_factory):
    """The losses of that run when it goes on."""
    folder = pathlib.Path(shutil.copytree(begun, tmp_path_factory.mktemp('whole') / 'run'))
    assert fit(edit(CFG, {'run.dir': str(folder)}), corpus=FakeCorpus()).status == 'completed'
    return losses(folder)


def test_every_field_has_one_rule():
    fields = resume.flat(to_dict(Config()))
    assert set(resume.RULES) == set(fields)
    assert {r.kind for r in resume.RULES.values()} == {resume.SAFE, resume.FLAG, resume.NEVER}
    how = {f'{section}.{name}' for section, names in HOW_NOT_WHAT.items() for name in names}
    assert {name for name, rule in resume.RULES.items() if rule.kind == resume.SAFE} == how | {'name'}
    for name in ('model.topology', 'model.layers', 'data.tokenizer', 'run.seed', 'data.batch', 'data.seq'):
        assert resume.RULES[name].kind == resume.NEVER


def test_what_is_outside_the_identity_is_safe_and_nothing_else():
    """The run's id does not see a field exactly where a change of it is safe."""
    base = Config()
    for section, values in {'run': {'keep': 9, 'hang_s': 5.0, 'torn': 'previous', 'seed': 3}, 'optim': {'lr_peak': 0.5}}.items():
        for name, value in values.items():
            changed = edit(base, {f'{section}.{name}': value})
            (change,) = resume.diff(base, changed)
            assert (run_id(changed) == run_id(base)) == (change.rule.kind == resume.SAFE)


def test_changes_are_refused_accepted_or_forbidden_in_three_columns(tmp_path):
    then = Config()
    now = edit(then, {'optim.lr_peak': 0.5, 'optim.clip': 0.0, 'run.keep': 7})
    with pytest.raises(UserError) as e:
        resume.check_resumable(then, now, tmp_path)
    assert str(e.value).splitlines()[1:] == [
        '  field          checkpoint  now  effect',
        '  optim.lr_peak  0.001       0.5  needs run.accept: another rate or direction of the updates from here on',
        '  optim.clip     1.0         0.0  needs run.accept: another rate or direction of the updates from here on',
        '  run.keep       2           7    safe: what is written and watched, and where',
        'to go on with the new values add --run.accept optim.lr_peak optim.clip; or restore the old, or give another run.dir',
    ]
    allowed = edit(now, {'run.accept': ('optim.lr-peak', 'optim.clip')})
    kinds = {c.field: c.rule.kind for c in resume.check_resumable(then, allowed, tmp_path)}
    assert kinds == {'optim.lr_peak': resume.FLAG, 'optim.clip': resume.FLAG, 'run.keep': resume.SAFE, 'run.accept': resume.SAFE}
    for name, said in (('model.topology', 'which no run can change'), ('optim.lr', "did you mean 'optim.")):
        with pytest.raises(UserError, match=said):
            resume.check_resumable(then, edit(then, {'run.accept': (name,)}), tmp_path)
    with pytest.raises(UserError, match='forbidden: another order of the data\n(.*\n)*restore these values'):
        resume.check_resumable(then, edit(allowed, {'run.seed': 1}), tmp_path)


def test_an_accepted_change_takes_effect_and_is_remembered(copy, whole):
    folder, cfg = copy
    told = []
    new = edit(cfg, {'optim.lr_peak': 0.0, 'run.accept': ('optim.lr_peak',)})
    outcome = fit(new, lambda kind, data: told.append(data.get('text', '')), corpus=FakeCorpus())
    assert outcome.status == 'completed' and any('optim.lr_peak  0.01' in t and 'accepted: another rate' in t for t in told)
    assert losses(folder) == whole  # the loss of step 6 is that of the weights before it ...
    assert [row['train/lr'] for row in rows_of(folder)][-1] == 0.0  # ... and the rate is the new one
    stored = read_config(folder)
    assert stored.optim.lr_peak == 0.0 and stored.run.accept == ()
    with Checkpoints(folder / 'checkpoints', read_only=True) as c:
        assert c.meta(6)['changed'] == ['step 5: optim.lr_peak 0.01 -> 0.0']


def test_a_checkpoint_that_must_be_there(tmp_path, copy, whole):
    missing = edit(CFG, {'run.dir': str(tmp_path / 'none'), 'run.resume': 'must'})
    with pytest.raises(MissingInput, match="no checkpoint in '.*none', and run.resume = 'must'"):
        fit(missing, corpus=FakeCorpus())
    assert not (tmp_path / 'none' / 'metrics.jsonl').exists()
    folder, cfg = copy
    fit(edit(cfg, {'run.resume': 'must'}), corpus=FakeCorpus())
    assert losses(folder) == whole and read_config(folder).run.resume == 'auto'


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_stops_the_run_or_goes_back_one_as_the_policy_says(copy, whole):
    folder, cfg = copy
    newest = folder / 'checkpoints' / '5'
    path = next(p for name, p in manifest.walk(newest) if name.startswith('params/d/'))
    flipped(path)
    rows = (folder / 'metrics.jsonl').read_text()
    name = str(path.relative_to(newest))
    with pytest.raises(BadData, match=f"checkpoints/5' is damaged: '{name}' has other content.*or set run.torn previous"):
        fit(cfg, corpus=FakeCorpus())
    assert (folder / 'metrics.jsonl').read_text() == rows
    told = []
    outcome = fit(edit(cfg, {'run.torn': 'previous'}), lambda kind, data: told.append(data.get('text', '')), corpus=FakeCorpus())
    assert outcome.status == 'completed' and losses(folder) == whole
    assert any(f"'{name}' has other content" in t and "checkpoints.damaged/5', going on from the one before" in t for t in told)
    assert 'going on from the checkpoint of step 4' in told and (folder / 'checkpoints.damaged' / '5').is_dir()
    assert manifest.verify(folder)['ok']


def test_a_finished_run_whose_last_checkpoint_is_lost_or_torn_goes_on_from_the_one_before(copy, whole):
    folder, cfg = copy
    fit(cfg, corpus=FakeCorpus())
    newest = folder / 'checkpoints' / '6'
    flipped(next(p for name, p in manifest.walk(newest) if p is not None and name.startswith('params/d/')))
    assert 'already complete' in fit(cfg, corpus=FakeCorpus()).message  # what is done is not looked at
    assert fit(edit(cfg, {'run.torn': 'previous'}), corpus=FakeCorpus()).message.endswith('completed at step 6') is False
    assert manifest.verify(folder)['ok'] and losses(folder) == whole and read_config(folder).run.torn == 'stop'
    shutil.rmtree(newest)
    assert fit(cfg, corpus=FakeCorpus()).status == 'completed' and newest.is_dir() and losses(folder) == whole
    shutil.rmtree(folder / 'checkpoints')  # for the room
    assert 'already complete' in fit(cfg, corpus=FakeCorpus()).message and not (folder / 'checkpoints').exists()


def test_a_run_that_was_stopped_as_not_finite_goes_on_with_what_is_accepted(tmp_path):
    cfg = edit(CFG, {'run.dir': str(tmp_path / 'run'), 'optim.lr_peak': 1e37, 'optim.warmup_steps': 0, 'run.checkpoint_every': 1})
    assert fit(cfg, corpus=FakeCorpus()).exit_code == rundir.NONFINITE_EXIT
    assert 'name it in run.accept' in fit(cfg, corpus=FakeCorpus()).message
    # What is killed before it ends does not leave the old end behind.
    mild = edit(cfg, {'optim.lr_peak': 1e-3, 'run.nonfinite': 'skip', 'run.accept': ('optim.lr_peak', 'run.nonfinite')})
    with pytest.raises(ZeroDivisionError):
        fit(mild, corpus=FakeCorpus(), stop=lambda step: bool(1 / 0))
    assert json.loads((tmp_path / 'run' / 'outcome.json').read_text())['status'] == 'failed'
    assert fit(mild, corpus=FakeCorpus()).step == 6


@pytest.mark.parametrize('torn', ['{"step": 6, "train/loss": 5.2\x00\x00\n{"step": 7}\n', '{"step": 6, "train/loss": NaN}\n'])
def test_what_no_checkpoint_relies_on_may_be_torn(copy, whole, torn):
    folder, cfg = copy
    with (folder / 'metrics.jsonl').open('a') as f:
        f.write(torn)
    assert fit(cfg, corpus=FakeCorpus()).status == 'completed' and losses(folder) == whole


def test_a_torn_row_is_the_end_only_where_no_row_that_counts_follows(tmp_path):
    path, torn = tmp_path / 'metrics.jsonl', '{"step": 3\x00\n'
    path.write_text('{"step": 2}\n' + torn + '{"step": 6}\n')  # rows of every second step, a checkpoint of step 5
    assert read_rows(path, 5) == [{'step': 2}]
    for to in (6, None):
        with pytest.raises(BadData, match='line 2'):
            read_rows(path, to)


def test_a_checkpoint_of_a_newer_package_is_not_called_damaged(copy):
    folder, cfg = copy
    (folder / 'config.json').unlink()
    path = folder / 'checkpoints' / '5' / manifest.META
    meta = json.loads(path.read_text())
    meta['config']['model']['brand_new'] = True
    path.write_text(json.dumps(meta))
    manifest.seal(path.parent.parent)
    with pytest.raises(BadData, match='written by another version of spannorm_jax.*brand_new.*upgrade') as e:
        fit(cfg, corpus=FakeCorpus())
    assert 'remove' not in str(e.value) and 'torn' not in str(e.value)


def test_a_checkpoint_under_the_name_of_another_step_is_not_sound(copy):
    folder, cfg = copy
    shutil.copytree(folder / 'checkpoints' / '4', folder / 'checkpoints' / '9')
    with pytest.raises(BadData, match="checkpoints/9' is damaged: it is the checkpoint of step 4"):
        fit(cfg, corpus=FakeCorpus())
    assert not manifest.verify(folder)['ok']


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_removed(copy, tmp_path):
    folder, cfg = copy
    (folder / 'checkpoints' / '4').rename(tmp_path / 'elsewhere')
    (folder / 'checkpoints' / '4').symlink_to(tmp_path / 'elsewhere')
    assert fit(edit(cfg, {'run.keep': 1}), corpus=FakeCorpus()).status == 'completed'
    assert manifest.steps(folder / 'checkpoints') == [6] and (tmp_path / 'elsewhere' / manifest.NAME).is_file()


def test_a_step_that_lost_its_manifest_and_its_meta_is_torn(copy, whole):
    """Nothing says that it was never committed, so nothing removes it: the policy decides."""
    folder, cfg = copy
    (folder / 'checkpoints' / '5' / manifest.NAME).unlink()
    os.truncate(folder / 'checkpoints' / '5' / manifest.META, 0)
    with pytest.raises(BadData, match=r"checkpoints/5' is damaged: 'meta/metadata' cannot be read.*or set run.torn previous"):
        fit(cfg, corpus=FakeCorpus())
    assert fit(edit(cfg, {'run.torn': 'previous'}), corpus=FakeCorpus()).status == 'completed' and losses(folder) == whole
    assert (folder / 'checkpoints.damaged' / '5').is_dir()


def test_the_last_sound_checkpoint_is_not_given_up(copy):
    folder, cfg = copy
    for step in ('4', '5'):
        os.truncate(next(p for name, p in manifest.walk(folder / 'checkpoints' / step) if name.startswith('optim/d/')), 10)
    with pytest.raises(BadData, match=r"checkpoints/4' is damaged: .* has 10 bytes.*there is none before it: use another run.dir"):
        fit(edit(cfg, {'run.torn': 'previous'}), corpus=FakeCorpus())
    assert (folder / 'checkpoints' / '4').is_dir()


@pytest.mark.parametrize('kept', [3, 5])
def test_rows_that_are_gone_are_missed(copy, whole, kept):
    folder, cfg = copy
    lines = (folder / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (folder / 'metrics.jsonl').write_text(''.join(lines[:kept]))
    told = []
    assert fit(cfg, lambda kind, data: told.append(data.get('text', '')), corpus=FakeCorpus()).status == 'completed'
    missed = f'metrics.jsonl ends at step {kept}, the newest checkpoint is of step 5: the rows between are lost'
    assert (missed in told) == (kept < 5) and losses(folder) == [*whole[:kept], whole[5]]


def test_a_step_without_its_manifest_was_never_committed(copy, whole):
    folder, cfg = copy
    (folder / 'checkpoints' / '5' / manifest.NAME).unlink()
    told = []
    fit(cfg, lambda kind, data: told.append(data.get('text', '')), corpus=FakeCorpus())
    assert 'the save of step 5 had been cut short; removed what it left' in told
    assert 'going on from the checkpoint of step 4' in told and losses(folder) == whole


def test_nothing_old_is_removed_before_the_new_one_is_sealed(tmp_path, monkeypatch):
    """At the moment of each manifest the older checkpoints are all there; a manifest that fails leaves them."""
    from test_checkpoint import META, state

    real, seen = manifest.seal, []

    def seal(folder):
        seen.append(manifest.steps(tmp_path))
        if folder.name == '3':
            raise OSError(28, 'No space left on device')
        real(folder)

    monkeypatch.setattr(manifest, 'seal', seal)
    with pytest.raises(Exception, match='No space left on device'), Checkpoints(tmp_path, keep=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(), META)
        ckpt.wait()
    assert seen == [[], [1], [2]] and manifest.steps(tmp_path) == [2]


def test_a_removal_that_was_never_begun_is_made_up_for(tmp_path, monkeypatch):
    """A run killed between its last manifest and the removal of what is older: the next start removes it, once it has read the newest."""
    folder = tmp_path / 'run'
    cfg = edit(CFG, {'run.dir': str(folder), 'run.keep': 1})
    with monkeypatch.context() as m:
        m.setattr(Checkpoints, '_retire', lambda self: None)
        assert fit(cfg, corpus=FakeCorpus()).step == 6
    assert manifest.steps(folder / 'checkpoints') == [2, 4, 6]
    (folder / 'outcome.json').unlink()
    damaged = pathlib.Path(shutil.copytree(folder, tmp_path / 'damaged'))
    assert fit(cfg, corpus=FakeCorpus()).step == 6
    assert manifest.steps(folder / 'checkpoints') == [6] and manifest.leftovers(folder / 'checkpoints') == []
    with open(next((damaged / 'checkpoints' / '6' / 'params').rglob('d/*')), 'r+b') as f:
        f.truncate(3)
    with pytest.raises(BadData, match='checkpoints/6'):
        fit(edit(cfg, {'run.dir': str(damaged)}), corpus=FakeCorpus())
    assert manifest.steps(damaged / 'checkpoints') == [2, 4, 6], 'the newest is torn: those before it are needed'


def test_an_error_of_a_background_write_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    from spannorm_jax.errors import StorageError

    real, stepped = manifest.seal, []

    def seal(folder):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(manifest, 'seal', seal)
    cfg = edit(CFG, {'run.dir': str(tmp_path / 'r'), 'run.steps': 400, 'run.checkpoint_every': 2, 'optim.schedule': 'constant'})
    with pytest.raises(StorageError, match='cannot write a checkpoint to .*No space left'):
        fit(cfg, lambda kind, data: stepped.append(data['step']) if kind == 'step' else None, corpus=FakeCorpus())
    assert max(stepped) <= 5  # at the next save at the latest, whatever the disk's speed
    monkeypatch.setattr(manifest, 'seal', real)
    assert fit(edit(cfg, {'run.steps': 4}), corpus=FakeCorpus()).status == 'completed'


def test_spikes_are_counted_against_the_median_of_201(tmp_path):
    pos = Position()
    draw = np.random.default_rng(0)
    values = (3 + 0.1 * draw.standard_normal(300)).tolist()
    values[250] = 5.0
    for i, x in enumerate(values):
        pos = pos.after(x, 1, True)
        assert spike_score(pos.recent) == pytest.approx(x - np.median(values[max(0, i - 200) : i + 1]), abs=1e-12)
    assert pos.spikes == 1 and len(pos.recent) == 201
    assert pos.after(float('nan'), 1, False).spikes == 1 and spike_score((*pos.recent, None)) is None
    assert from_dict(Position, json.loads(json.dumps(dataclasses.asdict(pos)))) == pos  # through a checkpoint, to the last bit
    assert rundir.smoothed(pos.recent) == pytest.approx(np.mean(values[-20:]))


@pytest.mark.parametrize('path', GOLDEN, ids=lambda p: p.name.removesuffix('.tar.xz'))
def test_old_checkpoints_restore_and_go_on(tmp_path, path):
    """Written once by the version of their format, kept for ever: every array, and the losses of the steps that follow."""
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path, filter='data')
    (folder,) = tmp_path.iterdir()
    expected = json.loads((folder / 'expected.json').read_text())
    with Checkpoints(folder / 'checkpoints', read_only=True) as c:
        assert c.steps() == [4] and c.damage(4) is None
        found = c.manager.restore(4, args=ocp.args.Composite(params=ocp.args.StandardRestore(), optim=ocp.args.StandardRestore()))
    leaves = jax.tree_util.tree_flatten_with_path({'params': found['params'], 'optim': found['optim']})[0]
    sums = {jax.tree_util.keystr(p, simple=True, separator='.'): x for p, x in leaves}
    assert set(sums) == set(expected['abs_sums'])
    for name, (total, shape) in expected['abs_sums'].items():
        assert list(sums[name].shape) == shape and np.abs(np.asarray(sums[name], np.float64)).sum() == total, name
    assert fit(edit(read_config(folder), {'run.dir': str(folder)}), corpus=FakeCorpus()).status == 'completed'
    np.testing.assert_allclose(losses(folder), expected['losses'], rtol=1e-4)


def test_spannorms_blocks_of_format_1_are_today_one_run(tmp_path):
    """Format 1 kept the first block, and in it the norm of the embedding, apart: parameters and moments, layer by layer."""
    with tarfile.open(pathlib.Path(__file__).parent / 'golden_checkpoints' / 'format1_scanned.tar.xz') as tar:
        tar.extractall(tmp_path, filter='data')
    cfg = read_config(tmp_path / 'scanned')
    made = program(cfg, make_mesh(cfg.mesh))
    with Checkpoints(tmp_path / 'scanned' / 'checkpoints', read_only=True) as c:
        old = c.manager.restore(4, args=ocp.args.Composite(params=ocp.args.StandardRestore(), optim=ocp.args.StandardRestore()))
        new = c.restore(4, made.abstract)
        alone = c.restore_params(4, made.abstract.params)
    first, rest = old['params']['stack']['blocks_0'], old['params']['stack']['blocks_1']
    assert cfg.model.layers == 3 and len(first['attn']['q']) == 1 and len(rest['attn']['q']) == 2
    blocks = new.params['stack']['blocks_0']
    for sub, name in (('attn', 'q'), ('ffn', 'down'), ('norm_attn_sum', 'gain')):
        np.testing.assert_array_equal(blocks[sub][name], np.concatenate([first[sub][name], rest[sub][name]]))
    np.testing.assert_array_equal(new.params['stack']['norm_embed']['gain'], first['norm_embed']['gain'][0])
    np.testing.assert_array_equal(new.params['head'], old['params']['head'])
    jax.tree.map(np.testing.assert_array_equal, alone, new.params)
    moments = {jax.tree_util.keystr(p, simple=True, separator='.'): x for p, x in jax.tree_util.tree_flatten_with_path(new.opt_state)[0]}
    checked = 0
    for path, x in moments.items():
        if 'blocks_0.attn.q' in path:
            np.testing.assert_array_equal(x, np.concatenate([old['optim'][path], old['optim'][path.replace('blocks_0', 'blocks_1')]]))
            checked += 1
    assert checked == 2 and all(x.shape == s.shape for x, s in zip(moments.values(), jax.tree.leaves(made.abstract.opt_state), strict=True))


def test_there_is_an_old_checkpoint_of_every_format_and_layout():
    names = {p.name.removesuffix('.tar.xz') for p in GOLDEN}
    assert names == {f'format{f}_{layout}' for f in range(1, FORMAT + 1) for layout in ('scanned', 'unrolled', 'moe_muon')}
