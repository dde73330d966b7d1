"""meta.json of a prepared folder: what it holds, and what is refused when one is opened.

A prepared folder may come from anyone. So every field is checked before any is used, and no name in it leads out of the folder.
"""

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spannorm_jax.errors import BadData, MissingInput
from spannorm_jax.json_file import LARGE, read_json

VERSION = 1
SPLITS = ('train', 'validation', 'test')
DTYPES = {'<u2': 1 << 16, '<u4': 1 << 31}  # and how many ids fit; rows are int32
TOKENIZER_FILES = ('tokenizer.model', 'tokenizer.json')


@dataclass(frozen=True)
class SplitMeta:
    """Counts of one split, and its shards in stream order as (file name, tokens)."""

    documents: int
    tokens: int
    bytes: int
    shards: list[tuple[str, int]]


@dataclass(frozen=True)
class Meta:
    """meta.json. `hash` is the corpus's identity: sha256 over the documents' sha256, in order, whatever the tokenizer.

    `key` says what the folder was made of (prepare.identity); two folders with one key hold the same bytes.
    """

    version: int
    key: str
    source: str
    hash: str
    tokenizer: dict  # name, fingerprint, vocab, bos, eos, file
    dtype: str
    block: int
    duplicates: int
    empty: int
    skipped_files: int
    splits: dict[str, SplitMeta]
    unigram: list[int]
    """How often each id is a target in the train split (a document's end counts as eos)."""
    cut: int = 1 << 20
    """A text longer than so many bytes became several documents."""
    contract: str = (
        'A document is bos t1..tn. A row is stream[p:p+T], its targets stream[p+1:p+T+1] with bos replaced by eos. '
        'bos occurs nowhere else. Ids are text only: no other special token is added.'
    )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + '\n'


def is_prepared(folder: Path) -> bool:
    """Whether a folder was written by `prepare`, even if damaged since. A folder of texts may have a meta.json of its own."""
    path = folder / 'meta.json'
    if not path.is_file():
        return False
    if (folder / 'train.documents').is_file():
        return True
    try:
        tree = _load(path)
    except BadData:
        return False
    return isinstance(tree, dict) and {'tokenizer', 'splits', 'unigram'} <= tree.keys()


def read_meta(folder: Path) -> Meta:
    """The meta.json of a prepared folder, every field checked.

    Raises: MissingInput (no such folder, or unfinished), BadData (naming the field; or of a newer version).
    """
    path = folder / 'meta.json'
    if not path.is_file():
        raise MissingInput(f'{str(folder)!r} is not a folder written by `spannorm prepare` (no meta.json: missing or unfinished)')
    tree = _load(path)
    try:
        if isinstance(tree, dict) and type(tree.get('version')) is int and tree['version'] > VERSION:
            raise BadData(f'{str(path)!r} has format version {tree["version"]}, this package reads {VERSION}: upgrade spannorm_jax')
        _check(tree)
        for field, name in _names(tree):
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise _Wrong(field, name, 'a file inside the folder, not a link out of it')
    except _Wrong as e:
        raise BadData(f'{str(path)!r} is damaged or not from `spannorm prepare`: {e}; prepare the folder again') from None
    tree['splits'] = {
        name: SplitMeta(s['documents'], s['tokens'], s['bytes'], [(file, n) for file, n in s['shards']])
        for name, s in tree['splits'].items()
    }
    return Meta(**tree)


def _load(path: Path) -> Any:
    try:
        return read_json(path, LARGE)  # a vocabulary of a million ids needs some 10 MB
    except OSError as e:
        raise MissingInput(f'cannot read {str(path)!r}: {e.strerror}') from None
    except BadData as e:
        raise BadData(f'{str(path)!r} is damaged ({e}); prepare the folder again') from None


class _Wrong(Exception):
    def __init__(self, field: str, found: Any, expected: str):
        super().__init__(f'{field} is {reprlib.repr(found)}, expected {expected}')


Rule = tuple[Callable[[Any], bool], str]


def _whole(least: int, below: int = 1 << 62) -> Rule:
    return lambda v: type(v) is int and least <= v < below, f'a whole number, at least {least} and below {below}'


