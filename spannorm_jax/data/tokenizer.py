"""Tokenizers: bytes, the Mistral v1 SentencePiece model, any SentencePiece .model, any Hugging Face tokenizer.json.

All obey one contract: `encode` never returns `bos` or `eos`, whatever the text says, so that in a stored stream
a `bos` is a document's start and nothing else. A tokenizer without a BOS uses its EOS in that place.
"""

import abc
import contextlib
import hashlib
import json
import math
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spannorm_jax.errors import BadData, MissingInput, UserError
from spannorm_jax.json_file import LARGE, read_bytes, read_json

FILE_BYTES = 256 << 20  # the largest tokenizers in use have some 30 MB
MOST_GROWTH = 64  # of a text by what a tokenizer.json replaces
MOST_IDS = 1 << 22  # they have some 300,000 ids; what counts tokens has a number for each
BYTES_FINGERPRINT = hashlib.sha256(b'256 bytes, separator 256').hexdigest()
# Names that BOS and EOS go by when tokenizer_config.json is not there to tell; the first one present is taken.
BOS_NAMES = ('<s>', '<|begin_of_text|>', '<bos>', '[BOS]', '<|startoftext|>')
EOS_NAMES = ('</s>', '<|end_of_text|>', '<|endoftext|>', '<eos>', '[EOS]', '<|im_end|>')


class Tokenizer(abc.ABC):
    """What the rest of the package sees of a tokenizer.

    Attributes: name (spec it was loaded from, without folders), fingerprint (sha256 of what defines it), vocab (ids are
    0..vocab-1), bos, eos, files (what a prepared folder must copy to be self-contained, by the name it gets there).
    """

    def __init__(self, name: str, fingerprint: str, vocab: int, bos: int, eos: int, files: dict[str, Path] | None = None):
        self.name, self.fingerprint, self.vocab, self.bos, self.eos, self.files = name, fingerprint, vocab, bos, eos, files or {}

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Integer ids (n,) of the text alone: no BOS, no EOS, special-token text taken as ordinary text."""

    @abc.abstractmethod
    def decode_bytes(self, ids) -> bytes:
        """The inverse of `encode`: UTF-8 bytes of the ids; BOS and EOS give nothing."""

    def decode(self, ids) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', errors='replace')


class ByteTokenizer(Tokenizer):
    """256 byte values and the separator 256, which is both BOS and EOS."""

    def __init__(self):
        super().__init__('bytes', BYTES_FINGERPRINT, 257, 256, 256)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode('utf-8'), np.uint8)

    def decode_bytes(self, ids) -> bytes:
        ids = np.asarray(ids, np.int64)
        return ids[ids < 256].astype(np.uint8).tobytes()


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Its control symbols (`<s>`, `</s>`) are never produced from text, by construction of the library."""

    def __init__(self, path: Path, name: str):
        try:
            import sentencepiece
        except ImportError:
            raise UserError(f"tokenizer {name!r} needs sentencepiece: pip install 'spannorm-jax[hf]'") from None
        data = read_bytes(path, FILE_BYTES)
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_proto=data)
            vocab = self.model.vocab_size()
            self.pieces = [self._piece(i) for i in range(vocab)]
            # Most models put a space before the first word of what they encode; decoding takes it off again.
            self.dummy_prefix = self.pieces[self.model.encode('a')[0]].startswith(b' ')
        except (RuntimeError, ValueError, LookupError) as e:
            raise BadData(f'{str(path)!r} is not a SentencePiece model: {e}') from None
        bos, eos = self.model.bos_id(), self.model.eos_id()
        if eos < 0:
            raise UserError(f'tokenizer {name!r} has no EOS symbol; train it with eos_id >= 0')
        super().__init__(name, hashlib.sha256(data).hexdigest(), vocab, bos if bos >= 0 else eos, eos, {'tokenizer.model': path})

    def _piece(self, i: int) -> bytes:
        if self.model.is_control(i):
            return b''
        piece = self.model.id_to_piece(i)
        return bytes([int(piece[3:5], 16)]) if self.model.is_byte(i) else piece.replace('\u2581', ' ').encode()

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self.model.encode(text), np.int64)

    def decode_bytes(self, ids) -> bytes:
        text = b''.join(self.pieces[i] for i in np.asarray(ids).tolist())
        return text.removeprefix(b' ') if self.dummy_prefix else text


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json. Truncation, padding and templates that the file may ask for are switched off."""

    def __init__(self, path: Path, name: str):
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"tokenizer {name!r} needs tokenizers: pip install 'spannorm-jax[hf]'") from None
        data = read_bytes(path, FILE_BYTES)
        with _refused(f'{str(path)!r} is not a Hugging Face tokenizer'):
            self.model = tokenizers.Tokenizer.from_str(data.decode())
        if (grown := _growth(json.loads(data))) > MOST_GROWTH:
            raise BadData(f'{str(path)!r} replaces text by text {grown} times as long; more than {MOST_GROWTH} times is not supported')
        if getattr(self.model.model, 'dropout', None):
            self.model.model.dropout = None  # or the same text would give other tokens each time
        self.model.no_truncation()
        self.model.no_padding()
        self.model.encode_special_tokens = True  # '</s>' in a document is text
        ids = self.model.get_vocab(with_added_tokens=True)
        config = path.with_name('tokenizer_config.json')
        said = _said(config) if config.is_file() else {}
        bos, eos = self._special('bos_token', said, ids, BOS_NAMES), self._special('eos_token', said, ids, EOS_NAMES)
        if eos is None:
            raise UserError(f'tokenizer {name!r}: no EOS token found; name it in {str(config)!r} as "eos_token"')
        vocab = max(ids.values()) + 1
        if vocab > MOST_IDS:
            raise BadData(f'{str(path)!r} has the id {vocab - 1}; more than {MOST_IDS} ids are not supported')
        digest = hashlib.sha256(data + json.dumps([bos, eos]).encode()).hexdigest()
        files = {'tokenizer.json': path} | ({config.name: config} if config.is_file() else {})
        super().__init__(name, digest, vocab, eos if bos is None else bos, eos, files)

    @staticmethod
    def _special(key: str, said: dict[str, str], ids: dict[str, int], names: tuple[str, ...]) -> int | None:
        found = [n for n in ((said[key],) if key in said else names) if n in ids]
        return ids[found[0]] if found else None

    def encode(self, text: str) -> np.ndarray:
        with _refused(f'tokenizer {self.name!r} cannot encode {reprlib.repr(text)}'):
            return np.asarray(self.model.encode(text, add_special_tokens=False).ids, np.int64)

    def decode_bytes(self, ids) -> bytes:
        keep = [i for i in np.asarray(ids).tolist() if i not in (self.bos, self.eos)]
        with _refused(f'tokenizer {self.name!r} cannot decode {reprlib.repr(keep)}'):
            return self.model.decode(keep, skip_special_tokens=False).encode()


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """What the library raises, as BadData: bare Exceptions, and where its Rust code panics an error that is no Exception."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != 'PanicException':
            raise
        raise BadData(f'{what}: {e}') from None


