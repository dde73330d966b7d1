"""The narrow half of the paper's pair of widths (figure 12): 310M parameters at width 640; the wide half is dense_5b. Both have 64 layers.

Cost: not trained here; `spannorm plan dense_310m --chips v5e:16x16` says what it needs.
Known: width, layers. UNKNOWN, counted to fit 310M: heads, ffn. UNKNOWN: tokens (20 per parameter).
The rest as in dense_5b.
"""

from spannorm_jax.config import Config, edit
from spannorm_jax.load import load_config


def get() -> Config:
    return edit(
        load_config('dense_5b'),
        {
            'name': 'dense_310m',
            'model.width': 640,
            'model.heads': 5,  # unknown
            'model.ffn': 1728,  # unknown
            'run.steps': 6_000_000_000 // (256 * 2048),  # unknown
        },
    )
