"""T5: is there an identity-like path from end to end? Singular values of the input-output Jacobian at initialisation.

Cost at nano: minutes; nothing is trained.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import LINES, color, finish, panels

s = sibling('_shared')
QUESTION = "Is Span's end-to-end Jacobian close to a multiple of the identity, as Pre's is said to be?"
CLAIM = "Span keeps PreNorm's identity-like path; SiameseNorm's authors say that a single normed stream cannot."
CHIPS = 'v5e:16x16'
CURVES = ()
measure = s.theory_of('T5')


def runs(scale):
    return s.at_init(scale, 128)


def figure(rows):
    cells = s.tables(rows)['spectrum']
    depths = sorted({c['layers'] for c in cells})
    fig, axes = panels(*(f'{L} layers' for L in depths))
    for c in cells:
        ax, bare = axes[depths.index(c['layers'])], c['scale_init'] == 'none'
        values = [v or float('nan') for v in c['spectrum']]
        label = c['topology'] + (' without Scale Init' if bare else ' with')
        ax.semilogy(range(1, len(values) + 1), values, color=color(c['topology'], []), ls=LINES[bare], label=label)
    finish(axes, 'index', 'singular value over the largest')
    return fig


def table(rows):
    return s.lines(s.tables(rows)['spectrum'])


def verdict(rows):
    cells = [c for c in s.tables(rows)['spectrum'] if c['scale_init'] != 'none']
    deep = max(c['layers'] for c in cells)
    at = {c['topology']: c for c in cells if c['layers'] == deep}
    text = f'{deep} layers, Scale Init, cosine of the Jacobian with the identity: ' + ', '.join(
        f'{t} {s.text(c["cosine"])}' for t, c in at.items()
    )
    if at['pre']['identity_like'] != 'holds':
        return s.Verdict('cannot tell', f'{text}; Pre itself is not identity-like by the rule (more than half of its power)')
    word = at['span']['identity_like']
    return s.Verdict('cannot tell' if word == 'cannot tell' else 'reproduced' if word == 'holds' else 'not reproduced', text)
