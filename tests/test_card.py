"""The model card and the configuration beside exported weights: only what the run says, and the same again after an import."""

import json
import pathlib
import re

from spannorm_jax import cli
from spannorm_jax.config import Config, MeshConfig, edit, from_dict
from spannorm_jax.interop import card
from spannorm_jax.load import read_config
from spannorm_jax.score import load_run
from spannorm_jax.track import read_rows


def test_the_card_of_a_run(trained, tmp_path):
    run = pathlib.Path(trained)
    assert cli.main(['export', trained, str(tmp_path / 'x')]) == 0
    text, row = (tmp_path / 'x' / 'README.md').read_text(), read_rows(run / 'metrics.jsonl')[-1]
    assert re.match(r'---\nlibrary_name: transformers\n(.*\n)*tags: \[spannorm_jax, span\]\n---\n\n# debug\n', text)
    for group, split in (('eval', 'validation'), ('test', 'test')):
        assert f'| {split} | {row[f"{group}/loss"]:.4f} | {row[f"{group}/bits_per_byte"]:.4f} |' in text
    corpus = json.loads((run / 'outcome.json').read_text())['corpus']
    facts = [f'hash `{corpus[:16]}`', 'step 3 of 3 (completed), 96 tokens', '2 blocks of width 16, 2 heads;', 'begins with id 256']
    assert all(fact in text for fact in facts) and 'trust_remote_code=True' in text and '| text | text,' in text
    assert from_dict(Config, json.loads((tmp_path / 'x' / 'run_config.json').read_text())) == read_config(run)


def test_a_card_says_which_options_the_topology_has(trained):
    run = load_run(pathlib.Path(trained), MeshConfig())
    text = lambda **fields: card.card(  # noqa: E731
        pathlib.Path(trained), edit(run.cfg, {f'model.{k}': v for k, v in fields.items()}), run.tokenizer, run.step, 'spannorm_jax'
    )
    assert 'block_end' not in text() and '(arXiv:2601.22580), block_end = affine' in text(block_end='affine')


def test_a_card_that_came_with_a_model_stays(trained, tmp_path):
    """A model card of others is carried along as it is; a folder without one stays without."""
    assert cli.main(['export', trained, str(tmp_path / 'a')]) == 0
    (tmp_path / 'a' / 'README.md').write_bytes(b'# another\r\n')
    (tmp_path / 'a' / 'run_config.json').unlink()
    assert cli.main(['import', str(tmp_path / 'a'), str(tmp_path / 'run')]) == 0
    assert cli.main(['export', str(tmp_path / 'run'), str(tmp_path / 'b')]) == 0
    assert (tmp_path / 'b' / 'README.md').read_bytes() == b'# another\r\n' and not (tmp_path / 'b' / 'run_config.json').exists()


def test_a_run_that_says_little(trained, tmp_path):
    """No rows, no outcome, a source with a bar in its name: nothing is made up, and the table stays a table."""
    loaded = load_run(pathlib.Path(trained), MeshConfig(devices=1))
    cfg = edit(loaded.cfg, {'data.source': 'a/b|c'})
    text = card.card(tmp_path, cfg, loaded.tokenizer, 0, 'llama')
    assert 'Nothing was measured.' in text and 'step 0 of 3 |' in text and 'trust_remote_code' not in text
    assert '| text | b\\|c |' in text
