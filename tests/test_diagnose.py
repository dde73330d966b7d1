"""`spannorm diagnose`: every entry of the table on real models, its pictures, its page, and what it refuses."""

import html.parser
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_diagnostics import batch_of
from test_topology import random_params, tiny

from spannorm_jax import cli, gallery, page
from spannorm_jax.config import Config, edit, to_dict
from spannorm_jax.data import open_data
from spannorm_jax.diagnose import as_json, as_numbers, grouped
from spannorm_jax.diagnostics import DIAGNOSTICS, Panel, Probe
from spannorm_jax.gallery import DARK, LIGHT, Group
from spannorm_jax.load import load_config
from spannorm_jax.model import LM, infos
from spannorm_jax.optim import make_optimizer
from spannorm_jax.step import init_state


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / 'text'
    folder.mkdir()
    for i in range(80):
        (folder / f'{i}.txt').write_text(f'document {i} ' * 20)
    return folder


def config(tmp_path, text, **changes):
    small = {
        'model.topology': 'pre',
        'model.layers': 3,
        'model.width': 16,
        'model.heads': 2,
        'data.seq': 16,
        'data.batch': 2,
        'mesh.devices': 1,
        'run.steps': 2,
    }
    return edit(Config(), small | {'data.source': str(text), 'data.cache': str(tmp_path / 'cache'), 'run.root': str(tmp_path)} | changes)


MODELS = {
    'pre': {},
    'span': {'experts': 4, 'expert_ffn': 8, 'shared_experts': 1, 'first_dense': 1},
    'siamese': {},
    'hc': {'tie_embeddings': True},
}


@pytest.mark.parametrize('name, fields', [c if c[0] == 'pre' else pytest.param(*c, marks=pytest.mark.full) for c in MODELS.items()])
def test_every_diagnostic_measures_and_is_drawn(name, fields, monkeypatch):
    """All keys that are drawn are there and finite where they must be; each has its picture in both themes, and its words on the page.

    Pictures are drawn but not rendered, which alone takes a minute; the command line below renders some.
    """
    monkeypatch.setattr(gallery, 'png', lambda fig: f'{len(fig.axes)} {fig.get_facecolor()}'.encode())
    cfg = edit(Config(), {'model': tiny(name, remat='none', **fields), 'run.steps': 4})  # half the work for the compiler
    params = random_params(cfg.model)
    state = init_state(cfg, LM(cfg.model), make_optimizer(cfg, infos(cfg.model)))
    opt_state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x + 1e-4, state.opt_state)  # as after a step
    names = ('grad_rms/write', 'sigma_ffn', 'rms', 'update_ratio/write')
    rows = [{'step': s, 'train/loss': 1.0} | {f'layer/{n}': [1.0 * s, 2.0, None] for n in names} for s in (1, 3)]
    probe, shown = Probe(cfg, params, batch_of(), opt_state, rows), {}
    for key, entry in DIAGNOSTICS.items():
        found = entry.measure(probe)
        if key == 'experts' and not cfg.model.experts:
            assert found == {}
            continue
        drawn = {k for panel in entry.panels for k in panel.keys}
        absent = ({'head'} if cfg.model.tie_embeddings else set()) | ({'law'} if name != 'span' else set())
        assert drawn - set(found) <= absent, key
        assert all(np.isfinite(np.asarray(found[k], float)).any() for k in drawn - absent), key
        shown[key] = (entry, [Group('one', (found,))])
    text = page.page('a page', [{'name': 'one'}], shown)
    for key, (entry, _) in shown.items():
        part = re.search(rf'<section id="{key}">.*?</section>', text, re.S)[0]
        assert all(words in html.unescape(part) for words in (entry.means, entry.normal, entry.cannot))
        pictures = sum(bool(gallery.drawable(panel, shown[key][1])) for panel in entry.panels)
        assert part.count('<picture>') == part.count('prefers-color-scheme: dark') == pictures >= 1
        assert len(set(re.findall(r'base64,([^"]+)', part))) >= 2, 'light and dark'
    assert np.isclose(probe.loss, shown['position'][1][0].runs[0]['mean'])
    assert np.isclose(shown['lens'][1][0].runs[0]['loss'][-1], probe.loss, rtol=1e-5)


