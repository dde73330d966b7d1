"""What is typed: parsing, messages, exit codes, and each command on something tiny. In process unless a process is the point."""

import dataclasses
import errno
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from spannorm_jax import catalog, cli, commands, doctor, edit, load, options, score
from spannorm_jax.config import Config, ModelConfig, run_id, to_dict
from spannorm_jax.model_config import MLA, MOE
from spannorm_jax.parametrization import FIELDS as PARAMETRIZATION
from spannorm_jax.topology import TOPOLOGIES

TINY = (
    '--model.layers 2 --model.width 16 --model.heads 2 --data.seq 16 --data.batch 2 --run.steps 3 --run.eval-tokens 64 '
    '--mesh.devices 1 --optim.warmup-steps 1'
).split()


@pytest.fixture
def text(tmp_path):
    """A folder of documents large enough that every split gets some."""
    folder = tmp_path / 'text'
    folder.mkdir()
    for i in range(80):
        (folder / f'{i}.txt').write_text(f'document {i} ' * 20)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path


BAD_INPUT = {
    'no command': ('', 2, 'usage: spannorm COMMAND'),
    'unknown command': ('trian nano', 2, "unknown command 'trian'; did you mean 'train'?"),
    'no config': ('train', 2, 'needs a CONFIG: debug, dense_310m'),
    'options but no config': ('train --model.layers 3', 2, 'needs a CONFIG'),
    'unknown config': ('train nanno', 2, "unknown config 'nanno'; did you mean 'nano'?"),
    'config file that is not there': ('train ./nix.py', 66, "'./nix.py' does not exist"),
    'config path that is not there': ('train runs/nix', 66, "config 'runs/nix' does not exist"),
    'run that is not there': ('train runs/nix/config.json', 66, 'is not a run'),
    'mistyped section': ('train nano --modle.layers 3', 2, "did you mean '--model.layers'?"),
    'mistyped field': ('audit nano --model.layer 3', 2, "did you mean '--model.layers'?"),
    'field without its section': ('train nano --warmup_steps 3', 2, "did you mean '--optim.warmup-steps'?"),
    'unknown field': ('train nano --bogus 3', 2, "no option '--bogus'; `spannorm train --help` lists them"),
    'field without dashes': ('train nano model.kv_heads=2', 2, 'write --model.kv-heads 2 instead'),
    'not a number': ('train nano --model.layers x', 2, "--model.layers: invalid literal for int() with base 10: 'x'"),
    'not a choice': ('train nano --model.norm rms', 2, "invalid choice 'rms' for argument '--model.norm'"),
    'not true or false': ('train nano --model.v-norm maybe', 2, "invalid choice 'maybe'"),
    'no value': ('train nano --model.layers', 2, "Missing value for argument '--model.layers'"),
    'unknown topology': ('train nano --model.topology spam', 2, "unknown topology 'spam'; did you mean 'span'?"),
    'ambiguous topology': ('train nano --model.topology hybridnorm', 2, 'ambiguous'),
    'option of another topology': ('audit nano --model.topology pre --model.first-skip normed', 2, 'read by span'),
    'heads': ('train nano --model.heads 5', 2, 'model.heads = 5 does not divide model.width = 96'),
    'absent device': ('train nano --mesh.platform tpu --data.cache c', 2, "mesh.platform = 'tpu' is not there"),
    'two configs': ('train nano debug', 2, 'debug'),
    'missing data': ('train debug --mesh.devices 1 --data.source nix.txt', 66, "'nix.txt' does not exist"),
    'eval of nothing': ('eval runs/nix', 66, 'is not a run'),
    'eval of an unknown split': ('eval . --split tets', 2, "invalid choice 'tets'"),
    'prepare without a folder': ('prepare stdlib', 2, 'DIR'),
    'prepare nothing': ('prepare nix out', 66, "'nix' does not exist"),
    'superfluous argument': ('topologies spam', 2, 'spam'),
    'a number that is none': ('diagnose nano --rows 2147483648', 2, 'diagnose: --rows = 2147483648: expected a whole number below 2^31'),
    'one of several numbers': ('theory --depths 8 99999999999', 2, 'theory: --depths = 99999999999: expected a whole number'),
    'mistyped switch': ('doctor --jsn', 2, "did you mean '--json'?"),
}


