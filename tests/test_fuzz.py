"""Whatever a file says, a parser gives a value or one of our errors: no crash, no hang, bounded memory. Inputs are mutated valid files.

FUZZ_EXECUTIONS (default a few thousand, with --full a million) and FUZZ_SEED choose how many and which; a failure prints its input.
"""

import contextlib
import json
import os
import random
import resource
import time

import pytest

from spannorm_jax import manifest
from spannorm_jax.config import Config, from_dict, to_dict
from spannorm_jax.data import meta as data_meta
from spannorm_jax.data.readers import Piece, documents
from spannorm_jax.data.tokenizer import load_tokenizer
from spannorm_jax.errors import BadData, UserError
from spannorm_jax.json_file import SMALL, parse_json, read_json
from spannorm_jax.load import read_config
from spannorm_jax.rundir import Position, read_outcome
from spannorm_jax.track import dump_row, parse_rows, read_rows

pytestmark = pytest.mark.reliability
SEED = int(os.environ.get('FUZZ_SEED', 20261130))
SLOWEST_S = 5.0  # for an input of a few kB, on a machine that does other things too
MOST_MB = 200  # that all executions together may add to the peak of this process

CONFIG = json.dumps(to_dict(Config())).encode()
ROWS = ''.join(dump_row({'step': i, 'train/loss': 3.5, 'layer/rms': [1.0, None], 'perf/mfu': None}) for i in range(4)).encode()
OUTCOME = b'{"status": "completed", "step": 8, "reason": "", "first_nonfinite": null, "skipped": 0, "rollbacks": 0, "corpus": "x"}'
POSITION = b'{"format": 1, "step": 4, "batch": 4, "tokens": 9, "skipped": 0, "rollbacks": 0, "recent": [1.5, null], "lowest": 1.0}'
JSONL = b'{"text": "one"}\n{"text": "two \\u00e9", "x": [1, {"y": null}]}\n\n{"text": ""}\n'
SPECIAL = {'id': 0, 'content': '</s>', 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
TOKENIZER = json.dumps(
    dict.fromkeys(('truncation', 'padding', 'normalizer', 'post_processor', 'decoder'))
    | {'version': '1.0', 'pre_tokenizer': {'type': 'Whitespace'}, 'added_tokens': [SPECIAL]}
    | {'model': {'type': 'WordLevel', 'vocab': {'</s>': 0, 'a': 1, 'b': 2}, 'unk_token': 'a'}}
).encode()
SHA = '0' * 64
SPLITS = {n: {'documents': 1, 'tokens': 5, 'bytes': 4, 'shards': [[f'{n}-00000.array_record', 5]]} for n in ('train', 'validation', 'test')}
META = json.dumps(
    {'version': 1, 'key': SHA, 'source': 's', 'hash': SHA, 'dtype': '<u2', 'block': 4096, 'duplicates': 0, 'empty': 0, 'skipped_files': 0}
    | {'tokenizer': {'name': 'bytes', 'fingerprint': SHA, 'vocab': 3, 'bos': 2, 'eos': 2, 'file': None}, 'splits': SPLITS}
    | {'unigram': [1, 1, 3]}
).encode()


class In:
    """One file of a folder, written anew for each execution."""

    def __init__(self, folder, name, parse):
        self.path, self.parse = folder / name, parse
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, data):
        self.path.write_bytes(data)
        return self.parse(self.path)


def sealed(folder):
    (folder / 'step').mkdir()
    (folder / 'step' / 'a').write_bytes(b'abc')
    manifest.seal(folder / 'step')
    return (folder / 'step' / manifest.NAME).read_bytes()


def targets(folder):
    """name -> (valid input, parser of bytes)."""
    return {
        'config': (CONFIG, lambda data: from_dict(Config, parse_json(data, 'config'))),
        'config.json': (CONFIG, In(folder, 'run/config.json', lambda p: read_config(p.parent))),
        'metrics': (ROWS, lambda data: parse_rows(data.decode('utf-8', 'replace'), 'metrics')),
        'metrics.jsonl': (ROWS, In(folder, 'metrics.jsonl', read_rows)),
        'outcome.json': (OUTCOME, In(folder, 'out/outcome.json', lambda p: read_outcome(p.parent))),
        'position': (POSITION, lambda data: Position.from_meta(parse_json(data, 'meta'))),
        'manifest': (sealed(folder), In(folder, f'step/{manifest.NAME}', lambda p: manifest.faults(p.parent))),
        'meta.json': (META, In(folder, 'prepared/meta.json', lambda p: data_meta.read_meta(p.parent))),
        'jsonl': (JSONL, In(folder, 'x.jsonl', lambda p: [d.text for d in documents(Piece('jsonl', str(p), 0, -1, 0, 1 << 20), 'text')])),
        'tokenizer.json': (TOKENIZER, In(folder, 'tok/tokenizer.json', lambda p: load_tokenizer(str(p)).encode('a b'))),
        'tokenizer_config.json': (b'{"eos_token": {"content": "</s>"}}', In(folder, 'tok/tokenizer_config.json', tokenizer_beside)),
    }


def tokenizer_beside(path):
    (path.parent / 'tokenizer.json').write_bytes(TOKENIZER)
    return load_tokenizer(str(path.parent / 'tokenizer.json')).eos


