"""Tokenizers: round trip, no special id out of text, contract of bos and eos, bad files."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from spannorm_jax.config import DataConfig
from spannorm_jax.data import check_vocab, load_tokenizer, open_data, prepare
from spannorm_jax.errors import BadData, MissingInput, UserError

LINES = [
    'the quick brown fox',
    'jumps over <s> the </s> lazy dog',
    'é日本語\U0001f600\r\n\ttabs',
    '  two spaces ',
    '<|endoftext|> [INST] <unk>',
]


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """A SentencePiece model and two tokenizer.json (with a BOS, and with an EOS alone), trained on the spot."""
    root = tmp_path_factory.mktemp('tokenizers')
    with open(root / 'small.model', 'wb') as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES * 9),
            model_writer=f,
            vocab_size=320,
            model_type='bpe',
            byte_fallback=True,
            normalization_rule_name='identity',
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    for name, special in (('both', ['<s>', '</s>']), ('eos', ['<|endoftext|>'])):
        model = Tokenizer(models.BPE())
        model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        model.train_from_iterator(LINES, trainer)
        if name == 'both':  # what a published file may ask for and a corpus must not get
            model.post_processor = processors.TemplateProcessing(single='<s> $A </s>', special_tokens=[('<s>', 0), ('</s>', 1)])
            model.enable_truncation(4)
            model.enable_padding(length=50)
            model.add_special_tokens([AddedToken('[INST]', special=True)])
        (root / name).mkdir()
        model.save(str(root / name / 'tokenizer.json'))
    return {
        'bytes': 'bytes',
        'mistral': 'mistral',
        'sp': str(root / 'small.model'),
        'hf': str(root / 'both' / 'tokenizer.json'),
        'hf_eos': str(root / 'eos' / 'tokenizer.json'),
    }


KINDS = ['bytes', 'mistral', 'sp', 'hf', 'hf_eos']


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('text', LINES + ['', ' ', '\n', 'a\0b'])
def test_round_trip_without_special_ids(files, kind, text):
    tok = load_tokenizer(files[kind])
    ids = tok.encode(text)
    assert tok.decode(ids) == text and tok.decode_bytes(ids) == text.encode()
    assert not np.isin(ids, [tok.bos, tok.eos]).any()
    assert len(ids) == 0 or (0 <= ids.min() and ids.max() < tok.vocab)
    assert tok.decode([tok.bos, *ids, tok.eos]) == text


def test_vocabularies_and_specials(files):
    got = {k: (t.vocab, t.bos, t.eos) for k in KINDS for t in [load_tokenizer(files[k])]}
    assert got['bytes'] == (257, 256, 256)
    assert got['mistral'] == (32000, 1, 2)
    assert got['sp'] == (320, 1, 2)
    assert got['hf'][1:] == (0, 1)
    assert got['hf_eos'][1] == got['hf_eos'][2] == 0, 'EOS stands in for a BOS that is not there'
    assert load_tokenizer('mistral').encode('hello world').tolist() == [6312, 28709, 1526]


def test_fingerprints_are_of_the_content(files, tmp_path):
    prints = [load_tokenizer(files[k]).fingerprint for k in KINDS]
    assert len(set(prints)) == len(KINDS)
    copy = tmp_path / 'renamed.model'
    copy.write_bytes(Path(files['sp']).read_bytes())
    assert load_tokenizer(str(copy)).fingerprint == load_tokenizer(files['sp']).fingerprint


def test_config_file_names_the_specials(files, tmp_path):
    (tmp_path / 'tokenizer.json').write_bytes(Path(files['hf']).read_bytes())
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': {'content': '[INST]'}, 'bos_token': '<s>'}))
    tok = load_tokenizer(str(tmp_path / 'tokenizer.json'))
    assert tok.decode_bytes([tok.eos]) == b'' and tok.bos == 0 and tok.eos not in (0, 1)
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<gone>'}))
    with pytest.raises(UserError, match='no EOS token'):
        load_tokenizer(str(tmp_path / 'tokenizer.json'))


@pytest.mark.parametrize(
    'text', ['{bad', '', '[]', '"x"', '[' * 100_000, '{"eos_token":["x"]}', '{"bos_token":1}', '{"eos_token":{"content":[]}}', '\xff']
)
def test_a_damaged_config_file_is_named(files, tmp_path, text):
    shutil.copy(files['hf'], tmp_path / 'tokenizer.json')
    (tmp_path / 'tokenizer_config.json').write_bytes(text.encode('latin-1'))
    with pytest.raises(BadData, match=r"tokenizer_config.json'.*(expected|not JSON)"):
        load_tokenizer(str(tmp_path / 'tokenizer.json'))


def test_a_text_that_it_cannot_encode_is_named(tmp_path):
    model = {'type': 'WordLevel', 'vocab': {'</s>': 0}, 'unk_token': '<unk>'}
    (tmp_path / 'tokenizer.json').write_text(json.dumps({'version': '1.0', 'added_tokens': [], 'model': model}))
    with pytest.raises(BadData, match="tokenizer.json' cannot encode 'xyz': .*UNK"):
        load_tokenizer(str(tmp_path / 'tokenizer.json')).encode('xyz')


def written(path, **fields):
    tree = {'version': '1.0', 'added_tokens': [], 'model': {'type': 'WordLevel', 'vocab': {'</s>': 0, '<unk>': 1}, 'unk_token': '<unk>'}}
    path.write_text(json.dumps(tree | fields))
    return str(path)


@pytest.mark.parametrize(
    'fields',
    [
        {'pre_tokenizer': {'type': 'FixedLength', 'length': 0}},
        {'normalizer': {'type': 'Precompiled', 'precompiled_charsmap': ''}},
        {'normalizer': {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'a' * 65}},
        {'normalizer': {'type': 'Sequence', 'normalizers': [{'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'a' * 9}] * 2}},
    ],
    ids=['length 0', 'no charsmap', 'one replacement', 'two replacements'],
)
def test_a_file_that_makes_the_library_panic_or_a_text_explode_is_refused(fields, tmp_path):
    with pytest.raises(BadData, match='tokenizer.json'):
        load_tokenizer(written(tmp_path / 'tokenizer.json', **fields)).encode('aé b')


def test_the_same_text_always_has_the_same_tokens(tmp_path):
    """Whatever dropout a file asks for, which is for training a tokenizer's user and changes data under one fingerprint."""
    model = {'type': 'BPE', 'dropout': 0.5, 'vocab': {'</s>': 0, 'a': 1, 'aa': 2, 'aaaa': 3}, 'merges': [['a', 'a'], ['aa', 'aa']]}
    tokenizer = load_tokenizer(written(tmp_path / 'tokenizer.json', model=model))
    assert all(tokenizer.encode('a' * 8).tolist() == [3, 3] for _ in range(20))


