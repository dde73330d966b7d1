"""Where each parameter lies in another project's weights: names, and the moves between its layout and ours. Numbers are never changed.

Theirs are matrices [out, in]; ours are [in, heads, dims] or [in, out], and norms have a `gain`. A `Place` says which weights, and which of
their rows, make one parameter; `canonical` reads by it and `stored` writes.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from spannorm_jax.model import each_param, infos, layer_name
from spannorm_jax.model_config import ModelConfig

HEADED = ('q', 'k', 'v')
HEADED_BIASES = tuple(f'{k}_bias' for k in HEADED)  # [heads, dims] here, flat there
MATRICES = (*HEADED, 'o', 'gate', 'up', 'down', 'head', 'router', 'q_a', 'kv_a', 'k_rope')  # [out, in] there

# Canonical modules of a block as transformers' Llama and DeepSeek name them; where no topology is involved, every layout below shares them.
QKV = {f'attn.{k}': f'self_attn.{k}_proj' for k in HEADED}
BLOCK = QKV | {'attn.o': 'self_attn.o_proj', 'attn.norm_q': 'self_attn.q_norm', 'attn.norm_k': 'self_attn.k_norm'} | {
    f'ffn.{k}': f'mlp.{k}_proj' for k in ('gate', 'up', 'down')
}  # fmt: skip
MODEL = {'embed': 'model.embed_tokens', 'head': 'lm_head', 'norm_final': 'model.norm'}
PRE = {'norm_attn_in': 'input_layernorm', 'norm_ffn_in': 'post_attention_layernorm'}
BRANCHES = {'norm_attn_branch': 'post_attention_layernorm', 'norm_ffn_branch': 'post_feedforward_layernorm'}
SANDWICH = BRANCHES | {'norm_attn_in': 'input_layernorm', 'norm_ffn_in': 'pre_feedforward_layernorm'}
PERI = PRE | {'norm_attn_branch': 'post_norm1', 'norm_ffn_branch': 'post_norm2'}


class Layout(NamedTuple):
    """Names: (module outside the blocks) -> theirs, and (layer, module of a block) -> theirs after `prefix` and the layer's number."""

    prefix: str
    model: Callable[[str], str]
    block: Callable[[int, str], str]
    fused: dict[str, tuple[str, ...]] = {}  # their module -> our modules that its rows hold, in order


class Place(NamedTuple):
    """Where a parameter comes from: one weight and its rows, or one weight per expert."""

    weights: tuple[str, ...]
    rows: Any = slice(None)


@functools.lru_cache(maxsize=8)  # a trace of the model, which takes a while
def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by canonical name."""
    found = {}
    for name, layers, info in each_param(cfg, infos(cfg)):
        found |= {layer_name(name, l): info.value.shape[l is not None :] for l in layers or [None]}
    return found


def split(own: str) -> tuple[str, str]:
    """A parameter as (module, suffix of its weight): norms and matrices have .weight and .bias, a topology's own parameter nothing."""
    for ours, theirs in (('.gain', '.weight'), ('.bias', '.bias'), ('_bias', '.bias')):
        module = own.removesuffix(ours)
        if module != own and (ours != '_bias' or last(module) in MATRICES):
            return module, theirs
    return own, '.weight' if last(own) in (*MATRICES, 'embed') else ''


def last(name: str) -> str:
    return name.rsplit('.', 1)[-1]


