"""What a model must beat: the entropy of single tokens, and a bigram."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spannorm_jax.data.pipeline import Corpus
from spannorm_jax.data.store import Stream, write_whole
from spannorm_jax.errors import BadData, UserError

KEPT = 'baselines.json'
PIECE = 1 << 20  # tokens counted at a time
MOST_IDS = 4096  # a table of vocab^2 counts: 128 MB at this size


def unigram_entropy(counts: Sequence[int]) -> float:
    """Entropy in nats per token, -sum p ln p, of how often each id is a target (Meta.unigram).

    It is the loss of a model that knows frequencies and no context: a run whose loss ends above it has diverged.

    Raises: BadData (all counts are 0: no text to train on).
    """
    seen = np.asarray([c for c in counts if c], np.float64)
    if not len(seen):
        raise BadData('the train split is empty: there is nothing to take the entropy of; give more text')
    p = seen / seen.sum()
    return float(-(p * np.log(p)).sum())


def bigram_bits_per_byte(corpus: Corpus, split: str = 'validation', max_tokens: int | None = None) -> float:
    """Bits per byte of p(b | a) = (n_ab + u_b) / (n_a + 1), u the add-one unigram, fitted on the train split.

    Evaluated on exactly the documents and tokens of `corpus.eval_batches(split, ..., max_tokens)`. Counting takes a pass over the
    train split, so the result is kept in the prepared folder (baselines.json), where that can be written.

    Raises: UserError (vocabulary above 4096: the table of counts would not fit), BadData (an empty split).
    """
    vocab = corpus.meta.tokenizer['vocab']
    if vocab > MOST_IDS:
        raise UserError(f'the bigram baseline takes vocabularies up to {MOST_IDS}, {corpus.meta.tokenizer["name"]!r} has {vocab}')
    path, place = corpus.folder / KEPT, f'{split} {max_tokens}'
    kept = _kept(path, corpus.meta.key)
    if place not in kept:
        kept[place] = _bigram(corpus, split, max_tokens)
        with contextlib.suppress(OSError):  # a read-only or full disk: it will be counted again
            write_whole(path, json.dumps({'key': corpus.meta.key, 'bigram_bits_per_byte': kept}, indent=1) + '\n')
    return kept[place]


def _kept(path: Path, key: str) -> dict[str, float]:
    """Results of earlier calls for the folder of this key; none where the file cannot be used."""
    try:
        tree = json.loads(path.read_text('utf-8'))
        kept = tree['bigram_bits_per_byte']
        return {place: float(bits) for place, bits in kept.items()} if tree['key'] == key else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _bigram(corpus: Corpus, split: str, max_tokens: int | None) -> float:
    vocab, bos, eos = (corpus.meta.tokenizer[k] for k in ('vocab', 'bos', 'eos'))
    held_out = corpus.eval_batches(split, 1, PIECE, max_tokens)
    pairs = np.zeros(vocab * vocab, np.int64)
    for tokens, targets in _transitions(Stream(corpus.folder, 'train', corpus.meta), corpus.meta.splits['train'].tokens, bos, eos):
        pairs += np.bincount(tokens * vocab + targets, minlength=vocab * vocab)
    pairs_VV = pairs.reshape(vocab, vocab)
    unigram_V = (pairs_VV.sum(0) + 1) / (pairs_VV.sum() + vocab)
    total_V = pairs_VV.sum(1) + 1
    nats = 0.0
    for tokens, targets in _transitions(held_out.stream, held_out.tokens, bos, eos):
        nats -= np.log((pairs_VV[tokens, targets] + unigram_V[targets]) / total_V[tokens]).sum()
    return float(nats / math.log(2) / held_out.bytes)


def _transitions(stream: Stream, upto: int, bos: int, eos: int):
    """(tokens, targets) of stream[:upto], a piece at a time."""
    for lo in range(0, upto, PIECE):
        window = stream.windows([lo], min(PIECE, upto - lo) + 1)[0].astype(np.int64)
        yield window[:-1], np.where(window[1:] == bos, eos, window[1:])
