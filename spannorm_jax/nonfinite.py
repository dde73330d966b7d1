"""What is said of a step that was not finite: where it began, in which batch, and what is done about it (run.nonfinite)."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spannorm_jax import distributed
from spannorm_jax.checkpoint import disk_errors
from spannorm_jax.config import Config
from spannorm_jax.model import LM
from spannorm_jax.step import first_nonfinite, micro_batches
from spannorm_jax.track import plain

LAST = 8  # batches that are listed: the bad one, and those whose updates the weights hold


class Trouble(NamedTuple):
    """One step that was not finite: a line of nonfinite.jsonl."""

    step: int
    batch: int
    """Index of the global batch, which is data.train_batches(..., start=batch)'s first."""
    batches: list[int]
    loss: Any
    grad_norm: Any
    update_norm: Any
    kind: str
    """weight (bad before the step), forward, gradient, loss or update: where the first value that is not finite was met."""
    first: str
    """Canonical name of the weight, block or gradient."""
    layer: int | None
    policy: str

    def __str__(self) -> str:
        what = {
            'weight': f'weight {self.first} is not finite',
            'forward': f'the first output that is not finite is that of {self.first}',
            'gradient': f'the first gradient that is not finite is that of {self.first}',
        }.get(self.kind, f'the {self.kind} is not finite')
        return f'step {self.step} (batch {self.batch}): loss {self.loss}, gradient norm {self.grad_norm}; {what}'


def make_probe(cfg: Config, lm: LM) -> Callable[[Any, Any], Any]:
    """(params, batch) -> (L, 3) bool, to be compiled when it is needed: whether attention, FFN and block put out something not finite.

    A forward pass without dropout, a micro-batch at a time.
    """

    def probe(params, batch):
        def one(_, micro):
            _, stats = lm.features(params, micro['tokens'], micro['segments'], micro['positions'], stats=True)
            seen = jnp.stack([stats['branch_var/attn'], stats['branch_var/ffn'], stats['rms']], -1)
            return None, ~jnp.isfinite(seen)

        return jax.lax.scan(one, None, micro_batches(batch, cfg.optim.accumulate))[1].any(0)

    return probe


def first_output(bad_L3: np.ndarray) -> str | None:
    """Name of the first sublayer, from the bottom, whose output is not finite."""
    found = np.argwhere(bad_L3)
    if not len(found):
        return None
    layer, place = found[0].tolist()
    return f'layers.{layer}' + ('.attn', '.ffn', '')[place]


def examine(
    cfg: Config, names: list[str], step: int, batch: int, metrics: dict[str, Any], params: Any = None, outputs: np.ndarray | None = None
) -> Trouble:
    """The first tensor that is not finite, in the order in which a step meets them: weights, outputs, gradients.

    params: those that the step began with, where they are still at hand; outputs: what `make_probe` found for its batch.
    """
    loss, norm, update = (float(metrics[k]) for k in ('loss', 'grad_norm', 'update_norm'))
    if params is not None and (name := first_nonfinite(cfg.model, names, params)):
        kind = 'weight'
    elif outputs is not None and (name := first_output(outputs)):
        kind = 'forward'
    elif metrics['bad'] >= 0:
        kind, name = 'gradient', names[metrics['bad']]
    else:
        kind = name = 'loss' if not math.isfinite(loss) else 'update'
    layer = int(name.split('.')[1]) if name.startswith('layers.') else None
    batches = list(range(max(0, batch - LAST + 1), batch + 1))
    return Trouble(step, batch, batches, loss, norm, update, kind, name, layer, cfg.run.nonfinite)


def record(folder: Path, trouble: Trouble) -> None:
    """Append to nonfinite.jsonl; of several processes one does."""
    if distributed.first():
        path = folder / 'nonfinite.jsonl'
        with disk_errors('write', path), path.open('a', encoding='utf-8') as f:
            f.write(json.dumps({k: v if isinstance(v, list) else plain(v) for k, v in trouble._asdict().items()}) + '\n')
