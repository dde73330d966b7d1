"""A run of about 20 seconds, most of it compiling: to see that everything works. It learns which bytes are frequent, and little more."""

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
            'optim.warmup_steps': 5,
            'run.steps': 100,
            'run.eval_tokens': 8192,
        },
    )
