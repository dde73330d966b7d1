"""A folder as Hugging Face lays it out (config.json, model.safetensors or shards of it, tokenizer files) <-> a model of ours."""

import contextlib
import json
import math
import re
import reprlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spannorm_jax.checkpoint import disk_errors
from spannorm_jax.config import from_dict, to_dict
from spannorm_jax.data import Tokenizer
from spannorm_jax.data.tokenizer import ByteTokenizer
from spannorm_jax.errors import BadData, UserError, nearest
from spannorm_jax.interop import families, names, remote
from spannorm_jax.interop.safetensors import Entry, folder_entries, read_json, write_folder
from spannorm_jax.model import each_param, layer_name, restack
from spannorm_jax.model_config import ModelConfig

OWN = 'spannorm_jax'
FORMAT = 1
SHARD_BYTES = 4_000_000_000
POSITIONS = 4096  # max_position_embeddings where nobody says; nothing of ours depends on it
TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer.model', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'chat_template.jinja',
)  # fmt: skip


def load_hf(folder: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """(configuration, parameters) of a model in a Hugging Face folder, float32, of model_type llama, gemma2, olmo2, hyperclovax,
    deepseek_v2, deepseek_v3 or spannorm_jax. Weights are read one parameter at a time; no code of the folder is run.

    Raises: UserError (a model_type or a feature that is not implemented, by name), MissingInput, BadData (weights that are missing, left
    over, cut off or of another shape).
    """
    folder = Path(folder)
    config = read_json(folder / 'config.json')
    cfg, layout = _read(config, folder)
    there = folder_entries(folder)
    _check_size(cfg, there, folder)
    where = names.places(cfg, layout)
    _check(cfg, where, there, folder, config)

    def weight(name: str) -> np.ndarray:
        return np.array(there[name].read(), np.float32)

    return cfg, restack(cfg, names.Named(cfg, where, weight))


def _read(config: dict[str, Any], folder: Path) -> tuple[ModelConfig, names.Layout]:
    kind, path = config.get('model_type'), folder / 'config.json'
    if kind == OWN:
        if config.get('format') != FORMAT:
            raise BadData(f'{str(path)!r} has format {config.get("format")!r}, this package reads {FORMAT}: upgrade spannorm_jax')
        try:
            return from_dict(ModelConfig, config.get('spannorm')), remote.LAYOUT
        except UserError as e:
            raise BadData(f'{str(path)!r}: {e}') from None
    if not isinstance(kind, str) or kind not in families.FAMILIES:
        known = nearest(str(kind)[:80], [*families.FAMILIES, OWN])
        raise UserError(f'{str(path)!r}: model_type {reprlib.repr(kind)} is not read here; {known}')
    try:
        return families.read_config(config), families.FAMILIES[kind].layout()
    except UserError as e:
        raise UserError(f'{path}: {e}') from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as e:  # a value of another type than transformers would write
        raise BadData(f'{str(path)!r} cannot be read: {e}') from None


def _check_size(cfg: ModelConfig, there: dict[str, Entry], folder: Path) -> None:
    """The weights could be those of this model. All its names and rows are listed next, which a few digits can make endless."""
    arrays, numbers = len(there), sum(math.prod(entry.shape) for entry in there.values())
    if cfg.layers + (cfg.layers - cfg.first_dense) * cfg.experts > arrays:
        said = f'{cfg.layers} layers' + f' of {cfg.experts} experts' * bool(cfg.experts)
        raise BadData(f'{str(folder)!r}: config.json says {said}, the weights are {arrays} arrays')
    wide = max(cfg.resolved_head_dim, cfg.value_dim)
    if cfg.heads * wide > numbers:
        raise BadData(f'{str(folder)!r}: config.json says {cfg.heads} heads of {wide}, the weights are {numbers} numbers')


def _check(cfg: ModelConfig, where: dict[str, names.Place], there: dict[str, Entry], folder: Path, config: dict[str, Any]) -> None:
    """Every weight is there, of the right shape and kind, and none is left over that would mean something."""
    wanted = {name: shape for name, (shape, _) in names.stored(cfg, where, lambda _: np.zeros(0)).items()}
    if missing := sorted(set(wanted) - set(there)):
        raise BadData(f'{str(folder)!r} lacks {len(missing)} weights: {", ".join(missing[:5])}')
    for name, shape in wanted.items():
        if there[name].shape != shape:
            raise BadData(f'{str(folder)!r}: {name} has shape {there[name].shape}, config.json says {shape}')
        if np.dtype(there[name].dtype).kind in 'bi':
            raise BadData(f'{str(folder)!r}: {name} is of dtype {np.dtype(there[name].dtype)}, expected floating point')
    if cfg.tie_embeddings and 'lm_head.weight' in there:
        head, embed = there['lm_head.weight'], there['model.embed_tokens.weight']
        if head.shape != embed.shape or not np.array_equal(head.read(), embed.read()):
            raise BadData(f'{str(folder)!r}: config.json ties the head to the embedding, but lm_head.weight is another matrix')
        wanted['lm_head.weight'] = head.shape
    mtp = config.get('num_nextn_predict_layers') or config.get('num_mtp_layers') or 0  # modules that only guess further tokens

    def idle(name: str) -> bool:
        layer = re.match(r'model\.layers\.([0-9]{1,9})\.', name)
        return name.endswith('rotary_emb.inv_freq') or bool(layer) and cfg.layers <= int(layer[1]) < cfg.layers + mtp

    if left := sorted(name for name in set(there) - set(wanted) if not idle(name)):
        raise BadData(f'{str(folder)!r} has {len(left)} weights that no part of this model reads: {", ".join(left[:5])}')


def save_hf(
    cfg: ModelConfig,
    params: dict[str, Any],
    folder: str | Path,
    *,
    model_type: str | None = None,
    tokenizer: Tokenizer | None = None,
    positions: int = POSITIONS,
    shard_bytes: int = SHARD_BYTES,
    beside: Mapping[str, bytes] | None = None,
) -> str:
    """Write a model so that transformers opens it, in float32; the model_type that was written.

    model_type None: llama for topology `pre` where Llama computes the same function, else spannorm_jax, which brings a modelling file
    (trust_remote_code). A family's name writes that layout, where it can express the model. `positions`: max_position_embeddings.
    `beside`: more files, by name.

    Raises: UserError (the folder is not empty; the family cannot express the model), StorageError.
    """
    folder = Path(folder)
    kind = model_type or default_type(cfg)
    if kind == OWN:
        config, layout, code = remote.config(cfg), remote.LAYOUT, remote.code(cfg)
        config |= {'format': FORMAT, 'spannorm': to_dict(cfg)}
    elif kind in families.FAMILIES:
        if why := families.differences(cfg, kind):
            raise UserError(f'a model of this configuration cannot be written as {kind}: {", ".join(why)}; use {OWN!r}')
        family = families.FAMILIES[kind]
        config, layout, code = family.write(cfg), family.layout(), {}
        config = {'architectures': [family.architecture]} | config
    else:
        raise UserError(f'unknown model_type {kind!r}; {nearest(kind, [*families.FAMILIES, OWN])}')
    ids = {'bos_token_id': tokenizer and tokenizer.bos, 'eos_token_id': tokenizer and tokenizer.eos}
    config = {'model_type': kind} | config | ids | {'max_position_embeddings': positions, 'torch_dtype': 'float32'}
    with disk_errors('write', folder), new_folder(folder) as part:
        (part / 'config.json').write_text(json.dumps(config, indent=1) + '\n', 'utf-8')
        for name, text in code.items():
            (part / name).write_text(text, 'utf-8')
        for name, data in (beside or {}).items():
            (part / name).write_bytes(data)
        if tokenizer is not None:
            write_tokenizer(tokenizer, part)
        write_folder(part, names.stored(cfg, names.places(cfg, layout), _lazily(cfg, params)), shard_bytes)
    return kind


def free(folder: Path) -> Path:
    """The folder itself, behind any link to it. Raises: UserError where it is a file, holds something, or is the current folder."""
    found = folder.resolve()
    if found == Path.cwd():
        raise UserError(f'{str(folder)!r} is the current folder; give a new one')
    if found.is_file():
        raise UserError(f'{str(folder)!r} is a file; give a new folder')
    if found.exists() and any(found.iterdir()):
        raise UserError(f'{str(folder)!r} is not empty; give a new folder')
    return found


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` when all is written: no half of it is ever seen there. A process that is killed
    leaves <folder>.<8 letters>.part behind. Raises: as `free` does; UserError where no folder can be made there."""
    found = free(folder)
    part = found.with_name(f'{found.name}.{uuid.uuid4().hex[:8]}.part')  # a name of its own: nobody else's files are in the way
    try:
        part.mkdir(parents=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError) as e:
        raise UserError(f'cannot make the folder {str(folder)!r}: {e.strerror}; give another one') from None
    try:
        yield part
        part.rename(found)  # takes the place of an empty folder
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def default_type(cfg: ModelConfig) -> str:
    """The model_type that is written where nobody asks for one."""
    return 'llama' if cfg.topology == 'pre' and not families.differences(cfg, 'llama') else OWN


def _lazily(cfg: ModelConfig, params: Any):
    """name -> array, one layer of one parameter at a time."""
    leaves = {}
    for name, layers, leaf in each_param(cfg, params):
        leaves |= {layer_name(name, l): (leaf, None if l is None else i) for i, l in enumerate(layers or [None])}

    def one(name: str) -> np.ndarray:
        leaf, i = leaves[name]
        return np.asarray(leaf if i is None else leaf[i])

    return one


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The files that transformers' AutoTokenizer looks for; what lay beside the tokenizer's own file comes along."""
    if isinstance(tokenizer, ByteTokenizer):
        for name, tree in byte_files().items():
            (folder / name).write_text(json.dumps(tree, indent=1, ensure_ascii=False) + '\n', 'utf-8')
        return
    files = dict(tokenizer.files)
    for path in list(files.values()):
        files |= {name: path.parent / name for name in TOKENIZER_FILES if name not in files and (path.parent / name).is_file()}
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
    if 'tokenizer_config.json' not in files and 'tokenizer.model' in files:
        tree = {'tokenizer_class': 'LlamaTokenizer', 'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': True, 'legacy': False}
        (folder / 'tokenizer_config.json').write_text(json.dumps(tree, indent=1) + '\n', 'utf-8')


def byte_files() -> dict[str, Any]:
    """The byte tokenizer as a tokenizer.json: a byte-level vocabulary without merges, byte b having id b, the separator 256."""
    separator = '<|endoftext|>'
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves; the others go to 256 and on
    hidden = [b for b in range(256) if b not in shown]
    vocab = {chr(b) if b in shown else chr(256 + hidden.index(b)): b for b in range(256)}
    special = {'id': 256, 'content': separator, 'special': True}
    special |= dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False}
    begin = [{'SpecialToken': {'id': separator, 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}]
    template = {
        'type': 'TemplateProcessing', 'single': begin, 'pair': [*begin, {'Sequence': {'id': 'B', 'type_id': 1}}],
        'special_tokens': {separator: {'id': separator, 'ids': [256], 'tokens': [separator]}},
    }  # fmt: skip
    model = {'type': 'BPE', 'dropout': None, 'unk_token': None, 'fuse_unk': False, 'byte_fallback': False, 'vocab': vocab, 'merges': []}
    tokenizer = {
        'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': [special], 'normalizer': None, 'pre_tokenizer': level,
        'post_processor': template, 'decoder': level, 'model': model,
    }  # fmt: skip
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': separator, 'eos_token': separator}
    return {'tokenizer.json': tokenizer, 'tokenizer_config.json': config | {'clean_up_tokenization_spaces': False}}
