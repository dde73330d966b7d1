"""Our own model_type: every topology under Llama's names for the matrices, with a torch modelling file for transformers.

The file is modeling_spannorm_jax.py of this folder, followed by the source of the functions of topology.py that the model consists of:
they are written in operators that arrays of both libraries have.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spannorm_jax import topology
from spannorm_jax.errors import UserError
from spannorm_jax.interop import names
from spannorm_jax.interop.families import as_function
from spannorm_jax.model_config import ModelConfig

FILE = 'modeling_spannorm_jax.py'
CLASSES = {'AutoConfig': 'SpanNormConfig', 'AutoModelForCausalLM': 'SpanNormForCausalLM'}
IN_FILE = ('copies',)  # functions that are written differently in torch, and are there already
INSIDE = {'attn.norm_inner': 'norms.attn_inner', 'ffn.norm_inner': 'norms.ffn_inner', 'ffn.shared.norm_inner': 'norms.ffn_inner_shared'}


def outside(module: str) -> str:
    if module.startswith('norm_'):
        return f'model.norms.{module.removeprefix("norm_")}'
    return names.MODEL.get(module, f'model.{module}')


def inside(layer: int, module: str) -> str:
    if names.last(module).startswith('norm_'):
        return INSIDE.get(module, f'norms.{names.last(module).removeprefix("norm_")}')
    return names.BLOCK.get(module, module)


LAYOUT = names.Layout('model.layers.', outside, inside)


def functions(cfg: ModelConfig) -> list[Callable]:
    """How the embedding becomes the stream, each kind of block, and how the stream becomes features."""
    entry = topology.TOPOLOGIES[cfg.topology]
    return list(dict.fromkeys([entry.enter, *(rule for rule, _, _ in topology.runs(cfg)), entry.leave]))


def config(cfg: ModelConfig) -> dict[str, Any]:
    """What the modelling file needs: `facts` with every default worked out, and the blocks run by run with their constants and weights."""
    entry, resolved, lo, runs = topology.TOPOLOGIES[cfg.topology], as_function(cfg), 0, []
    weights = {name: list(shape) for name, (shape, _) in names.stored(cfg, names.places(cfg, LAYOUT), lambda _: np.zeros(0)).items()}
    for rule, moe, n in topology.runs(cfg):
        stem = f'{LAYOUT.prefix}{lo}.'
        own = {name.removeprefix(stem): shape for name, shape in weights.items() if name.startswith(stem)}
        rows = [entry.coef(cfg, l) for l in range(lo, lo + n)]
        runs.append(
            {'layers': n, 'rule': rule.__name__, 'moe': moe, 'coef': {k: [row[k] for row in rows] for k in rows[0]}, 'weights': own}
        )
        lo += n
    facts = vars(resolved) | {
        'kv_heads': cfg.resolved_kv_heads, 'head_dim': cfg.resolved_head_dim, 'value_dim': cfg.value_dim, 'rotated_dim': cfg.rotated_dim,
        'gated': cfg.gated,
    }  # fmt: skip
    return {
        'architectures': ['SpanNormForCausalLM'],
        'auto_map': {k: f'{Path(FILE).stem}.{v}' for k, v in CLASSES.items()},
        'vocab_size': cfg.vocab, 'hidden_size': cfg.width, 'num_hidden_layers': cfg.layers, 'num_attention_heads': cfg.heads,
        'use_cache': False, 'facts': facts, 'enter': entry.enter.__name__, 'embed_norm_inside': entry.embed_norm_inside(cfg),
        'leave': entry.leave.__name__, 'runs': runs,
        'weights': {k: v for k, v in weights.items() if not k.startswith(LAYOUT.prefix)},
    }  # fmt: skip


def code(cfg: ModelConfig) -> dict[str, str]:
    """The modelling file by its name. Raises: UserError for a function of a topology whose source cannot be copied."""
    text = (Path(__file__).parent / FILE).read_text('utf-8').rstrip('\n')
    sources = [_source(cfg, fn) for fn in functions(cfg) if fn.__name__ not in IN_FILE]
    return {FILE: '\n\n\n'.join([text, *sources]) + '\n'}


def _source(cfg: ModelConfig, fn: Callable) -> str:
    try:
        text = inspect.getsource(fn)
    except (OSError, TypeError):
        text = ''
    if not text.startswith(f'def {fn.__name__}('):
        raise UserError(
            f'topology {cfg.topology!r} cannot be exported: the source of {fn.__name__} cannot be copied; write it as a function in a file'
        )
    return text.replace('    from spannorm_jax import streams\n\n', '').rstrip('\n')
