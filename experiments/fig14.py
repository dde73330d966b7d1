"""Figure 14: gradient per block, Pre and Span, with and without Scale Init, over depth and learning rate, three seeds.

Cost at nano: 12 runs beside those of figure 2.
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import LINES, color, finish, over_layers, panels

s, fig02 = sibling('_shared'), sibling('fig02')
KEY = 'layer/grad_rms/write'
QUESTION = "Do Span's gradients collapse without Scale Init, and stay level with it, at every depth and rate?"
CLAIM = 'Span without Scale Init collapses; with it the gradient norm per layer stays near 1e-1.'
CHIPS = 'v5e:16x16'
CURVES = (KEY,)
COLLAPSED = 0.1  # first block over last


def runs(scale):
    found = {name: cfg for name, cfg in fig02.runs(scale).items() if cfg.model.topology != 'post' or name == 'control'}
    middle, cfg = s.by(scale, 2, 24, 64, 24), next(iter(found.values()))
    axes = {'model.topology': ('pre', 'span'), 'model.scale_init': ('sqrt_2L', 'none'), 'model.layers': (middle,)}
    return found | product(cfg, axes | {s.RATE: (4 * cfg.optim.lr_peak,), 'run.seed': s.seeds(scale)})


def figure(rows):
    cells = s.group(s.without_control(rows), 'model.layers', s.RATE)
    fig, axes = panels(*(f'{L} layers, rate {rate:g}' for L, rate in cells))
    for ax, own in zip(axes, cells.values(), strict=True):
        ax.set_yscale('log')
        for (topology, init), arm in s.group(own, 'model.topology', 'model.scale_init').items():
            label = topology + (' with Scale Init' if init != 'none' else ' without')
            over_layers(ax, arm, KEY, label, color(topology, []), LINES[init == 'none'], at=0)
    finish(axes, 'block', 'rms of the gradient of W_O and W_2, early')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = s.group([row for row in s.without_control(rows) if row['model.topology'] == 'span'], 'model.scale_init')
    bare, scaled = max(map(s.bottom_over_top, at['none'])), min(map(s.bottom_over_top, at['sqrt_2L']))
    text = (
        f'first block over last, Span: at most {bare:.2g} without Scale Init, at least {scaled:.2g} with it, over depths, rates and seeds'
    )
    return s.judged(bare < COLLAPSED <= scaled, text)