@pytest.mark.full
def test_one_block_lost_weights_and_other_depths_share_a_page(monkeypatch):
    """What has one block, or weights that are not finite, is measured all the same; what has no number there is drawn nowhere."""
    monkeypatch.setattr(gallery, 'png', lambda fig: b'a picture')
    probes = {}
    for name, layers, broken in (('one', 1, 1.0), ('lost', 2, np.nan), ('two', 2, 1.0)):
        cfg = edit(Config(), {'model': tiny('span', layers=layers), 'run.steps': 4})
        probes[name] = Probe(cfg, jax.tree.map(lambda w, broken=broken: w * broken, random_params(cfg.model)), batch_of())
    shown = {}
    for key, entry in DIAGNOSTICS.items():
        found = {name: entry.measure(probe) for name, probe in probes.items()}
        json.dumps(as_json(found), allow_nan=False)
        shown[key] = (entry, [Group(name, (as_numbers(values),)) for name, values in found.items()])
    text = page.page('depths', [{'label': name} for name in probes], shown)
    assert 'id="removal"' in text and text.count('<section') >= 17
    (drawn,) = (g for _, g in [shown['removal']])
    assert [g.label for g in gallery.drawable(Panel(('skipped',), ''), drawn)] == ['one', 'two']
    assert [g.label for g in gallery.drawable(Panel(('group/skipped',), ''), drawn)] == ['two']


