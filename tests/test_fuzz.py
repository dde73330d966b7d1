"""Whatever a file says, a parser gives a value or one of our errors: no crash, no hang, bounded memory. Inputs are mutated valid files.

FUZZ_EXECUTIONS (with --full, ten million over all parsers) and FUZZ_SEED choose how many and which; a failure prints its input.
"""

import contextlib
import io
import json
import os
import random
import resource
import struct
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece

from spannorm_jax import ledger, manifest
from spannorm_jax.config import Config, edit, from_dict, to_dict
from spannorm_jax.data import meta as data_meta
from spannorm_jax.data.readers import Piece, documents
from spannorm_jax.data.sources import find
from spannorm_jax.data.tokenizer import load_tokenizer
from spannorm_jax.errors import BadData, UserError
from spannorm_jax.interop import families, huggingface, safetensors
from spannorm_jax.json_file import SMALL, parse_json, read_json
from spannorm_jax.ledger import CAUSES, COUNTS, Ledger
from spannorm_jax.load import read_config
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.rundir import Position, read_outcome
from spannorm_jax.track import dump_row, read_rows

pytestmark = pytest.mark.reliability
SEED = int(os.environ.get('FUZZ_SEED', 20261130))
SLOWEST_S = 2.0  # of a processor, for an input of a few kB
MOST_MB = 200  # that all executions together may add to the peak of this process

CONFIG = json.dumps(to_dict(Config())).encode()
ROWS = ''.join(dump_row({'step': i, 'train/loss': 3.5, 'layer/rms': [1.0, None], 'perf/mfu': None}) for i in range(4)).encode()
OUTCOME = b'{"status": "completed", "step": 8, "reason": "", "first_nonfinite": null, "skipped": 0, "rollbacks": 0, "corpus": "x"}'
POSITION = b'{"format": 1, "step": 4, "batch": 4, "tokens": 9, "skipped": 0, "rollbacks": 0, "recent": [1.5, null], "lowest": 1.0}'
TIME = json.dumps(dict.fromkeys(COUNTS, 3) | {'seconds': dict.fromkeys(CAUSES, 1.5)}).encode()
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


ARRAYS = {'a': {'dtype': 'F32', 'shape': [2, 3], 'data_offsets': [0, 24]}, 'b': {'dtype': 'BF16', 'shape': [4], 'data_offsets': [24, 32]}}
HEADER = json.dumps({'__metadata__': {'format': 'pt'}} | ARRAYS).encode()
INDEX = json.dumps({'metadata': {'total_size': 32}, 'weight_map': {'a': 'one.safetensors', 'b': 'one.safetensors'}}).encode()
DEEPSEEK = dict(
    attention='mla', kv_latent=8, nope_dim=4, rope_dim=4, v_dim=4, positions='rope_interleaved', experts=4, experts_per_token=2,
    shared_experts=1, first_dense=1,
)  # fmt: skip


class In:
    """One file of a folder, written anew for each execution: in place, since a file system may wait for the disk where one is cut to 0."""

    def __init__(self, folder, name, parse):
        self.path, self.parse = folder / name, parse
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def __call__(self, data):
        with self.path.open('r+b', buffering=0) as f:
            f.write(data)
            f.truncate()
        return self.parse(self.path)


def weights(header, held=bytes(32)):
    return struct.pack('<Q', len(header)) + header + held


def read_weights(path):
    return {name: np.array(entry.read()) for name, entry in safetensors.entries(path).items()}


def indexed(folder):
    """An index, beside the one file that it may name."""
    parse = In(folder, f'weights/{safetensors.INDEX}', lambda p: safetensors.folder_entries(p.parent))
    (folder / 'weights' / 'one.safetensors').write_bytes(weights(HEADER))
    return INDEX, parse


