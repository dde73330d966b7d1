"""Diagnostics of depth: one pure function per measurement, on arrays, any function, or a model taken apart. No I/O.

On arrays: spectra, similarity, activations. On any function: jacobians, curvature. On our models: anatomy, removal, readout, training.
`table.DIAGNOSTICS` says of each what it means; `Probe` is one model on one batch.
"""

from spannorm_jax.diagnostics.activations import by_position, massive, row_norms
from spannorm_jax.diagnostics.anatomy import Gates, outputs, record, through
from spannorm_jax.diagnostics.curvature import hessian_spectrum, lanczos, stability_limit
from spannorm_jax.diagnostics.jacobians import (
    block_jacobians,
    end_to_end,
    norm_jacobian,
    random_products,
    singular_values,
    spectral_norm,
    token_jacobian,
)
from spannorm_jax.diagnostics.probe import Probe
from spannorm_jax.diagnostics.readout import effective_depth, logit_lens
from spannorm_jax.diagnostics.removal import groups, in_groups, one_by_one, swaps
from spannorm_jax.diagnostics.similarity import angular_distances, block_influence, by_distance, cosine_pairs, linear_cka
from spannorm_jax.diagnostics.spectra import effective_ranks, eigenvalues, entropy_rank, over_median, weight_spectrum
from spannorm_jax.diagnostics.table import DIAGNOSTICS, Diagnostic, Panel
from spannorm_jax.diagnostics.training import (
    coordinate_check,
    depth_profile,
    laziness,
    lr_sensitivity,
    norm_law,
    size_slopes,
    slope,
    spikes,
)

__all__ = [
    'DIAGNOSTICS', 'Diagnostic', 'Gates', 'Panel', 'Probe', 'angular_distances', 'block_influence', 'block_jacobians', 'by_distance',
    'by_position', 'coordinate_check', 'cosine_pairs', 'depth_profile', 'effective_depth', 'effective_ranks', 'eigenvalues', 'end_to_end',
    'entropy_rank', 'groups', 'hessian_spectrum', 'in_groups', 'lanczos', 'laziness', 'linear_cka', 'logit_lens', 'lr_sensitivity',
    'massive', 'norm_jacobian', 'norm_law', 'one_by_one', 'outputs', 'over_median', 'random_products', 'record', 'row_norms',
    'singular_values', 'size_slopes', 'slope', 'spectral_norm', 'spikes', 'stability_limit', 'swaps', 'through', 'token_jacobian',
    'weight_spectrum',
]  # fmt: skip