class Checker(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.scripts = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == 'script'
        self.links += [v for k, v in attrs if k in ('src', 'href', 'srcset')]
        if tag not in ('meta', 'img', 'source'):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_needs_nothing_and_escapes_everything():
    evil = '<script>alert(1)</script>&"'
    entry = DIAGNOSTICS['position']
    text = page.page(evil, [{'name': evil, 'layers': 3}], {'position': (entry, [Group(evil, ({'loss': np.ones(4), 'mean': 1.0},))])})
    checker = Checker()
    checker.feed(text)
    assert not checker.open and not checker.scripts and 'alert(1)' in text and '<script' not in text
    assert all(link.startswith(('data:image/png;base64,', '#')) for link in checker.links)
    assert "default-src 'none'" in text and 'width=device-width' in text
    nothing = page.page('x', [{'name': 'x'}], {'position': (entry, [Group('x', ({},))])})
    assert '<section' not in nothing


def test_seeds_are_a_band_and_groups_have_colours():
    runs = tuple({'loss': np.array([1.0, 2.0, np.nan]) + s} for s in (0, 1, 5))
    panel = Panel(('loss',), 'loss')
    fig = gallery.figure([panel], [Group('three seeds', runs), Group('one', ({'loss': np.array([4.0, 4, 4])},)), Group('none', ({},))])
    ax = fig.axes[0]
    three, one = ax.lines
    np.testing.assert_allclose(three.get_xydata(), [[1, 3], [2, 4]])
    assert [three.get_color(), one.get_color()] == list(LIGHT.runs[:2])
    (band,) = ax.collections
    box = band.get_datalim(ax.transData)
    np.testing.assert_allclose([box.y0, box.y1], [1, 7])
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['three seeds', 'one']
    for heat, value in ((False, np.ones(3)), (True, np.eye(3))):  # a path may hold dollar signs
        odd = [Group(f'data.source $a_${i}', ({'loss': value * (i + 1)},)) for i in range(2)]
        assert gallery.png(gallery.figure([panel._replace(heat=heat)], odd))
    dark = gallery.figure([panel], [Group('one', ({'loss': np.ones(3)},))], theme=DARK)
    assert dark.axes[0].lines[0].get_color() == DARK.runs[0] and gallery.figure([panel], [Group('none', ({},))]) is None
    narrow = gallery.figure([Panel(('loss',), 'x', log=True)], [Group('a', ({'loss': np.linspace(0.0201, 0.0219, 9)},))])
    gallery.png(narrow)
    labels = [t.get_text() for which in ('major', 'minor') for t in narrow.axes[0].get_yticklabels(which=which) if t.get_text()]
    assert len(labels) > 2 and len(set(labels)) == len(labels)
    odd = gallery.figure([panel], [Group(n, ({'loss': np.ones(3)},)) for n in ('_mine', 'b')])
    assert [t.get_text().strip() for t in odd.axes[0].get_legend().get_texts()] == ['_mine', 'b']
    heat = gallery.figure([Panel(('m',), 'm', heat=True)], [Group(n, ({'m': np.eye(3) * k},)) for n, k in (('a', 1), ('b', 2))])
    assert [ax.collections[0].get_array().max() for ax in heat.axes if ax.get_title(loc='left')] == [1, 2]
    seeds = ({'m': np.full((2, 4), np.nan)}, {'m': np.arange(8.0).reshape(2, 4), 'steps': np.array([10, 20, 50, 90])})
    mesh = gallery.figure([Panel(('m',), 'm', heat=True)], [Group('a', seeds)]).axes[0].collections[0]
    np.testing.assert_array_equal(mesh.get_array(), seeds[1]['m'], 'of the first seed that has numbers')
    np.testing.assert_array_equal(mesh.get_coordinates()[0, :, 0], [10, 15, 35, 70, 90], 'columns at their own steps')


def test_labels_of_groups(tmp_path, text):
    base = config(tmp_path, text)
    several = [edit(base, {'model.topology': t, 'run.seed': s, 'run.dir': f'{t}{s}'}) for t in ('pre', 'span') for s in (0, 1)]
    assert grouped(several, [True] * 4) == [(0, 'topology pre'), (0, 'topology pre'), (1, 'topology span'), (1, 'topology span')]
    assert grouped(several[:2], [True] * 2) == [(0, 'run'), (0, 'run')]
    assert grouped(several[:2], [False, True]) == [(0, 'run at its start'), (1, 'run')]
    assert grouped(several[1:3], [False, True]) == [(0, 'topology pre'), (1, 'topology span')]


def copied(run, to, rows, **changes):
    """A run of its own with the checkpoints of another: other settings, and these rows of layer/*."""
    shutil.copytree(run, to)
    (to / 'config.json').write_text(json.dumps(to_dict(edit(load_config(run), {'run.dir': None} | changes))))
    names = ('grad_rms/write', 'sigma_ffn', 'rms', 'update_ratio/write')
    lines = [{'step': s, 'train/loss': 1.0} | {f'layer/{n}': [1.0, 10.0**s] for n in names} for s in rows]
    (to / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return to


def test_an_imported_folder_is_a_run_without_moments(tmp_path, trained, monkeypatch, capsys):
    """Out to a Hugging Face folder and back: the same numbers, and Adam's first steps in place of what it does not hold."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(['export', trained, 'hf']) == 0 and cli.main(['import', 'hf', 'runs/imported']) == 0
    data = ['--data.source', load_config(trained).data.source, '--data.cache', 'cache', '--data.seq', '16']
    capsys.readouterr()
    found = []
    for i, run in enumerate((trained, 'runs/imported')):
        assert cli.main(['diagnose', run, '--only', 'position', 'updates', '--rows', '2', '--dir', f'd{i}', '--json', *data]) == 0
        found.append(json.loads(capsys.readouterr().out)['diagnostics'])
    np.testing.assert_allclose(found[1]['position'][0]['loss'], found[0]['position'][0]['loss'], rtol=1e-5)
    assert found[1]['updates'][0].keys() == found[0]['updates'][0].keys()


def test_runs_and_configs_from_the_command_line(tmp_path, trained, monkeypatch, capsys):
    """Two seeds of a run and a configuration: files, JSON, the same numbers as the library gives."""
    monkeypatch.chdir(tmp_path)
    copied(trained, tmp_path / 'a', [1, 2])
    copied(trained, tmp_path / 'b', [2], **{'run.seed': 1})
    cfg = edit(load_config(trained), {'run.dir': None, 'optim.lr_peak': 0.5, 'run.seed': 7})
    (tmp_path / 'mine.py').write_text(
        'import json\nfrom spannorm_jax.config import Config, from_dict\n'
        f'def get():\n    return from_dict(Config, json.loads({json.dumps(json.dumps(to_dict(cfg)))}))\n'
    )
    command = ['diagnose', 'a', 'b', 'mine.py', '--only', 'history', 'similarity', 'position', '--dir', 'out', '--rows', '3', '--json']
    command += ['--data.seq', '12']  # a field of all three
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / 'out/diagnostics.json').read_text()) == found
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {
        'diagnostics.json', 'index.html', 'history.png', 'similarity.png', 'position.png'
    }  # fmt: skip
    assert [(r['step'], r['seed'], r['topology'], r['layers']) for r in found['runs']] == [
        (3, 0, 'span', 2), (3, 1, 'span', 2), (0, 7, 'span', 2)
    ]  # fmt: skip
    first, second, third = (r['label'] for r in found['runs'])
    assert first == second != third
    history = found['diagnostics']['history']
    assert history[0]['steps'] == [1, 2] and history[1]['steps'] == [2] and history[2] == {}
    np.testing.assert_allclose(history[0]['rms'], [[0, 0], [1, 2]])
    assert [len(run['loss']) for run in found['diagnostics']['position']] == [12] * 3
    np.testing.assert_allclose(np.diag(found['diagnostics']['similarity'][1]['cosine']), 1, rtol=1e-5)

    params = LM(cfg.model).init(jax.random.key(7))
    batch = next(iter(open_data(cfg.data).eval_batches('validation', 3, 12, 36).batches()))
    logp = jax.nn.log_softmax(jax.jit(LM(cfg.model).apply)(params, batch['tokens'], batch['segments'], batch['positions']))
    nats = -np.take_along_axis(np.asarray(logp), batch['targets'][..., None], -1)[..., 0]
    assert found['runs'][2]['loss on the probe'] == pytest.approx(nats[batch['segments'] > 0].mean(), rel=1e-5)


def test_what_diagnose_refuses(tmp_path, text, trained, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begun = tmp_path / 'begun'
    begun.mkdir()
    (begun / 'config.json').write_text(json.dumps(to_dict(config(tmp_path, text))))
    (begun / 'metrics.jsonl').write_text('')
    (tmp_path / 'llama').mkdir()
    (tmp_path / 'llama/config.json').write_text(json.dumps({'model_type': 'llama', 'hidden_size': 8}))
    for line, code, message in (
        ('diagnose', 2, 'at least one RUN_OR_CONFIG'),
        ('diagnose nano --only simlarity', 2, "unknown diagnostic 'simlarity'; did you mean 'similarity'?"),
        ('diagnose nano --rows 0', 2, '--rows 0 must be at least 1'),
        ('diagnose runs/nix', 66, "'runs/nix' does not exist"),
        ('diagnose begun', 66, 'has no checkpoint yet'),
        ('diagnose nano --model.layrs 3', 2, "did you mean '--model.layers'?"),
        ('diagnose llama', 2, 'spannorm import llama'),
        (f'diagnose {trained} --model.layers 3 --model.norm-eps 1e-3', 2, 'out model.layers 2 -> 3, model.norm_eps 1e-06 -> 0.001'),
    ):
        assert cli.main(line.split()) == code
        assert message in capsys.readouterr().err, line
