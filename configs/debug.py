"""A run of a few seconds: to see that everything works, and for tests. It learns next to nothing."""

from spannorm_jax.config import Config, edit
from spannorm_jax.load import load_config


def get() -> Config:
    return edit(
        load_config('nano'),
        {
            'name': 'debug',
            'model.layers': 2,
            'model.width': 32,
            'model.heads': 2,
            'data.seq': 64,
            'data.batch': 4,
            'optim.warmup_steps': 2,
            'run.steps': 20,
            'run.eval_tokens': 8192,
        },
    )
