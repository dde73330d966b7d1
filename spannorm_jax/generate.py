"""Text from a model: prompts of one batch side by side, one program for the prompts and one for each further token.

Axes: B rows (prompts), T positions, V vocabulary.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spannorm_jax.data import Tokenizer, check_vocab
from spannorm_jax.errors import UserError
from spannorm_jax.fields import check_number, check_range, check_types
from spannorm_jax.model import LM
from spannorm_jax.sharding import replicated

ROUND = 64  # prompts and caches are padded to multiples of this, so that few shapes are compiled


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from softmax(logits / temperature); what each rule leaves is the input of the next."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int | None = None
    """Only the k most likely (and those as likely as the k-th)."""
    top_p: float | None = None
    """Only the smallest set of the most likely that together have this probability."""
    min_p: float | None = None
    """Only those at least this many times as likely as the most likely."""

    def __post_init__(self):
        check_types(self)
        check_range(self, ('temperature',), 0)
        check_range(self, ('top_k',), 1)
        check_range(self, ('top_p',), 0, 1, open_low=True)
        check_range(self, ('min_p',), 0, 1)


class Completion(NamedTuple):
    """What a prompt became. `text` goes on where the prompt ends; `tokens` are its ids, without the end of the document."""

    prompt: str
    text: str
    tokens: list[int]
    finish: str  # eos | stop | length


class Generated(NamedTuple):
    completions: list[Completion]
    tokens_per_s: float  # of all rows together, from the second token on: without compilation and prompts; NaN where there is none


def narrowed(logits_BV: Float[Array, 'B V'], s: Sampling) -> Float[Array, 'B V']:
    """(logits - the row's largest) / temperature, with -inf for the tokens that the rules leave out.

    top_k and min_p keep ties with the last token they keep; top_p keeps the smallest set, of equal tokens those with the lower ids.
    """
    z = (logits_BV - logits_BV.max(-1, keepdims=True)) / s.temperature
    if s.top_k is not None and s.top_k < z.shape[-1]:
        z = jnp.where(z < jax.lax.top_k(z, s.top_k)[0][:, -1:], -jnp.inf, z)
    if s.top_p is not None:
        order = jnp.argsort(z, axis=-1, descending=True)
        p = jax.nn.softmax(jnp.take_along_axis(z, order, -1), axis=-1)
        kept = jnp.cumsum(p, axis=-1) - p < s.top_p  # the first always
        z = jnp.where(jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), -1), z, -jnp.inf)
    if s.min_p:
        z = jnp.where(z < z.max(-1, keepdims=True) + math.log(s.min_p), -jnp.inf, z)
    return z


def draw(logits_BV: Float[Array, 'B V'], s: Sampling, key: Array) -> Int[Array, ' B']:
    """A token per row. A row's randomness depends on the key and its index alone, not on the rows beside it."""
    if s.temperature < jnp.finfo(jnp.float32).tiny:  # what is smaller is 0 to the device, and divides by it
        return logits_BV.argmax(-1)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(logits_BV)))
    return jax.vmap(jax.random.categorical)(keys_B, narrowed(logits_BV, s))


@functools.cache
def stepper(lm: LM, s: Sampling, vocab: int, mesh: jax.sharding.Mesh | None = None) -> Callable[..., Any]:
    """(params, cache, tokens (B, T), key, i, segments, positions) -> the cache after them and the next, i-th, token of each row (B, 1),
    which every process has whole."""

    def step(params, cache, tokens_BT, key, i, segments_BT=None, positions_BT=None):
        x_BTD, extras = lm.features(params, tokens_BT, segments_BT, positions_BT, cache=cache)
        logits_BV = lm.logits(params, x_BTD[:, -1])
        logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1]) < vocab, logits_BV, -jnp.inf)  # ids that the tokenizer does not have
        return extras['cache'], draw(logits_BV, s, jax.random.fold_in(key, i)).astype(jnp.int32)[:, None]

    return jax.jit(step, donate_argnums=1, out_shardings=None if mesh is None else (None, replicated(mesh)))


