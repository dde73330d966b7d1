"""What may change when a run goes on: every field of the configuration in one table, and the difference of two configurations in words."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from spannorm_jax.config import HOW_NOT_WHAT, Config, to_dict
from spannorm_jax.errors import UserError, nearest

SAFE, FLAG, NEVER = 'safe', 'needs run.accept', 'forbidden'

# effect -> fields, by dotted name; fields of HOW_NOT_WHAT are safe.
_SAFE = {'a name for people': 'name'}
_FLAG = {
    'another rate or direction of the updates from here on': (
        'optim.lr_peak optim.schedule optim.warmup_steps optim.lr_final optim.decay_fraction optim.beta1 optim.beta2 optim.eps '
        'optim.muon_lr optim.weight_decay optim.decay_roles optim.clip'
    ),
    'another objective from here on': (
        'optim.z_loss optim.balance_loss optim.router_z_loss optim.router_bias_rate optim.router_bias_until model.dropout model.balance '
        'model.capacity_factor'
    ),
    'the same gradients up to rounding, with other dropout': 'optim.accumulate',
    'the schedule of the new length from here on': 'run.steps',
    'evaluations on more or less text: old and new ones do not compare': 'run.eval_tokens',
    'what happens at a step that is not finite': 'run.nonfinite',
    'the text itself must be the same: its hash is compared': 'data.source data.text_field',
}
_NEVER = {
    'other parameters': (
        'model.topology model.layers model.width model.heads model.kv_heads model.head_dim model.ffn model.vocab model.attention '
        'model.q_latent model.kv_latent model.nope_dim model.rope_dim model.v_dim model.experts model.expert_ffn model.shared_experts '
        'model.first_dense model.router_bias model.norm model.norm_unit_offset model.norm_bias model.final_norm model.embed_norm '
        'model.qk_norm model.v_norm model.attn_bias model.mlp_bias model.tie_embeddings model.branch_gain model.post_fraction '
        'model.siamese_input_norm model.resid_gain model.block_end model.streams model.stream_exit model.activation'
    ),
    'another function of the same parameters': (
        'model.experts_per_token model.router model.router_normalize model.router_scale model.expert_groups model.groups_per_token '
        'model.latent_norm_eps model.norm_eps model.final_norm_eps model.positions model.rope_theta model.attn_scale model.document_mask '
        'model.attn_soft_cap model.logit_soft_cap model.embed_scale model.branch_scale model.logit_scale model.first_skip model.alpha '
        'model.first_block model.residual_scale model.residual_exit_scale model.hc_tanh model.sinkhorn_rounds model.norm_input_guard '
        'model.dtype model.residual_dtype model.parametrization model.base_width model.base_head_dim model.base_layers model.depth_alpha'
    ),
    'the run began with other values': 'model.init model.init_std model.embed_std model.scale_init model.beta model.branch_gain_init',
    'other state of the optimizer': 'optim.optimizer',
    'other tokens': 'data.tokenizer',
    'another order of the data': 'data.seq data.batch run.seed',
}
_SAFE_BY_SECTION = {
    'model': 'the same numbers, up to rounding',
    'optim': 'the same numbers, up to rounding',
    'mesh': 'the same numbers, up to rounding',
    'data': 'the same batches',
    'run': 'what is written and watched, and where',
}


class Rule(NamedTuple):
    """What changing a field means for a run that goes on."""

    kind: str  # SAFE, FLAG or NEVER
    effect: str


def _rules() -> dict[str, Rule]:
    table = {f'{s}.{name}': Rule(SAFE, _SAFE_BY_SECTION[s]) for s, names in HOW_NOT_WHAT.items() for name in names}
    for kind, effects in ((SAFE, _SAFE), (FLAG, _FLAG), (NEVER, _NEVER)):
        for effect, names in effects.items():
            for name in names.split():
                assert name not in table, f'{name} has two rules'
                table[name] = Rule(kind, effect)
    return table


RULES = _rules()


class Change(NamedTuple):
    """A field that differs."""

    field: str
    then: Any
    now: Any
    rule: Rule

    def __str__(self) -> str:
        return f'{self.field} {json.dumps(self.then)} -> {json.dumps(self.now)}'


def flat(tree: dict[str, Any], at: str = '') -> dict[str, Any]:
    """Nested dict -> dotted names."""
    items = {}
    for key, value in tree.items():
        items |= flat(value, f'{at}{key}.') if isinstance(value, dict) else {at + key: value}
    return items


def diff(then: Config, now: Config) -> list[Change]:
    """The fields that differ. Under a constant rate a run of another length has the same steps, so run.steps is then safe."""
    old, new = flat(to_dict(then)), flat(to_dict(now))
    rules = RULES
    if now.optim.schedule == then.optim.schedule == 'constant':
        rules = RULES | {'run.steps': Rule(SAFE, 'the same steps, fewer or more of them')}
    return [Change(name, old[name], new[name], rules[name]) for name in new if old[name] != new[name]]


def table(changes: list[Change], accepted: tuple[str, ...] = ()) -> str:
    """The changes as three columns: checkpoint, now, effect."""
    rows = [('field', 'checkpoint', 'now', 'effect')]
    for c in changes:
        kind = 'accepted' if c.rule.kind == FLAG and c.field in accepted else c.rule.kind
        rows.append((c.field, json.dumps(c.then), json.dumps(c.now), f'{kind}: {c.rule.effect}'))
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    return '\n'.join('  ' + '  '.join([*(f'{cell:{w}}' for cell, w in zip(row[:3], wide, strict=True)), row[3]]) for row in rows)


def check_resumable(then: Config, now: Config, folder: Path) -> list[Change]:
    """What `now` changes of the run in `folder`, begun or last saved as `then`.

    Raises: UserError with all changes in three columns where one is forbidden, or needs to be named in run.accept and is not.
    """
    changes, accepted = diff(then, now), tuple(name.replace('-', '_') for name in now.run.accept)
    for name in accepted:
        if name not in RULES:
            raise UserError(f'run.accept names {name!r}; {nearest(name, RULES)}')
        if RULES[name].kind == NEVER:
            raise UserError(f'run.accept names {name!r}, which no run can change ({RULES[name].effect}); give another run.dir')
    never = [c.field for c in changes if c.rule.kind == NEVER]
    asked = [c.field for c in changes if c.rule.kind == FLAG and c.field not in accepted]
    if not never and not asked:
        return changes
    mend = 'restore these values, or give another run.dir'
    if not never:
        mend = f'to go on with the new values add --run.accept {" ".join([*accepted, *asked])}; or restore the old, or give another run.dir'
    raise UserError(f'{str(folder)!r} holds a run of another configuration:\n{table(changes, accepted)}\n{mend}')
