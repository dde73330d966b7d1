"""What a run compiles and where its arrays lie: the same for training on the devices at hand and for planning on described ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spannorm_jax import sharding
from spannorm_jax.config import Config
from spannorm_jax.model import LM, infos
from spannorm_jax.optim import make_optimizer, peaks
from spannorm_jax.step import TrainState, abstract_state, make_eval_step, make_step


class Program(NamedTuple):
    """A configuration on a mesh."""

    cfg: Config
    mesh: jax.sharding.Mesh
    lm: LM
    infos: Any
    optimizer: optax.GradientTransformationExtraArgs
    places: TrainState  # shardings
    abstract: TrainState  # shapes, dtypes and shardings
    batch: dict[str, jax.ShapeDtypeStruct]
    eval_batch: dict[str, jax.ShapeDtypeStruct]  # as large as a micro-batch
    peaks: dict[str, jax.ShapeDtypeStruct]
    notes: list[str]  # of parameters that are split less than the rules say

    def step(self, stats: bool = False) -> Any:
        """The jitted train step; `step().lower(abstract, batch, peaks).compile()`, under `jax.set_mesh(mesh)`, is what trains."""
        step = make_step(self.cfg, self.lm, self.optimizer, self.infos, stats)
        return jax.jit(step, donate_argnums=0, out_shardings=(self.places, sharding.replicated(self.mesh)))

    def eval_step(self) -> Any:
        """The jitted `make_eval_step`; `eval_step().lower(abstract.params, eval_batch).compile()` is what evaluates."""
        return jax.jit(make_eval_step(self.cfg, self.lm), out_shardings=sharding.replicated(self.mesh))

    def rates(self) -> dict[str, jax.Array]:
        """The peak rates, the last argument of a compiled step."""
        return jax.device_put({k: jnp.float32(v) for k, v in peaks(self.cfg.optim).items()}, sharding.replicated(self.mesh))


def program(cfg: Config, mesh: jax.sharding.Mesh) -> Program:
    """Raises: UserError for a batch that does not divide over the mesh."""
    sharding.check_batch(cfg, mesh)
    lm, tree, whole = LM(cfg.model), infos(cfg.model), sharding.replicated(mesh)
    optimizer = make_optimizer(cfg, tree)
    shapes = abstract_state(tree, optimizer)
    params, notes = sharding.param_shardings(tree, mesh)
    places = TrainState(whole, params, sharding.state_shardings(shapes.opt_state, shapes.params, params, mesh), whole)
    abstract = jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, places)
    batch, held_out = (sharding.abstract_batch((cfg.data.batch // n, cfg.data.seq), mesh) for n in (1, cfg.optim.accumulate))
    rates = dict.fromkeys(peaks(cfg.optim), jax.ShapeDtypeStruct((), jnp.float32, sharding=whole))
    return Program(cfg, mesh, lm, tree, optimizer, places, abstract, batch, held_out, rates, notes)
