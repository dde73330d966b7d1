"""Configuration: JSON round trip, strictness, edits, identity."""

import hashlib
import json
import math

import pytest

from spannorm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig, edit, from_dict, run_id, to_dict
from spannorm_jax.errors import UserError


def test_json_round_trip_and_edit():
    cfg = edit(Config(), {'model.topology': 'deepnorm', 'model.alpha': 2.0, 'run.seed': 3, 'name': 'x.y-1', 'optim.decay_roles': ('read',)})
    assert cfg.model.alpha == 2.0 and cfg.run.seed == 3
    assert from_dict(Config, to_dict(cfg)) == cfg
    assert from_dict(Config, to_dict(edit(cfg, {'run.sinks': ('wandb',)}))).run.sinks == ('wandb',)
    assert hash(cfg) == hash(from_dict(Config, to_dict(cfg)))


def test_edits_are_valid_together_not_one_by_one():
    cfg = edit(Config(), {'model.heads': 7, 'model.width': 70, 'data.batch': 9, 'optim.accumulate': 3})
    assert (cfg.model.heads, cfg.model.width, cfg.optim.accumulate) == (7, 70, 3)


def test_identity_holds_what_changes_numbers_and_nothing_else():
    base = Config()
    for change in (
        {'run.root': 'x'},
        {'run.dir': 'y'},
        {'data.workers': 2},
        {'mesh.fsdp': 2},
        {'run.keep': 5},
        {'run.checkpoint_every': 7},
        {'model.remat': 'full'},
    ):
        assert run_id(edit(base, change)) == run_id(base)
    for change in (
        {'model.layers': 3},
        {'run.seed': 1},
        {'data.batch': 16},
        {'optim.lr_peak': 2e-3},
        {'run.steps': 5},
        {'run.eval_tokens': 9},
    ):
        assert run_id(edit(base, change)) != run_id(base)
    assert run_id(base).startswith('run-') and len(run_id(base)) == len('run-') + 8
    # what is at its default is no part of it: a field that a later version adds renames no run
    told = {'name': 'run', 'model': {'layers': 3}, 'data': {}, 'optim': {}, 'mesh': {}, 'run': {}}
    text = json.dumps(told, sort_keys=True)
    assert run_id(edit(base, {'model.layers': 3, 'run.root': 'x'})) == f'run-{hashlib.sha256(text.encode()).hexdigest()[:8]}'


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: edit(Config(), {'model.topolgy': 'pre'}), "no field 'topolgy'; did you mean 'topology'"),
        (lambda: from_dict(Config, {'model': {'layer': 3}}), "no field 'model.layer'; did you mean 'layers'"),
        (lambda: from_dict(Config, {'model': {'layers': 'three'}}), 'model.layers'),
        (lambda: from_dict(Config, {'model': {'layers': True}}), 'model.layers'),
        (lambda: from_dict(Config, {'model': []}), 'model.: expected an object'),
        (lambda: from_dict(Config, []), 'expected an object'),
        (lambda: ModelConfig(topology='spam'), 'unknown topology'),
        (lambda: ModelConfig(width=10, heads=3), 'does not divide model.width'),
        (lambda: ModelConfig(heads=4, kv_heads=3), 'does not divide model.heads'),
        (lambda: ModelConfig(width=12, heads=4), 'even number of dimensions'),
        (lambda: ModelConfig(layers=0), 'layers'),
        (lambda: ModelConfig(layers=2.5), 'layers'),
        (lambda: ModelConfig(activation='swigelu'), "did you mean 'swiglu'"),
        (lambda: ModelConfig(dropout=1.5), 'outside'),
        (lambda: ModelConfig(first_skip='normed', topology='pre'), 'no effect on topology'),
        (lambda: ModelConfig(branch_gain='scalar'), 'no effect on topology'),
        (lambda: ModelConfig(init='own', scale_init='none'), "scale_init has no effect with model.init = 'own'"),
        (lambda: ModelConfig(topology='deepnorm', beta=2.0), "beta has no effect with model.init = 'common'"),
        (lambda: ModelConfig(topology='pre', branch_gain_init=1.0), "branch_gain_init has no effect with model.branch_gain = 'none'"),
        (lambda: ModelConfig(topology='mixln', branch_scale=0.1), 'no effect on topology'),
        (lambda: ModelConfig(norm_eps=math.nan), 'norm_eps = nan: expected a finite number'),
        (lambda: ModelConfig(vocab=2**40), 'vocab = 1099511627776: expected a whole number below'),
        (lambda: ModelConfig(attn_soft_cap=0.0), 'attn_soft_cap = 0.0 is outside'),
        (lambda: ModelConfig(rope_theta=-5.0), 'rope_theta'),
        (lambda: ModelConfig(init_std=-1.0), 'init_std'),
        (lambda: from_dict(Config, {'optim': {'lr_peak': 10**400}}), 'lr_peak'),
        (lambda: OptimConfig(lr_peak=math.inf), 'lr_peak = inf'),
        (lambda: OptimConfig(beta1=1.0), 'beta1 = 1.0 is outside'),
        (lambda: OptimConfig(loss_chunk=-3), 'loss_chunk'),
        (lambda: OptimConfig(muon_lr=0.1), 'muon_lr has no effect'),
        (lambda: OptimConfig(decay_roles=('reed',)), "did you mean 'read'"),
        (lambda: RunConfig(eval_tokens=-7), 'eval_tokens'),
        (lambda: RunConfig(seed=2**70), 'seed'),
        (lambda: DataConfig(batch=0), 'batch'),
        (lambda: DataConfig(workers=-1), 'workers'),
        (lambda: OptimConfig(optimizer='adam'), 'adamw'),
        (lambda: OptimConfig(lr_peak=-1.0), 'lr_peak'),
        (lambda: OptimConfig(beta1=2.0), 'beta1'),
        (lambda: MeshConfig(fsdp=0), 'fsdp'),
        (lambda: MeshConfig(platform='npu'), 'platform'),
        (lambda: RunConfig(steps=-1), 'steps'),
        (lambda: RunConfig(sinks=('tensorbord',)), 'sinks'),
        (lambda: Config(name='a/b'), 'name'),
        (lambda: Config(name='..'), 'name'),
        (lambda: Config(optim=OptimConfig(accumulate=3)), 'accumulate = 3 does not divide data.batch = 8'),
    ],
)
def test_wrong_configs_say_what_is_wrong(make, message):
    with pytest.raises(UserError, match=message.replace('.', r'\.')):
        make()