def _growth(tree: Any) -> int:
    """By how much the replacements that a tokenizer.json asks for can lengthen a text at most, one after the other."""
    if isinstance(tree, list):
        return math.prod(map(_growth, tree))
    if not isinstance(tree, dict):
        return 1
    if tree.get('type') == 'Replace':
        return max(1, len(str(tree.get('content', ''))))
    return math.prod(_growth(tree[key]) for key in ('normalizer', 'normalizers', 'pre_tokenizer', 'pretokenizers') if key in tree)


def _said(path: Path) -> dict[str, str]:
    """bos_token and eos_token of a tokenizer_config.json, where it names them. Raises: BadData."""
    try:
        tree = read_json(path, LARGE)
    except BadData as e:
        raise BadData(f'{e}; mend it or take it away') from None
    if not isinstance(tree, dict):
        raise BadData(f'{str(path)!r} is a {type(tree).__name__}, expected an object; mend it or take it away')
    said = {}
    for key in ('bos_token', 'eos_token'):
        token = tree.get(key)
        token = token.get('content') if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise BadData(f'{str(path)!r}: {key} is of type {type(token).__name__}, expected text, or an object with "content"')
        said |= {key: token} if token else {}
    return said


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: bytes | mistral | the path of a SentencePiece .model or of a tokenizer.json.

    Raises: UserError (unknown kind, missing extra), MissingInput (no such file), BadData (a file that does not load).
    """
    if spec == 'bytes':
        return ByteTokenizer()
    if spec == 'mistral':
        return SentencePieceTokenizer(_mistral_v1(), 'mistral')
    path = Path(spec)
    kinds = {'.json': HuggingFaceTokenizer, '.model': SentencePieceTokenizer}
    kind = path.suffix.lower()
    if kind not in kinds:
        raise UserError(f'unknown tokenizer {spec!r}: expected bytes, mistral, or the path of a .model or a tokenizer.json')
    if not path.is_file():
        raise MissingInput(f'tokenizer file {spec!r} does not exist')
    return kinds[kind](path, path.name)


def _mistral_v1() -> Path:
    """The v1 model (32,000 pieces) that the mistral-common wheel carries: nothing is downloaded."""
    import importlib.util

    found = importlib.util.find_spec('mistral_common')  # found, not imported: only the file is wanted
    if found is None or found.origin is None:
        raise UserError("tokenizer 'mistral' needs mistral-common: pip install 'spannorm-jax[hf]'")
    path = Path(found.origin).parent / 'data' / 'tokenizer.model.v1'
    if not path.is_file():
        raise MissingInput(f'this mistral-common has no {path.name}; pip install -U mistral-common')
    return path


def check_vocab(tokenizer: Tokenizer, model_vocab: int) -> None:
    """Raise UserError where the model's embedding is too small for the tokenizer's ids."""
    if tokenizer.vocab > model_vocab:
        raise UserError(
            f'tokenizer {tokenizer.name!r} has {tokenizer.vocab} ids but model.vocab = {model_vocab}; '
            f'set model.vocab to at least {tokenizer.vocab}'
        )
