"""T8: the first block. Reading A (raw skip) or B (normed skip), times the initial scale of the embedding.

Cost at nano: 12 runs, and the control.
"""

from spannorm_jax.experiment import product, sibling
from spannorm_jax.figures import LINES, finish, over_layers, panels

s = sibling('_shared')
KEY = 'layer/grad_rms/write'
CELL = ('model.first_skip', 'model.embed_std')
QUESTION = 'Which reading of the first block trains better, and does the scale of the embedding decide?'
CLAIM = 'Ours: under reading A with a small embedding the first block forgets its skip, so that reading B is better there.'
CHIPS = 'v5e:16x16'
CURVES = (KEY,)


def runs(scale):
    cfg = s.base(scale)
    return product(cfg, {CELL[0]: ('raw', 'normed'), CELL[1]: (1.0, 0.02), 'run.seed': s.seeds(scale)}) | s.control(cfg, scale)


def figure(rows):
    fig, (left, right) = panels('test loss', 'gradient per block, early', width=5)
    for i, ((skip, std), own) in enumerate(s.group(s.without_control(rows), *CELL).items()):
        label = f'reading {"A" if skip == "raw" else "B"}, embedding std {std:g}'
        found = s.interval(own, 'test/loss')
        half = (found.high - found.low) / 2 if found.n > 1 else 0.0
        left.errorbar([i], [found.mean], half, fmt='o', color=f'C{i}', capsize=3, label=label)
        over_layers(right, own, KEY, label, f'C{i}', LINES[skip == 'normed'], at=0)
    left.set_xticks([])
    right.set_yscale('log')
    finish([left], '', 'nats per token, 95% interval')
    right.set(xlabel='block', ylabel='rms of the gradient of W_O and W_2')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = s.group(s.without_control(rows), *CELL)
    best = min(at, key=lambda cell: s.interval(at[cell], 'eval/loss').mean)
    found = s.lower(at['normed', 0.02], at['raw', 0.02], ('reading B', 'reading A, embedding std 0.02'))
    unit = s.lower(at['normed', 1.0], at['raw', 1.0], ('reading B', 'reading A, embedding std 1'))
    advice = f'lowest validation loss: first_skip={best[0]!r}, embed_std={best[1]:g}'
    return s.Verdict(found.status, f'{found.reason}; {unit.reason}; {advice}')
