"""A Hugging Face folder as a run, to evaluate, sample and export again."""

import dataclasses
import re
import shutil
from pathlib import Path

from spannorm_jax.checkpoint import Checkpoints, disk_errors
from spannorm_jax.config import Config, DataConfig, to_dict
from spannorm_jax.data import check_vocab, load_tokenizer
from spannorm_jax.errors import BadData, MissingInput
from spannorm_jax.interop import card
from spannorm_jax.interop.huggingface import POSITIONS, TOKENIZER_FILES, byte_files, free, load_hf, new_folder
from spannorm_jax.interop.safetensors import read_json
from spannorm_jax.load import TOKENIZER
from spannorm_jax.rundir import Position, write_config


def import_run(folder: Path, run: Path, seq: int | None = None) -> Config:
    """Make `run` from a model's folder: its configuration, its tokenizer (bytes where there is none that we read), its weights as the
    checkpoint of step 0. `seq`: tokens per row, None for the model's max_position_embeddings. The run appears when it is whole.

    Raises: as `load_hf`; UserError (the run's folder is not empty), StorageError.
    """
    if not folder.is_dir():
        raise MissingInput(f'{str(folder)!r} is not a folder')
    with disk_errors('read', run):
        free(run)  # better said now than after the weights
    model, params = load_hf(folder)
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    own = None if is_bytes(folder) else next((f.name for f in files if f.name in ('tokenizer.json', 'tokenizer.model')), None)
    tokenizer = load_tokenizer('bytes' if own is None else str(folder / own))
    check_vocab(tokenizer, model.vocab)
    spec = 'bytes' if own is None else f'{TOKENIZER}/{own}'  # in the run's folder, where `load.read_config` finds it
    positions = read_json(folder / 'config.json').get('max_position_embeddings')
    seq = seq or (positions if isinstance(positions, int) and positions > 0 else POSITIONS)
    name = re.sub(r'[^\w.-]+', '-', folder.resolve().name, flags=re.ASCII).lstrip('.') or 'imported'
    cfg = Config(name=name, model=model, data=DataConfig(tokenizer=spec, seq=seq, batch=1))
    meta = {'config': to_dict(cfg), 'text': '', 'tokenizer': tokenizer.fingerprint} | dataclasses.asdict(Position())
    with disk_errors('write', run), new_folder(run) as part:
        (part / TOKENIZER).mkdir()
        for file in files:
            shutil.copyfile(file, part / TOKENIZER / file.name)
        card.keep(folder, part)
        with Checkpoints(part / 'checkpoints') as checkpoints:
            checkpoints.save_params(0, params, meta)
        write_config(part, cfg)
    return cfg


def is_bytes(folder: Path) -> bool:
    """Whether the tokenizer of a model's folder is the one that we write for a run on bytes: then no library need read it."""
    try:
        return all(read_json(folder / name) == tree for name, tree in byte_files().items())
    except (MissingInput, BadData):
        return False