def test_an_id_that_no_table_should_have_room_for_is_refused(files, tmp_path):
    tree = json.loads(Path(files['hf']).read_text())
    tree['model']['vocab']['far away'] = 2**31
    (tmp_path / 'tokenizer.json').write_text(json.dumps(tree))
    with pytest.raises(BadData, match='has the id 2147483648; more than 4194304 ids'):
        load_tokenizer(str(tmp_path / 'tokenizer.json'))


@pytest.mark.parametrize('kind', KINDS)
def test_a_prepared_folder_carries_its_tokenizer(files, tmp_path, kind):
    (tmp_path / 'x.jsonl').write_text('\n'.join(json.dumps({'text': f'{line} {i}'}) for i in range(20) for line in LINES))
    meta = prepare(str(tmp_path / 'x.jsonl'), tmp_path / 'out', tokenizer=files[kind], workers=1)
    tok = load_tokenizer(files[kind])
    corpus = open_data(DataConfig(source=str(tmp_path / 'out'), tokenizer=files[kind]))
    assert corpus.tokenizer.name == tok.name
    assert corpus.tokenizer.fingerprint == tok.fingerprint == meta.tokenizer['fingerprint']
    held = corpus.eval_batches('train', 2, 32)
    flat = {n: np.concatenate([b[n] for b in held.batches()]).ravel()[: held.tokens] for n in ('tokens', 'targets')}
    starts = np.flatnonzero(flat['tokens'] == tok.bos)
    assert len(starts) == held.documents == meta.splits['train'].documents, 'a special token in the data became a BOS'
    texts = [tok.decode(flat['tokens'][a + 1 : b]) for a, b in zip(starts, [*starts[1:], held.tokens], strict=True)]
    assert set(texts) <= {f'{line} {i}' for i in range(20) for line in LINES}
    assert sum(len(t.encode()) for t in texts) == held.bytes
    np.testing.assert_array_equal(np.flatnonzero(flat['targets'] == tok.eos), [*(starts[1:] - 1), held.tokens - 1])
    np.testing.assert_array_equal(np.bincount(flat['targets'], minlength=tok.vocab), meta.unigram)
    if kind != 'bytes':
        with pytest.raises(UserError, match='set data.tokenizer to'):
            open_data(DataConfig(source=str(tmp_path / 'out')))


def test_check_vocab():
    tok = load_tokenizer('bytes')
    check_vocab(tok, 257)
    with pytest.raises(UserError, match='has 257 ids but model.vocab = 256; set model.vocab to at least 257') as caught:
        check_vocab(tok, 256)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ('name', 'data', 'error', 'message'),
    [
        ('none.model', None, MissingInput, 'does not exist'),
        ('bad.model', b'junk', BadData, 'not a SentencePiece model'),
        ('tokenizer.json', b'{}', BadData, 'not a Hugging Face tokenizer'),
        ('tokenizer.txt', b'', UserError, 'unknown tokenizer'),
    ],
)
def test_bad_tokenizers(tmp_path, name, data, error, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=message):
        load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize(('spec', 'module'), [('mistral', 'sentencepiece'), ('hf', 'tokenizers')])
def test_missing_extra_is_named(files, monkeypatch, spec, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf'needs {module}: pip install .spannorm-jax\[hf\]'):
        load_tokenizer(files[spec])
