"""What each entry of the table measures of a Probe: arrays and numbers by name, empty where it does not apply to the model."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spannorm_jax import parametrization
from spannorm_jax.config import OptimConfig
from spannorm_jax.diagnostics import activations, anatomy, curvature, jacobians, readout, removal, similarity, spectra, training
from spannorm_jax.diagnostics.probe import Probe, adam_state
from spannorm_jax.initializers import is_param
from spannorm_jax.model import LM, each_param
from spannorm_jax.optim import schedule
from spannorm_jax.step import TrainState, role_counts, role_sums

Measured = dict[str, Any]  # numbers, and arrays (NumPy)


def of_step(*names: str, profile: str = '') -> Callable[[Probe], Measured]:
    """The layer/* of one step under these names, and how `profile` runs over depth."""

    def measure(probe: Probe) -> Measured:
        found = {name: probe.step[f'layer/{name}'] for name in names if f'layer/{name}' in probe.step}
        return found | {f'{profile}: {k}': v for k, v in (training.depth_profile(found[profile]) if profile else {}).items()}

    return measure


def gradients(probe: Probe) -> Measured:
    """The layer/* of gradients; what the norms' scales alone predict of them (ending where they end); effective ranks of the matrices."""
    found = of_step('grad_rms/read', 'grad_rms/write', profile='grad_rms/write')(probe)
    scales = (np.log(probe.step[f'layer/sigma_{site}']) for site in ('attn', 'ffn'))
    normed = probe.cfg.model.block_end == 'norm'  # else what enters is no norm's
    law = training.norm_law(probe.cfg.model.topology, *scales) if normed else None
    if law is not None:
        with np.errstate(all='ignore'):
            measured = np.log(found['grad_rms/write'])
            rest = measured - law
            found |= {'law': np.exp(law + rest[-1]), 'law: ln first over last': law[0] - law[-1]}
            found |= {'measured: ln first over last': measured[0] - measured[-1], 'law: R2': 1 - rest.var() / measured.var()}
    for name, l, several in matrices(probe, probe.grads, ('write',)):
        ranks = [spectra.effective_ranks(np.square(spectra.singular_values_of(m)))['soft'] for m in several]
        known = [rank for rank in ranks if np.isfinite(rank)]  # an expert that no token chose has no gradient, and no rank
        found.setdefault(f'rank/{name}', np.full(probe.cfg.model.layers, np.nan))[l] = np.mean(known) if known else np.nan
    return found


def scales(probe: Probe) -> Measured:
    found = of_step('sigma_attn', 'sigma_ffn', 'branch_var/attn', 'branch_var/ffn', profile='sigma_ffn')(probe)
    for site in ('attn', 'ffn'):
        tokens_LN = probe.tensors[f'deviation/{site}'].reshape(probe.cfg.model.layers, -1)[:, probe.real_N]
        found |= {f'sigma_{site}/p{q}': np.percentile(tokens_LN, q, axis=1) for q in (5, 50, 95)}
    return found


def updates(probe: Probe) -> Measured:
    """The layer/* of one step; by role also `cosine` of two successive updates, `surprise` = rms of g / sqrt(v) as Adam sees it (1 in its
    first step), and `grad_over_eps` = rms of the gradient over Adam's eps."""
    roles = ('read', 'write')
    found = of_step(*(f'{what}/{role}' for role in roles for what in ('update_ratio', 'update_visible')))(probe)
    for role in roles:
        eps = probe.cfg.optim.eps * parametrization.factors(probe.cfg.model, role, True).eps
        found[f'grad_over_eps/{role}'] = probe.step[f'layer/grad_rms/{role}'] / eps
    if not probe.successive:
        return found
    return found | {f'{k}/{role}': by_role[role] for k, by_role in of_successive(probe, *probe.successive).items() for role in roles}


def of_successive(probe: Probe, *states: TrainState) -> dict[str, dict[str, np.ndarray]]:
    """`cosine` of the updates between three states and `surprise` of the gradient in the first of them: {name: {role: (L,)}}."""
    cfg, tree = probe.cfg, probe.infos
    sums = functools.partial(role_sums, cfg.model, tree)

    def run(states):
        u, w = (jax.tree.map(jnp.subtract, b.params, a.params) for a, b in itertools.pairwise(states))
        dot, uu, ww = (sums(jax.tree.map(jnp.multiply, x, y)) for x, y in ((u, w), (u, u), (w, w)))
        before, after = (adam_state(s.opt_state) for s in states[:2])
        surprise = sums(adam_ratio(cfg.optim, before, after, tree))
        count = role_counts(cfg.model, tree)
        return {
            'cosine': {role: dot[role] / jnp.sqrt(uu[role] * ww[role]) for role in dot},
            'surprise': {role: jnp.sqrt(surprise[role] / count[role]) for role in dot},
        }

    return jax.tree.map(np.asarray, jax.jit(run)(states))


def adam_ratio(opt: OptimConfig, before: Any, after: Any, tree: Any) -> Any:
    """g^2 / v of every parameter: g the gradient that moved Adam from one state to the next, v its second moment with g in it, without the
    bias of its start; NaN where another rule moves it.  Source: arXiv:2304.13013, RMS_t."""
    t = after.count.astype(jnp.float32)

    def one(info, m, m_new, v_new):
        if isinstance(m, optax.MaskedNode):
            return jnp.full(info.value.shape, jnp.nan)
        g = (m_new - opt.beta1 * m) / (1 - opt.beta1)
        return jnp.square(g) / jnp.maximum(v_new / (1 - opt.beta2**t), opt.eps**2)

    return jax.tree.map(one, tree, before.mu, after.mu, after.nu, is_leaf=is_param)


def experts(probe: Probe) -> Measured:
    """moe/* of one step; also `cv` = std over mean of the experts' shares, `router_rms` of the router's logits, and `grad_cv` = std over
    mean of the norms of the experts' gradients."""
    found = {k.removeprefix('moe/'): v for k, v in probe.step.items() if k.startswith('moe/')}
    if not found:
        return {}
    found['cv'] = found['load'].std(-1) / found['load'].mean(-1)
    logits = probe.tensors['router_logits']
    logits_LNE = logits.reshape(len(logits), -1, logits.shape[-1])[:, probe.real_N]
    router_rms, grad_cv = np.full((2, len(found['load'])), np.nan)
    router_rms[np.isfinite(found['cv'])] = np.sqrt(np.square(logits_LNE).mean((1, 2)))
    for _, l, several in matrices(probe, probe.grads, ('write',)):
        if len(several) > 1:
            norms = np.linalg.norm(several, axis=(1, 2))
            grad_cv[l] = norms.std() / norms.mean()
    return found | {'router_rms': router_rms, 'grad_cv': grad_cv}


def compiled(measure: Callable, probe: Probe, *args: Any) -> Any:
    """`measure(cfg, params, *args)` as NumPy."""
    return jax.tree.map(np.asarray, jax.jit(functools.partial(measure, probe.cfg.model))(probe.params, *args))


def jacobian(probe: Probe) -> Measured:
    ends = compiled(jacobians.end_to_end, probe, probe.small, probe.key)
    rank = spectra.effective_ranks(np.square(ends['last_token']))
    ends |= {'hard_rank': rank['hard'], 'soft_rank': rank['soft']}
    return compiled(jacobians.block_jacobians, probe, probe.small, probe.key) | {f'end_to_end/{k}': v for k, v in ends.items()}


def ranks(probe: Probe) -> Measured:
    found: dict[str, list[float]] = {}
    layers = {'state': probe.states, 'ffn_out': probe.tokens(probe.seen['ffn'])}
    if 'hidden' in probe.seen:
        layers['ffn_hidden'] = probe.tokens(probe.seen['hidden'])
    for what, x_LND in layers.items():
        for x_ND in x_LND:
            for name, value in spectra.effective_ranks(spectra.eigenvalues(x_ND)).items():
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
    L = probe.cfg.model.layers
    first = removal.groups(turns(probe))
    kept_KL = np.concatenate([1 - np.eye(L), removal.without_groups(first, L)])  # one by one, then in groups
    both = compiled(removal.rises, probe, probe.batch, kept_KL)
    found = {k: v[:L] for k, v in both.items()}
    if L > 1:
        found |= {f'group/{k}': v[L:] for k, v in both.items()} | {'group/first': first + 1}
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


def matrices(probe: Probe, tree: Any, roles: Sequence[str]) -> Iterator[tuple[str, int, list[np.ndarray]]]:
    """(name, block, matrices) of every parameter of these roles in the blocks; several matrices where there are experts."""
    leaves = zip(each_param(probe.cfg.model, probe.infos), jax.tree.leaves(tree), strict=True)
    for (name, layers, info), w in leaves:
        if info.role in roles and layers is not None:
            for l, one in zip(layers, np.asarray(w), strict=True):
                yield name, l, [spectra.matrix(m, info.role) for m in (one if 'experts' in info.axes else one[None])]


def weights(probe: Probe) -> Measured:
    """Of every matrix of the blocks, by its name; of several experts the mean."""
    found: Measured = {}
    for name, l, several in matrices(probe, probe.params, ('read', 'write')):
        each = [spectra.weight_spectrum(m) for m in several]
        for what in each[0]:
            found.setdefault(f'{name}/{what}', np.full(probe.cfg.model.layers, np.nan))[l] = np.mean([e[what] for e in each])
    return found


def along_the_row(probe: Probe) -> Measured:
    return {'loss': activations.by_position(probe.nats_BT, np.asarray(probe.batch['segments']) > 0), 'mean': probe.loss}


def sharpness(probe: Probe) -> Measured:
    few = {k: v[:2] for k, v in probe.batch.items()}

    def spectrum(params, preconditioner):
        cfg = anatomy.differentiable(probe.cfg.model)
        loss = lambda p: anatomy.mean_over(few, anatomy.loss(cfg, p, few))  # noqa: E731
        return curvature.hessian_spectrum(loss, params, probe.key, preconditioner=preconditioner)

    run = jax.jit(spectrum)  # compiled once for both
    found: Measured = {'hessian': np.asarray(run(probe.params, jax.tree.map(jnp.ones_like, probe.params)))}
    if probe.preconditioner is not None:
        found['preconditioned'] = np.asarray(run(probe.params, probe.preconditioner))
        cfg, steps = probe.cfg, int(np.asarray(adam_state(probe.opt_state).count))
        rate = float(schedule(cfg.optim, max(cfg.run.steps, steps))(steps - 1))  # of the last step that was made
        found |= {'rate': rate, 'limit': curvature.stability_limit(rate, cfg.optim.beta1)}
    return found | {'sharpness': found['hessian'][0]}


def history(probe: Probe) -> Measured:
    """layer/* through training, (L, rows that have them); only for a run that was trained with run.stats_every."""
    names = ('grad_rms/write', 'sigma_ffn', 'rms', 'update_ratio/write')
    rows = [row for row in probe.rows if all(f'layer/{n}' in row for n in names)]
    if not rows:
        return {}
    found = {name: np.array([row[f'layer/{name}'] for row in rows], np.float64).T for name in names}
    return {k: np.log10(np.where(v > 0, v, np.nan)) for k, v in found.items()} | {'steps': np.array([row['step'] for row in rows])}
