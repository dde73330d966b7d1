"""Text to batches: sources, tokenizers, the prepared folder, and the pipeline over it."""

from spannorm_jax.data.meta import Meta
from spannorm_jax.data.pipeline import Corpus, EvalSet, open_data, tokenizer_of
from spannorm_jax.data.prepare import prepare
from spannorm_jax.data.tokenizer import Tokenizer, check_vocab, load_tokenizer

__all__ = ['Corpus', 'EvalSet', 'Meta', 'Tokenizer', 'check_vocab', 'load_tokenizer', 'open_data', 'prepare', 'tokenizer_of']
