"""What each entry of the table measures of a Probe: arrays and numbers by name, empty where it does not apply to the model."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spannorm_jax.diagnostics import activations, anatomy, curvature, jacobians, readout, removal, similarity, spectra, training
from spannorm_jax.diagnostics.probe import Probe
from spannorm_jax.model import LM, each_param, infos

Measured = dict[str, Any]  # numbers, and arrays (NumPy)


def of_step(*names: str, profile: str = '') -> Callable[[Probe], Measured]:
    """The layer/* of one step under these names, and how `profile` runs over depth."""

    def measure(probe: Probe) -> Measured:
        found = {name: probe.step[f'layer/{name}'] for name in names if f'layer/{name}' in probe.step}
        return found | {f'{profile}: {k}': v for k, v in (training.depth_profile(found[profile]) if profile else {}).items()}

    return measure


def experts(probe: Probe) -> Measured:
    return {k.removeprefix('moe/'): v for k, v in probe.step.items() if k.startswith('moe/')}


def compiled(measure: Callable, probe: Probe, *args: Any) -> Any:
    """`measure(cfg, params, *args)` as NumPy."""
    return jax.tree.map(np.asarray, jax.jit(functools.partial(measure, probe.cfg.model))(probe.params, *args))


def jacobian(probe: Probe) -> Measured:
    ends = compiled(jacobians.end_to_end, probe, probe.small, probe.key)
    return compiled(jacobians.block_jacobians, probe, probe.small, probe.key) | {f'end_to_end/{k}': v for k, v in ends.items()}


def ranks(probe: Probe) -> Measured:
    found: dict[str, list[float]] = {}
    layers = {'state': probe.states, 'ffn_out': probe.tokens(probe.seen['ffn'])}
    if 'hidden' in probe.seen:
        layers['ffn_hidden'] = probe.tokens(probe.seen['hidden'])
    for what, x_LND in layers.items():
        for x_ND in x_LND:
            known = np.isfinite(x_ND).all()
            of = spectra.effective_ranks(spectra.eigenvalues(x_ND) if known else np.zeros(x_ND.shape[-1]))
            for name, value in of.items():
                found.setdefault(f'{what}/{name}', []).append(value)
    return {k: np.array(v) for k, v in found.items()}


def eigenspectra(probe: Probe) -> Measured:
    tables = {'embedding': probe.params['embed']} | ({} if probe.cfg.model.tie_embeddings else {'head': np.asarray(probe.params['head']).T})
    rows = {k: np.asarray(v) for k, v in tables.items()} | {'features': probe.tokens(np.asarray(probe.seen['features'])[None])[0]}
    return {k: spectra.over_median(spectra.eigenvalues(x)) for k, x in rows.items()}


def alike(probe: Probe) -> Measured:
    pairs = np.asarray(jax.jit(similarity.cosine_pairs)(probe.states))
    return {'cosine': pairs, 'by_distance': similarity.by_distance(pairs), 'mean': pairs[np.triu_indices(len(pairs), 1)].mean()}


def turns(probe: Probe) -> np.ndarray:
    return np.asarray(jax.jit(similarity.angular_distances)(probe.last_tokens))


def turned(probe: Probe) -> Measured:
    return {'angular': turns(probe), 'influence': np.asarray(jax.jit(similarity.block_influence)(probe.states))}


def removed(probe: Probe) -> Measured:
    found = compiled(removal.one_by_one, probe, probe.batch)
    if probe.cfg.model.layers > 2:
        first = removal.groups(turns(probe))
        several = compiled(lambda cfg, params, batch: removal.in_groups(cfg, params, batch, first), probe, probe.batch)
        found |= {f'group/{k}': v for k, v in several.items()} | {'group/first': first + 1}
    if probe.cfg.model.layers > 1:
        found['swapped'] = compiled(removal.swaps, probe, probe.batch)
    return found


def lens(probe: Probe) -> Measured:
    look = lambda cfg, params, x, batch: readout.logit_lens(functools.partial(LM(cfg).logits, params), x, batch)  # noqa: E731
    found = compiled(look, probe, probe.seen['readout'], probe.batch)
    return found | {'effective_depth': readout.effective_depth(found['kl'])}


def massive(probe: Probe) -> Measured:
    return activations.massive(probe.states)


def vocabulary(probe: Probe) -> Measured:
    found = {'embedding': activations.row_norms(probe.params['embed'])}
    if not probe.cfg.model.tie_embeddings:
        found['head'] = activations.row_norms(np.asarray(probe.params['head']).T)
    logits = np.asarray(jax.jit(LM(probe.cfg.model).logits)(probe.params, probe.seen['features']), np.float32)
    real = logits.reshape(-1, logits.shape[-1])[probe.real_N]
    return found | {'logit_mean': real.mean(), 'logit_std': real.std(-1).mean()}


def weights(probe: Probe) -> Measured:
    """Of every matrix of the blocks, by its name; of several experts the mean."""
    L, found = probe.cfg.model.layers, {}
    leaves = zip(each_param(probe.cfg.model, infos(probe.cfg.model)), jax.tree.leaves(probe.params), strict=True)
    for (name, layers, info), w in leaves:
        if info.role not in ('read', 'write') or layers is None:
            continue
        for l, one in zip(layers, np.asarray(w), strict=True):
            several = one if 'experts' in info.axes else one[None]
            each = [spectra.weight_spectrum(spectra.matrix(m, info.role)) for m in several]
            for what in each[0]:
                found.setdefault(f'{name}/{what}', np.full(L, np.nan))[l] = np.mean([e[what] for e in each])
    return found


def along_the_row(probe: Probe) -> Measured:
    return {'loss': activations.by_position(probe.nats_BT, np.asarray(probe.batch['segments']) > 0), 'mean': probe.loss}


def sharpness(probe: Probe) -> Measured:
    few = {k: v[:2] for k, v in probe.batch.items()}

    def spectrum(cfg, params, batch, key, preconditioner):
        cfg = anatomy.differentiable(cfg)
        loss = lambda p: anatomy.mean_over(batch, anatomy.loss(cfg, p, batch))  # noqa: E731
        return curvature.hessian_spectrum(loss, params, key, preconditioner=preconditioner)

    found: Measured = {'hessian': compiled(spectrum, probe, few, probe.key, None)}
    if probe.preconditioner is not None:
        found['preconditioned'] = compiled(spectrum, probe, few, probe.key, probe.preconditioner)
        found['limit'] = curvature.stability_limit(probe.cfg.optim.lr_peak, probe.cfg.optim.beta1)
    return found | {'sharpness': found['hessian'][0]}


def history(probe: Probe) -> Measured:
    """layer/* through training, (L, rows that have them); only for a run that was trained with run.stats_every."""
    names = ('grad_rms/write', 'sigma_ffn', 'rms', 'update_ratio/write')
    rows = [row for row in probe.rows if all(f'layer/{n}' in row for n in names)]
    if not rows:
        return {}
    found = {name: np.array([row[f'layer/{name}'] for row in rows], np.float64).T for name in names}
    return {k: np.log10(np.where(v > 0, v, np.nan)) for k, v in found.items()} | {'steps': np.array([row['step'] for row in rows])}
