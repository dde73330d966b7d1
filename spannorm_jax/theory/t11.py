"""T11, the paper's other assumptions at initialisation, one number each."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spannorm_jax.diagnostics.anatomy import differentiable
from spannorm_jax.layers import Attention, Mlp, Norm
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.theory import anatomy
from spannorm_jax.theory.cells import Cell, Tables, depths_of, log_depths
from spannorm_jax.theory.verdicts import FAILS, HOLDS, estimate, slope, within


def smallest(x_BTD: jax.Array) -> jax.Array:
    """The token with the least rms, (D,)."""
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    return x_ND[jnp.square(x_ND).sum(-1).argmin()]


def norms_of_blocks(cfg: ModelConfig, params: Any, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """Spectral norms (L,) of the Jacobians of each block and of its parts, where they are evaluated in the forward pass.

    block |dx_{l+1}/dx_l|, attn |dA/dx|, ffn |dF/dy|: over all positions of a row together, from below by power iteration, by which they
    may be a few per cent too small; norm, that of N_ffn at the token of Z with the least rms, times that rms; product |W2 W1|, W1 the up
    projection; least and sigma as in `anatomy.observe`.
    """
    cfg = differentiable(cfg)
    x_BTD, make_stream, parts = anatomy.start(cfg, params, tokens_BT)
    stream, found = make_stream(x_BTD), []

    def one(x, pc, run):
        p, coef = pc
        out, seen = anatomy.watch(run.block, p, x, coef, run.ctx)
        key = jax.random.fold_in(jax.random.key(0), coef['layer'])
        into = {name: seen[name][0] for name in ('attn', 'ffn')}
        total = anatomy.sums(seen, out)
        maps = {
            'block': (lambda x: run.apply(p, x, coef), x),
            'attn': (lambda x: Attention(cfg).apply({'params': p['attn']}, x, run.ctx)[0], into['attn']),
            'ffn': (lambda y: Mlp(cfg).apply({'params': p['ffn']}, y), into['ffn']),
            'norm': (lambda z: Norm(cfg).apply({'params': p['norm_ffn_sum']}, z), smallest(total['ffn'][0])),
        }
        norms = {name: anatomy.spectral_norm(f, at, key) for name, (f, at) in maps.items()}
        for name, (z, _) in total.items():
            rms_BT = jnp.sqrt(jnp.square(z).mean(-1))
            norms |= {f'least_{name}': rms_BT.min(), f'sigma_{name}': rms_BT.mean()}
        norms['norm'] *= norms['least_ffn']
        norms['product'] = jnp.linalg.norm(p['ffn']['up'] @ p['ffn']['down'], 2)
        return out, norms

    for run in parts:
        stream, norms = jax.lax.scan(lambda x, pc, run=run: one(x, pc, run), stream, (run.params, run.coef))
        found.append(norms)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *found)


def t11(cells: dict[Cell, dict[str, np.ndarray]]) -> Tables:
    """One row per assumption, topology (span, post), init and depth: {assumption, value, verdict}.

    homogeneous sigma > 1    share of the 2L sums whose mean rms is above 1 (all of them: above 0.99), and the coefficient of variation
                             of sigma - 1 over blocks (below 0.1)
    norm Jacobian 1/sigma    |dN/dZ| min sigma, within 1% of 1
    FFN Jacobian |W2 W1|     |dF/dy| / |W2 W1|, within 10% of 1
    bound of eq. 18 (span)   (1 + |W2 W1| (1 + |dA/dx|) / min sigma_A) / min sigma_Z over |dx_{l+1}/dx_l|, the largest over blocks being
                             its slack: a bound where it is never below 1; `with |dF/dy|` in place of |W2 W1| it must be one
    second term O(1/L)       slope over ln L of ln(|W2 W1| (1 + |dA/dx|) / (min sigma_A min sigma_Z)): -1 within a tenth
    product of norms O(1)    sum over blocks of ln |dx_{l+1}/dx_l|: its slope over ln L, within 0.1 of 0
    """
    rows = []
    for first, group in depths_of(list(cells)).items():
        second, products = [], []
        for cell in group:
            m = cells[cell]

            def row(assumption, values, verdict, cell=cell):
                rows.append(cell.to_json() | {'assumption': assumption, 'value': estimate(values), 'verdict': verdict})

            sigma = np.concatenate([m['sigma_attn'], m['sigma_ffn']], 1)
            above = (sigma > 1).mean(1)
            row('sigma > 1: share of sums', above, within(estimate(above), 0.99, math.inf))
            for name, site in (('A', 'attn'), ('Z', 'ffn')):
                excess = m[f'sigma_{site}'] - 1
                spread = excess.std(1) / np.abs(excess.mean(1))
                row(f'sigma_{name} the same in every block: variation of sigma - 1', spread, within(estimate(spread), -math.inf, 0.1))
            row('norm Jacobian = 1/sigma: ratio', m['norm'].mean(1), within(estimate(m['norm'].mean(1)), 0.99, 1.01))
            ffn = (m['ffn'] / m['product']).mean(1)
            row('FFN Jacobian = |W2 W1|: ratio', ffn, within(estimate(ffn), 0.9, 1.1))
            term = {k: m[k] * (1 + m['attn']) / m['least_attn'] / m['least_ffn'] for k in ('product', 'ffn')}
            if cell.topology == 'span':
                for name, k in (('eq. 18', 'product'), ('eq. 18 with |dF/dy|', 'ffn')):
                    slack = (1 / m['least_ffn'] + term[k]) / m['block']
                    verdict = HOLDS if slack.min() >= 1 else FAILS
                    row(f'{name}: bound over block norm, mean', slack.mean(1), '')
                    row(f'{name}: bound over block norm, least', slack.min(1), verdict)
            second.append(np.log(term['product'].mean(1)))
            products.append(np.log(m['block']).sum(1))
            row('ln of the product of block norms', products[-1], '')
        if len(group) > 1:
            told = {k: v for k, v in first.to_json().items() if k != 'layers'}
            x = log_depths(group)
            for assumption, y, low, high in (
                ('second term of eq. 18: slope over ln L', second, -1.1, -0.9),
                ('product of block norms: slope of its ln over ln L', products, -0.1, 0.1),
            ):
                found = estimate(slope(x, np.stack(y, -1)))
                if first.topology == 'span' or 'product' in assumption:
                    rows.append(told | {'assumption': assumption, 'value': found, 'verdict': within(found, low, high)})
    return {'assumptions': rows}
