"""Figure 6: mean cosine similarity of layer outputs by their distance, Pre and Span, mixture of experts.

Cost at nano: nothing beside figure 5, whose runs these are.
"""

from spannorm_jax.experiment import sibling
from spannorm_jax.figures import color, finish, panels

s, fig05 = sibling('_shared'), sibling('fig05')
QUESTION = 'How fast does the similarity of two layers fall with the distance between them?'
CLAIM = 'Slowly for Pre, which stays above 0.5; fast for Span, which falls to about 0.25.'
CHIPS = 'v5p:4x4x4'
CURVES = ()
runs, measure = fig05.runs, s.similarity


def figure(rows):
    fig, axes = panels('mean over pairs and seeds', width=6)
    for topology, own in s.group(s.without_control(rows), 'model.topology').items():
        for row in own:
            axes[0].plot(range(len(row['by_distance'])), row['by_distance'], color=color(topology, []), lw=1.2, label=topology)
    finish(axes, 'distance in blocks', 'mean cosine')
    return fig


def verdict(rows):
    if not s.control_failed(rows):
        return s.UNSEPARATED
    far = {t: [row['by_distance'][-1] for row in own] for t, own in s.group(s.without_control(rows), 'model.topology').items()}
    text = f'at the largest distance: Pre {min(far["pre"]):.2f} or more, Span {max(far["span"]):.2f} or less'
    return s.judged(min(far['pre']) > fig05.PRE and max(far['span']) < fig05.SPAN, text)
