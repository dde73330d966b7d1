"""`spannorm bench`: what is measured against its own definition, on a step of a millisecond; and what is typed."""

import json
import math

import numpy as np
import pytest

from spannorm_jax import cli, host
from spannorm_jax.bench import BASE, bench, literal, variants
from spannorm_jax.config import Config, edit
from spannorm_jax.errors import UserError
from spannorm_jax.model import flops_per_token

TINY = edit(Config(), {'model.layers': 1, 'model.width': 8, 'model.heads': 1, 'data.seq': 8, 'data.batch': 2, 'mesh.devices': 1})


def test_a_variant_is_the_base_with_other_fields():
    made = variants(TINY, ('model.topology=pre', 'optim.loss-chunk=0,model.remat=full', 'model.kv_heads=None'))
    assert list(made) == [BASE, 'model.topology=pre', 'optim.loss-chunk=0,model.remat=full', 'model.kv_heads=None']
    assert made[BASE] == made['model.kv_heads=None'] == TINY
    assert made['model.topology=pre'] == edit(TINY, {'model.topology': 'pre'})
    assert made['optim.loss-chunk=0,model.remat=full'] == edit(TINY, {'optim.loss_chunk': 0, 'model.remat': 'full'})
    assert [literal(t) for t in ('4', '1e-3', 'True', 'None', 'pre', '')] == [4, 1e-3, True, None, 'pre', '']
    assert [literal(t) for t in ('{[]: 1}', '1 +', '\0')] == ['{[]: 1}', '1 +', '\0']


@pytest.mark.parametrize(
    'text', ['pre', 'model.topology', '=pre', 'model.topology=pre,full', 'model.topologi=pre', 'model.layers=many', '']
)
def test_what_is_no_variant_is_said(text):
    with pytest.raises(UserError, match='--vs|no field|model.layers'):
        variants(TINY, (text,))


def test_numbers_follow_their_definitions(monkeypatch):
    monkeypatch.setitem(host.PEAK_FLOPS, 'cpu', 1e12)
    cases = variants(TINY, ('data.batch=4',))
    base, other = bench(cases, 3, lambda text: None)
    for m, cfg in zip((base, other), cases.values(), strict=True):
        tokens = cfg.data.batch * cfg.data.seq
        assert len(m.rounds_ms) == 3 and m.step_ms == sorted(m.rounds_ms)[1]
        np.testing.assert_allclose(m.tokens_per_s, 1000 * tokens / m.step_ms)
        np.testing.assert_allclose(m.mfu, m.tokens_per_s * flops_per_token(cfg.model, 8) / 1e12)
        assert m.compile_s > 0.1 and m.peak_bytes > 3 * 4 * 1000 and m.data_tokens_per_s > 0
    ratios = 2 * np.array(base.rounds_ms) / np.array(other.rounds_ms)
    np.testing.assert_allclose(other.speed.mean, math.exp(np.log(ratios).mean()))
    assert base.speed is None and other.speed.low < other.speed.mean < other.speed.high


def test_the_command(capsys, monkeypatch):
    """The keys of the contract, and a table that names base and variant; what is measured is measured above."""
    found = [m for m in bench({BASE: TINY}, 2, lambda text: None)]
    second = found[0]._replace(name='model.remat=none', speed=found[0].speed)
    monkeypatch.setattr('spannorm_jax.bench.bench', lambda cases, rounds, tell: found + [second] * (len(cases) - 1))
    assert cli.main(['bench', 'debug', '--vs', 'model.remat=none', '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    assert {'tokens_per_s', 'step_ms', 'compile_s', 'peak_bytes', 'mfu', 'data_tokens_per_s'} <= told.keys() and told['mfu'] is None
    assert [v['name'] for v in told['variants']] == ['model.remat=none']
    assert cli.main(['bench', 'debug', '--vs', 'model.remat=none', 'model.topology=pre']) == 0
    text = capsys.readouterr().out
    assert 'model.remat=none' in text and 'peak FLOP/s' in text and f'{found[0].flops_per_token:,.0f} FLOPs per token' in text
    assert cli.main(['bench', 'debug', '--rounds', '1', '--vs', 'model.topology']) == UserError.exit_code
    assert cli.main(['bench', 'debug', 'model.topology=pre']) == UserError.exit_code
    assert 'write --model.topology pre instead' in capsys.readouterr().err
