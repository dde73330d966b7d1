"""T5, T6 and T8 at initialisation: the identity path, the size of the branches, and the first block."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spannorm_jax.theory import anatomy
from spannorm_jax.theory.cells import Cell, Tables, depths_of, log_depths
from spannorm_jax.theory.verdicts import FAILS, HOLDS, estimate, slope, within

Measured = dict[str, np.ndarray]


def jacobian(cfg: Any, params: Any, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """Singular values (D,), relative to the largest, of the last position's own end-to-end Jacobian J, ln |J|_2, and cos(J, I)."""
    M_DD, scale = anatomy.own_jacobian(cfg, params, tokens_BT)
    s = jnp.linalg.svd(M_DD, compute_uv=False)
    return {'singular': s / s[0], 'ln_largest': scale + jnp.log(s[0]), 'cosine': jnp.trace(M_DD) / (anatomy.length(M_DD) * len(s) ** 0.5)}


def t5(cells: dict[Cell, Measured]) -> Tables:
    """Is there an identity-like path from end to end?

    cos(J, I) = tr J / (|J|_F sqrt(D)) is 1 for any multiple of the identity and about 0 for a random matrix; its square is the share of
    J's power along I, and sqrt(1 - cos^2) the relative distance to the nearest multiple of I. Rule: identity-like where that share is
    above one half. effective_rank = (sum s^2)^2 / sum s^4 / D.
    """
    rows = []
    for cell, m in cells.items():
        s, cosine = m['singular'], m['cosine']
        power = np.square(s)
        share = estimate(np.sign(cosine) * np.square(cosine))
        rows.append(
            cell.to_json()
            | {
                'cosine': estimate(cosine),
                'distance': estimate(np.sqrt(1 - np.square(cosine))),
                'ln_largest': estimate(m['ln_largest']),
                'median_over_largest': estimate(np.median(s, -1)),
                'least_over_largest': estimate(s[:, -1]),
                'effective_rank': estimate(np.square(power.sum(-1)) / np.square(power).sum(-1) / s.shape[-1]),
                'identity_like': within(share, 0.5, math.inf),
                'spectrum': s.mean(0).tolist(),
            }
        )
    return {'spectrum': rows}


def t6(cells: dict[Cell, Measured]) -> Tables:
    """Var(F) = O(1/L), and branch and skip uncorrelated.

    The slope of ln Var over ln L (variance of a branch, mean over blocks) should be -1 with Scale Init: holds within a tenth of it. The
    sum's variance is 1 + Var + 2 corr sqrt(Var), so leaving the correlation out is right where |2 corr| is at most a quarter of
    sqrt(Var), in the mean over blocks.
    """
    slopes, correlations = [], []
    for first, group in depths_of(list(cells)).items():
        for branch in ('attn', 'ffn'):
            if len(group) > 1:
                ln_var = np.stack([np.log(cells[c][f'branch_var_{branch}'].mean(1)) for c in group], -1)
                found = estimate(slope(log_depths(group), ln_var))
                told = {k: v for k, v in first.to_json().items() if k != 'layers'}
                rule = within(found, -1.1, -0.9) if first.scale_init != 'none' else ''
                slopes.append(told | {'branch': branch, 'depths': [c.layers for c in group], 'slope': found, 'order_1_over_L': rule})
            for cell in group:
                corr, deviation = cells[cell][f'corr_{branch}'], np.sqrt(cells[cell][f'share_{branch}'])
                cross = estimate((2 * corr / deviation).mean(1))
                correlations.append(
                    cell.to_json()
                    | {
                        'branch': branch,
                        'var': estimate(cells[cell][f'branch_var_{branch}'].mean(1)),
                        'corr': estimate(corr.mean(1)),
                        'largest_abs_corr': estimate(np.abs(corr).max(1)),
                        'cross_over_var': cross,
                        'uncorrelated': within(cross, -0.25, 0.25),
                    }
                )
    return {'slopes': slopes, 'correlations': correlations}


def t8(cells: dict[Cell, Measured]) -> Tables:
    """The first block of span: reading A ('raw') or B ('normed'), embedding std 1 or 0.02.

    branch_share = Var(F) / Var(skip) in block 1; over_block_2 = ln of it over that of block 2, since the theory wants every block in one
    regime: within a factor of 2.
    ln_jump = ln |dloss/dE| - ln |dloss/dx_2|, how the first block (and N_e under B) changes the gradient on its way to the embedding;
    sigma_A and sigma_Z are the rms of the first block's sums. Recommended: of the choices in the regime, the one whose |ln_jump| is least.
    """
    rows = []
    for cell, m in cells.items():
        share = m['share_ffn']
        rows.append(
            cell.to_json()
            | {
                'loss': estimate(m['loss']),
                'branch_share': estimate(share[:, 0]),
                'over_block_2': estimate(np.log(share[:, 0] / share[:, 1])),
                'one_regime': within(estimate(np.log2(share[:, 0] / share[:, 1])), -1, 1),
                'ln_jump': estimate(m['ln_embedding'] - m['ln_stream'][:, 1]),
                'sigma_A': estimate(m['sigma_attn'][:, 0]),
                'sigma_Z': estimate(m['sigma_ffn'][:, 0]),
                'ln_g1_over_gL': estimate(m['ln_grad'][:, 0] - m['ln_grad'][:, -1]),
            }
        )
    return {'choices': rows, 'recommended': list(_recommended(rows))}


def _recommended(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for depth in dict.fromkeys(row['layers'] for row in rows):
        good = [row for row in rows if row['layers'] == depth and row['one_regime'] == HOLDS]
        best = min(good, key=lambda row: abs(row['ln_jump'].mean), default=None)
        choice = {k: best[k] for k in ('first_skip', 'embed_std')} if best else {'first_skip': 'none', 'embed_std': 'none'}
        yield {'layers': depth, **choice, 'in_one_regime': len(good), 'verdict': HOLDS if best else FAILS}
