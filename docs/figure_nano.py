"""Draws the figure of the README from finished runs: python docs/figure_nano.py RUN RUN ...

The runs' metrics are kept in results/nano.json, so that the figure can be drawn again without them: python docs/figure_nano.py
"""

import json
import math
import sys
from pathlib import Path

from spannorm_jax.compare import compare_figure, read_run
from spannorm_jax.config import Config, from_dict, to_dict
from spannorm_jax.data import open_data
from spannorm_jax.data.baselines import bigram_bits_per_byte

ROOT = Path(__file__).parent.parent
KEPT = ROOT / 'results' / 'nano.json'
COLUMNS = ('step', 'train/loss', 'eval/loss', 'eval/bits_per_byte', 'test/loss', 'test/bits_per_byte')


def collect(folders: list[str]) -> dict:
    runs = [read_run(folder) for folder in folders]
    cfg: Config = runs[0]['config']
    corpus = open_data(cfg.data)
    held_out = corpus.eval_batches('validation', 1, cfg.data.seq, cfg.run.eval_tokens)
    bits = bigram_bits_per_byte(corpus, 'validation', cfg.run.eval_tokens)
    return {
        'corpus': corpus.hash,
        'bigram_bits_per_byte': bits,
        'bigram_nats_per_token': bits * math.log(2) * held_out.bytes / held_out.tokens,
        'runs': [{'config': to_dict(run['config']), 'metrics': [_kept(row) for row in run['metrics']]} for run in runs],
    }


def _kept(row: dict) -> dict:
    return {k: row[k] for k in COLUMNS if k in row}


if __name__ == '__main__':
    if sys.argv[1:]:
        KEPT.write_text(json.dumps(collect(sys.argv[1:])) + '\n')
    kept = json.loads(KEPT.read_text())
    runs = [run | {'config': from_dict(Config, run['config'])} for run in kept['runs']]
    title = 'nano: 12 layers, 240 steps on the Python standard library, one seed each'
    compare_figure(runs, title, {'bigram model': kept['bigram_nats_per_token']}).savefig(ROOT / 'docs' / 'nano.png')
