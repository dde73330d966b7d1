"""The paper's 740M model, whose FFN gradients figure 7 shows at three learning rates (8e-5 and above).

Cost: not trained here; `spannorm plan dense_740m --chips v5e:16x16` says what it needs.
Known: the size. UNKNOWN, counted to fit it: layers, width, heads, ffn, tying. UNKNOWN: tokens (20 per parameter).
The rest as in dense_5b.
"""

from spannorm_jax.config import Config, edit
from spannorm_jax.load import load_config


def get() -> Config:
    return edit(
        load_config('dense_5b'),
        {
            'name': 'dense_740m',
            'model.layers': 24,  # unknown
            'model.width': 1536,  # unknown
            'model.heads': 12,  # unknown
            'model.ffn': 4096,  # unknown
            'model.tie_embeddings': True,  # unknown
            'run.steps': 15_000_000_000 // (256 * 2048),  # unknown
        },
    )
