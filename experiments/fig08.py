"""Figure 8: hard and soft rank, concentration and utilisation of the FFN's activations, by block.

Cost at nano: runs of table 2's grid at one rate. The paper's "effective dimension ratio" has no public formula: candidates are labelled.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, finish, panels

s = sibling('_shared')
QUESTION = 'Does Span use more dimensions of its activations than Pre?'
CLAIM = 'Hard rank .23 for Span against .09 for Pre; effective dimension ratio 30.66 against 12.99 (formula not public).'
CHIPS = 'v5e:16x16'
CURVES = ()
measure = s.spectra
SHOWN = {'hard': 'hard rank / F', 'soft': 'soft rank / F', 'concentration': 'concentration', 'utilisation': 'utilisation (a candidate)'}


def runs(scale):
    return s.trained(scale) | s.control(s.base(scale), scale)


def mean(row, key):
    known = [v for v in row[key] if v is not None]
    return sum(known) / len(known) if known else float('nan')


def figure(rows):
    fig, axes = panels(*SHOWN.values())
    for topology, own in s.group(s.without_control(rows), 'model.topology').items():
        for ax, name in zip(axes, SHOWN, strict=True):
            for row in own:
                values = [float('nan') if v is None else v for v in row[f'ffn_hidden/{name}']]
                ax.plot(range(1, len(values) + 1), values, color=color(topology, []), lw=1, label=topology)
    finish(axes, 'block', 'FFN activations')
    return fig


def table(rows):
    """Means over blocks and seeds. Candidates for the effective dimension ratio: hard and soft rank of the stream."""
    keys = {'hard rank': 'ffn_hidden/hard', 'soft rank': 'ffn_hidden/soft', 'concentration': 'ffn_hidden/concentration'}
    keys |= {'candidate: stream, hard rank': 'state/hard', 'candidate: stream, soft rank': 'state/soft'}
    arms = s.group(s.without_control(rows), 'model.topology')
    return [{'topology': t} | {what: s.t_interval(mean(row, k) for row in own) for what, k in keys.items()} for t, own in arms.items()]


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    at = s.group(s.without_control(rows), 'model.topology')
    pre = {row['run.seed']: mean(row, 'ffn_hidden/hard') for row in at['pre']}
    d = s.t_interval(mean(row, 'ffn_hidden/hard') - pre[row['run.seed']] for row in at['span'])
    text = f'hard rank of the FFN activations, Span - Pre: {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]'
    return s.Verdict('reproduced' if d.low > 0 else 'not reproduced' if d.high < 0 else 'cannot tell', text)
