"""Windows against a table made by hand, scores against one forward pass per token, the measures of `spannorm eval` in every protocol."""

import json
import math
import pathlib
from collections import Counter

import jax
import numpy as np
import pytest
from test_topology import random_params, tiny

from spannorm_jax import LM, cli, likelihood
from spannorm_jax.config import MeshConfig
from spannorm_jax.data import load_tokenizer, open_data
from spannorm_jax.errors import UserError
from spannorm_jax.likelihood import Piece, Scorer, windows
from spannorm_jax.load import read_config
from spannorm_jax.loss import token_scores
from spannorm_jax.score import count_words, load_run, measures, nats_by_document, score, stride_of
from spannorm_jax.sharding import make_mesh

BYTES = load_tokenizer('bytes')
LONG = 40  # no text here is longer


class Oracle:
    """ln p of a token, and the likeliest token, after a context: a forward pass of its own for each, and float64 from the logits on."""

    def __init__(self, lm, params):
        self.run = jax.jit(lambda tokens, segments: lm.apply(params, tokens, segments))

    def __call__(self, context, token):
        n = len(context)
        padded = np.zeros((1, LONG), np.int32)
        padded[0, :n] = context
        z = np.asarray(self.run(padded, (np.arange(LONG)[None] < n).astype(np.int32))[0, n - 1], np.float64)
        return z[token] - z.max() - np.log(np.exp(z - z.max()).sum()), int(z.argmax())


@pytest.fixture(scope='module')
def model():
    lm = LM(tiny('span', vocab=300, layers=2))
    params = random_params(lm.cfg)
    return lm, params, Oracle(lm, params)


def scorer(lm, params, seq, rows=2, **mesh):
    return Scorer(lm, params, make_mesh(MeshConfig(**({'devices': 1} | mesh))), seq, rows)


# Ids 0..10, 0 being the beginning, in windows of 4: (first id read, ids predicted) of each.
BY_HAND = {
    4: [(0, [1, 2, 3, 4]), (4, [5, 6, 7, 8]), (6, [9, 10])],  # the last one reads four ids as well
    2: [(0, [1, 2, 3, 4]), (2, [5, 6]), (4, [7, 8]), (6, [9, 10])],
    1: [(0, [1, 2, 3, 4]), (1, [5]), (2, [6]), (3, [7]), (4, [8]), (5, [9]), (6, [10])],
    3: [(0, [1, 2, 3, 4]), (3, [5, 6, 7]), (6, [8, 9, 10])],
}


@pytest.mark.parametrize('stride', BY_HAND)
def test_windows_by_hand(stride):
    got = [(int(p.ids[0]), p.ids[len(p.ids) - p.counted :].tolist()) for p in windows(np.arange(11), 4, stride)]
    assert got == BY_HAND[stride]


def test_windows_count_every_id_once_with_context():
    for n in range(1, 14):
        for seq in range(1, 6):
            for stride in range(1, seq + 1):
                found = list(windows(np.arange(n), seq, stride))
                assert [i for p in found for i in p.ids[len(p.ids) - p.counted :]] == list(range(1, n))
                assert all(1 <= p.counted < len(p.ids) <= seq + 1 for p in found)
                for p in found[1:]:
                    assert len(p.ids) == seq + 1 and len(p.ids) - p.counted >= seq - stride + 1


