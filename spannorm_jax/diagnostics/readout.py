"""What the head would say after each layer. Axes: L + 1 states (the embedding first), B rows, T positions, V vocabulary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spannorm_jax.diagnostics.anatomy import Batch, mean_over, token_nats


def logit_lens(head: Callable[[Array], Array], readout_LBTD: Float[Array, 'L B T D'], batch: Batch) -> dict[str, Float[Array, ' L']]:
    """Each layer's state through the model's own exit and head, against what the model says: `kl` = KL(final | layer) in nats,
    `agreement` = share of tokens with the same first choice, `loss` in nats. `head`: features -> logits. Means over real tokens.

    Source: the logit lens (nostalgebraist 2020). A layer that writes in another basis than the last scores badly, whatever it knows.
    """
    final_BTV = jax.nn.log_softmax(head(readout_LBTD[-1]))

    def one(h_BTD):
        logp_BTV = jax.nn.log_softmax(head(h_BTD))
        kl_BT = (jnp.exp(final_BTV) * (final_BTV - logp_BTV)).sum(-1)
        same_BT = logp_BTV.argmax(-1) == final_BTV.argmax(-1)
        found = {'kl': kl_BT, 'agreement': same_BT, 'loss': token_nats(logp_BTV, batch)}
        return {name: mean_over(batch, x_BT) for name, x_BT in found.items()}

    return jax.lax.map(one, readout_LBTD)


def effective_depth(kl_L: Array, limit: float = 0.1) -> int:
    """The first layer from which on KL(final | layer) stays below `limit` nats; 0 is the embedding, len(kl) that none
    does (a KL that is not finite does not)."""
    below = jnp.asarray(kl_L) < limit
    return int(len(below) - jnp.argmin(below[::-1])) if not bool(below.all()) else 0
