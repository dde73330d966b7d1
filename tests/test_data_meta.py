"""meta.json of a stranger: each field that lies is refused by name before it is used, and no name leads out of the folder."""

import json
import os
import re
import shutil

import numpy as np
import pytest

from spannorm_jax.config import DataConfig
from spannorm_jax.data import Corpus, open_data, prepare
from spannorm_jax.data.meta import is_prepared, read_meta
from spannorm_jax.errors import BadData, MissingInput, UserError

GONE = object()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp('meta')
    (root / 'x.jsonl').write_text(''.join(json.dumps({'text': f'text {i}'}) + '\n' for i in range(120)))
    prepare(str(root / 'x.jsonl'), root / 'out', workers=1)
    return root / 'out'


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'copy')


def change(folder, path: tuple, value) -> None:
    tree = at = json.loads((folder / 'meta.json').read_text())
    for part in path[:-1]:
        at = at[part]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    (folder / 'meta.json').write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ('path', 'value', 'field'),
    [
        (('version',), '1', 'version'),
        (('version',), True, 'version'),
        (('version',), 0, 'version'),
        (('key',), None, 'key'),
        (('hash',), '../x', 'hash'),
        (('source',), GONE, 'source'),
        (('extra',), 1, 'extra'),
        (('block',), 0, 'block'),
        (('block',), 4096.0, 'block'),
        (('dtype',), 'zz', 'dtype'),
        (('dtype',), ['<u2'], 'dtype'),
        (('cut',), 0, 'cut'),
        (('duplicates',), -1, 'duplicates'),
        (('skipped_files',), 1.5, 'skipped_files'),
        (('tokenizer',), {}, 'tokenizer.name'),
        (('tokenizer',), [], 'tokenizer'),
        (('tokenizer', 'vocab'), '257', 'tokenizer.vocab'),
        (('tokenizer', 'vocab'), 1 << 40, 'tokenizer.vocab'),
        (('tokenizer', 'bos'), 257, 'tokenizer.bos'),
        (('tokenizer', 'eos'), -1, 'tokenizer.eos'),
        (('tokenizer', 'file'), '../../../etc/passwd', 'tokenizer.file'),
        (('tokenizer', 'file'), '/etc/tokenizer.model', 'tokenizer.file'),
        (('tokenizer', 'name'), '/etc/x.model', 'tokenizer.name'),
        (('splits', 'test'), GONE, 'splits.test'),
        (('splits', 'train'), None, 'splits.train'),
        (('splits', 'train', 'documents'), 0, 'splits.train.documents'),
        (('splits', 'train', 'tokens'), 1, 'splits.train.tokens'),
        (('splits', 'train', 'shards'), {}, 'splits.train.shards'),
        (('splits', 'train', 'shards', 0), ['a'], 'splits.train.shards[0]'),
        (('splits', 'train', 'shards', 0, 0), '../pd/train-00000.array_record', 'splits.train.shards[0][0]'),
        (('splits', 'train', 'shards', 0, 0), 'test-00000.array_record', 'splits.train.shards[0][0]'),
        (('splits', 'train', 'shards', 0, 0), 'train-00000.array_record\n', 'splits.train.shards[0][0]'),
        (('splits', 'train', 'shards', 0, 1), '9', 'splits.train.shards[0][1]'),
        (('unigram',), ['a'], 'unigram'),
        (('unigram', 7), 'a', 'unigram[7]'),
        (('unigram', 7), 5, 'the sum of unigram'),
    ],
)
def test_a_field_that_lies_is_named(folder, path, value, field):
    assert read_meta(folder).tokenizer['vocab'] == 257
    change(folder, path, value)
    with pytest.raises(BadData, match=rf"meta.json' is damaged .*: {re.escape(field)} is .*, expected .*; prepare the folder again$"):
        open_data(DataConfig(source=str(folder)))


@pytest.mark.parametrize('text', ['[' * 100_000, '{"a":' * 100_000, '', '\xff', '[]', '9' * 5000, '{"version": 1}'])
def test_a_meta_that_is_no_object_of_ours(folder, text):
    (folder / 'meta.json').write_bytes(text.encode('latin-1'))
    with pytest.raises(BadData, match="meta.json' is damaged") as caught:
        open_data(DataConfig(source=str(folder)))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ('name', 'field'), [('train-00000.array_record', 'splits.train.shards[0][0]'), ('test.documents', 'the table of splits.test')]
)
def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path, name, field):
    os.rename(folder / name, tmp_path / 'elsewhere')
    os.symlink('../elsewhere', folder / name)
    with pytest.raises(BadData, match=re.escape(field) + ' is .* not a link out of it'):
        open_data(DataConfig(source=str(folder)))
    os.symlink(folder, tmp_path / 'link')
    os.replace(tmp_path / 'elsewhere', folder / name)
    assert open_data(DataConfig(source=str(tmp_path / 'link'))).rows(8) > 0  # the folder itself may be a link


@pytest.mark.parametrize(('field', 'value'), [('vocab', 258), ('bos', 0), ('fingerprint', '0' * 64)])
def test_the_tokenizer_must_be_the_one_of_the_meta(folder, field, value):
    change(folder, ('tokenizer', field), value)
    if field == 'vocab':
        change(folder, ('unigram',), [*json.loads((folder / 'meta.json').read_text())['unigram'], 0])
    with pytest.raises(BadData, match=rf"meta.json': tokenizer.{field} is .*, that of bytes is"):
        _ = Corpus(folder, read_meta(folder)).tokenizer


@pytest.mark.parametrize(('at', 'value'), [((0, 0), 0), ((-1, 0), 1 << 40), ((0, 0), 1 << 40), ((0, 1), 0)])
def test_a_table_of_documents_that_lies(folder, at, value):
    corpus = open_data(DataConfig(source=str(folder)))
    corpus.eval_batches('train', 1, 8)
    table = np.fromfile(folder / 'train.documents', '<i8').reshape(-1, 2)
    table[at] = value
    table.tofile(folder / 'train.documents')
    with pytest.raises(BadData, match="train.documents' is damaged"):
        corpus.eval_batches('train', 1, 8)


@pytest.mark.parametrize('text', ['{"author": "me"}', '[1]', '{"tokenizer": 1, "splits": 2}', 'not JSON', '[' * 100_000])
def test_a_text_folder_may_have_a_meta_json_of_its_own(tmp_path, text):
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in' / 'meta.json').write_text(text)
    (tmp_path / 'in' / 'a.txt').write_text('some text\n\n' * 3000)
    assert not is_prepared(tmp_path / 'in')
    corpus = open_data(DataConfig(source=str(tmp_path / 'in'), cache=str(tmp_path / 'cache')))
    assert corpus.meta.skipped_files == 1 and sum(s.bytes for s in corpus.splits.values()) == 33_000
    with pytest.raises(UserError, match="not empty .*'(a.txt|meta.json)'"):
        prepare(str(tmp_path / 'in' / 'a.txt'), tmp_path / 'in', workers=1)
    with pytest.raises((BadData, MissingInput)):
        read_meta(tmp_path / 'in')