def side_by_side(ids: Sequence[Sequence[int]], T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, segments and positions (B, T) of prompts that end at the same place; what stands before them is padding."""
    tokens_BT, length_B1 = np.zeros((len(ids), T), np.int32), np.array([[len(row)] for row in ids])
    for row, prompt in zip(tokens_BT, ids, strict=True):
        row[T - len(prompt) :] = prompt
    positions_BT = np.arange(T) - (T - length_B1)
    return tokens_BT, (positions_BT >= 0).astype(np.int32), np.maximum(positions_BT, 0).astype(np.int32)


class Row:
    """One prompt on its way: its tokens, and the text that is certain."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, stop: Sequence[str], max_tokens: int, room: int = 0):
        self.tokenizer, self.stop, self.max_tokens, self.prompt = tokenizer, stop, max_tokens, prompt
        self.ids = [tokenizer.bos, *tokenizer.encode(prompt).tolist()][-room:]
        self.before, self.new, self.said, self.text, self.finish = len(tokenizer.decode_bytes(self.ids)), [], 0, '', ''

    def add(self, token: int) -> str:
        """Take one more token; the piece of text that has become certain with it."""
        if token == self.tokenizer.eos:
            self.finish = 'eos'
        else:
            self.new.append(token)
            # Together with the prompt: a tokenizer may write the first word of a text differently.
            self.text = self.tokenizer.decode_bytes([*self.ids, *self.new])[self.before :].decode('utf-8', errors='replace')
            found = [at for at in map(self.text.find, self.stop) if at >= 0]
            if found:
                self.text, self.finish = self.text[: min(found)], 'stop'
            elif len(self.new) == self.max_tokens:
                self.finish = 'length'
        certain = len(self.text) if self.finish else self._certain()
        piece, self.said = self.text[self.said : certain], max(self.said, certain)
        return piece

    def _certain(self) -> int:
        """Without a character that is not whole yet, and without what may be the beginning of a stop string."""
        upto = len(self.text.rstrip('\ufffd'))
        begun = (n for s in self.stop for n in range(1, len(s)) if self.text[:upto].endswith(s[:n]))
        return upto - max(begun, default=0)


def generate(
    lm: LM,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int = 128,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] = lambda row, piece: None,
    mesh: jax.sharding.Mesh | None = None,
    room: int = 0,
) -> Generated:
    """Continue each prompt until the document ends, a stop string appears (it is left out) or max_tokens are made.

    A prompt begins a document, as in training. `on_text(row, piece)` hears of text as soon as it is certain. `mesh`: where the parameters
    lie; None is one device. `room`: tokens of a prompt that are read, its last ones; 0 is all of them.

    Raises: UserError (no prompt, one that is not text, an empty stop string, numbers out of range, a tokenizer of another vocabulary).
    """
    check(prompts, max_tokens, seed, stop)
    check_vocab(tokenizer, lm.cfg.vocab)
    rows = [Row(tokenizer, prompt, stop, max_tokens, room) for prompt in prompts]
    step = functools.partial(stepper(lm, sampling or Sampling(), tokenizer.vocab, mesh), params)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        tokens_per_s = decode(lm, step, rows, max_tokens, jax.random.key(seed), on_text)
    return Generated([Completion(row.prompt, row.text, row.new, row.finish) for row in rows], tokens_per_s)


def check(prompts: Sequence[str], max_tokens: int, seed: int, stop: Sequence[str]) -> None:
    """What `generate` asks of its arguments, for who wants to know before anything is shown. Raises: UserError."""
    if not prompts:
        raise UserError('there is no prompt; give at least one')
    for text in (*prompts, *stop):
        if any('\ud800' <= c <= '\udfff' for c in text):  # how Python holds bytes of a command line that are not UTF-8
            raise UserError(f'{ascii(text)[:80]} is not text: it holds bytes that are not UTF-8')
    if max_tokens < 1:
        raise UserError(f'max_tokens = {max_tokens} must be at least 1')
    check_number('max_tokens', max_tokens)
    check_number('seed', seed)  # jax would take a larger one for another, silently
    if '' in stop:
        raise UserError('a stop string is empty; leave it out')


def decode(lm: LM, step: Callable, rows: list[Row], max_tokens: int, key: Array, on_text: Callable[[int, str], None]) -> float:
    """Fill the rows; tokens per second, all rows together."""
    T = up(max(len(row.ids) for row in rows))
    tokens_BT, segments_BT, positions_BT = side_by_side([row.ids for row in rows], T)
    cache, token_B1 = step(lm.new_cache(len(rows), up(T + max_tokens)), tokens_BT, key, 0, segments_BT, positions_BT)
    begun = 0.0
    for i in range(max_tokens):
        # The next step is on its way while this one's tokens are looked at.
        launched = step(cache, token_B1, key, i + 1) if i + 1 < max_tokens else None
        for index, (row, token) in enumerate(zip(rows, jax.device_get(token_B1)[:, 0].tolist(), strict=True)):
            if not row.finish and (piece := row.add(token)):
                on_text(index, piece)
        if i == 1:
            begun = time.perf_counter()
        if launched is None or all(row.finish for row in rows):
            return len(rows) * (i - 1) / (time.perf_counter() - begun) if i > 1 else math.nan
        cache, token_B1 = launched
    raise AssertionError('max_tokens is at least 1')


def up(n: int) -> int:
    return -(-n // ROUND) * ROUND