def hf(kind, folder, **fields):
    """The config.json of a model of another project."""
    family = families.FAMILIES[kind]
    valid = {'model_type': kind} | family.write(ModelConfig(topology='pre', layers=2, width=16, heads=4, ffn=24, **fields))
    parse = In(folder, f'{kind}/config.json', lambda p: huggingface._read(safetensors.read_json(p), p.parent))
    return json.dumps(valid).encode(), parse


def parquet():
    out = io.BytesIO()
    rows = {'n': list(range(40)), 'text': [f'some words {i % 7}' for i in range(40)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), out, row_group_size=25)
    return out.getvalue()


def texts(path):
    return [d.text for task in find(str(path)).tasks for piece in task for d in documents(piece, 'text')]


def pieces():
    """A SentencePiece model."""
    out, lines = io.BytesIO(), ['the quick brown fox', 'jumps over the lazy dog'] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=60, model_type='bpe', minloglevel=2, normalization_rule_name='identity'
    )
    return out.getvalue()


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
        'metrics.jsonl': (ROWS, In(folder, 'metrics.jsonl', read_rows)),
        'outcome.json': (OUTCOME, In(folder, 'out/outcome.json', lambda p: read_outcome(p.parent))),
        'time.json': (TIME, In(folder, 'time.json', kept_book)),
        'position': (POSITION, lambda data: Position.from_meta(parse_json(data, 'meta'))),
        'manifest': (sealed(folder), In(folder, f'step/{manifest.NAME}', lambda p: manifest.faults(p.parent))),
        'meta.json': (META, In(folder, 'prepared/meta.json', lambda p: data_meta.read_meta(p.parent))),
        'jsonl': (JSONL, In(folder, 'x.jsonl', lambda p: [d.text for d in documents(Piece('jsonl', str(p), 0, -1, 0, 1 << 20), 'text')])),
        'tokenizer.json': (TOKENIZER, In(folder, 'tok/tokenizer.json', lambda p: load_tokenizer(str(p)).encode('a b'))),
        'tokenizer_config.json': (b'{"eos_token": {"content": "</s>"}}', In(folder, 'beside/tokenizer_config.json', tokenizer_beside)),
        'tokenizer.model': (pieces(), In(folder, 'tok/tokenizer.model', lambda p: load_tokenizer(str(p)).encode('the fox'))),
        'parquet': (parquet(), In(folder, 'x.parquet', texts)),
        'safetensors': (weights(HEADER), In(folder, 'x.safetensors', read_weights)),
        'safetensors header': (HEADER, In(folder, 'y.safetensors', read_weights)),
        'safetensors index': indexed(folder),
        'hf llama': hf('llama', folder),
        'hf deepseek_v3': hf('deepseek_v3', folder, **DEEPSEEK),
    }


def kept_book(path):
    """No run hangs on time.json: one that makes no sense is begun anew."""
    book, before = Ledger(path.parent), ledger.read(path.parent)
    book.save()
    if before is None:
        raise BadData('begun anew')


def tokenizer_beside(path):
    if not (path.parent / 'tokenizer.json').exists():
        (path.parent / 'tokenizer.json').write_bytes(TOKENIZER)
    return load_tokenizer(str(path.parent / 'tokenizer.json')).eos


PIECES = [b'[' * 2000, b'{"a":' * 2000, b'9' * 30, b'9' * 5000, b'"../../etc/passwd"', b'"/etc/passwd"', b'"\\ud800"', b'\\u0000', b'\r\n']
PIECES += b'1e999 -1 NaN Infinity null true \x00 \xff\xfe \xef\xbb\xbf "" [] {} 0.1 "a" , : } ]'.split() + [b'\n', b' ']


def mutate(draw, data, depth=0):
    """Bytes near valid ones: flips, cuts, repeats, foreign pieces; or, in a line of JSON, a value within, exchanged."""
    kind = draw.randrange(7 if data[:1] == b'{' else 5)
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
            lines = data.split(b'\n')
            i = draw.randrange(len(lines))
            tree = json.loads(lines[i])
            exchange(draw, tree)
            lines[i] = json.dumps(tree).encode()
            data = b'\n'.join(lines)
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