PIECES = [b'[' * 2000, b'{"a":' * 2000, b'9' * 30, b'9' * 5000, b'"../../etc/passwd"', b'"/etc/passwd"', b'"\\ud800"', b'\\u0000', b'\r\n']
PIECES += b'1e999 -1 NaN Infinity null true \x00 \xff\xfe \xef\xbb\xbf "" [] {} 0.1 "a" , : } ]'.split() + [b'\n', b' ']


def mutate(draw, data, depth=0):
    """Bytes near valid ones: flips, cuts, repeats, foreign pieces; or a JSON value within, exchanged."""
    kind = draw.randrange(7)
    if kind == 0 and data:
        i = draw.randrange(len(data))
        data = data[:i] + bytes([data[i] ^ 1 << draw.randrange(8)]) + data[i + 1 :]
    elif kind == 1:
        data = data[: draw.randrange(len(data) + 1)]
    elif kind == 2:
        i, j = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data = data[:i] + data[j:]
    elif kind == 3:
        i, j = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data = data[:j] + data[i:j] * draw.choice([1, 2, 20]) + data[j:]
    elif kind == 4:
        i = draw.randrange(len(data) + 1)
        data = data[:i] + draw.choice(PIECES) + data[i:]
    else:
        with contextlib.suppress(ValueError, RecursionError):
            tree = json.loads(data)
            exchange(draw, tree)
            data = json.dumps(tree).encode()
    return mutate(draw, data, depth + 1) if depth < 4 and draw.random() < 0.3 and len(data) < 1 << 16 else data


def exchange(draw, tree):
    """Another value, of a kind of its own, at a random place."""
    while isinstance(tree, dict | list) and tree:
        key = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
        if not isinstance(tree[key], dict | list) or draw.random() < 0.3:
            new = [None, True, -1, 0, 1.5, 1e308, 2**40, 'x', '../x', '', [], {}, [[1]], {'a': 1}, ['x'] * 3, 'y' * 500]
            if draw.random() < 0.2:
                del tree[key]
            else:
                tree[key] = draw.choice(new)
            return
        tree = tree[key]


def fuzz(name, count, folder):
    valid, parse = targets(folder)[name]
    parse(valid)  # so that what follows is near something that is right
    draw, good = random.Random(f'{SEED} {name}'), 0
    begun_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(count):
        data = mutate(draw, valid)
        begun = time.perf_counter()
        try:
            parse(data)
            good += 1
        except UserError as e:
            assert str(e)
        except BaseException as e:
            raise AssertionError(f'{name}, execution {i}, seed {SEED}: {type(e).__name__}: {e}\n{data[:2000]!r}') from e
        taken = time.perf_counter() - begun
        assert taken < SLOWEST_S, f'{name}, execution {i}: {taken:.1f} s\n{data[:2000]!r}'
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun_kb) / 1024
    assert grown_mb < MOST_MB, f'{name}: {grown_mb:.0f} MB'
    assert 0 < good < count  # neither all nor none are valid: the mutations are near the edge
    return good


QUICK = {'config': 500, 'config.json': 200, 'meta.json': 400, 'tokenizer.json': 300, 'tokenizer_config.json': 100, 'manifest': 400}
NAMES = [
    'config', 'config.json', 'metrics', 'metrics.jsonl', 'outcome.json', 'position', 'manifest', 'meta.json', 'jsonl', 'tokenizer.json',
    'tokenizer_config.json',
]  # fmt: skip


@pytest.mark.parametrize('name', NAMES)
def test_mutated_files(name, tmp_path):
    fuzz(name, QUICK.get(name, 1000), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_many_mutated_files(name, tmp_path, capsys):
    count = int(os.environ.get('FUZZ_EXECUTIONS', 100_000))
    begun = time.perf_counter()
    good = fuzz(name, count, tmp_path)
    with capsys.disabled():
        print(
            f'\n{name}: {count:,} executions, seed {SEED}, {good:,} valid, {count / (time.perf_counter() - begun):,.0f} a second',
            flush=True,
        )


def test_a_file_that_is_too_long_is_refused_without_being_read(tmp_path):
    path = tmp_path / 'config.json'
    with path.open('wb') as f:
        f.truncate(1 << 40)  # a terabyte of NUL, on paper
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadData, match='longer than 1 MiB'):
        read_json(path, SMALL)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun < 64 * 1024
    rows = tmp_path / 'metrics.jsonl'
    with rows.open('wb') as f:
        f.truncate(1 << 40)  # one line without an end
    with pytest.raises(BadData, match='line 1: longer than 16 MiB'):
        read_rows(rows)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun < 256 * 1024


def test_nothing_of_ours_can_run_what_a_file_says():
    """No pickle and no eval in the package, but where a configuration in Python is asked for (docs/reliability.md)."""
    import pathlib
    import re

    package = pathlib.Path(manifest.__file__).parent
    words = re.compile(r'\bpickle\b|\bcloudpickle\b|\beval\(|\bexec\(|allow_pickle=True|runpy|yaml\.load|torch\.load|shell=True')
    found = {p.name for p in package.rglob('*.py') if words.search(p.read_text())}
    assert found <= {'load.py'}
