"""Every kind of source, and every kind of bad one: what is said, where, and with which exit code."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from spannorm_jax.data import prepare, readers, sources
from spannorm_jax.data.readers import Piece, documents
from spannorm_jax.errors import BadData, MissingInput, UserError

TEXTS = ['first', 'sécond\r\nline', 'third \U0001f600 <s> </s>', 'x' * 300]


def read(source, text_field: str = 'text') -> list[str]:
    return [d.text for task in sources.find(str(source)).tasks for piece in task for d in documents(piece, text_field)]


def jsonl(texts=TEXTS, field: str = 'text') -> bytes:
    return ''.join(json.dumps({'meta': {'n': i}, field: t}) + '\n' for i, t in enumerate(texts)).encode()


def zst(data: bytes) -> bytes:
    return zstandard.compress(data)


@pytest.mark.parametrize(
    ('name', 'data'),
    [
        ('x.jsonl', jsonl()),
        ('x.jsonl', b'\xef\xbb\xbf' + jsonl().rstrip(b'\n')),
        ('x.jsonl', jsonl().replace(b'\n', b'\r\n\n')),
        ('x.ndjson', jsonl()),
        ('X.JSONL', jsonl()),
        ('X.NDJSON.GZ', gzip.compress(jsonl())),
        ('X.Jsonl.ZST', zst(jsonl())),
        ('x.jsonl.gz', gzip.compress(jsonl())),
        ('x.jsonl.zst', zst(jsonl())),
        ('x.jsonl.zst', zst(jsonl()[:20]) + zst(jsonl()[20:])),  # several frames, as parallel compressors write
    ],
)
def test_jsonl(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == TEXTS


@pytest.mark.parametrize('target', [1, 7, 40, 41, 1000])
def test_a_jsonl_file_cut_anywhere_gives_each_line_once(tmp_path, monkeypatch, target):
    monkeypatch.setattr(sources, 'TASK_BYTES', target)
    monkeypatch.setattr(sources, 'TASKS', 10**9)
    (tmp_path / 'x.jsonl').write_bytes(jsonl())
    assert read(tmp_path / 'x.jsonl') == TEXTS


def test_text_folder_in_order_with_odd_names(tmp_path):
    for name, text in (('b b.txt', 'two'), ('a\nnewline.txt', 'one'), ('sub/c.txt', 'three'), ('.hidden', 'no'), ('z.txt.gz', '')):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b'four') if name.endswith('gz') else text.encode())
    os.symlink(tmp_path, tmp_path / 'sub' / 'loop')
    os.symlink(tmp_path / 'sub', tmp_path / 'sub' / 'self')
    assert read(tmp_path) == ['one', 'two', 'three', 'four']
    assert read(tmp_path / '*.txt') == ['one', 'two']


@pytest.mark.parametrize(
    ('size', 'files', 'cut'),
    [(500, 1, 1 << 10), (400_000, 1, 1562), (1_000_000, 4, 15_625), (5_000_000, 1, 16 << 10), (40, 199, 1 << 10), (40_000, 200, 1 << 20)],
)
def test_text_in_few_files_is_cut_and_a_file_among_many_is_one_document(tmp_path, size, files, cut):
    for i in range(files):
        (tmp_path / f'{i:03}.txt').write_bytes(b'x' * size)
    found = sources.find(str(tmp_path))
    assert found.cut == cut and {piece.cut for task in found.tasks for piece in task} == {cut}
    assert len(read(tmp_path)) == files * -(-size // cut)


def test_records_are_never_cut_as_plain_text_is(tmp_path):
    (tmp_path / 'x.jsonl').write_bytes(jsonl(['paragraph\n\n' * 3000]))
    assert read(tmp_path / 'x.jsonl') == ['paragraph\n\n' * 3000]


def test_bom_goes_and_line_ends_stay(tmp_path):
    (tmp_path / 'x.txt').write_bytes(b'\xef\xbb\xbfone\r\ntwo\n')
    assert read(tmp_path / 'x.txt') == ['one\r\ntwo\n']


@pytest.mark.parametrize('name', ['x.json', 'X.JSON', 'x.json.gz'])
def test_json_is_refused_where_named_and_passed_over_in_a_folder(tmp_path, name):
    (tmp_path / name).write_bytes(jsonl())
    for source in (tmp_path / name, tmp_path, tmp_path / '*'):
        with pytest.raises(UserError, match=rf"{name}': .json is not read; write one object a line and name it .jsonl") as caught:
            sources.find(str(source))
        assert caught.value.exit_code == 2
    (tmp_path / 'a.txt').write_text('some text')
    assert sources.find(str(tmp_path)).skipped == 1 and read(tmp_path) == ['some text']
    with pytest.raises(UserError, match='.json is not read'):
        sources.find(str(tmp_path / '*'))


def test_records_beside_other_files(tmp_path):
    (tmp_path / 'README.md').write_text('not data')
    (tmp_path / 'a.jsonl').write_bytes(jsonl())
    found = sources.find(str(tmp_path))
    assert found.skipped == 1 and read(tmp_path) == TEXTS


def write_parquet(path: Path, **columns) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)


def test_parquet(tmp_path):
    write_parquet(tmp_path / 'x.parquet', n=list(range(4)), text=TEXTS)
    assert read(tmp_path / 'x.parquet') == TEXTS


def test_text_field(tmp_path):
    (tmp_path / 'x.jsonl').write_bytes(jsonl(field='content'))
    assert read(tmp_path / 'x.jsonl', 'content') == TEXTS


def test_a_long_record_becomes_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, 'DOCUMENT_BYTES', 100)
    (tmp_path / 'x.jsonl').write_bytes(jsonl())
    assert read(tmp_path / 'x.jsonl') == TEXTS[:3] + ['x' * 100] * 3


BAD = {
    'not json': ('x.jsonl', jsonl() + b'{"text": \n', r"x.jsonl' line 5 is not JSON"),
    'not an object': ('x.jsonl', b'[1]\n', r"line 1: expected an object with the field 'text', got list"),
    'no field of a million': (
        'x.jsonl',
        json.dumps(dict.fromkeys(range(99999))).encode(),
        r"line 1 has no field 'text' \(it has '0', .*, '7', \.\.\.\);",
    ),
    'no field': ('x.jsonl', b'{"text": "a"}\n{"content": "a", "id": 1}\n', r"line 2 has no field 'text' \(it has 'content', 'id'\)"),
    'not text': ('x.jsonl', b'{"text": null}\n', r"line 1: field 'text' is NoneType"),
    'surrogate': ('x.jsonl', b'{"text": "\\ud800"}\n', r"line 1: field 'text' is not text that UTF-8 can hold"),
    'jsonl utf-8': ('x.jsonl', b'{"text": "a"}\n{"text": "\xff"}\n', r'line 2 is not UTF-8 at byte offset 24'),
    'jsonl binary': ('x.jsonl', bytes(range(256)), r'line 1 is not'),
    'deep': ('x.jsonl', b'[' * 200_000 + b'\n', r'line 1 is not JSON'),
    'gz line': ('x.jsonl.gz', gzip.compress(jsonl() + b'nope\n'), r"x.jsonl.gz' line 5 is not JSON"),
    'gz cut': ('x.jsonl.gz', gzip.compress(jsonl())[:-12], r"x.jsonl.gz' is damaged or cut short"),
    'gz not': ('x.jsonl.gz', b'plain', r"x.jsonl.gz' is damaged or cut short"),
    'zst cut': ('x.jsonl.zst', zst(jsonl())[:-4], r"x.jsonl.zst' is damaged or cut short"),
    'zst not': ('x.jsonl.zst', b'plain text', r"x.jsonl.zst' is damaged or cut short"),
    'nul': ('x.txt', b'text\0binary', r"x.txt' is not text: NUL byte at offset 4"),
    'utf-8': ('x.txt', 'é'.encode() * 3 + b'\xe9', r"x.txt' is not UTF-8 at byte offset 6"),
    'utf-16': ('x.txt', b'\xff\xfe' + 'héllo'.encode('utf-16-le').replace(b'\0', b'a'), r'offset 0; looks like UTF-16'),
    'empty': ('x.txt', b'', r'holds no data: 1 files, all empty'),
    'only a bom': ('x.txt', b'\xef\xbb\xbf', r'holds no text'),
    'only empty texts': ('x.jsonl', b'{"text": ""}\n', r'holds no text'),
    'parquet not': ('x.parquet', b'not parquet at all', r"x.parquet' is not a Parquet file"),
}


@pytest.mark.parametrize('case', sorted(BAD))
def test_bad_data(tmp_path, case):
    name, data, message = BAD[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadData, match=message) as caught:
        prepare(str(tmp_path / name), tmp_path / 'out', workers=1)
    assert caught.value.exit_code == 65 and not (tmp_path / 'out' / 'meta.json').exists()


def test_offsets_and_lines_count_from_the_file_not_the_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'TASK_BYTES', 30)
    monkeypatch.setattr(sources, 'TASKS', 10**9)
    (tmp_path / 'x.jsonl').write_bytes(b'{"text": "a"}\n' * 50 + b'{"text": \xff}\n')
    with pytest.raises(BadData, match=r'line 51 is not UTF-8 at byte offset 709'):
        read(tmp_path / 'x.jsonl')
    monkeypatch.setattr(sources, 'PART_BYTES', (16, 16))
    (tmp_path / 'x.txt').write_bytes(b'0123456789\n' * 9 + b'\0')
    with pytest.raises(BadData, match='NUL byte at offset 99'):
        read(tmp_path / 'x.txt')


def test_a_line_beyond_the_bound_is_refused_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, 'RECORD_BYTES', 1 << 20)
    (tmp_path / 'x.jsonl').write_bytes(b'{"text": "a"}\n{"text": "' + b'a' * (3 << 20) + b'"}\n')
    with pytest.raises(BadData, match=r'line 2 is longer than 1 MiB'):
        read(tmp_path / 'x.jsonl')


def test_binary_file_in_a_folder_is_named(tmp_path):
    (tmp_path / 'a.txt').write_text('text')
    (tmp_path / 'picture.png').write_bytes(b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR')
    with pytest.raises(BadData, match='picture.png'):
        read(tmp_path)


def test_rows_that_share_a_value_do_not_each_hold_it(tmp_path):
    value = 'x' * (4 << 20)
    pyarrow.parquet.write_table(pyarrow.table({'text': [value] * 64}), tmp_path / 'x.parquet', dictionary_pagesize_limit=8 << 20)
    assert (tmp_path / 'x.parquet').stat().st_size < 1 << 20
    before = pyarrow.total_allocated_bytes()
    first = next(documents(Piece('parquet', str(tmp_path / 'x.parquet'), 0, 1, 1), 'text'))
    assert value.startswith(first.text) and pyarrow.total_allocated_bytes() - before < 32 << 20


def test_parquet_column_and_values(tmp_path, monkeypatch):
    write_parquet(tmp_path / 'x.parquet', content=TEXTS)
    with pytest.raises(BadData, match=r"no column 'text' \(it has 'content'\)"):
        read(tmp_path / 'x.parquet')
    write_parquet(tmp_path / 'w.parquet', text=[['a'], ['b']])  # a list has no column of that very name on disk
    with pytest.raises(BadData, match=r"row group 0 row 0: field 'text' is list"):
        read(tmp_path / 'w.parquet')
    write_parquet(tmp_path / 'y.parquet', text=['a', 'b', 'c', 'd', None])
    with pytest.raises(BadData, match=r"row group 1 row 1: field 'text' is NoneType"):
        read(tmp_path / 'y.parquet')
    monkeypatch.setattr(readers, 'GROUP_BYTES', 10)
    with pytest.raises(BadData, match=r"y.parquet' row group 0 holds .* write row groups below"):
        read(tmp_path / 'y.parquet')
    monkeypatch.undo()
    data = bytearray((tmp_path / 'y.parquet').read_bytes())
    data[4:60] = bytes(56)
    (tmp_path / 'z.parquet').write_bytes(data)
    with pytest.raises(BadData, match=r"z.parquet' row group 0"):
        read(tmp_path / 'z.parquet')


def test_files_that_are_not_files(tmp_path):
    os.mkfifo(tmp_path / 'pipe.txt')
    with pytest.raises(BadData, match="pipe.txt' is not a regular file"):
        sources.find(str(tmp_path))
    os.remove(tmp_path / 'pipe.txt')
    with pytest.raises(BadData, match='holds no files'):
        sources.find(str(tmp_path))
    os.symlink('me.txt', tmp_path / 'me.txt')
    with pytest.raises(MissingInput, match=r'cannot read .*me.txt') as caught:
        sources.find(str(tmp_path))
    assert caught.value.exit_code == 66


def test_a_prepared_folder_is_not_a_raw_source(tmp_path):
    (tmp_path / 'x.jsonl').write_bytes(jsonl())
    prepare(str(tmp_path / 'x.jsonl'), tmp_path / 'out', workers=1)
    with pytest.raises(UserError, match='prepared folder already'):
        prepare(str(tmp_path / 'out'), tmp_path / 'again')


@pytest.mark.parametrize(('name', 'module'), [('x.jsonl.zst', 'zstandard'), ('x.parquet', 'pyarrow')])
def test_missing_extra_is_named(tmp_path, monkeypatch, name, module):
    (tmp_path / name).write_bytes(b'x')
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf'needs {module}: pip install .spannorm-jax\[text\]'):
        read(tmp_path / name)


TFDS = """
import sys
import tensorflow_datasets as tfds
from spannorm_jax.data import prepare, sources, readers
from spannorm_jax.errors import UserError

