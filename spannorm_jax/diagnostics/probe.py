"""One model on one fixed batch: what several diagnostics need, computed once."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spannorm_jax import parametrization
from spannorm_jax.config import Config, edit
from spannorm_jax.diagnostics.anatomy import Batch, Params, mean_over, record, token_nats
from spannorm_jax.initializers import is_param
from spannorm_jax.model import LM, infos
from spannorm_jax.optim import make_optimizer
from spannorm_jax.step import TrainState, make_step

SMALL = 1, 32  # rows and positions of the batch that Jacobians are taken on


@dataclass(frozen=True)
class Probe:
    """A model and its probe batch (tokens, segments, positions, targets, each (B, T); segment 0 is padding).

    params: of any origin: drawn, trained, loaded from another layout. opt_state: of the optimizer of `cfg`; None: its first.
    rows: of metrics.jsonl, for what training has written down.
    """

    cfg: Config
    params: Params
    batch: Batch
    opt_state: Any = None
    rows: Sequence[dict[str, Any]] = ()
    seed: int = 0

    @property
    def key(self) -> jax.Array:
        return jax.random.key(self.seed)

    @cached_property
    def real_N(self) -> np.ndarray:
        """Which of the B T tokens are not padding."""
        return np.asarray(self.batch['segments']).reshape(-1) > 0

    @cached_property
    def seen(self) -> dict[str, Any]:
        """`anatomy.record` of the batch."""
        return jax.jit(functools.partial(record, self.cfg.model))(self.params, self.batch)

    def tokens(self, x_LBTD: Any) -> np.ndarray:
        """(L, B, T, D) -> the real tokens (L, N, D), float32."""
        x = np.asarray(x_LBTD, np.float32)
        return x.reshape(len(x), -1, x.shape[-1])[:, self.real_N]

    @cached_property
    def states(self) -> np.ndarray:
        """(L + 1, N, D): the embedded tokens, then what leaves each block."""
        return self.tokens(self.seen['states'])

    @cached_property
    def last_tokens(self) -> np.ndarray:
        """(L + 1, B, D): the states of the last real token of each row that has one."""
        real_BT = np.asarray(self.batch['segments']) > 0
        last_B = real_BT.shape[1] - 1 - real_BT[:, ::-1].argmax(1)
        states = np.asarray(self.seen['states'], np.float32)
        return states[:, np.arange(len(last_B)), last_B][:, real_BT.any(1)]

    @cached_property
    def nats_BT(self) -> np.ndarray:
        head = lambda params, x, batch: token_nats(LM(self.cfg.model).logits(params, x), batch)  # noqa: E731
        return np.asarray(jax.jit(head)(self.params, self.seen['features'], self.batch))

    @property
    def loss(self) -> float:
        return float(mean_over(self.batch, jnp.asarray(self.nats_BT)))

    @cached_property
    def grads(self) -> Params:
        """Of the mean loss, before clipping."""
        lm, b = LM(self.cfg.model), self.batch

        def loss(params):
            x_BTD, _ = lm.features(params, b['tokens'], b['segments'], b['positions'])
            return mean_over(b, token_nats(lm.logits(params, x_BTD), b))

        return jax.jit(jax.grad(loss))(self.params)

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Of the model's own forward pass: deviation/{attn,ffn} (L, B, T), the std of every sum; router_logits (L, B, T, E) of blocks with
        experts, in their order."""
        b = self.batch

        def run(params):
            extras = LM(self.cfg.model).features(params, b['tokens'], b['segments'], b['positions'], stats='tensors')[1]
            logits = [run['router_logits'] for run in extras['after'] if 'router_logits' in run]
            routers = {'router_logits': jnp.concatenate(logits)} if logits else {}
            return {k: v for k, v in extras.items() if k.startswith('deviation/')} | routers

        return jax.tree.map(np.asarray, jax.jit(run)(self.params))

    @cached_property
    def stepper(self) -> tuple[TrainState, Callable]:
        """The optimizer where it stands, and its step: (state, batch) -> (state, metrics)."""
        cfg = edit(self.cfg, {'optim.accumulate': 1, 'model.dropout': 0.0})  # of the model that all else here measures
        optimizer = make_optimizer(cfg, self.infos)
        opt_state = jax.jit(optimizer.init)(self.params) if self.opt_state is None else self.opt_state
        state = TrainState(jnp.int32(cfg.run.steps // 2), self.params, opt_state, jnp.zeros((), bool))
        return state, jax.jit(make_step(cfg, LM(cfg.model), optimizer, self.infos, stats=True))

    @cached_property
    def infos(self) -> Any:
        return infos(self.cfg.model)

    @cached_property
    def step(self) -> dict[str, np.ndarray]:
        """layer/* and moe/* of one optimizer step on the batch, which is then thrown away."""
        state, step = self.stepper
        metrics = step(state, self.batch)[1]
        return {k: np.asarray(v) for k, v in metrics.items() if k.startswith(('layer/', 'moe/'))}

    @cached_property
    def successive(self) -> list[TrainState]:
        """The states before and after two steps, on the even and on the odd rows; empty where either kind has no text."""
        (state, step), B = self.stepper, len(self.batch['segments'])
        if not all((self.batch['segments'][half::2] > 0).any() for half in (0, 1)):
            return []
        states = [state]
        for half in (0, 1):
            # Rows as padding, not fewer of them: the compiled step serves again.
            rows_B1 = (jnp.arange(B) % 2 == half)[:, None]
            states.append(step(states[-1], self.batch | {'segments': jnp.where(rows_B1, self.batch['segments'], 0)})[0])
        return states

    @cached_property
    def small(self) -> Batch:
        """The beginning of the batch."""
        return {k: v[: SMALL[0], : SMALL[1]] for k, v in self.batch.items()}

    @cached_property
    def preconditioner(self) -> Any:
        """(sqrt(v / (1 - beta2^t)) + eps) / (its factor on the rate) of Adam, a tree like the parameters; None without an AdamW state that
        has made a step."""
        opt = self.cfg.optim
        if self.opt_state is None or opt.optimizer != 'adamw' or not (t := jnp.asarray((adam := adam_state(self.opt_state)).count)):
            return None

        def scale(info, v, p):
            if isinstance(v, optax.MaskedNode):
                # A parameter that Adam does not move counts as infinitely stiff to it: it has no share in the curvature that Adam sees.
                return jnp.full_like(p, jnp.inf)
            f = parametrization.factors(self.cfg.model, info.role, 'layers' in info.axes)
            return f.eps * (jnp.sqrt(v / (1 - opt.beta2**t)) + opt.eps) / f.lr

        return jax.tree.map(scale, self.infos, adam.nu, self.params, is_leaf=is_param)


def adam_state(opt_state: Any) -> optax.ScaleByAdamState:
    """Adam's moments within the state of `make_optimizer`; MaskedNode where another rule moves a parameter."""
    return next(part.inner_states['adam'].inner_state for part in opt_state if hasattr(part, 'inner_states'))
