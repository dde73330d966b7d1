"""Sampling rules against brute force, generation against recomputation, stop strings, streaming, and `spannorm generate`."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_topology import random_params, tiny

from spannorm_jax import LM, cli
from spannorm_jax.data import load_tokenizer
from spannorm_jax.errors import UserError
from spannorm_jax.generate import Generated, Row, Sampling, draw, generate, narrowed, side_by_side

BYTES = load_tokenizer('bytes')


def brute(z, s):
    """The ids that the rules leave, by sorting and counting."""
    z = [x / s.temperature for x in z]
    left = sorted(range(len(z)), key=lambda i: -z[i])[: s.top_k]
    if s.top_p is not None:
        total, kept = sum(math.exp(z[i]) for i in left), []
        for i in left:
            if sum(math.exp(z[j]) for j in kept) / total >= s.top_p:
                break
            kept.append(i)
        left = kept
    return {i for i in left if math.exp(z[i] - max(z)) >= (s.min_p or 0)}


@pytest.mark.parametrize(
    'rule',
    [
        dict(top_k=3),
        dict(top_p=0.6),
        dict(top_p=1.0),
        dict(min_p=0.2),
        dict(top_k=50),
        dict(top_k=9, top_p=0.8, min_p=0.15, temperature=1.7),
    ],
    ids=str,
)
def test_rules_are_brute_force(rule):
    s, logits = Sampling(**rule), np.random.default_rng(0).normal(size=(4, 20)) * 2
    got = np.asarray(narrowed(jnp.asarray(logits, jnp.float32), s))
    for row, z in zip(got, logits, strict=True):
        assert set(np.flatnonzero(np.isfinite(row))) == brute(z, s)
        np.testing.assert_allclose(row[np.isfinite(row)], ((z - z.max()) / s.temperature)[np.isfinite(row)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('p', [0.1, 0.35, 0.6, 1.0])
def test_top_p_is_the_smallest_set_where_tokens_are_equal(p):
    for z in ([0.0] * 10, [1.0, 0.0, 1.0, 0.0, 1.0, -1.0]):
        (row,) = np.asarray(narrowed(jnp.array([z]), Sampling(top_p=p)))
        assert set(np.flatnonzero(np.isfinite(row))) == brute(z, Sampling(top_p=p))


@pytest.mark.parametrize('temperature', [5e-324, 1e-39, 1e-37, 1e-10])
@pytest.mark.parametrize('rule', [{}, {'top_p': 0.9}, {'min_p': 0.1}, {'top_k': 3}], ids=str)
def test_a_tiny_temperature_is_greedy(temperature, rule):
    logits = jnp.array([[1.0, 3.0, -2.0, 50.0], [900.0, -3.0, 899.0, 0.0]])
    assert draw(logits, Sampling(temperature, **rule), jax.random.key(0)).tolist() == [3, 0]


def test_draws_follow_the_distribution_and_do_not_depend_on_the_rows_beside():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2, 1e-9]]))
    s, keys = Sampling(min_p=0.5), jax.random.split(jax.random.key(0), 4000)
    drawn = np.asarray(jax.vmap(lambda k: draw(logits, s, k)[0])(keys))
    share = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(share, [5 / 8, 3 / 8, 0, 0], atol=0.03)
    many = jax.random.normal(jax.random.key(1), (3, 50))
    assert draw(many, Sampling(), keys[0])[0] == draw(many[:1], Sampling(), keys[0])[0]
    np.testing.assert_array_equal(draw(many, Sampling(temperature=0.0), keys[0]), np.asarray(many).argmax(-1))


@pytest.mark.parametrize('bad', [dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5), dict(min_p=2.0)], ids=str)
def test_rules_out_of_range(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


def model(**fields):
    lm = LM(tiny('span', vocab=300, layers=2, **fields))
    return lm, random_params(lm.cfg)


def test_greedy_is_recomputation_and_batches_do_not_mix():
    """Prompts of different lengths in one batch: each token is the argmax of a whole forward pass over its row alone."""
    lm, params = model()
    prompts = ['ab', 'a longer prompt', '']
    made = generate(lm, params, BYTES, prompts, max_tokens=6, sampling=Sampling(temperature=0.0))
    assert isinstance(made, Generated) and made.tokens_per_s > 0
    run = jax.jit(lm.apply)
    for prompt, c in zip(prompts, made.completions, strict=True):
        ids = [256, *prompt.encode()]
        for i in range(6 if c.finish == 'length' else len(c.tokens) + 1):
            padded = np.zeros((1, 32), np.int32)
            padded[0, : len(ids)] = ids
            best = int(run(params, padded)[0, len(ids) - 1, :257].argmax())  # ids above 256 are no bytes
            assert best == (c.tokens[i] if i < len(c.tokens) else 256)
            ids.append(best)
        assert c.text == bytes(c.tokens).decode(errors='replace') and c.prompt == prompt


def test_seeds_and_streaming():
    lm, params = model()
    run = lambda seed, **kw: generate(lm, params, BYTES, ['x', 'yy'], max_tokens=8, seed=seed, **kw).completions  # noqa: E731
    pieces = {0: '', 1: ''}
    first = run(1, on_text=lambda row, piece: pieces.update({row: pieces[row] + piece}))
    assert run(1) == first and run(2) != first
    assert [c.text for c in first] == [pieces[0], pieces[1]]


def test_stop_strings_and_whole_characters():
    """Text is cut before the earliest stop string; nothing is said that a later token could take back."""

    def feed(data, stop, limit=99):
        row, said = Row(BYTES, 'p', stop, limit), []
        for byte in data:
            said.append(row.add(byte))
            if row.finish:
                break
        return row, said

    row, said = feed(b'one STOP two', ['STOP', 'P t'])
    assert (row.text, row.finish, ''.join(said)) == ('one ', 'stop', 'one ') and len(row.new) == 8
    row, said = feed(b'a STEP', ['STOP'])
    assert said == ['a', ' ', '', '', 'STE', 'P'] and not row.finish
    row, said = feed('é€'.encode(), [])
    assert said == ['', 'é', '', '', '€']
    row, said = feed([*'é'.encode()[:1], 256], [])
    assert (row.text, row.finish, ''.join(said)) == ('\ufffd', 'eos', '\ufffd')
    row, said = feed(b'abc', [], 2)
    assert (row.text, row.finish) == ('ab', 'length')


def test_the_first_word_goes_on_from_the_prompt():
    """A SentencePiece model writes a space before a word; at the border between prompt and text it must not be lost."""
    pytest.importorskip('sentencepiece')
    tok = load_tokenizer('mistral')
    row = Row(tok, 'Hello', [], 99)
    ids = tok.encode('Hello world').tolist()
    assert ids[: len(row.ids) - 1] == row.ids[1:]
    assert ''.join(row.add(i) for i in ids[len(row.ids) - 1 :]) == ' world'


def test_prompts_end_at_the_same_place():
    tokens, segments, positions = side_by_side([[5], [6, 7, 8]], 4)
    np.testing.assert_array_equal(tokens, [[0, 0, 0, 5], [0, 6, 7, 8]])
    np.testing.assert_array_equal(segments, [[0, 0, 0, 1], [0, 1, 1, 1]])
    np.testing.assert_array_equal(positions, [[0, 0, 0, 0], [0, 0, 1, 2]])


def test_refusals():
    lm, params = model()
    bad = [
        ({'prompts': []}, 'no prompt'), ({'max_tokens': 0}, 'max_tokens = 0'), ({'stop': ['']}, 'stop string is empty'),
        ({'prompts': ['a', 'b\udcff']}, 'is not text'), ({'stop': ['\udcff']}, 'is not text'),
        ({'max_tokens': 2**31}, 'max_tokens = 2147483648'), ({'seed': 2**32}, 'seed = 4294967296'), ({'seed': -(2**70)}, 'seed = -'),
    ]  # fmt: skip
    for change, match in bad:
        with pytest.raises(UserError, match=match):
            generate(lm, params, BYTES, **{'prompts': ['x']} | change)
    small = LM(tiny('span'))
    with pytest.raises(UserError, match='257 ids'):
        generate(small, None, BYTES, ['x'])


def test_command(trained, capsys):
    capsys.readouterr()
    greedy = ['generate', trained, '--temperature', '0', '--max-tokens', '5', '--mesh.devices', '1', '--prompt', 'document']
    assert cli.main(greedy) == 0
    out, err = capsys.readouterr()
    assert out.startswith('document') and 'step 3, ' in err and 'tokens/s' in err
    assert cli.main([*greedy, '--max-tokens', '1']) == 0
    assert capsys.readouterr().err == 'step 3, 1 tokens\n'
    assert cli.main([*greedy, 'other', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c['prompt'] for c in found['completions']] == ['document', 'other'] and found['step'] == 3
    assert out == 'document' + found['completions'][0]['text'] + '\n'
    assert cli.main([*greedy, 'other', '--max-tokens', '20', '--stop', out[8:10]]) == 0
    out, err = capsys.readouterr()
    assert "--- 'document' (stop)\ndocument\n" in out and "--- 'other'" in out and 'longer than the 16 tokens' in err
    for most, note in (('7', False), ('8', True)):  # with the beginning and the prompt, 16 tokens and 17
        assert cli.main([*greedy, '--max-tokens', most]) == 0
        assert ('longer than the 16 tokens' in capsys.readouterr().err) == note


@pytest.mark.parametrize(
    ('line', 'code', 'message'),
    [
        ('generate runs/nix', 66, 'is not a run'),
        ('generate RUN --top-p 2', 2, 'top_p = 2.0 is outside (0, 1]'),
        ('generate RUN --max-tokens 0 --mesh.devices 1', 2, 'max_tokens = 0'),
        ('generate RUN --promt x', 2, "did you mean '--prompt'?"),
        ('generate RUN --seed 9223372036854775808', 2, '--seed = 9223372036854775808: expected a whole number'),
        ('generate RUN --prompt a\udcffb --mesh.devices 1', 2, "'a\\udcffb' is not text"),
    ],
)
def test_bad_input(line, code, message, trained, capsys):
    capsys.readouterr()
    assert cli.main(line.replace('RUN', trained).split()) == code
    out, err = capsys.readouterr()
    assert message in err and out == ''