def places(cfg: ModelConfig, layout: Layout) -> dict[str, Place]:
    """Where every parameter of a model lies. Raises: KeyError for one that the layout has no name for."""
    found, parts = {}, {part: (module, parts) for module, parts in layout.fused.items() for part in parts}
    sizes = shapes(cfg)
    for name in sizes:
        if not name.startswith('layers.'):
            module, suffix = split(name)
            found[name] = Place((layout.model(module) + suffix,))
            continue
        _, l, own = name.split('.', 2)
        stem, (module, suffix) = f'{layout.prefix}{l}.', split(own)
        special = latent(cfg, module, suffix) if cfg.attention == 'mla' else None
        if cfg.experts and int(l) >= cfg.first_dense:
            special = special or routed(cfg, own)
        if special:
            found[name] = Place(tuple(stem + w for w in special.weights), special.rows)
        elif module in parts:
            theirs, members = parts[module]
            rows = [math.prod(sizes[f'layers.{l}.{m}']) // cfg.width for m in members]
            lo = sum(rows[: members.index(module)])
            found[name] = Place((stem + theirs + suffix,), slice(lo, lo + rows[members.index(module)]))
        else:
            found[name] = Place((stem + layout.block(int(l), module) + suffix,))
    return found


def latent(cfg: ModelConfig, module: str, suffix: str) -> Place | None:
    """Weights of mla, two of which hold two of ours: the compressed vector above the rotated key, and per head a key above a value."""
    C, nope, J = cfg.kv_latent, cfg.nope_dim, cfg.v_dim
    head = np.arange(cfg.heads)[:, None] * (nope + J)
    compressed, expanded = ('self_attn.kv_a_proj_with_mqa.weight',), ('self_attn.kv_b_proj.weight',)
    return {
        'attn.q': Place(('self_attn.q_proj.weight' if cfg.q_latent is None else 'self_attn.q_b_proj.weight',)),
        'attn.q_a': Place(('self_attn.q_a_proj.weight',)),
        'attn.norm_q_a': Place((f'self_attn.q_a_layernorm{suffix}',)),
        'attn.norm_kv_a': Place((f'self_attn.kv_a_layernorm{suffix}',)),
        'attn.kv_a': Place(compressed, slice(0, C)),
        'attn.k_rope': Place(compressed, slice(C, C + cfg.rope_dim)),
        'attn.k': Place(expanded, (head + np.arange(nope)).ravel()),
        'attn.v': Place(expanded, (head + nope + np.arange(J)).ravel()),
    }.get(module)


def routed(cfg: ModelConfig, own: str) -> Place | None:
    """Weights of a mixture of experts, stored one expert after the other."""
    names = {'ffn.router': 'mlp.gate.weight', 'ffn.router_bias': 'mlp.gate.e_score_correction_bias'}
    names |= {'ffn.norm_inner_gain': 'norms.ffn_inner.weight', 'ffn.norm_inner_bias': 'norms.ffn_inner.bias'}
    names |= {f'ffn.shared.{k}': f'mlp.shared_experts.{k}_proj.weight' for k in ('gate', 'up', 'down')}
    if own in names:
        return Place((names[own],))
    if own in ('ffn.gate', 'ffn.up', 'ffn.down'):
        return Place(tuple(f'mlp.experts.{e}.{last(own)}_proj.weight' for e in range(cfg.experts)))
    return None


class Named(Mapping):
    """Parameters by canonical name, each read from the weights when it is asked for."""

    def __init__(self, cfg: ModelConfig, where: dict[str, Place], weight: Callable[[str], Any]):
        self.sizes, self.where, self.weight = shapes(cfg), where, weight

    def __getitem__(self, name: str) -> Any:
        place, shape = self.where[name], self.sizes[name]
        if len(place.weights) == 1:
            w = self.weight(place.weights[0])
            return self._shaped(name, w[place.rows] if w.ndim else w, shape)  # a scalar has no rows
        return np.stack([self._shaped(name, self.weight(w), shape[1:]) for w in place.weights])

    @staticmethod
    def _shaped(name: str, w: Any, shape: tuple[int, ...]) -> Any:
        return (w.T if last(name) in MATRICES else w).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def stored(
    cfg: ModelConfig, where: dict[str, Place], param: Callable[[str], np.ndarray]
) -> dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]:
    """Their weights from ours, by their names: (shape, how to make it)."""
    sizes, pieces = shapes(cfg), {}
    for name, place in where.items():
        for e, weight in enumerate(place.weights):
            pieces.setdefault(weight, []).append((name, e if len(place.weights) > 1 else None, place.rows))

    def rows_of(name: str, expert: int | None) -> tuple[int, ...]:
        shape = sizes[name] if expert is None else sizes[name][1:]
        if last(name) in HEADED_BIASES:
            return (math.prod(shape),)
        if last(name) not in MATRICES:
            return shape
        inputs = math.prod(shape[:-1]) if last(name) == 'o' else shape[0]
        return math.prod(shape) // inputs, inputs

    def piece(name: str, expert: int | None) -> np.ndarray:
        x = param(name) if expert is None else param(name)[expert]
        shape = rows_of(name, expert)
        return x.reshape(shape[::-1]).T if last(name) in MATRICES else x.reshape(shape)

    def make(found: list) -> np.ndarray:
        if len(found) == 1:
            return piece(*found[0][:2])
        out = np.empty(total(found), np.float32)
        for name, expert, rows in found:
            out[rows] = piece(name, expert)
        return out

    def total(found: list) -> tuple[int, ...]:
        parts = [rows_of(name, expert) for name, expert, _ in found]
        return parts[0] if len(parts) == 1 else (sum(p[0] for p in parts), *parts[0][1:])

    return {weight: (total(found), lambda found=found: make(found)) for weight, found in pieces.items()}
