"""The paper's mixture of experts, 16B parameters of which 2.4B are active, with latent attention (figures 5 and 6, table 3).

Cost: not trained here; `spannorm plan moe_16b_a2b4 --chips v5p:4x4x4` says what it needs (docs/plan.md has the numbers).
Known: 27 layers, latent attention, 64 experts, 6 active. UNKNOWN, as in DeepSeek's public 16B configuration: all else of the model.
"""

from spannorm_jax.config import Config, edit
from spannorm_jax.load import load_config


def get() -> Config:
    return edit(
        load_config('dense_5b'),
        {
            'name': 'moe_16b_a2b4',
            'model.layers': 27,
            'model.width': 2048,  # unknown
            'model.heads': 16,  # unknown
            'model.ffn': 10_944,  # unknown: of the first block, which is dense
            'model.attention': 'mla',
            'model.positions': 'rope_interleaved',  # unknown
            'model.experts': 64,
            'model.experts_per_token': 6,
            'model.expert_ffn': 1408,  # unknown
            'model.shared_experts': 2,  # unknown
            'model.first_dense': 1,  # unknown
            'model.router': 'softmax',  # unknown
            'data.batch': 64,  # unknown
            'mesh.fsdp': 16,
            'mesh.expert': 4,
        },
    )
