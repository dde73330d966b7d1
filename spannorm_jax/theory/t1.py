"""T1, the gradient law: is the gradient of SpanNorm the square root of PostNorm's?

SpanNorm's eq. 11 has the gradient shrink by 1/sigma for every norm on the path that leads down: sigma^-L for Span, sigma^-2L for Post.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spannorm_jax.diagnostics import norm_law
from spannorm_jax.layers import ACTIVATIONS
from spannorm_jax.model_config import GATED
from spannorm_jax.theory.cells import Cell, Tables
from spannorm_jax.theory.verdicts import agrees, estimate, r_squared, slope, within

POINT = 'ffn.down'  # the parameter whose gradient is compared over depth


def power_ratio(activation: str) -> float:
    """kappa: how much more power a wide random FFN passes back than forward, relative to its output's variance.

    F = W2 phi(W1 x) with independent weights and a Gaussian pre-activation z has Var F ~ E phi(z)^2 and |dF/dx|^2 ~ E phi'(z)^2, so kappa =
    E phi'^2 / E phi^2: 1 for ReLU, whose output is proportional to its input. With a gate F is a product, both factors of which pass a
    gradient: kappa = 1 + E phi'^2 / E phi^2. Gauss-Hermite quadrature is no use at a kink; this is a Riemann sum to 1e-4.
    """
    z = jnp.linspace(-12, 12, 96_001)
    weight = jnp.exp(-z * z / 2)
    phi = ACTIVATIONS[activation]
    ratio = (weight * jax.vmap(jax.grad(phi))(z) ** 2).sum() / (weight * phi(z) ** 2).sum()
    return float(ratio) + (activation in GATED)


def laws(topology: str, ln_a: np.ndarray, ln_z: np.ndarray, kappa: float) -> dict[str, np.ndarray]:
    """Predicted ln |g_l| of the FFN down projection, (..., L), up to a constant, from ln sigma of the sums alone.

    paper: the norms divide and nothing else happens (`diagnostics.norm_law`); for pre constant, since no norm stands on the path.
    branches: what comes back through the branches adds its power. A branch adds sigma^2 - 1 to a normed skip, so it passes back
    kappa (sigma^2 - 1) of the power that enters it; attention counts with kappa = 1 (its values' path).
      post   a block adds ln sqrt(1 + kappa (z^2 - 1)) - ln z, since attention's own gain cancels ln a
      span   the same: what returns through F passes 1/a and then 1 + (a^2 - 1), which cancel
      pre    a block adds ln sqrt(1 + kappa (z^2 / a^2 - 1)) + ln(a_l / z_{l-1}), a and z being the rms of the stream
    """
    above = lambda x: np.cumsum(x[..., ::-1], -1)[..., ::-1] - x  # noqa: E731  sum over m > l
    paper = norm_law(topology, ln_a, ln_z)
    if paper is None:  # pre
        attention = np.concatenate([np.zeros_like(ln_a[..., :1]), ln_a[..., 1:] - ln_z[..., :-1]], -1)
        ffn = 0.5 * np.log1p(kappa * np.expm1(2 * (ln_z - ln_a)))
        return {'paper': np.zeros_like(ln_z), 'branches': above(attention + ffn)}
    returned = 0.5 * np.log1p(kappa * np.maximum(np.expm1(2 * ln_z), -0.99 / kappa))
    return {'paper': paper, 'branches': -ln_z + above(returned - ln_z)}


def t1(cells: dict[Cell, dict[str, np.ndarray]]) -> Tables:
    """Tables and rows of T1 out of the measurements of all cells, each array (seeds, L) or (seeds,)."""
    rows, found = [], {}
    for cell, m in cells.items():
        ln_g = m['ln_grad']
        total = found[cell] = ln_g[:, 0] - ln_g[:, -1]
        blocks = np.arange(cell.layers)
        row: dict[str, Any] = cell.to_json() | {
            'ln_g1_over_gL': estimate(total),
            'slope': estimate(slope(blocks, ln_g)),
            'loss': estimate(m['loss']),
            'sigma_A': estimate(np.exp(m['ln_sigma_attn']).mean(1)),
            'sigma_Z': estimate(np.exp(m['ln_sigma_ffn']).mean(1)),
        }
        for name, p in laws(cell.topology, m['ln_sigma_attn'], m['ln_sigma_ffn'], power_ratio(cell.activation)).items():
            ends = p[:, 0] - p[:, -1]
            row[name] = {
                'predicted': estimate(ends),
                'slope': estimate(slope(blocks, p)),
                'over_measured': estimate(ends / total),
                'r2': estimate(r_squared(p, ln_g)),
                'verdict': agrees(ends, total),
            }
        rows.append(row)
    return {'cells': rows, 'root': list(_root(found, cells))}


def _root(found: dict[Cell, np.ndarray], cells: dict[Cell, dict[str, np.ndarray]]):
    """Span against Post at equal init, depth and seed: is ln(g_1/g_L) half of Post's, and how much larger is Span's gradient?"""
    for cell, span in found.items():
        other = cell._replace(topology='post')
        if cell.topology != 'span' or other not in found:
            continue
        post, m = found[other], cells[other]
        said = (m['ln_sigma_attn'][:, 1:]).sum(1)
        c = cell.layers * np.expm1(2 * m['ln_sigma_attn']).mean(1)  # Var(A) = c / L
        yield {
            **{k: v for k, v in cell.to_json().items() if k != 'topology'},
            'post': estimate(post),
            'span': estimate(span),
            'span_over_post': estimate(span / post),
            'root': agrees(post / 2, span),
            'ln_gain_measured': estimate(span - post),
            'ln_gain_predicted': estimate(said),
            'ln_gain_limit': estimate(c / 2),
            'gain': agrees(said, span - post),
            'factor_500': within(estimate(span - post), math.log(250), math.log(1000)) if cell.layers == 128 else '',  # the paper's example
        }