@pytest.mark.parametrize('line, code, message', BAD_INPUT.values(), ids=list(BAD_INPUT))
def test_bad_input(line, code, message, here, capsys):
    assert cli.main(line.split()) == code
    out, err = capsys.readouterr()
    assert message in err and 'Traceback' not in err
    assert out == ''


def test_one_line_for_each_error(here, capsys):
    """A message is one line, whichever library found the mistake."""
    for line, _, _ in list(BAD_INPUT.values())[1:]:
        cli.main(line.split())
        assert len(capsys.readouterr().err.splitlines()) == 1, line


@pytest.mark.parametrize(
    'error, code, message',
    [
        (KeyboardInterrupt(), 130, 'interrupted'),
        (OSError(errno.ENOSPC, 'No space left on device', '/full'), 74, "No space left on device '/full'"),
        (OSError(errno.EROFS, 'Read-only file system'), 74, 'Read-only file system'),
        (
            jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore'),
            2,
            'Out of memory allocating 9 bytes.; ask',
        ),
    ],
)
def test_what_the_system_raises(error, code, message, monkeypatch, capsys):
    def examine():
        raise error

    monkeypatch.setattr(doctor, 'examine', examine)
    assert cli.main(['doctor']) == code
    assert message in capsys.readouterr().err


def test_a_bug_is_not_dressed_up(monkeypatch):
    def examine():
        raise OSError(errno.ENOENT, 'a bug')

    monkeypatch.setattr(doctor, 'examine', examine)
    with pytest.raises(OSError, match='a bug'):
        cli.main(['doctor'])


def settings(line):
    args = cli.parse('train', line.split())
    assert args is not None
    return args.settings


# Fields whose values must fit one another or a list of names.
BY_HAND = {
    'model.heads': 8, 'model.width': 64, 'model.kv_heads': 2, 'model.head_dim': 6, 'data.batch': 16, 'optim.accumulate': 2, 'mesh.data': 4,
    'model.experts': 16, 'model.experts_per_token': 4, 'model.expert_groups': 4, 'model.groups_per_token': 2, 'model.first_dense': 1,
    'optim.decay_roles': ('read', 'head'), 'optim.optimizer': 'muon', 'run.sinks': ('wandb',), 'run.accept': ('optim.clip',),
    'model.parametrization': 'completep', 'model.base_width': 64, 'model.base_head_dim': 8, 'model.base_layers': 2,
}  # fmt: skip


def another_value(path, hint, now):
    """A value that the field could have and has not."""
    choices = [c for c in getattr(hint, '__args__', ()) if c != now and c is not type(None)]
    if path in BY_HAND:
        return BY_HAND[path]
    if choices and isinstance(choices[0], str):
        return choices[0]
    if now is None:
        return {int: 3, float: 0.25, str: 'x', bool: True}[choices[0]]
    return {bool: lambda: not now, int: lambda: now + 2, float: lambda: now / 2 + 0.01, str: lambda: now + 'x'}[type(now)]()