class TinyText(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')
    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({'text': tfds.features.Text()}))
    def _split_generators(self, manager):
        return {'train': self._generate_examples()}
    def _generate_examples(self):
        for i in range(40):
            yield i, {'text': f'document {i} \u00e9'}

root = sys.argv[1]
try:
    prepare('tfds:tiny_text', root + '/out', workers=1)
except UserError as e:
    print('said', e.exit_code, e)
TinyText(data_dir=root, file_format='array_record').download_and_prepare()
texts = [d.text for t in sources.find('tfds:tiny_text').tasks for p in t for d in readers.documents(p, 'text')]
assert sorted(texts) == sorted(f'document {i} \u00e9' for i in range(40)), texts
meta = prepare('tfds:tiny_text', root + '/out', workers=1)
print('said', sum(s.documents for s in meta.splits.values()), meta.source)
for source, field in (('tfds:tiny_text', 'content'), ('tfds:no_such_set', 'text')):
    try:
        prepare(source, root + '/other', text_field=field, workers=1)
    except UserError as e:
        print('said', e.exit_code, e)
assert 'tensorflow' not in sys.modules, 'TFDS pulled TensorFlow in'
"""


def test_tfds_without_tensorflow(tmp_path):
    env = os.environ | {'TFDS_DATA_DIR': str(tmp_path)}
    command = [sys.executable, '-c', TFDS, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=env)
    assert run.returncode == 0, run.stderr
    said = [line.removeprefix('said ') for line in run.stdout.splitlines() if line.startswith('said ')]
    assert said[0].startswith("66 'tfds:tiny_text' is not prepared") and '--file_format=array_record' in said[0]
    assert said[1] == '40 tfds:tiny_text'
    assert "has no field 'content' (it has 'text')" in said[2] and said[2].startswith('65') and 'record 0' in said[2]
    assert said[3].startswith("66 TFDS knows no data set 'no_such_set'")