@pytest.mark.parametrize('chunk', [0, 6, 9])
def test_token_scores_against_float64(chunk):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 10, 8)).astype(np.float32), rng.normal(size=(8, 23)).astype(np.float32)
    z = x.astype(np.float64) @ w
    targets = np.where(rng.random((3, 10)) < 0.5, z.argmax(-1), rng.integers(0, 23, (3, 10))).astype(np.int32)
    want = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[..., None], -1)[..., 0]
    nats, greedy = jax.jit(lambda x, w, t: token_scores(lambda x: x @ w, x, t, chunk))(x, w, targets)
    np.testing.assert_allclose(nats, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(greedy, z.argmax(-1) == targets)
    assert 5 < np.asarray(greedy).sum() < 29


def test_scores_are_one_forward_pass_per_token(model):
    """Pieces of every length, more of them than fit a batch; greedy answers are found among them."""
    lm, params, oracle = model
    rng, seq = np.random.default_rng(1), 36
    pieces = [Piece(rng.integers(0, 257, n).astype(np.int32), c) for n, c in ((2, 1), (9, 3), (37, 36), (34, 1), (33, 2), (5, 0))]
    context = rng.integers(0, 257, 6)
    pieces += [Piece(np.array([*context, best := oracle(context, 0)[1], oracle([*context, best], 0)[1]], np.int32), 2)]
    assert scorer(lm, params, seq).rows == {32: 2, 36: 2}
    found = dict(scorer(lm, params, seq)(pieces))
    assert sorted(found) == list(range(len(pieces)))
    for i, (ids, counted) in enumerate(pieces):
        want = [oracle(ids[:j], ids[j]) for j in range(len(ids) - counted, len(ids))]
        np.testing.assert_allclose(found[i].nats, [-w for w, _ in want], rtol=2e-5, atol=2e-5)
        assert found[i].greedy == all(best == token for (_, best), token in zip(want, ids[len(ids) - counted :], strict=True))
    assert [found[i].greedy for i in (1, 6)] == [False, True]


def test_scores_do_not_depend_on_the_mesh_or_on_what_stands_beside(tokens):
    """Experts with a capacity would drop tokens of a crowd: they have none here."""
    lm = LM(tiny('span', vocab=300, layers=1, experts=4, experts_per_token=2, expert_ffn=8, capacity_factor=0.5))
    params, rng = random_params(lm.cfg), np.random.default_rng(2)
    pieces = [Piece(rng.integers(0, 257, n).astype(np.int32), n - 1) for n in (7, 30, 12, 25, 9)]
    together = dict(scorer(lm, params, 32, rows=5)(pieces))
    alone = scorer(lm, params, 32, rows=1)
    meshed = dict(scorer(lm, params, 32, rows=3, devices=8, data=2, tensor=2, sequence=2)(pieces))
    for i, piece in enumerate(pieces):
        for other in (dict(alone([piece]))[0], meshed[i]):
            np.testing.assert_allclose(together[i].nats, other.nats, rtol=1e-5, atol=1e-5)
            assert together[i].greedy == other.greedy


@pytest.mark.parametrize('stride', BY_HAND)
def test_documents_by_hand(stride, model):
    """The text 'abcdefghi' after its beginning, then its end: ten tokens in windows of four, each with the context of the table."""
    lm, params, oracle = model
    ids = np.array([256, *b'abcdefghi', 256], np.int32)
    starts = {i: lo for lo, predicted in BY_HAND[stride] for i in predicted}
    each = [-oracle(ids[starts[i] : i], ids[i])[0] for i in range(1, 11)]
    short = np.array([256, *b'xy', 256], np.int32)
    both = each + [-oracle(short[:i], short[i])[0] for i in range(1, 4)]
    nats, count, ends = nats_by_document(scorer(lm, params, 4), [ids, short], stride)
    np.testing.assert_allclose([nats, ends], [sum(both), both[9] + both[12]], rtol=1e-5)
    assert count == 13


def test_measures_of_a_uniform_model():
    """ln V nats a token, whatever is counted: 7 tokens, 2 words, 6 bytes."""
    got = measures(7 * math.log(257), 7, 2, 6)
    want = {'loss': math.log(257), 'bits_per_byte': 7 / 6 * math.log2(257), 'perplexity': 257.0}
    assert got == pytest.approx(want | {'word_perplexity': 257**3.5, 'byte_perplexity': 257 ** (7 / 6)}, rel=1e-12)
    assert measures(1e4, 1, 1, 1)['perplexity'] == math.inf
    assert [count_words(text) for text in ('a b', 'a  b\n c', 'a b\n')] == [2, 3, 3]


def test_texts_are_the_files(trained):
    """Of the held-out documents, each once: beginning, bytes, end."""
    cfg = read_config(pathlib.Path(trained))
    corpus = open_data(cfg.data)
    found = [list(corpus.eval_batches(split, 2, 16).texts()) for split in ('validation', 'test')]
    assert all(ids[0] == ids[-1] == 256 and (ids[1:-1] < 256).all() and ids.dtype == np.int32 for ids in found[0] + found[1])
    texts = Counter(BYTES.decode(ids) for ids in found[0] + found[1])
    assert texts <= Counter(f'document {i} ' * 20 for i in range(80)) and sum(texts.values()) > 2
    assert len(list(corpus.eval_batches('test', 2, 16, 1).texts())) == 1


@pytest.mark.parametrize(('group', 'split'), [('eval', 'validation'), ('test', 'test')])
def test_in_the_loop_and_offline_to_the_last_bit(group, split, trained):
    run = pathlib.Path(trained)
    row = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
    found = score(run, split, 64, None, MeshConfig(devices=1))
    assert (found['loss'], found['bits_per_byte']) == (row[f'{group}/loss'], row[f'{group}/bits_per_byte'])
    assert found['tokens'] == found['bytes'] + found['documents']


@pytest.mark.parametrize(('protocol', 'stride', 'moves'), [('documents', None, 16), ('strided', 5, 5), ('strided', None, 8)])
def test_protocols(protocol, stride, moves, trained):
    """Against the model itself on windows cut here; words are those of the texts, and `text_alone` leaves the ends out."""
    run = pathlib.Path(trained)
    found = score(run, 'validation', 100, None, MeshConfig(devices=1), protocol, stride)
    loaded = load_run(run, MeshConfig(devices=1))
    log_p = jax.jit(lambda tokens: jax.nn.log_softmax(loaded.lm.apply(loaded.params, tokens)))
    texts = list(open_data(loaded.cfg.data).eval_batches('validation', 2, 16, 100).texts())
    nats = ends = 0.0
    for ids in texts:
        at, done = 0, 1
        while done < len(ids):
            upto = min(len(ids), done + (16 if done == 1 else moves))
            at = max(0, upto - 17)
            rows = np.zeros((1, 16), np.int32)
            rows[0, : upto - 1 - at] = ids[at : upto - 1]
            each = [-float(log_p(rows)[0, j - at - 1, ids[j]]) for j in range(done, upto)]
            nats, done = nats + sum(each), upto
        ends += each[-1]
    words = sum(len(BYTES.decode(ids).split(' ')) for ids in texts)
    tokens = sum(len(ids) - 1 for ids in texts)
    assert (found['tokens'], found['words'], found['documents'], found['bytes']) == (tokens, words, len(texts), tokens - len(texts))
    for name, want in measures(nats, tokens, words, found['bytes']).items():
        assert found[name] == pytest.approx(want, rel=1e-4 if name == 'word_perplexity' else 1e-5)
    for name, want in measures(nats - ends, tokens - len(texts), words, found['bytes']).items():
        assert found['text_alone'][name] == pytest.approx(want, rel=1e-4 if name == 'word_perplexity' else 1e-5)
    assert f'move on by {moves}' in found['protocol'] or protocol == 'documents'


def test_strides():
    assert [stride_of('rows', None, 16), stride_of('documents', None, 16), stride_of('strided', None, 16)] == [16, 16, 8]
    assert (stride_of('strided', 16, 16), stride_of('strided', None, 1)) == (16, 1)
    for protocol, stride, match in (('strided', 0, 'outside'), ('strided', 17, 'outside'), ('rows', 4, 'belongs to')):
        with pytest.raises(UserError, match=match):
            stride_of(protocol, stride, 16)


def test_a_few_short_questions_to_a_long_model_stay_few():
    made = Scorer(LM(tiny('pre')), None, make_mesh(MeshConfig(devices=1)), 65536, 1)
    assert made.rows[32] == likelihood.MOST_ROWS and made.rows[65536] == 1 and made.rows[4096] == 16


def test_command(trained, capsys):
    capsys.readouterr()
    line = ['eval', trained, '--mesh.devices', '1', '--tokens', '64']
    assert cli.main([*line, '--protocol', 'strided', '--stride', '4']) == 0
    out = capsys.readouterr().out
    assert 'windows of 16 tokens that move on by 4' in out and 'at least 13 before it' in out and 'per word' in out
    assert cli.main([*line, '--protocol', 'documents', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['text_alone']['loss'] != found['loss'] and 'each document on its own' in found['protocol']


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('--stride 4', 'belongs to the protocol strided'),
        ('--protocol strided --stride 40', 'outside [1, 16]'),
        ('--limit 3', 'belong to --tasks'),
    ],
)
def test_bad_input(options, message, trained, capsys):
    assert cli.main(['eval', trained, *options.split()]) == 2
    assert message in capsys.readouterr().err