def test_overrides_reach_every_field():
    """Every field of Config is set through its option to another value, in as few command lines as the topologies' own options allow."""
    readers = {option: name for name, entry in TOPOLOGIES.items() for option in entry.options}
    # Latent attention and experts exclude other fields: each gets a line of its own.
    readers |= dict.fromkeys((*MLA, 'attention'), 'post') | dict.fromkeys((*MOE, 'experts'), 'lns')
    readers |= dict.fromkeys(('parametrization', *PARAMETRIZATION), 'reordered')
    lines = {}
    for option, hint in cli.options_of(options.Train):
        path = option.removeprefix('--').replace('-', '_')
        if path == 'profile':  # no field: what this one start does besides
            continue
        topology = 'deepnorm' if path == 'model.init' else readers.get(path.removeprefix('model.'), 'pre')  # beta needs init = own
        base = edit(load.load_config('nano'), {'model.topology': topology})
        if path != 'model.topology':
            section, _, name = path.partition('.')
            now = getattr(getattr(base, section), name) if name else getattr(base, section)
            lines.setdefault(topology, {})[path] = another_value(path, hint, now)
    for topology, changes in lines.items():
        words = ['nano', '--model.topology', topology]
        for path, value in changes.items():
            words += [f'--{path}'.replace('_', '-'), *map(str, value if isinstance(value, tuple) else (value,))]
        expected = edit(load.load_config('nano'), {'model.topology': topology} | changes)
        assert cli.parse('train', words).settings == expected
    seen = {path for changes in lines.values() for path in changes}
    assert {'name', 'model.dtype', 'mesh.tensor', 'run.nonfinite', 'model.streams', 'model.first_skip', 'model.v_dim'} <= seen and len(
        seen
    ) > 120


def test_spellings_of_an_option():
    assert settings('nano --optim.lr_peak=0.5 --model.tie-embeddings --name a').model.tie_embeddings is True
    assert settings('--run.steps 7 nano --model.v-norm true').run.steps == 7
    assert settings('nano --model.v-norm false --mesh.data -1').mesh.data == -1
    assert settings('nano --model.kv-heads None').model.kv_heads is None
    assert settings('nano --model.topology PreNorm').model.topology == 'pre'
    assert cli.parse('audit', ['--json', 'debug']).json and cli.parse('audit', ['debug', '--json']).json
    assert settings('nano') == load.load_config('nano')


