"""Table 3: Span against Pre with a mixture of experts and latent attention, each at its own best learning rate.

Paper: 16B with 2.4B active, 27 layers, MLA, 6 of 64 experts (all else unknown, as in DeepSeek's public 16B configuration).
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import finish, panels, sensitivity

s = sibling('_shared')
ARMS = {'model.topology': ('pre', 'span')}
QUESTION = 'Is Span better than Pre with experts and latent attention too?'
CLAIM = 'Span is ahead.'
CHIPS = 'v5p:4x4x4'
CURVES = ('train/loss',)
EXPERTS = {
    'model.attention': 'mla', 'model.kv_latent': 32, 'model.nope_dim': 16, 'model.rope_dim': 8, 'model.v_dim': 16, 'model.experts': 8,
    'model.experts_per_token': 2, 'model.shared_experts': 1, 'model.first_dense': 1,
}  # fmt: skip


def moe(scale):
    """12 blocks at nano, of the form of configs/nano_moe.py at the width of the other experiments."""
    if scale == 'paper':
        return s.base(scale, 'moe_16b_a2b4')
    return s.edit(s.base(scale), EXPERTS | {'model.layers': s.by(scale, 2, 12, 27, 27)})


def runs(scale):
    return s.arms(moe(scale), scale, ARMS) | s.control(moe(scale), scale)


def more(scale, rows):
    return s.grow(moe(scale), rows, scale)


def figure(rows):
    fig, axes = panels('mixture of experts', width=6)
    sensitivity(axes[0], s.group(s.without_control(rows), 'model.topology'))
    finish(axes, 'peak learning rate', 'validation loss (nats per token)')
    return fig


def table(rows):
    return s.grid_table(rows)


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = s.group(s.without_control(rows), 'model.topology')
    return s.lower(s.at_best(at['span']), s.at_best(at['pre']), ('Span', 'Pre'))
