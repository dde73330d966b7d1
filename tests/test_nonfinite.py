"""NaN injected into a gradient or one layer (test_train.py: into a batch): what is reported, what each policy does, what is never saved."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fakes import POISON, TINY, FakeCorpus

from spannorm_jax import nonfinite, program
from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import edit
from spannorm_jax.model import LM, infos
from spannorm_jax.step import leaf_names
from spannorm_jax.topology import TOPOLOGIES
from spannorm_jax.train import fit

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures('compiled_once')]
CFG = edit(TINY, {'model.layers': 1, 'run.eval_every': 0, 'run.checkpoint_every': 3, 'run.steps': 7})


@jax.custom_vjp
def bad_back(x, bad):
    return x


bad_back.defvjp(lambda x, bad: (x, bad), lambda bad, g: (jnp.where(bad, jnp.nan, g), None))


class BadGradient(LM):
    """All is finite forward; for a batch that holds POISON the gradient is NaN from the features down."""

    def features(self, params, tokens, *args, **kw):
        x, extras = super().features(params, tokens, *args, **kw)
        return bad_back(x, (tokens == POISON).any()), extras


def bad_block(x, attn, ffn, norm, c):
    """PreNorm, but for NaN that leaves the second block."""
    x = x + attn(norm('attn_in', x))
    return x + ffn(norm('ffn_in', x)) + jnp.where(c.layer == 1, jnp.nan, 0.0)


def lines(folder):
    return [json.loads(line) for line in (folder / 'nonfinite.jsonl').read_text().splitlines()]


def saved_arrays(folder):
    """Every array of every checkpoint."""
    with Checkpoints(folder / 'checkpoints', read_only=True) as c:
        for step in c.steps():
            found = c.manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(), optim=ocp.args.StandardRestore()))
            yield from jax.tree.leaves((found['params'], found['optim']))


def test_a_gradient_under_skip(tmp_path, monkeypatch):
    monkeypatch.setattr(program, 'LM', BadGradient)
    outcome = fit(edit(CFG, {'run.dir': str(tmp_path), 'run.nonfinite': 'skip'}), corpus=FakeCorpus(poison=[1, 4]))
    assert (outcome.status, outcome.step, outcome.skipped) == ('completed', 7, 2)
    one, two = lines(tmp_path)
    assert (one['step'], one['batch'], two['step'], two['batch']) == (2, 1, 5, 4) and two['batches'] == [0, 1, 2, 3, 4]
    assert (two['kind'], two['first'], two['layer'], two['policy']) == ('gradient', 'norm_final.gain', None, 'skip')
    assert np.isfinite(two['loss']) and two['grad_norm'] is None  # the loss was fine, its gradient was not
    assert all(np.isfinite(x).all() for x in saved_arrays(tmp_path))


def test_a_gradient_under_rollback(tmp_path, monkeypatch):
    """Back to step 3, and on with the data after batch 4; the skipped range is in the report, the rows have no hole."""
    monkeypatch.setattr(program, 'LM', BadGradient)
    outcome = fit(edit(CFG, {'run.dir': str(tmp_path), 'run.nonfinite': 'rollback'}), corpus=FakeCorpus(poison=[4]))
    assert (outcome.status, outcome.step, outcome.rollbacks) == ('completed', 7, 1)
    (one,) = lines(tmp_path)
    assert (one['step'], one['batch'], one['kind'], one['first'], one['policy']) == (5, 4, 'gradient', 'norm_final.gain', 'rollback')
    assert [json.loads(line)['step'] for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()] == list(range(1, 8))
    with Checkpoints(tmp_path / 'checkpoints', read_only=True) as c:
        assert c.meta(7)['batch'] == 9  # 7 steps, and batches 3 and 4 left out
    assert all(np.isfinite(x).all() for x in saved_arrays(tmp_path))


def test_a_layer_is_named_by_its_output(tmp_path, monkeypatch):
    monkeypatch.setitem(TOPOLOGIES, 'bad', TOPOLOGIES['pre']._replace(block=bad_block))
    cfg = edit(CFG, {'run.dir': str(tmp_path), 'model.topology': 'bad', 'model.layers': 3, 'optim.accumulate': 2})
    outcome = fit(cfg, corpus=FakeCorpus())
    assert (outcome.exit_code, outcome.step, outcome.first_nonfinite) == (70, 0, 'layers.1')
    assert 'step 1 (batch 0)' in outcome.reason and 'the first output that is not finite is that of layers.1' in outcome.reason
    (one,) = lines(tmp_path)
    assert (one['kind'], one['layer'], one['policy']) == ('forward', 1, 'stop')
    assert list(saved_arrays(tmp_path)) == []  # nothing of it was saved


def test_the_first_of_several_outputs():
    bad = np.zeros((3, 3), bool)
    assert nonfinite.first_output(bad) is None
    bad[2] = True
    assert nonfinite.first_output(bad) == 'layers.2.attn'
    bad[1, 2] = True
    assert nonfinite.first_output(bad) == 'layers.1'


def test_weights_come_before_outputs_and_gradients():
    names = leaf_names(TINY.model, infos(TINY.model))
    params = jax.tree.map(lambda p: jnp.zeros(p.value.shape), infos(TINY.model), is_leaf=lambda p: hasattr(p, 'value'))
    metrics = {'loss': jnp.nan, 'grad_norm': jnp.nan, 'update_norm': jnp.nan, 'bad': names.index('layers.0.attn.q')}
    everywhere = np.ones((2, 3), bool)
    look = lambda **k: nonfinite.examine(TINY, names, 9, 8, metrics, **k)  # noqa: E731
    assert (look().kind, look().first, look().layer) == ('gradient', 'layers.0.attn.q', 0)
    found = look(params=params, outputs=everywhere)
    assert (found.kind, found.first) == ('forward', 'layers.0.attn')
    params['head'] = params['head'].at[0, 0].set(jnp.inf)
    found = look(params=params, outputs=everywhere)
    assert (found.kind, found.first) == ('weight', 'head') and found.batches == list(range(1, 9))
    metrics |= {'bad': -1, 'loss': 1.0}
    assert look().kind == 'update'