def test_every_parser_without_jax():
    """Building every parser and printing every help imports no jax, numpy or matplotlib, which take seconds."""
    code = (
        'import sys\nfrom spannorm_jax import cli\n'
        'assert cli.main(["--help"]) == 0\n'
        'for name in cli.COMMANDS: assert cli.main([name, "--help"]) == 0\n'
        'assert cli.main(["train", "nano", "--help"]) == 0\n'
        'heavy = {"jax", "flax", "numpy", "matplotlib", "orbax", "grain"} & set(sys.modules)\n'
        'assert not heavy, heavy\n'
        'import spannorm_jax; assert "jax" not in sys.modules; spannorm_jax.LM; assert "jax" in sys.modules'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f'usage: spannorm {name}' in done.stdout
    assert done.stdout.count('Example: spannorm ') == len(cli.COMMANDS) + 2


def test_help_takes_less_than_a_second():
    """Processor time of a whole process, which whatever shares its core stretches too: the least of some."""
    took = []
    while len(took) < 5 and min(took, default=1.0) >= 1.0:
        before = os.times()
        done = subprocess.run([sys.executable, '-m', 'spannorm_jax', 'train', '--help'], capture_output=True, text=True)
        after = os.times()
        assert done.returncode == 0 and '--model.topology' in done.stdout
        took.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(took) < 1.0


def test_a_closed_pipe_is_quiet():
    done = subprocess.run(
        f'{sys.executable} -m spannorm_jax --help | true; echo ${{PIPESTATUS[0]}}',
        shell=True,
        capture_output=True,
        text=True,
        executable='bash',
    )
    assert done.stderr == '' and done.stdout.strip() == '0'


def test_text_that_the_terminal_cannot_show():
    """Characters that its encoding lacks, and a file's name of bytes that are no text, show as escapes and end nothing."""
    program = (
        'import sys, spannorm_jax.__main__ as m; from spannorm_jax import cli\n'
        'cli.main = lambda argv: print("\\u00e9 \\udcff", ascii(argv[0])); m.main()'
    )
    for encoding, shown in (('ascii', '\\xe9 \\udcff'), ('utf-8', 'é \\udcff')):
        line = [sys.executable, '-c', program, b'\xff']
        done = subprocess.run(line, env=os.environ | {'PYTHONIOENCODING': encoding}, capture_output=True, check=True)
        assert done.stdout.decode() == f"{shown} '\\udcff'\n"


def test_version(capsys):
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out == 'spannorm 0.1.0\n'


class TestConfigFiles:
    def file(self, here, text):
        path = here / 'mine.py'
        path.write_text(text)
        return str(path)

    def test_of_ones_own(self, here):
        path = self.file(here, 'from spannorm_jax import Config, ModelConfig\ndef get(): return Config("mine", ModelConfig(layers=3))')
        assert settings(f'{path} --model.width 64') == Config('mine', ModelConfig(layers=3, width=64))

    @pytest.mark.parametrize(
        'text, message',
        [
            ('x = 1', 'expected a function get()'),
            ('def get(): return {}', 'expected a function get()'),
            ('def get():\n  return undefined', 'line 2: NameError'),
            ('def get(:', 'line 1: SyntaxError'),
            ('from spannorm_jax import ModelConfig\ndef get(): return ModelConfig(heads=7)', 'does not divide'),
        ],
    )
    def test_with_a_mistake(self, here, capsys, text, message):
        assert cli.main(['train', self.file(here, text)]) == 2
        err = capsys.readouterr().err
        assert message in err and 'mine.py' in err and 'Traceback' not in err

    @pytest.mark.parametrize(
        'text, code, message',
        [
            ('{"model": {"layers": "x"}}', 2, "model.layers = 'x'"),
            ('{"model": {"layer": 1}}', 2, "did you mean 'layers'?"),
            ('[1', 65, 'is not JSON'),
            ('[' * 100_000, 65, 'is not JSON'),
        ],
    )
    def test_json_with_a_mistake(self, here, capsys, text, code, message):
        (here / 'config.json').write_text(text)
        assert cli.main(['train', 'config.json']) == code
        assert message in capsys.readouterr().err

    def test_json_of_a_run_points_at_that_run(self, here):
        cfg = load.load_config('debug')
        run = here / 'moved'
        run.mkdir()
        (run / 'config.json').write_text(json.dumps(to_dict(cfg)))
        assert load.load_config(str(run / 'config.json')) == cfg  # a copy of a configuration, nothing has run here
        (run / 'metrics.jsonl').touch()
        assert load.load_config(str(run / 'config.json')) == edit(cfg, {'run.dir': str(run)})
        assert load.load_config(str(run)).run.dir == str(run)


def test_train_eval_resume(here, text, capsys):
    """A run from nothing to its end; again; its evaluation; and with a changed configuration."""
    line = ['train', 'debug', *TINY, '--data.source', str(text), '--run.eval-tokens', 'None']
    assert cli.main(line) == 0
    out, err = capsys.readouterr()
    (run,) = (here / 'runs').iterdir()
    assert run.name == run_id(cli.parse('train', line[1:]).settings)
    last = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
    assert f'validation {last["eval/bits_per_byte"]:.3f} bits/byte (bigram model: ' in out and f'runs/{run.name}/loss.png' in out
    assert 'step 3/3' in err and (run / 'loss.png').stat().st_size > 1000

    assert cli.main(line) == 0
    assert 'already complete' in capsys.readouterr().err
    assert cli.main(['train', str(run / 'config.json')]) == 0
    assert 'already complete' in capsys.readouterr().err
    assert cli.main(['train', str(run / 'config.json'), '--model.width', '32']) == 2
    assert 'model.width' in capsys.readouterr().err

    for split, group in (('validation', 'eval'), ('test', 'test')):
        assert cli.main(['eval', str(run), '--split', split, '--json']) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert re.search(r'^evaluating: (\d+) of \1 batches$', err, re.M)
        np.testing.assert_allclose(
            [found['loss'], found['bits_per_byte']], [last[f'{group}/loss'], last[f'{group}/bits_per_byte']], rtol=1e-6
        )
        np.testing.assert_allclose(found['perplexity'], np.exp(found['loss']), rtol=1e-12)
        np.testing.assert_allclose(found['bits_per_byte'] * np.log(2) * found['bytes'], found['loss'] * found['tokens'], rtol=1e-9)
        assert found['step'] == 3 and found['tokens'] == found['bytes'] + found['documents'] and 'rows of 16 tokens' in found['protocol']
    assert cli.main(['eval', str(run), '--mesh.tensor', '2', '--mesh.devices', '4']) == 0
    assert f'{last["eval/bits_per_byte"]:.3f}' in capsys.readouterr().out

    (text / '1.txt').write_text('changed')
    assert cli.main(['eval', str(run)]) == 65
    assert '--source' in capsys.readouterr().err
    assert cli.main(['eval', str(run), '--source', str(text)]) == 0


def test_eval_before_a_checkpoint(here, capsys):
    (here / 'config.json').write_text(json.dumps(to_dict(Config())))
    assert cli.main(['eval', '.']) == 66
    assert 'no checkpoint yet' in capsys.readouterr().err


def test_exit_code_and_message_of_a_run_that_stops(here, text, capsys):
    code = cli.main(
        ['train', 'debug', *TINY, '--data.source', str(text), '--optim.lr-peak', '1e30', '--optim.clip', '0', '--run.steps', '9']
    )
    out = capsys.readouterr().out
    assert code == 70 and 'diverged at step' in out


def test_prepare(here, text, capsys):
    assert cli.main(['prepare', str(text), 'out', '--workers', '1']) == 0
    out, err = capsys.readouterr()
    meta = json.loads((here / 'out/meta.json').read_text())
    assert f'{meta["splits"]["train"]["tokens"]:,} tokens' in out and 'preparing text' in err
    assert cli.main(['prepare', str(text), 'out', '--json']) == 0
    assert json.loads(capsys.readouterr().out) == meta
    assert cli.main(['prepare', str(text / '1.txt'), 'out']) == 2
    assert 'already holds' in capsys.readouterr().err


def test_audit_agrees_with_the_model(capsys):
    from spannorm_jax.model import unstack

    cfg = edit(load.load_config('debug'), {'model.topology': 'siamese_olmo'})
    assert cli.main(['audit', 'debug', '--model.topology', 'siamese_olmo', '--json']) == 0
    rows = {row['name']: row for row in json.loads(capsys.readouterr().out)}
    import jax

    from spannorm_jax import LM

    params = unstack(cfg.model, LM(cfg.model).init(jax.random.key(cfg.run.seed)))
    assert rows.keys() == params.keys() and 'layers.1.attn.o' in rows
    for name, value in params.items():
        np.testing.assert_allclose([rows[name]['mean'], rows[name]['std']], [np.mean(value), np.std(value)], atol=1e-6)
    assert rows['layers.0.ffn.down'] | {'mean': 0, 'std': 0} == {
        'name': 'layers.0.ffn.down', 'role': 'write', 'shape': [88, 32], 'fan_in': 88, 'intended_mean': 0.0, 'intended_std': 88**-0.5 / 2,
        'mean': 0, 'std': 0, 'decays': True, 'dtype': 'float32', 'bytes_per_device': 4 * 88 * 32, 'ok': True,
    }  # fmt: skip


def test_audit_in_pieces_and_on_a_mesh(monkeypatch):
    """A model too large to draw at once is drawn parameter by parameter: the same numbers; bytes are those of one shard."""
    from spannorm_jax import audit

    cfg = edit(load.load_config('debug'), {'mesh.fsdp': 2, 'mesh.tensor': 4, 'model.layers': 1, 'model.topology': 'post'})
    whole = list(audit.audit(cfg))
    monkeypatch.setattr(audit, 'WHOLE_PARAMS', 0)
    for a, b in zip(whole, audit.audit(cfg), strict=True):
        assert a[:6] == b[:6] and a[8:] == b[8:]
        np.testing.assert_allclose(a[6:8], b[6:8], rtol=1e-5, atol=1e-7)
    size = {row.name: row.bytes_per_device for row in whole}
    # width splits over fsdp = 2; ffn over tensor = 4; 2 heads do not divide over 4
    assert size['layers.0.ffn.up'] == 4 * 32 * 88 // 8 and size['layers.0.attn.q'] == 4 * 32 * 32 // 2


def test_audit_finds_a_wrong_std(monkeypatch, capsys):
    """The depth factor left off the matrices that write to the stream, as in many a published code."""
    from spannorm_jax import audit

    def without_the_factor(cfg):
        for name, layers, info, value in values(cfg):
            yield name, layers, info, value * 2 if name == 'ffn.down' else value  # sqrt(2L) = 2

    values = audit._values
    monkeypatch.setattr(audit, '_values', without_the_factor)
    assert cli.main(['audit', 'debug']) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines() if 'MISMATCH' in line] == ['ffn.down']
    assert '2 of 21 parameters' in err and 'layers.0.ffn.down, layers.1.ffn.down' in err


