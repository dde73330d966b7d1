"""`nano` as a mixture of experts with latent attention: 12 blocks, the first one dense, 8 experts of which a token uses 2, one shared.

Cost: minutes on 2 CPU cores. The load of the experts is in metrics.jsonl (moe/*, docs/moe.md).
"""

from spannorm_jax.config import Config, edit
from spannorm_jax.load import load_config


def get() -> Config:
    return edit(
        load_config('nano'),
        {
            'name': 'nano_moe',
            'model.attention': 'mla',
            'model.kv_latent': 32,
            'model.nope_dim': 16,
            'model.rope_dim': 8,
            'model.v_dim': 24,
            'model.experts': 8,
            'model.experts_per_token': 2,
            'model.shared_experts': 1,
            'model.first_dense': 1,
        },
    )
