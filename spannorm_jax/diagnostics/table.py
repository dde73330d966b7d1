"""The table of diagnostics: what each measures, how it is drawn, what it means, what is normal and what it cannot tell.

Adding one is a function in measures.py and an entry here: the command, the page and the documentation pick it up.
"""

from collections.abc import Callable
from typing import NamedTuple

from spannorm_jax.diagnostics import measures
from spannorm_jax.diagnostics.measures import Measured, of_step
from spannorm_jax.diagnostics.probe import Probe


class Panel(NamedTuple):
    """One picture: lines of `keys` over their index, the first drawn full and the others thin and dashed beside it, or a heat map of a
    matrix (one for each run)."""

    keys: tuple[str, ...]
    title: str
    over: str = 'block'
    first: int = 1  # number of the first place
    log: bool = False
    heat: bool = False


class Diagnostic(NamedTuple):
    measure: Callable[[Probe], Measured]
    title: str
    source: str  # its number in the list of measurements, and where it comes from
    means: str
    normal: str
    cannot: str
    panels: tuple[Panel, ...]


DIAGNOSTICS: dict[str, Diagnostic] = {
    'gradients': Diagnostic(
        measures.gradients, 'Gradients by layer', 'D1, D2, D5',
        'Root mean square of the loss gradient in each block, for the matrices that read the stream and those that write to it, before '
        'clipping; dashed, for PostNorm and SpanNorm, what the scales at the norms alone predict (SpanNorm\'s eq. 11), made to end where '
        'the gradient ends. The factor per layer is the exponential of the slope of its logarithm over depth. The rank of a gradient is '
        'the share of directions that carry it (entropy of its squared singular values).',
        'Within a factor of about ten from first to last block, at any depth. At their start, with SwiGLU, PreNorm, PostNorm and '
        'SpanNorm all fall towards the top, the latter two the more so without a scaled initialisation (theory.md); trained, PostNorm '
        'may fall towards the bottom.',
        'Adam divides by the size of a gradient, so a steady slope alone does not say that the lower blocks learn slowly; it says so '
        'only where gradients near its eps. One batch is one sample of a noisy quantity, and the rank of a gradient grows with the batch.',
        (Panel(('grad_rms/read',), 'reading matrices: gradient rms', log=True),
         Panel(('grad_rms/write', 'law'), 'writing matrices: gradient rms (dashed: predicted)', log=True),
         Panel(('rank/ffn.down',), 'FFN down: soft rank of the gradient'))),
    'scales': Diagnostic(
        measures.scales, 'Scales at the norms', 'D2',
        'Standard deviation over channels of the sums that enter a norm (or would, where a topology has none there), mean over tokens and '
        'dashed the 5th and 95th percentile of them, and the variance of what each branch adds.',
        'Where norms act on sums: just above 1, with branch variances that fall as one over the number of blocks if the initialisation is '
        'scaled with depth. Without such norms the sums grow with depth.',
        'The gradient itself: a product of these scales predicts it only under assumptions (independent branches, equal scales) that the '
        'other figures here can contradict.',
        (Panel(('sigma_attn', 'sigma_attn/p5', 'sigma_attn/p95'), 'sum at attention: std'),
         Panel(('sigma_ffn', 'sigma_ffn/p5', 'sigma_ffn/p95'), 'sum at FFN: std'),
         Panel(('branch_var/attn',), 'attention branch: variance', log=True),
         Panel(('branch_var/ffn',), 'FFN branch: variance', log=True))),
    'residual': Diagnostic(
        of_step('rms', 'branch_skip_ratio/attn', 'branch_skip_ratio/ffn', 'branch_skip_corr/attn', 'branch_skip_corr/ffn', profile='rms'),
        'Residual stream', 'D3',
        'Size of the stream after each block, size of each branch against its skip, and their correlation.',
        'A stream of constant size where blocks end in a norm; growth like the square root of depth for PreNorm at its start, faster when '
        'trained. Correlations near 0 at the start.',
        'Whether a small branch is useless: the head may read exactly the direction it writes. The removal figure asks that.',
        (Panel(('rms',), 'stream: rms', log=True), Panel(('branch_skip_ratio/attn',), 'attention: branch over skip', log=True),
         Panel(('branch_skip_ratio/ffn',), 'FFN: branch over skip', log=True),
         Panel(('branch_skip_corr/attn',), 'attention: correlation with skip'),
         Panel(('branch_skip_corr/ffn',), 'FFN: correlation with skip'))),
    'attention': Diagnostic(
        of_step('attn_entropy', 'attn_sink', 'attn_logit_max'), 'Attention', 'D9',
        'Entropy of the attention rows over the entropy of uniform ones, mean weight on the first visible position, and the largest '
        'score before the softmax, over at most 64 queries of each row and all heads.',
        'Entropy near 1 at the start and spread out when trained; some weight on the first position in trained models; scores of tens at '
        'most.',
        'Which head does what: these are means over heads. Low entropy is focus or collapse, and only the loss tells which.',
        (Panel(('attn_entropy',), 'entropy, share of uniform'), Panel(('attn_sink',), 'weight on the first position'),
         Panel(('attn_logit_max',), 'largest score'))),
    'updates': Diagnostic(
        measures.updates, 'Updates by layer', 'D10',
        'Size of one optimizer step against the size of the weights it changes, at half the run\'s schedule; the share of weights '
        'that a bfloat16 copy would see move; the cosine of two successive steps, on the even and the odd rows; and the gradient against '
        'Adam\'s memory of it, the root mean square of g / sqrt(v). Without an optimizer state these are Adam\'s first steps.',
        'Around one in a thousand at the peak rate, alike over depth; matrices whose initialisation is scaled down move more relative to '
        'their size. Successive steps share their momentum, so that their cosine is near 0.9. g over sqrt(v) stays near 1, is 1 in Adam\'s '
        'first step, and rises before a loss spike, when v has not caught up.',
        'The movement of the function: a small step along a sharp direction changes more than a large one along a flat one. See '
        'sharpness.',
        (Panel(('update_ratio/read',), 'reading matrices: |update| / |weights|', log=True),
         Panel(('update_ratio/write',), 'writing matrices: |update| / |weights|', log=True),
         Panel(('update_visible/write',), 'writing matrices: share bfloat16 sees move'),
         Panel(('cosine/read',), 'reading matrices: cosine of two updates'),
         Panel(('cosine/write',), 'writing matrices: cosine of two updates'),
         Panel(('surprise/write',), 'writing matrices: rms of g / sqrt(v)'))),
    'history': Diagnostic(
        measures.history, 'Through training', 'D1-D3, D10',
        'Gradient, scale at the FFN\'s norm, stream and relative update of every block over the steps of the run, as logarithms to base '
        'ten, from the rows that run.stats_every wrote.',
        'Bands that settle within the warm-up and stay. A block that goes dark for good has stopped learning.',
        'Anything between the rows, or of runs without them. Colours are scaled to each picture: read the bar before comparing two.',
        (Panel(('grad_rms/write',), 'log10 gradient rms (writing)', 'step', heat=True),
         Panel(('sigma_ffn',), 'log10 std at FFN', 'step', heat=True), Panel(('rms',), 'log10 stream rms', 'step', heat=True),
         Panel(('update_ratio/write',), 'log10 |update| / |weights|', 'step', heat=True))),
    'experts': Diagnostic(
        measures.experts, 'Experts', 'D17',
        'Share of all choices that each expert of each block takes, the fullest one over the mean, and entropy of the router\'s shares; '
        'size of the router\'s logits, and how unevenly the experts\' gradients are sized (std over mean of their norms).',
        'Shares near one over the number of experts; the fullest below about twice the mean once the selection biases have settled.',
        'Whether experts differ in what they do. Balance on one batch is not balance on every domain.',
        (Panel(('load',), 'share of choices by expert', 'expert', heat=True), Panel(('max_over_mean',), 'fullest expert over the mean'),
         Panel(('entropy',), 'entropy of the shares, nats'), Panel(('dropped',), 'dropped choices'),
         Panel(('router_rms',), 'router logits: rms'), Panel(('grad_cv',), 'expert gradients: std over mean'))),
    'jacobians': Diagnostic(
        measures.jacobian, 'Jacobians', 'D4',
        'How a block, and all of them together, stretch small changes of the stream: the largest stretch (power iteration), the root mean '
        'square one, and the mean squared distance from doing nothing. On the first 32 positions of one row. The hard and soft rank are '
        'those of the last token\'s Jacobian, as a share of the width.',
        'Root mean square stretch near 1 in every block. From end to end, a spectrum that reaches neither far above nor far below 1 lets '
        'gradients through; a distance below 1 says that an identity path survives. Where a norm ends the model one singular value is 0.',
        'What large changes do: this is the derivative at one point. Two close largest values make the power iteration a slight '
        'underestimate.',
        (Panel(('spectral',), 'block: largest stretch', log=True), Panel(('frobenius',), 'block: rms stretch', log=True),
         Panel(('from_identity',), 'block: distance from identity', log=True),
         Panel(('end_to_end/singular',), 'end to end: largest singular values', 'rank', log=True),
         Panel(('end_to_end/last_token',), 'end to end: last token, all of them', 'rank', log=True))),
    'ranks': Diagnostic(
        measures.ranks, 'Effective ranks', 'D5',
        'How many directions the tokens of the batch use in the stream, in the FFN\'s output and in its hidden units, as a share of all: '
        'hard (participation ratio), soft (entropy), and how concentrated the spectrum is.',
        'Hard below soft always. Both fall where one direction takes over, as with massive activations; concentration then nears 1.',
        'Whether the unused directions are needed. With fewer tokens than about four times the width all ranks come out low, the same for '
        'every model. The paper\'s "effective dimension ratio" has no public formula: no number here claims to be it.',
        (Panel(('state/hard',), 'stream: hard rank', first=0), Panel(('state/soft',), 'stream: soft rank', first=0),
         Panel(('state/concentration',), 'stream: concentration', first=0), Panel(('ffn_out/hard',), 'FFN output: hard rank'),
         Panel(('ffn_hidden/hard',), 'FFN hidden: hard rank'), Panel(('ffn_hidden/soft',), 'FFN hidden: soft rank'),
         Panel(('ffn_hidden/concentration',), 'FFN hidden: concentration'), Panel(('ffn_hidden/utilisation',), 'FFN hidden: utilisation'))),
    'spectra': Diagnostic(
        measures.eigenspectra, 'Eigenspectra', 'D5',
        'Eigenvalues of the covariance of the embedding\'s rows, the head\'s and the final features, largest first, over their median.',
        'A flat line for a fresh embedding (a Marchenko-Pastur slope for few rows); training raises a few directions above the rest.',
        'Which tokens the top directions stand for; in a byte vocabulary they are often just the frequent bytes.',
        (Panel(('embedding',), 'embedding', 'rank', log=True), Panel(('head',), 'head', 'rank', log=True),
         Panel(('features',), 'final features', 'rank', log=True))),
    'similarity': Diagnostic(
        measures.alike, 'Similarity of layers', 'D6',
        'Mean cosine between the states of every two layers (0 is the embedding), and its mean by how far apart they lie.',
        'Falls with distance. High everywhere means that blocks add little to what is there; PreNorm tends that way in its deeper half.',
        'Whether an addition is small but vital. A single large channel makes any two states look alike: see massive activations.',
        (Panel(('cosine',), 'mean cosine', heat=True, first=0), Panel(('by_distance',), 'mean cosine by distance', 'layers apart', 0))),
    'redundancy': Diagnostic(
        measures.turned, 'Turning of the stream', 'D6',
        'Angle between the states of two layers at the last token, as a share of half a turn, and how much each block turns all tokens '
        '(one minus the cosine of its input and output).',
        'First and last blocks turn most. A long stretch of near zero is what layer pruning removes first.',
        'The effect on the loss, which the removal figure measures; and nothing about norms, which the head may read too.',
        (Panel(('angular',), 'angular distance', heat=True, first=0), Panel(('influence',), 'block influence'))),
    'removal': Diagnostic(
        measures.removed, 'Blocks taken out', 'D7',
        'Rise of the loss (nats per token) without one block, without n neighbours that turn the stream least, and with two neighbours '
        'swapped. Skipped: the stream goes past the block. Silenced: its branches add nothing, its norms and skips stay.',
        'First and last blocks matter most in a trained model; at the start nothing does. The two removals agree for PreNorm and differ '
        'where blocks end in norms.',
        'What the model would lose after retraining without the block. Every removal leads off what it was trained on.',
        (Panel(('skipped',), 'one block skipped'), Panel(('silenced',), 'one block silenced'),
         Panel(('group/skipped',), 'n blocks skipped', 'blocks removed'), Panel(('group/silenced',), 'n blocks silenced', 'blocks removed'),
         Panel(('swapped',), 'swapped with the next'))),
    'lens': Diagnostic(
        measures.lens, 'Logit lens', 'D14',
        'What the head would say if the model ended after each block: divergence from what it says at the end, share of tokens with the '
        'same first choice, and loss.',
        'Divergence falls with depth, most of it in the upper half of a trained model.',
        'What a layer knows but writes in another basis than the last one uses. Topologies whose stream has no constant size are read '
        'through their final norm.',
        (Panel(('kl',), 'KL(final | layer), nats', first=0, log=True), Panel(('agreement',), 'same first choice', first=0),
         Panel(('loss',), 'loss, nats', first=0))),
    'massive': Diagnostic(
        measures.massive, 'Massive activations', 'D8',
        'The largest number in each layer\'s state against the median one, excess kurtosis over channels, and how many numbers exceed a '
        'hundred medians.',
        'Ratios of tens and kurtosis near 0 at the start. Large PreNorm models grow a few numbers of thousands of medians, in one or two '
        'channels of the first token.',
        'Whether they do harm: they hurt quantisation and low precision, and some act as a bias that the model relies on.',
        (Panel(('ratio',), 'largest over median', first=0, log=True), Panel(('kurtosis',), 'excess kurtosis', first=0),
         Panel(('over_100',), 'numbers above 100 medians', first=0))),
    'weights': Diagnostic(
        measures.weights, 'Weight spectra', 'D16',
        'Condition number of the matrices of every block (at most a million), the share of directions that carry their size (stable '
        'rank), and the share of singular values above the Marchenko-Pastur edge of a random matrix of the same variance.',
        'No outliers at the start; training lifts some out of the bulk. Square matrices have large condition numbers by themselves, so '
        'compare a matrix with its own start.',
        'What a small singular value costs: the data may never use that direction.',
        (Panel(('ffn.up/condition',), 'FFN up: condition number', log=True),
         Panel(('ffn.down/condition',), 'FFN down: condition number', log=True),
         Panel(('attn.o/stable_rank',), 'attention output: stable rank'), Panel(('ffn.down/stable_rank',), 'FFN down: stable rank'),
         Panel(('ffn.up/outliers',), 'FFN up: share above the edge'), Panel(('ffn.down/outliers',), 'FFN down: share above the edge'))),
    'vocabulary': Diagnostic(
        measures.vocabulary, 'Embedding and head', 'D15',
        'Root mean square of every row of the embedding and of the head, smallest first.',
        'One value at the start. Rare tokens stay there, or shrink under weight decay; frequent ones move.',
        'Anything about tokens by name, or about directions: see the eigenspectra.',
        (Panel(('embedding',), 'embedding: rms of each row', 'token, sorted'), Panel(('head',), 'head: rms of each row', 'token, sorted'))),
    'position': Diagnostic(
        measures.along_the_row, 'Loss along the row', 'D18',
        'Mean loss at each position of a row.',
        'Falls over the first tens of positions and flattens. A row that begins inside a document starts without its context.',
        'Single positions: each is a mean over the rows of the probe alone, so the line is noisy.',
        (Panel(('loss',), 'loss, nats', 'position'),)),
    'sharpness': Diagnostic(
        measures.sharpness, 'Sharpness', 'D13',
        'Largest and smallest eigenvalues of the Hessian of the loss on two rows, by twenty Lanczos steps; for a run with Adam\'s moments '
        'also of the Hessian as Adam sees it, beside the value above which its step overshoots on a quadratic.',
        'Training at a constant rate lifts the preconditioned one to about its limit (38 over the rate at beta1 = 0.9) and holds it there.',
        'The inner eigenvalues: Lanczos finds the ends first. Two rows are a noisier and usually sharper loss than the whole batch.',
        (Panel(('hessian',), 'Hessian: Ritz values', 'rank'), Panel(('preconditioned',), 'as Adam sees it: Ritz values', 'rank'))),
}  # fmt: skip