SITES = {
    'pre': 'attn_in ffn_in final',
    'post': 'attn_sum ffn_sum',
    'span': 'attn_sum ffn_sum embed',
    'peri': 'attn_in attn_branch ffn_in ffn_branch embed final',
    'hybrid': 'q k v ffn_in final',
    'subln': 'attn_in attn_inner ffn_in ffn_inner final',
}


def test_topologies(capsys):
    assert cli.main(['topologies', '--json']) == 0
    rows = {row['name']: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(TOPOLOGIES)
    assert {name: ' '.join(rows[name]['norm_sites']) for name in SITES} == SITES
    assert rows['siamese_olmo']['extra_parameters'] == ['c1'] and rows['pre']['extra_parameters'] == []
    assert 'final_x' in rows['siamese_olmo']['norm_sites']
    assert 'attn_alpha' in rows['hc']['extra_parameters'] and rows['deepnorm']['options'] == ['alpha', 'beta']
    assert all(row['source'].startswith('arXiv:') and row['equation'] for row in rows.values())
    assert cli.main(['topologies']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[:1] == [name] for line in lines for name in TOPOLOGIES) == len(TOPOLOGIES)
    assert catalog.markdown(list(rows.values())).count('\n') == len(rows) + 1


def test_doctor(capsys):
    import jax

    assert cli.main(['doctor', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['versions']['jax'] == jax.__version__ and len(found['devices']) == 8 and found['backend'] == 'cpu'
    assert found['disk']['free_bytes'] > 0 and 'text' in found['extras']
    assert cli.main(['doctor']) == 0
    assert f'jax {jax.__version__}' in capsys.readouterr().out


@pytest.mark.parametrize(
    'installed, platforms, why, mend',
    [
        ((), 'cpu', 'without its cuda plugin', "pip install 'spannorm-jax[cuda]'"),
        (('jax-cuda12-plugin',), 'cpu', 'JAX_PLATFORMS=cpu keeps JAX away', 'unset JAX_PLATFORMS'),
        (('jax-cuda12-plugin',), '', 'its backend does not start', 'driver'),
    ],
)
def test_doctor_explains_an_idle_gpu(monkeypatch, capsys, installed, platforms, why, mend):
    monkeypatch.setattr(doctor, '_nvidia', lambda: 'GPU 0: NVIDIA Made-up')
    real = doctor.version
    monkeypatch.setattr(doctor, 'version', lambda name: '1.0' if name in installed else None if 'cuda' in name else real(name))
    monkeypatch.setenv('JAX_PLATFORMS', platforms)
    assert cli.main(['doctor']) == 0
    out = capsys.readouterr().out
    assert 'GPU 0: NVIDIA Made-up: NOT USED' in out and why in out and mend in out


def test_json_has_no_nan(capsys):
    commands.print_json({'a': [float('nan'), 1.5], 'b': (float('inf'), None, True)})
    assert json.loads(capsys.readouterr().out) == {'a': [None, 1.5], 'b': [None, None, True]}


class TestProgress:
    def lines(self, capsys, events, seconds):
        from spannorm_jax.progress import Progress

        clock = iter(seconds)
        with pytest.MonkeyPatch.context() as m:
            m.setattr('spannorm_jax.progress.time.monotonic', lambda: next(clock))
            with Progress() as progress:
                for kind, data in events:
                    progress(kind, data)
        return capsys.readouterr().err.splitlines()

    def test_plain_lines(self, capsys):
        steps = [('step', {'step': i, 'steps': 10, 'loss': 1.0 / i}) for i in (1, 2, 3, 10)]
        row = ('row', {'step': 1, 'perf/tokens_per_s': 1234.5, 'eval/bits_per_byte': 2.5})
        got = self.lines(capsys, [steps[0], row, *steps[1:], ('message', {'text': 'end [of] it'})], (0.0, 4.0, 6.0, 7.0))
        assert got == [
            'training: step 1/10  loss 1.0000',
            'step 1  validation 2.5000 bits/byte',
            'training: step 3/10  loss 0.3333  1,234 tokens/s  0:21 left',
            'training: step 10/10  loss 0.1000  1,234 tokens/s',
            'end [of] it',
        ]

    def test_bar_on_a_terminal(self):
        import io

        from rich.console import Console

        from spannorm_jax.progress import Progress

        out = io.StringIO()
        with Progress(Console(file=out, force_terminal=True, width=100)) as progress:
            progress('prepare', {'done': 1_000_000, 'all': 2_000_000})
            progress('step', {'step': 5, 'steps': 10, 'loss': 2.25})
            progress.bar.refresh()
        assert '1.0 of 2.0 MB' in out.getvalue() and 'step 5/10  loss 2.2500' in out.getvalue() and '50%' in out.getvalue()


def test_options_of_lists_every_field():
    names = {name for name, _ in cli.options_of(options.Audit)}
    sections = {f.name for f in dataclasses.fields(Config)}
    assert {f'--{f.name.replace("_", "-")}' for f in dataclasses.fields(options.Audit)} - names == {'--config', '--settings'}
    assert {name[2:].split('.')[0] for name in names if '.' in name} == sections - {'name'}
    assert score.PROTOCOLS and pathlib.Path(load.folder('configs')).is_dir() and time.time() > 0


@pytest.mark.skipif(sys.platform != 'linux', reason='a setting of the GNU C library')
@pytest.mark.parametrize('before, want', [(None, 'glibc.malloc.hugetlb=1'), ('glibc.malloc.perturb=0', 'glibc.malloc.perturb=0')])
def test_huge_pages(before, want):
    """The process starts again once, as itself: same number, same arguments, what is set stays."""
    program = (
        'import os, sys, spannorm_jax.__main__ as m; print(os.getpid(), flush=True); m.huge_pages(); '
        'print(os.environ["GLIBC_TUNABLES"], *sys.argv)'
    )
    environment = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'} | ({'GLIBC_TUNABLES': before} if before else {})
    out = subprocess.run([sys.executable, '-c', program, 'a b', '--c'], env=environment, capture_output=True, text=True, check=True).stdout
    *pids, last = out.splitlines()
    assert last == f'{want} -c a b --c' and len(set(pids)) == 1 and len(pids) == (1 if before else 2)


def test_a_program_that_calls_main_goes_on(tmp_path):
    """It is not started again, nor is it where the setting got lost on the way: no loop."""
    program = (
        'import os; print("once", flush=True); import spannorm_jax.__main__ as m; {}; m.main(); print(os.environ.get("GLIBC_TUNABLES"))'
    )
    environment = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
    for flags, call in (((), 'pass'), (('-X', 'spannorm_again'), 'm.huge_pages()')):
        line = [sys.executable, *flags, '-c', program.format(call)]
        out = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout
        assert out.startswith('once') and out.count('once') == 1 and out.endswith('None\n')
