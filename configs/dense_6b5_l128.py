"""The paper's 6.5B model of 128 layers (figure 4, table 1): 400B tokens.

Cost: not trained here; `spannorm plan dense_6b5_l128 --chips v5e:16x16` says what it needs (docs/plan.md has the numbers).
Known: layers, tokens. UNKNOWN, counted to fit 6.5B: width, heads, ffn. The rest as in dense_5b.
"""

from spannorm_jax.config import Config, edit
from spannorm_jax.load import load_config


def get() -> Config:
    return edit(
        load_config('dense_5b'),
        {
            'name': 'dense_6b5_l128',
            'model.layers': 128,
            'model.width': 2048,  # unknown
            'model.heads': 16,  # unknown
            'model.ffn': 5504,  # unknown
            'run.steps': 400_000_000_000 // (256 * 2048),
        },
    )