# Of 1000 executions: the parsers that take longest get the fewest.
SHARES = {
    'jsonl': 150, 'safetensors': 120, 'safetensors header': 120, 'position': 100, 'safetensors index': 80,
    'outcome.json': 60, 'metrics.jsonl': 220, 'manifest': 40, 'tokenizer_config.json': 25, 'tokenizer.json': 20, 'meta.json': 20,
    'hf llama': 10, 'hf deepseek_v3': 10, 'config': 5, 'config.json': 5, 'time.json': 10, 'tokenizer.model': 3, 'parquet': 2,
}  # fmt: skip


def fuzz(name, count, folder):
    """How many of the executions gave a value, and by how much the peak of memory grew."""
    valid, parse = targets(folder)[name]
    if name == 'safetensors header':
        of_file, parse = parse, lambda header: of_file(weights(header))
    parse(valid)  # so that what follows is near something that is right
    draw, good = random.Random(f'{SEED} {name}'), 0
    begun_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(count):
        data = mutate(draw, valid)
        begun = time.process_time()
        try:
            parse(data)
            good += 1
        except UserError as e:
            assert str(e)
        except BaseException as e:
            raise AssertionError(f'{name}, execution {i}, seed {SEED}: {type(e).__name__}: {e}\n{data[:2000]!r}') from e
        taken = time.process_time() - begun
        assert taken < SLOWEST_S, f'{name}, execution {i}: {taken:.1f} s\n{data[:2000]!r}'
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun_kb) / 1024
    assert grown_mb < MOST_MB, f'{name}: {grown_mb:.0f} MB'
    assert 0 < good < count  # neither all nor none are valid: the mutations are near the edge
    return good, grown_mb


@pytest.mark.parametrize('name', SHARES)
def test_mutated_files(name, tmp_path):
    fuzz(name, max(200, 5 * SHARES[name]), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('name', SHARES)
def test_many_mutated_files(name, tmp_path, capsys):
    count = int(os.environ.get('FUZZ_EXECUTIONS', 10_000_000)) * SHARES[name] // 1000
    begun = time.process_time()
    good, grown_mb = fuzz(name, count, tmp_path)
    speed = count / (time.process_time() - begun)
    with capsys.disabled():
        print(f'\n{name}: {count:,} executions, seed {SEED}, {good:,} valid, {speed:,.0f} a second, +{grown_mb:.0f} MB', flush=True)


@pytest.mark.parametrize('data', [b'"a"', b'[]', b'7', b'null'])
def test_a_position_is_an_object(data):
    with pytest.raises(UserError, match='the position is'):
        Position.from_meta(parse_json(data, 'meta'))


@pytest.mark.parametrize('number', ['NaN', 'Infinity', '-Infinity', '1e999', '-1e999'])
def test_what_is_not_finite_is_no_json(number):
    with pytest.raises(BadData, match='x is not JSON: .* is no number of JSON'):
        parse_json(f'{{"a": [{number}]}}'.encode(), 'x')
    assert parse_json(b'[1e308, -2.5, 7]', 'x') == [1e308, -2.5, 7]


def test_a_tokenizer_of_a_name_that_no_file_can_have(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(to_dict(edit(Config(), {'data.tokenizer': 'b' * 5000}))))
    assert read_config(tmp_path).data.tokenizer == 'b' * 5000


@pytest.mark.parametrize(
    'command',
    ['train LONG', 'train debug --mesh.devices 1 --data.source LONG', 'eval LONG', 'verify LONG', 'import LONG out', 'diagnose LONG'],
)
def test_a_path_that_no_file_can_have_is_missing(command, capsys):
    from spannorm_jax import cli

    assert cli.main(command.replace('LONG', 'a' * 5000).split()) in (2, 66)
    assert 'File name too long' in capsys.readouterr().err


def test_every_parser_has_its_share(tmp_path):
    assert targets(tmp_path).keys() == SHARES.keys() and sum(SHARES.values()) == 1000


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
