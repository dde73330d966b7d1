"""A Hugging Face folder as a run, to evaluate, sample and export again."""

import dataclasses
import re
import shutil
from pathlib import Path

from spannorm_jax.checkpoint import Checkpoints, disk_errors
from spannorm_jax.config import Config, DataConfig, to_dict
from spannorm_jax.data import check_vocab, load_tokenizer
from spannorm_jax.errors import MissingInput, UserError
from spannorm_jax.interop import card
from spannorm_jax.interop.huggingface import POSITIONS, TOKENIZER_FILES, load_hf
from spannorm_jax.interop.safetensors import read_json
from spannorm_jax.rundir import Position, write_config


def import_run(folder: Path, run: Path, seq: int | None = None) -> Config:
    """Make `run` from a model's folder: its configuration, its tokenizer (bytes where there is none that we read), its weights as the
    checkpoint of step 0. `seq`: tokens per row, None for the model's max_position_embeddings.

    Raises: as `load_hf`; UserError (the run's folder is not empty), StorageError.
    """
    if not folder.is_dir():
        raise MissingInput(f'{str(folder)!r} is not a folder')
    with disk_errors('read', run):
        if run.exists() and any(run.iterdir()):
            raise UserError(f'{str(run)!r} is not empty; give a new folder')
    model, params = load_hf(folder)
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    own = next((file.name for file in files if file.name in ('tokenizer.json', 'tokenizer.model')), None)
    tokenizer = load_tokenizer('bytes' if own is None else str(folder / own))
    check_vocab(tokenizer, model.vocab)
    spec = 'bytes' if own is None else str((run / 'tokenizer' / own).absolute())
    positions = read_json(folder / 'config.json').get('max_position_embeddings')
    seq = seq or (positions if isinstance(positions, int) and positions > 0 else POSITIONS)
    name = re.sub(r'[^\w.-]+', '-', folder.resolve().name, flags=re.ASCII).lstrip('.') or 'imported'
    cfg = Config(name=name, model=model, data=DataConfig(tokenizer=spec, seq=seq, batch=1))
    with disk_errors('write', run):
        (run / 'tokenizer').mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, run / 'tokenizer' / file.name)
        card.keep(folder, run)
    meta = {'config': to_dict(cfg), 'text': '', 'tokenizer': tokenizer.fingerprint} | dataclasses.asdict(Position())
    with Checkpoints(run / 'checkpoints') as checkpoints:
        checkpoints.save_params(0, params, meta)
    write_config(run, cfg)
    return cfg
