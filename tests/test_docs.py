"""The documentation is true: its Python runs, its commands parse, its table is today's, its links and files exist."""

import dataclasses
import json
import pathlib
import re
import runpy
import shlex

import jax
import numpy as np
import pytest

from spannorm_jax import catalog, cli, experiment, launch, load, train
from spannorm_jax.config import Config, MeshConfig, edit, to_dict
from spannorm_jax.topology import TOPOLOGIES

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / 'README.md', ROOT / 'experiments/README.md', *(ROOT / 'docs').glob('*.md')])


def blocks(page, language):
    return re.findall(rf'```{language}\n(.*?)```', page.read_text(), re.S)


def test_table_of_topologies_is_up_to_date():
    """Mend it with: python tests/test_docs.py"""
    assert with_table(text := (ROOT / 'README.md').read_text()) == text


def with_table(text):
    table = catalog.markdown(catalog.rows())
    return re.sub(r'(<!-- topologies:.*?-->\n).*?(<!-- end)', lambda m: f'{m[1]}{table}\n{m[2]}', text, flags=re.S)


@pytest.mark.parametrize('page', PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_files(page):
    text = page.read_text()
    for target in re.findall(r'\]\(([^)#]+)', text):
        assert target.startswith('https://') or (page.parent / target).exists(), target
    for name in re.findall(r'`((?:spannorm_jax|tests|docs|configs|results|experiments|benchmarks)/[\w./{},]*)`', text):
        for one in expand(name):
            assert (ROOT / one).exists(), one


def expand(name):
    match = re.fullmatch(r'(.*)\{(.*)\}(.*)', name)
    return [f'{match[1]}{part}{match[3]}' for part in match[2].split(',')] if match else [name]


def test_list_of_diagnostics_is_up_to_date():
    """Mend it with: python docs/figure_diagnostics.py"""
    made = runpy.run_path(str(ROOT / 'docs/figure_diagnostics.py'))
    text = (ROOT / 'docs/diagnostics.md').read_text()
    assert made['with_list'](text) == text


def test_pictures_of_topologies_are_up_to_date():
    """Mend it with: python docs/figure_blocks.py"""
    made = runpy.run_path(str(ROOT / 'docs/figure_blocks.py'))
    text = (ROOT / 'docs/topologies.md').read_text()
    assert made['with_lists'](text) == text and set((ROOT / 'docs/blocks').glob('*')) == set(made['drawn']())
    assert all(path.read_text() == drawn for path, drawn in made['drawn']().items())


def test_which_topology_follows_from_the_rows(tmp_path):
    """Mend the page with: python docs/choosing.py"""
    made = runpy.run_path(str(ROOT / 'docs/choosing.py'))
    assert (ROOT / 'docs/choosing.md').read_text() == made['page'](ROOT / 'results')
    # rates 1e-3 to 8e-3: one arm is best at the rate in the middle, two tie at their own best, one diverges everywhere
    losses = {'span': [3, 2.0, 1.9, 2.2], 'pre': [3, 2.5, 2.0, 1.9], 'peri': [3, 2.5, 2.4, 2.3], 'post': [None] * 4}
    size = {'model.width': 64, 'model.layers': 8, 'model.init': 'common', 'run.steps': 200}
    rows = []
    for topology, at in losses.items():
        for rate, loss in zip(made['shared'].GRID, at, strict=True):
            for seed in (0, 1):
                own = {'model.topology': topology, 'optim.lr_peak': rate, 'run.seed': seed, 'eval/loss': loss and loss + 0.02 * seed}
                ended = {'status': 'completed' if loss else 'diverged', 'run': f'{len(rows)}', 'name': f'{len(rows)}'}
                rows.append(size | own | ended)
    # seeds differ by 0.02 everywhere: variance 0.0002 of one run, so the difference of two has a standard error of 0.02
    assert made['noise'](rows) == pytest.approx(0.04)
    text = '\n'.join(made['section'](8, rows, 0.04))
    assert '| one rate | `span` |' in text and '| four rates | `span` or `pre` |' in text
    assert '| `post` | diverged | diverged | diverged | not found | not found | 0.001 | 8 |' in text
    # rows of another recipe are others, and a run that two experiments share counts once
    others = [row | {'model.init': 'own', 'run': f'own{i}'} for i, row in enumerate(rows[:6])]
    for id, some in (('table2', rows), ('T7', [*rows[:3], *others])):
        path = experiment.result_path(tmp_path, 'nano', id)
        experiment.save_rows(path, experiment.load_experiment(id), 'nano', some)
    assert [row['run'] for row in made['kept'](tmp_path)] == [row['run'] for row in rows]


def test_readme_says_what_the_rows_of_table_2_say():
    shared = experiment.sibling('_shared')
    rows = experiment.load_rows(experiment.result_path(ROOT / 'results', 'nano', 'table2'))
    best = {t: shared.at_best(own) for t, own in shared.group(shared.without_control(rows), 'model.topology').items()}
    text = ' '.join((ROOT / 'README.md').read_text().split())
    for rival in ('pre', 'peri'):
        d = shared.paired(best[rival], best['span'], 'test/loss')
        assert f'{d.mean:.3f}' in text and f'\\[{d.low:.3f}, {d.high:.3f}\\]' in text, d
    assert all(shared.paired(best[rival], best['span'], 'test/loss').low > 0 for rival in ('mixln', 'lns', 'hybrid'))
    assert f'table 2 is "{experiment.load_experiment("table2").verdict(rows).status}"' in text


def commands():
    for page in PAGES:
        text = page.read_text()
        found = re.findall(r'^(spannorm .*)$', '\n'.join(blocks(page, 'sh')), re.M) + re.findall(r'`(spannorm [^`]*)`', text)
        for line in dict.fromkeys(found):
            yield pytest.param(line, id=f'{page.stem}: {line[:60]}')


@pytest.mark.parametrize('line', list(commands()))
def test_commands_parse(line):
    words = [w for w in shlex.split(line, comments=True)[1:] if w != '...']
    if not words or {'COMMAND', 'CONFIG'} & set(words) or 'mine.py' in words[1:2] or 'runs/x/config.json' in words:
        assert words[:1] in ([], ['COMMAND'], ['train'], ['audit'], ['plan'], ['bench'], ['diagnose'])
        return
    assert words[0] in cli.COMMANDS
    if len(words) > 1 and '--help' not in words:
        assert cli.parse(words[0], words[1:]) is not None


def test_recipes_of_pods():
    """Every command, field and variable of docs/pods.md exists, in every language of its blocks; every field of the mesh is explained."""
    text = (ROOT / 'docs/pods.md').read_text()
    lines = re.findall(r"spannorm (train|eval) ([^A-Z\n'`][^\n'`&]*)", text)
    assert len(lines) > 6 and all(cli.parse(command, shlex.split(rest)) for command, rest in lines)
    for field in re.findall(r'`((?:mesh|data|run|optim)\.\w+)`', text):
        section, name = field.split('.')
        assert hasattr(getattr(Config(), section), name), field
    assert {f'mesh.{f.name}' for f in dataclasses.fields(MeshConfig)} - set(re.findall(r'`(mesh\.\w+)`', text)) == {'mesh.platform'}
    ours = set(re.findall(r'SPANNORM_\w+', text))
    assert ours == set(launch.SECONDS) and all(f'| `{name}` | {seconds:g} |' in text for name, seconds in launch.SECONDS.items())
    assert set(launch.START) <= set(re.findall(r'JAX_\w+', text))


@pytest.mark.parametrize('page', [p for p in PAGES if '.py::' in p.read_text()], ids=lambda p: p.name)
def test_promises_name_tests_that_exist(page):
    """`test_file.py::test_name`, and `::test_name` of the file named before it."""
    file, found = None, 0
    for name, test in re.findall(r'`(?:tests/)?(test_\w+\.py)?::(\w+)`', page.read_text()):
        file = name or file
        assert f'\ndef {test}(' in (ROOT / 'tests' / file).read_text(), f'{file}::{test}'
        found += 1
    assert found


def tiny(folder):
    (folder / 'text').mkdir()
    for i in range(80):
        (folder / 'text' / f'{i}.txt').write_text(f'document {i} ' * 20)
    small = {'model.layers': 2, 'model.width': 16, 'model.heads': 2, 'data.seq': 16, 'data.batch': 2, 'mesh.devices': 1, 'run.steps': 2}
    return small | {'data.source': str(folder / 'text'), 'data.cache': str(folder / 'cache')}


@pytest.mark.parametrize('page', PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page, one after the other in one namespace, in a folder with two runs; what they train is made tiny."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, 'fit', lambda cfg, *args, real=train.fit, **kwargs: real(edit(cfg, tiny(tmp_path)), *args, **kwargs))
    for topology in ('pre', 'span'):
        run = tmp_path / 'runs' / f'nano-{topology}'
        run.mkdir(parents=True)
        (run / 'config.json').write_text(json.dumps(to_dict(edit(load.load_config('nano'), {'model.topology': topology}))))
        rows = [{'step': s, 'train/loss': 5 / s, 'eval/loss': 5.1 / s} for s in range(1, 50)]
        (run / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    before, space = set(TOPOLOGIES), {}
    try:
        for block in blocks(page, 'python'):
            exec(compile(block, page.name, 'exec'), space)
    finally:
        for name in set(TOPOLOGIES) - before:
            del TOPOLOGIES[name]
    if page == ROOT / 'README.md':
        assert (tmp_path / 'compare.png').stat().st_size > 1000
        assert set(space['grads']['params']['block_3']) == {'attn', 'ffn', 'norm_attn_sum', 'norm_ffn_sum'}
        assert space['stats']['rms'].shape == (24,)
    if page.name == 'training.md':
        assert (space['outcome'].status, space['outcome'].step) == ('completed', 2)
    if page.name == 'diagnostics.md':
        assert space['layers'].shape == (3, 256, 32) and space['stretch'].shape == (32,)
        whole = jax.jacobian(lambda v: space['model'].apply(space['variables'], v))(space['x'][0])
        np.testing.assert_allclose(space['stretch'][0], np.linalg.norm(whole, 2), rtol=1e-3)
        assert space['similar'].shape == (3, 3) and 0 < space['ranks'][2]['hard'] < 1 and space['sharpest'] > 0
    if page.name == 'topologies.md':
        assert space['cfg'].topology == 'halved'


def test_the_path_of_docs_start(tmp_path, monkeypatch, capsys):
    """Its file trains and compares, as its commands say; the models are made tiny."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text(blocks(ROOT / 'docs/start.md', 'python')[0])
    small = ' '.join(f'--{field} {value}' for field, value in tiny(tmp_path).items())
    try:
        for config in ('nano', 'mine.py'):
            assert cli.main(f'train {config} {small}'.split()) == 0
        shown = []
        monkeypatch.setattr(
            'spannorm_jax.compare.labels', lambda configs: shown.append([cfg.model.topology for cfg in configs]) or ['a', 'b']
        )
        runpy.run_path('mine.py', run_name='__main__')
        (run,) = (tmp_path / 'runs').glob('mine-*')
        rest = {'eval': '--tokens 64 --mesh.devices 1', 'generate': '--prompt a --max-tokens 3 --mesh.devices 1', 'export': 'exported'}
        assert rest.keys() == {name for name, command in cli.COMMANDS.items() if hasattr(command.options, 'topology_file')}
        for command, more in rest.items():
            del TOPOLOGIES['halved']
            line = f'{command} {run} {more}'.split()
            assert cli.main(line) == 2 and '--topology-file' in capsys.readouterr().err
            assert cli.main([*line, '--topology-file', 'mine.py']) == 0, command
        assert 'def halved(' in (tmp_path / 'exported/modeling_spannorm_jax.py').read_text()
    finally:
        TOPOLOGIES.pop('halved', None)
    assert shown == [['halved', 'span']] and (tmp_path / 'compare.png').stat().st_size > 1000
    assert 'feed-forward' in (tmp_path / 'halved.svg').read_text()


def test_the_worked_example_is_its_equation():
    """docs/topologies.md: the block computes x' = N2(F(y) + x + y) / 2, y = N1(A(x) + x), on numbers."""
    space = {}
    try:
        exec(blocks(ROOT / 'docs/topologies.md', 'python')[0], space)
    finally:
        TOPOLOGIES.pop('halved', None)
    norm = {'attn_sum': lambda v: v * 3, 'ffn_sum': lambda v: v * 5}
    y = 3 * (2.0 * 7 + 7)
    assert space['halved'](7.0, lambda v: 2 * v, lambda v: v + 1, lambda site, v: norm[site](v), None) == 5 * ((y + 1) + 7 + y) / 2


def test_exit_codes_are_those_of_the_errors():
    from spannorm_jax import errors, rundir

    listed = {int(code) for code in re.findall(r'^\| (\d+) \|', (ROOT / 'docs/cli.md').read_text(), re.M)}
    raised = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)}
    assert listed == raised | set(rundir.EXIT.values()) | {rundir.NONFINITE_EXIT, cli.INTERRUPTED, cli.STORAGE}


def test_compare_labels_say_what_differs():
    from spannorm_jax.compare import labels

    base = load.load_config('debug')
    other = edit(base, {'model.topology': 'pre', 'run.seed': 1})
    assert labels([base, other]) == ['topology span, seed 0', 'topology pre, seed 1']
    assert labels([base]) == ['debug'] and labels([]) == []


def test_a_run_under_way_can_be_compared(tmp_path):
    """The last line of its metrics may be half written."""
    from spannorm_jax.compare import read_run

    (tmp_path / 'config.json').write_text(json.dumps(to_dict(load.load_config('debug'))))
    assert read_run(tmp_path)['metrics'] == []
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "train/loss": 5.0}\n{"step": 2, "tra')
    assert read_run(tmp_path)['metrics'] == [{'step': 1, 'train/loss': 5.0}]


def test_kept_figure_is_drawn_from_kept_numbers():
    kept = json.loads((ROOT / 'results/nano.json').read_text())
    topologies = [run['config']['model']['topology'] for run in kept['runs']]
    text = (ROOT / 'README.md').read_text()
    assert sorted(topologies) == ['post', 'pre', 'span'] and len(kept['corpus']) == 64
    for run in kept['runs']:
        assert f'{run["metrics"][-1]["eval/bits_per_byte"]:.2f}' in text, 'the caption quotes each run'


if __name__ == '__main__':
    readme = ROOT / 'README.md'
    readme.write_text(with_table(readme.read_text()))
