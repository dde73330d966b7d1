"""The page of results: what it says follows from the kept rows, all of it is escaped, and docs/results.md is today's."""

import base64
import json
import pathlib
import re
from html.parser import HTMLParser

import pytest
from test_experiments import bowl, never, rows_of

from spannorm_jax import cli, experiment, results_page
from spannorm_jax.experiment import load_experiment, result_path, save_rows

ROOT = pathlib.Path(__file__).parent.parent


class Seen(HTMLParser):
    """Tags with their attributes, and the text, of a page; its style is left out."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ''
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def kept(tmp_path):
    """Results of two experiments: one that holds, and one whose rows carry what must be escaped."""
    exp = load_experiment('table2')
    save_rows(result_path(tmp_path, 'nano', 'table2'), exp, 'nano', rows_of(exp, 'nano', bowl, never))
    exp = load_experiment('T8')
    rows = [row | {'corpus': '<script>|`*'} for row in rows_of(exp, 'smoke', lambda name, cfg: 2.5)]
    save_rows(result_path(tmp_path, 'gpu', 'T8'), exp, 'gpu', rows)
    save_rows(result_path(tmp_path, 'smoke', 'fig02'), exp, 'smoke', rows)  # smoke results are not shown
    return tmp_path


def test_html(kept):
    page = results_page.html_page(kept)
    seen = Seen(page)
    assert not {'script', 'link', 'iframe'} & {tag for tag, _ in seen.tags} and '<script>|`*' in seen.text
    assert [a['id'] for tag, a in seen.tags if tag == 'section' and 'id' in a] == ['table2-nano', 'T8-gpu']
    exp = load_experiment('table2')
    for text in (
        exp.question,
        exp.claim,
        'spannorm experiment table2 --scale nano',
        'reproduced at nano scale',
        'cannot tell at gpu scale',
    ):
        assert text in seen.text
    for id in experiment.known():
        assert id in seen.text
    assert seen.text.count('not run') == len(experiment.known()) - 2
    images = [a['src'] for tag, a in seen.tags if tag == 'img']
    assert len(images) == 2 and all(base64.b64decode(src.split(',')[1])[1:4] == b'PNG' for src in images)
    assert all(a['href'].startswith('#') for tag, a in seen.tags if tag == 'a'), 'nothing is loaded from elsewhere'


def test_table_states_seeds_budget_and_selection(kept):
    (table2, t8) = results_page.results(kept)
    assert '8 layers' not in table2.ran() and 'layers 16, width 64; 200 steps of 1024 tokens; seeds 0, 1, 2' in table2.ran()
    assert 'chosen on validation by one rule for all, reported on test' in table2.ran() and '(1 diverged)' in table2.ran()
    assert 'no selection' in t8.ran() and f'{len(table2.rows)} core-minutes' in table2.ran()
    by_topology = {line['topology']: line for line in table2.table}
    assert by_topology['span']['best rate'] == 2e-3 and by_topology['span']['runs'] == 10 and by_topology['span']['test/loss'].n == 3
    (raw, *_), heads = t8.table, set(t8.table[0])
    assert heads >= {'first_skip', 'embed_std', 'test/loss', 'runs', 'diverged'} and raw['runs'] == 1


def test_markdown(kept):
    text = results_page.markdown_page(kept, '../results')
    assert '| table2 | nano |' in text and '](../results/nano/table2.png)' in text and not re.search(r'(?<!\\)<', text)
    rows = [line for line in text.split('\n## ')[1].splitlines() if line.startswith('|')]
    table = [line for line in rows if re.match(r'\| (pre|post|span|mixln|lns|hybrid|peri) \|', line)]
    heads = next(line for line in rows if line.startswith('| topology |'))
    assert len(table) == 7 and {len(re.split(r'(?<!\\)\|', line)) for line in (*table, heads)} == {heads.count('|') + 1}
    assert r'corpus \<script\>\|\`\*;' in text


def test_command(kept, tmp_path, capsys):
    line = ['report', '--results', str(kept), '--out', str(tmp_path / 'new' / 'r.html'), '--markdown', str(tmp_path / 'docs.md'), '--json']
    assert cli.main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r['id'], r['scale'], r['status']) for r in found] == [('table2', 'nano', 'reproduced'), ('T8', 'gpu', 'cannot tell')]
    assert (tmp_path / 'new' / 'r.html').read_text() == results_page.html_page(kept)
    assert '](./nano/table2.png)' in (tmp_path / 'docs.md').read_text()


def test_the_page_of_results_is_up_to_date():
    """Mend it with: spannorm report --markdown docs/results.md"""
    assert (ROOT / 'docs/results.md').read_text() == results_page.markdown_page(ROOT / 'results')


def test_kept_results_redraw():
    """Every kept figure can be drawn again from its rows, which are of one corpus and hold the runs that the experiment names today."""
    for path in (ROOT / 'results').glob('*/*.json'):
        exp, rows = load_experiment(path.stem), experiment.load_rows(path)
        exp.figure(rows)
        assert exp.verdict(rows).reason and path.with_suffix('.png').is_file() and len({row['corpus'] for row in rows}) == 1
        assert exp.all_runs(path.parent.name).keys() <= {row['name'] for row in rows}
