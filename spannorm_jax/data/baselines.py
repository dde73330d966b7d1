"""What a model must beat: the entropy of single tokens, and a bigram."""

import math

import numpy as np

from spannorm_jax.data.pipeline import Corpus
from spannorm_jax.data.store import Meta, Stream
from spannorm_jax.errors import BadData, UserError

PIECE = 1 << 20  # tokens counted at a time
MOST_IDS = 4096  # a table of vocab^2 counts: 128 MB at this size


def unigram_entropy(meta: Meta) -> float:
    """Entropy in nats per token of the train targets' distribution, -sum p ln p. A run whose loss ends above it has diverged."""
    counts = np.asarray([c for c in meta.unigram if c], np.float64)
    if not len(counts):
        raise BadData(f'the train split of {meta.source!r} is empty: there is nothing to take the entropy of')
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


def bigram_bits_per_byte(corpus: Corpus, split: str = 'validation', max_tokens: int | None = None) -> float:
    """Bits per byte of p(b | a) = (n_ab + u_b) / (n_a + 1), u the add-one unigram, fitted on the train split.

    Evaluated on exactly the documents and tokens of `corpus.eval_batches(split, ..., max_tokens)`.

    Raises: UserError (vocabulary above 4096: the table of counts would not fit), BadData (an empty split).
    """
    vocab, bos, eos = (corpus.meta.tokenizer[k] for k in ('vocab', 'bos', 'eos'))
    if vocab > MOST_IDS:
        raise UserError(f'the bigram baseline takes vocabularies up to {MOST_IDS}, {corpus.meta.tokenizer["name"]!r} has {vocab}')
    pairs = np.zeros(vocab * vocab, np.int64)
    for tokens, targets in _transitions(Stream(corpus.folder, 'train', corpus.meta), corpus.meta.splits['train'].tokens, bos, eos):
        pairs += np.bincount(tokens * vocab + targets, minlength=vocab * vocab)
    pairs_VV = pairs.reshape(vocab, vocab)
    unigram_V = (pairs_VV.sum(0) + 1) / (pairs_VV.sum() + vocab)
    total_V = pairs_VV.sum(1) + 1
    held_out = corpus.eval_batches(split, 1, PIECE, max_tokens)
    nats = 0.0
    for tokens, targets in _transitions(held_out.stream, held_out.tokens, bos, eos):
        nats -= np.log((pairs_VV[tokens, targets] + unigram_V[targets]) / total_V[tokens]).sum()
    return float(nats / math.log(2) / held_out.bytes)


def _transitions(stream: Stream, upto: int, bos: int, eos: int):
    """(tokens, targets) of stream[:upto], a piece at a time."""
    for lo in range(0, upto, PIECE):
        window = stream.windows([lo], min(PIECE, upto - lo) + 1)[0].astype(np.int64)
        yield window[:-1], np.where(window[1:] == bos, eos, window[1:])