_TEXT: Rule = lambda v: isinstance(v, str), 'text'
_SHA256: Rule = lambda v: isinstance(v, str) and re.fullmatch('[0-9a-f]{64}', v) is not None, '64 hexadecimal digits'
_ANY: Rule = lambda v: True, ''
_META: dict[str, Rule] = {
    'version': _whole(1, VERSION + 1),
    'key': _SHA256,
    'source': _TEXT,
    'hash': _SHA256,
    'tokenizer': _ANY,
    'dtype': (lambda v: v in tuple(DTYPES), f'one of {", ".join(DTYPES)}'),
    'block': _whole(1, 1 << 24),
    'duplicates': _whole(0),
    'empty': _whole(0),
    'skipped_files': _whole(0),
    'splits': _ANY,
    'unigram': _ANY,
    'cut': _whole(1),
    'contract': _TEXT,
}
_TOKENIZER: dict[str, Rule] = {
    'name': _TEXT,
    'fingerprint': _SHA256,
    'vocab': _whole(1, max(DTYPES.values()) + 1),
    'bos': _whole(0),
    'eos': _whole(0),
    'file': (lambda v: v is None or v in TOKENIZER_FILES, f'null or one of {", ".join(TOKENIZER_FILES)}'),
}
_SPLIT: dict[str, Rule] = {'documents': _whole(0), 'tokens': _whole(0), 'bytes': _whole(0), 'shards': _ANY}


def _fields(tree: Any, rules: dict[str, Rule], at: str = '', optional: Iterable[str] = ()) -> None:
    """An object with exactly the fields of `rules`, each as its rule wants it."""
    if not isinstance(tree, dict):
        raise _Wrong(at or 'all of it', tree, 'an object')
    for name in tree.keys() - rules.keys():
        raise _Wrong(f'{at}{"." if at else ""}{name}', tree[name], 'no such field')
    for name, (holds, expected) in rules.items():
        field = f'{at}{"." if at else ""}{name}'
        if name not in tree and name not in optional:
            raise _Wrong(field, 'missing', expected or 'a value')
        if name in tree and not holds(tree[name]):
            raise _Wrong(field, tree[name], expected)


def _list(value: Any, field: str, length: int | None = None) -> list:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise _Wrong(field, value, 'a list' if length is None else f'a list of {length}')
    return value


def _check(tree: Any) -> None:
    """Raise _Wrong at the first field that `prepare` would not have written."""
    _fields(tree, _META, optional=('cut', 'contract'))
    tokenizer = tree['tokenizer']
    _fields(tokenizer, _TOKENIZER, 'tokenizer')
    vocab = tokenizer['vocab']
    for name in ('bos', 'eos'):
        if tokenizer[name] >= vocab:
            raise _Wrong(f'tokenizer.{name}', tokenizer[name], f'an id below tokenizer.vocab = {vocab}')
    if tokenizer['file'] is None and tokenizer['name'] != 'bytes':  # a name is no path: it must not choose what is opened
        raise _Wrong('tokenizer.name', tokenizer['name'], "'bytes' where tokenizer.file is null")
    if vocab > DTYPES[tree['dtype']]:
        raise _Wrong('dtype', tree['dtype'], f'one that holds {vocab} ids')
    _fields(tree['splits'], dict.fromkeys(SPLITS, _ANY), 'splits')
    for name, split in tree['splits'].items():
        _check_split(split, name)
    whole, expected = _whole(0)
    for i, count in enumerate(_list(tree['unigram'], 'unigram', vocab)):
        if not whole(count):
            raise _Wrong(f'unigram[{i}]', count, expected)
    if sum(tree['unigram']) != tree['splits']['train']['tokens']:
        raise _Wrong('the sum of unigram', sum(tree['unigram']), f'splits.train.tokens = {tree["splits"]["train"]["tokens"]}')


def _check_split(split: Any, name: str) -> None:
    at = f'splits.{name}'
    _fields(split, _SPLIT, at)
    whole, expected = _whole(1)
    for i, shard in enumerate(_list(split['shards'], f'{at}.shards')):
        file, tokens = _list(shard, f'{at}.shards[{i}]', 2)
        if not isinstance(file, str) or not re.fullmatch(rf'{name}-[0-9]+\.array_record', file):
            raise _Wrong(f'{at}.shards[{i}][0]', file, f'a plain file name such as {name}-00000.array_record')
        if not whole(tokens):
            raise _Wrong(f'{at}.shards[{i}][1]', tokens, expected)
    if sum(n for _, n in split['shards']) != split['tokens']:
        raise _Wrong(f'{at}.tokens', split['tokens'], f'{sum(n for _, n in split["shards"])}, as many as its shards')
    if not split['documents'] <= split['tokens'] or (split['tokens'] and not split['documents']):
        raise _Wrong(f'{at}.documents', split['documents'], f'at least one and no more than its {split["tokens"]} tokens')


def _names(tree: dict) -> Iterable[tuple[str, str]]:
    """(field, name) of every file that is opened because of this meta.json."""
    if tree['tokenizer']['file']:
        yield 'tokenizer.file', tree['tokenizer']['file']
        yield 'the file beside tokenizer.file', 'tokenizer_config.json'
    for name, split in tree['splits'].items():
        yield f'the table of splits.{name}', f'{name}.documents'
        yield from ((f'splits.{name}.shards[{i}][0]', file) for i, (file, _) in enumerate(split['shards']))
