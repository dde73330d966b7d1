"""What stands beside exported weights: a model card (README.md) and the whole configuration of the run (run_config.json)."""

import json
import shutil
from pathlib import Path
from typing import Any

from spannorm_jax.config import Config, to_dict
from spannorm_jax.data import Tokenizer
from spannorm_jax.interop.huggingface import OWN
from spannorm_jax.model import count_params
from spannorm_jax.model_config import ModelConfig
from spannorm_jax.rundir import read_outcome
from spannorm_jax.topology import TOPOLOGIES
from spannorm_jax.track import read_rows

FILES = ('README.md', 'run_config.json')
KEPT = 'card'  # folder of a run where an import puts the files that its model came with


def beside(run: Path, cfg: Config, tokenizer: Tokenizer, step: int, kind: str) -> dict[str, bytes]:
    """The files by name, from what the run's folder says of checkpoint `step`; those that an imported model came with stay its own."""
    if (run / KEPT).is_dir():
        return {name: (run / KEPT / name).read_bytes() for name in FILES if (run / KEPT / name).is_file()}
    config = json.dumps(to_dict(cfg), indent=1) + '\n'
    return {'README.md': card(run, cfg, tokenizer, step, kind).encode(), 'run_config.json': config.encode()}


def keep(folder: Path, run: Path) -> None:
    """Put the files of a model's folder where `beside` finds them, so that a further export is the same."""
    (run / KEPT).mkdir(exist_ok=True)
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, run / KEPT / name)


def card(run: Path, cfg: Config, tokenizer: Tokenizer, step: int, kind: str) -> str:
    """README.md: what the model is, what it was trained on and how, what was measured, how to open it. Only what the run itself says."""
    m, o, entry = cfg.model, cfg.optim, TOPOLOGIES[cfg.model.topology]
    known: dict[str, Any] = {}
    for row in read_rows(run / 'metrics.jsonl', step):
        known |= row
    outcome = read_outcome(run)
    text = f', text hash `{outcome.corpus[:16]}`' if outcome and outcome.corpus else ''
    seen = f', {known["train/tokens"]:,} tokens' if 'train/tokens' in known else ''
    status = f' ({outcome.status})' if outcome and outcome.step == step else ''
    experts = f', {m.experts} experts of which a token uses {m.experts_per_token}' if m.experts else ''
    chosen = ''.join(f', {k} = {v}' for k in entry.options if (v := getattr(m, k)) != getattr(ModelConfig(), k))
    facts = {
        'topology': f'{m.topology}: {entry.equation} ({entry.source}){chosen}',
        'model': f'{m.layers} blocks of width {m.width}, {m.heads} heads{experts}; {count_params(m):,} parameters, float32',
        'tokenizer': f'{tokenizer.name}, {tokenizer.vocab} ids; every text begins with id {tokenizer.bos}',
        'text': f'{Path(cfg.data.source).name}{text}',
        'training': f'rows of {cfg.data.seq} tokens, {cfg.data.batch} a step; {o.optimizer}, {o.schedule}, peak rate {o.lr_peak:g}, '
        f'seed {cfg.run.seed}',
        'checkpoint': f'step {step} of {cfg.run.steps}{status}{seen}',
    }
    held_out = [
        f'| {split} | {known[f"{group}/loss"]:.4f} | {known[f"{group}/bits_per_byte"]:.4f} |'
        for group, split in (('eval', 'validation'), ('test', 'test'))
        if known.get(f'{group}/loss') is not None
    ]
    measured = ['| held-out text | nats per token | bits per byte |', '|---|---|---|', *held_out] if held_out else ['Nothing was measured.']
    remote = ', trust_remote_code=True' if kind == OWN else ''
    return '\n'.join(
        [
            *('---', 'library_name: transformers', 'pipeline_tag: text-generation', f'tags: [spannorm_jax, {m.topology}]', '---', ''),
            *(f'# {cfg.name}', '', '| | |', '|---|---|'),
            *(f'| {name} | {escaped(fact)} |' for name, fact in facts.items()),
            *('', 'The whole configuration is in `run_config.json`; `spannorm train run_config.json` repeats the run.', ''),
            *('## Measured', '', *measured, ''),
            f'Protocol: rows of {cfg.data.seq} tokens cut from whole documents, whose ends are predicted too and count as no byte.',
            *('', '## Use', '', '```python', 'from transformers import AutoModelForCausalLM, AutoTokenizer', ''),
            f"model = AutoModelForCausalLM.from_pretrained('.'{remote})",
            *("tokenizer = AutoTokenizer.from_pretrained('.')", '```', ''),
        ]
    )


def escaped(text: str) -> str:
    """As a cell of a Markdown table."""
    return text.replace('|', '\\|').replace('\n', ' ')
