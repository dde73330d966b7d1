"""Figure 12: width transfer. Loss over the learning rate at three widths, with one rate for all parameters and with muP.

Cost at nano: some 25 runs of 8 layers, and the control. Paper: 310M (width 640) to 5B (2560) at 64 layers; its width scaling is not
defined in public: ours is muP for Adam (docs/parametrizations.md).
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import finish, panels, sensitivity
from spannorm_jax.stats import wanted

s = sibling('_shared')
KIND = 'model.parametrization'
QUESTION = 'Does a learning rate that is found on a narrow Span model serve a wide one?'
CLAIM = 'Stability transfers over width, with and without width scaling.'
CHIPS = 'v5e:16x16'
CURVES = ('train/loss',)


def sized(scale, width):
    """Span at a width, with heads of one size."""
    if scale == 'paper':
        return s.edit(s.base(scale), {'model.width': width, 'model.heads': width // 128, 'model.ffn': None})
    layers = s.by(scale, 2, 8, 24, 64)
    return s.edit(
        s.base(scale), {'model.layers': layers, 'model.width': width, 'model.heads': max(1, width // s.by(scale, 8, 16, 64, 128))}
    )


def widths(scale):
    return s.by(scale, (16, 32), (32, 64, 128), (128, 256, 512), (640, 1280, 2560))


def mup(scale, cfg):
    """The same model scaled by muP from the narrowest one."""
    narrow = sized(scale, widths(scale)[0]).model
    return s.edit(cfg, {KIND: 'mup', 'model.base_width': narrow.width, 'model.base_head_dim': narrow.resolved_head_dim})


def runs(scale):
    """At the smallest width both are the same model, which is run once."""
    found = s.control(sized(scale, widths(scale)[0]), scale)
    for width in widths(scale):
        cfg = sized(scale, width)
        axes = {'model.width': (width,), s.RATE: s.rates(scale), 'run.seed': (0,)}
        found |= product(cfg, {KIND: ('standard',)} | axes)
        if width != widths(scale)[0]:
            found |= product(mup(scale, cfg), {KIND: ('mup',)} | axes)
    return found


def more(scale, rows):
    """Where the best rate of a width lies at an end of the grid, one rate more at that end; one seed throughout."""
    found = {}
    for kind in ('standard', 'mup'):
        for width, own in by_width(rows, kind).items():
            if kind == 'mup' and width == widths(scale)[0]:
                continue
            cfg = sized(scale, width) if kind == 'standard' else mup(scale, sized(scale, width))
            for rate, seed in sorted(wanted(own, s.rates(scale), (0,))):
                found |= product(cfg, {KIND: (kind,), 'model.width': (width,), s.RATE: (rate,), 'run.seed': (seed,)})
    return found


def by_width(rows, kind):
    """Rows of one parametrization by width; the narrowest width serves both."""
    rows = s.without_control(rows)
    least = min(row['model.width'] for row in rows)
    own = s.group([row for row in rows if row[KIND] == kind or row['model.width'] == least], 'model.width')
    return dict(sorted(own.items()))


def figure(rows):
    fig, axes = panels('one rate for all parameters', 'muP', width=5)
    for ax, kind in zip(axes, ('standard', 'mup'), strict=True):
        sensitivity(ax, {f'width {width}': own for width, own in by_width(rows, kind).items()})
    finish(axes, 'peak learning rate', 'validation loss (nats per token)')
    return fig


def verdict(rows):
    """Transfers: the widest model is stable at the narrow one's best rate, and its own best rate is at most one step of the grid away."""
    if not s.control_failed(rows):
        return s.UNSEPARATED
    parts = []
    for kind in ('standard', 'mup'):
        at = by_width(rows, kind)
        narrow, wide = (s.best_rate(at[pick(at)]) for pick in (min, max))
        stable, _ = s.edge(at[max(at)])
        holds = narrow is not None and wide is not None and (stable or 0) >= narrow and max(narrow, wide) <= 2.01 * min(narrow, wide)
        parts.append(s.judged(holds, f'{kind}: best rate {narrow} at width {min(at)}, {wide} at {max(at)}, which is stable up to {stable}'))
    return s.all_of(*parts)
