"""Rows of the embedding table. Axes: B rows, T positions, V vocabulary, D width; b, t, v, d the parts on one device, G the parts of D."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from spannorm_jax.sharding import spec


def look_up(w_VD: Float[Array, 'V D'], tokens_BT: Int[Array, 'B T'], dtype: str) -> Float[Array, 'B T D']:
    """w[tokens] in `dtype`, on this device or over the mesh that is set (`jax.set_mesh`).

    A device holds some columns of the table and some tokens. Tokens are small, so they travel: each device looks up its columns for all
    tokens of its group and an all-to-all brings the columns of a token together. The table is never gathered, nor is its gradient.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return w_VD[tokens_BT].astype(dtype)
    (vocab, width), _ = spec(('vocab', 'width'), w_VD.shape, mesh)
    tokens = spec(('rows', 'positions'), tokens_BT.shape, mesh)[0]

    def body(w_vd, tokens_bt):
        ids_Gbt = jax.lax.all_gather(tokens_bt, width) if width else tokens_bt[None]
        if vocab:
            ids_Gbt -= jax.lax.axis_index(vocab) * len(w_vd)
            here = (ids_Gbt >= 0) & (ids_Gbt < len(w_vd))
            x_Gbtd = jnp.where(here[..., None], w_vd[jnp.where(here, ids_Gbt, 0)], 0)
        else:
            x_Gbtd = w_vd[ids_Gbt]
        x_Gbtd = x_Gbtd.astype(dtype)  # before it travels, after the gradient's sum over equal tokens on the way back
        x_Gbtd = jax.lax.all_to_all(x_Gbtd, width, 0, 0) if width else x_Gbtd
        x_btD = jnp.moveaxis(x_Gbtd, 0, 2).reshape(*tokens_bt.shape, -1)
        return jax.lax.psum(x_btD, vocab) if vocab else x_btD

    places = PartitionSpec(vocab, width), tokens
    return jax.shard_map(body, in_specs=places, out_specs=PartitionSpec(*tokens, None), check_vma=False)(w_VD, tokens_BT)
