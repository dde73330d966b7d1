"""One rung of the paper's depth ladder (figure 11): width 384 and 32 to 512 layers at one learning rate.

Cost: not trained here; `spannorm plan depth_ladder --chips v5e:4x4 --mesh.fsdp 16` says what it needs. Another rung: --model.layers 64.
Known: width, layers. UNKNOWN: heads, ffn, tokens, and the learning rate. The rest as in dense_5b.
"""

from spannorm_jax.config import Config, edit
from spannorm_jax.load import load_config


def get(layers: int = 512) -> Config:
    return edit(
        load_config('dense_5b'),
        {
            'name': 'depth_ladder',
            'model.layers': layers,
            'model.width': 384,
            'model.heads': 6,  # unknown
            'model.ffn': 1024,  # unknown
            'run.steps': 20_000,  # unknown
        },
    )
