"""The paper's 5B model: 64 layers, width 2560 (figure 4, tables 1 and 2), for 256 chips with one row each.

Cost: not trained here; `spannorm plan dense_5b --chips v5e:16x16` says what it needs (docs/plan.md has the numbers).
Known: layers, width, the Mistral tokenizer (32,000 ids), 200B tokens, sigma 0.02. UNKNOWN, counted to fit 5B: heads, ffn. UNKNOWN,
common practice: everything in optim, the batch, and the row length that this file sets to 2048.
"""

from spannorm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig


def get() -> Config:
    return Config(
        name='dense_5b',
        model=ModelConfig(
            topology='span',
            layers=64,
            width=2560,
            heads=20,  # unknown
            ffn=6912,  # unknown
            vocab=32_000,
            init_std=0.02,
            dtype='bfloat16',
            residual_dtype='bfloat16',  # unknown
            remat='full',
        ),
        data=DataConfig(source='prepared', tokenizer='mistral', seq=2048, batch=256),  # unknown
        optim=OptimConfig(lr_peak=2e-4, warmup_steps=2000),  # 2e-4: the paper's rate for most topologies, by implication; warm-up unknown
        mesh=MeshConfig(fsdp=256),
        run=RunConfig(steps=200_000_000_000 // (256 * 2048), eval_every=1000, checkpoint_every=1000),
    )
