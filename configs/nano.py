"""The demo: SpanNorm on the running Python's standard library, byte by byte.

Cost: 245,760 tokens, 3.6 minutes of processor time (3 min 21 s on two CPU cores that other jobs shared).
Expect 2.59 validation bits/byte (a bigram model has 3.52).
The learning rate is the best of 1e-3 and 3e-3 for pre, post and span alike, over 60 steps; 1e-2 was tried for span and was worse.
"""

from spannorm_jax.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def get() -> Config:
    return Config(
        name='nano',
        model=ModelConfig(topology='span', layers=12, width=96, heads=4),
        data=DataConfig(source='stdlib', tokenizer='bytes', seq=128, batch=8),
        optim=OptimConfig(lr_peak=3e-3, warmup_steps=20),
        run=RunConfig(steps=240, eval_every=80, eval_tokens=32_768, checkpoint_every=80),
    )
