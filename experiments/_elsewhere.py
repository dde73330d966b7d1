"""The models of T12, made of `Block` and `Stack`: a deep denoiser, not causal, and one block applied again and again."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from spannorm_jax import Block, ModelConfig, Stack
from spannorm_jax.optim import schedule

TASKS = {'denoiser': 'a quarter of the bytes replaced, all positions seen', 'recurrent': 'one causal block, its weights tied over depth'}
REPLACED = 0.25


class Model(nn.Module):
    """Tokens (B, T) -> logits (B, T, V)."""

    cfg: ModelConfig
    task: str

    @nn.compact
    def __call__(self, tokens_BT):
        cfg = self.cfg
        x_BTD = nn.Embed(cfg.vocab, cfg.width, embedding_init=nn.initializers.normal(1.0))(tokens_BT)
        if self.task == 'denoiser':
            x_BTD, _ = Stack(cfg, causal=False)(x_BTD)
        else:
            tied = nn.scan(Block, variable_broadcast='params', split_rngs={'params': False}, length=cfg.layers)
            x_BTD, _ = tied(cfg, layer=1)(x_BTD)  # not 0: the first block of some topologies differs
        return nn.Dense(cfg.vocab, use_bias=False)(x_BTD)


def corrupt(tokens, key, vocab):
    """(tokens with a share REPLACED by others drawn evenly, which ones)."""
    where, what = jax.random.split(key)
    hit = jax.random.bernoulli(where, REPLACED, tokens.shape)
    return jnp.where(hit, jax.random.randint(what, tokens.shape, 0, vocab), tokens), hit


def nats(model, params, batch, key):
    """Sum of cross-entropies and how many there are: of the bytes replaced, or of the next byte everywhere."""
    seen, counts = corrupt(batch['tokens'], key, model.cfg.vocab) if model.task == 'denoiser' else (batch['tokens'], True)
    targets = batch['tokens'] if model.task == 'denoiser' else batch['targets']
    counts &= batch['segments'] > 0
    each = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, seen), targets)
    return jnp.where(counts, each, 0).sum(), counts.sum()


def train(cfg, task, corpus):
    """Trains the model of a task as `cfg` says, for ten times its warm-up: {'eval/loss', 'test/loss', 'grad_norm'}."""
    model, data = Model(cfg.model, task), cfg.data
    opt, steps = cfg.optim, 10 * cfg.optim.warmup_steps
    decayed = lambda params: jax.tree.map(lambda w: w.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(schedule(opt, steps), opt.beta1, opt.beta2, opt.eps, weight_decay=opt.weight_decay, mask=decayed)
    optimizer = optax.chain(optax.clip_by_global_norm(opt.clip), adamw)

    @jax.jit
    def step(params, state, batch, key):
        def loss(params):
            total, count = nats(model, params, batch, key)
            return total / count

        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    key = jax.random.key(cfg.run.seed)
    params = nn.meta.unbox(jax.jit(model.init)(key, jnp.zeros((data.batch, data.seq), jnp.int32)))
    state, first = optimizer.init(params), None
    batches = corpus.train_batches(data.batch, data.seq, cfg.run.seed)
    for i in range(steps):
        params, state, norm = step(params, state, next(batches), jax.random.fold_in(key, i))
        first = float(norm) if first is None else first
    batches.close()
    held = jax.jit(lambda batch, key: nats(model, params, batch, key))
    found = {'grad_norm': first}
    for group, split in (('eval', 'validation'), ('test', 'test')):
        parts = [
            held(b, jax.random.key(k))
            for k, b in enumerate(corpus.eval_batches(split, data.batch, data.seq, cfg.run.eval_tokens).batches())
        ]
        total, count = np.array(parts, np.float64).sum(0)
        found[f'{group}/loss'] = float(total / count)
    return {k: v if np.isfinite(v) else None for k, v in found.items()}
