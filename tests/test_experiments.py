"""Every file of experiments/: its runs at all scales, its figure and its verdict on made-up rows, and that the verdict depends on them."""

import json
import math

import jax
import numpy as np
import pytest

from spannorm_jax import diagnose, experiment, load, sweep
from spannorm_jax.config import Config, edit, run_id, to_dict
from spannorm_jax.errors import MissingInput, UserError
from spannorm_jax.experiment import SCALES, load_experiment
from spannorm_jax.model import LM
from spannorm_jax.results_page import by_what_differs
from spannorm_jax.resume import flat
from spannorm_jax.stats import RATE, group

IDS = list(experiment.known())
SHARED = experiment.sibling('_shared')


def made_up(exp, name, cfg, loss, status='completed', rng=None):
    """A row as row_of makes them, without a run. rng draws the curves."""
    rng = rng or np.random.default_rng(0)
    steps = (20, 100, 300)
    L = cfg.model.layers
    curves = {
        k: [[t, (np.exp(rng.normal(-3, 0.1, L)) if k.startswith('layer/') else loss + 100 / t).tolist()] for t in steps]
        if k.startswith('layer/')
        else [[t, loss + 100 / t] for t in steps]
        for k in exp.curves
    }
    row = {'name': name} | {k: v for k, v in flat(to_dict(cfg)).items() if k not in experiment.HIDDEN}
    row |= {'run': name, 'status': status, 'step': 300, 'reason': '', 'corpus': 'c' * 64, 'spikes': 0, 'minutes': 1.0}
    held = loss if status == 'completed' else None
    row |= {'train/final': loss, 'eval/loss': held, 'test/loss': held, 'test/bits_per_byte': held and held / math.log(2), 'curves': curves}
    return row | (made_up_measure(exp, cfg, rng) if exp.measure else {})


def made_up_measure(exp, cfg, rng):
    """What the `measure` of an experiment adds."""
    L, falling = cfg.model.layers, {'span': 0.2, 'pre': 0.8}.get(cfg.model.topology, 0.5)
    if exp.id == 'fig13':
        return {'step_ms/span': [10.0, 10.2, 10.1], 'step_ms/pre': [10.0, 10.1, 10.2]}
    if exp.id in ('fig05', 'fig06'):
        pairs = [[falling ** min(abs(i - j), 1) for i in range(L + 1)] for j in range(L + 1)]
        return {'cosine': pairs, 'by_distance': [1.0] + [falling] * L, 'mean': falling}
    if exp.id in ('fig08', 'fig09', 'fig10'):
        ranks = {f'{at}/{k}': [(1 - falling) * rng.uniform(0.9, 1) for _ in range(L)] for at in ('ffn_hidden', 'state') for k in RANKS}
        weights = {f'layers.ffn.{k}/condition': [10 * math.exp(falling) * rng.uniform(0.9, 1)] * L for k in ('up', 'down', 'gate')}
        return ranks | weights | {'embedding': np.geomspace(math.exp(3 * falling), math.exp(-3 * falling), 16).tolist()}
    if exp.id == 'T12':
        return {
            f'{task}/{k}/loss': 2.0 - falling / 10 + rng.uniform(0, 0.01) for task in ('denoiser', 'recurrent') for k in ('eval', 'test')
        }
    if exp.id == 'table1':
        return {f'harness/{name}': rng.uniform(0, 1) for name in experiment.sibling('_tasks').COLUMNS}
    return {'tables': TABLES[exp.id]} if cfg.run.steps == 0 else {}


RANKS = ('hard', 'soft', 'concentration', 'utilisation')


def told(mean, half=0.1):
    return {'mean': mean, 'low': mean - half, 'high': mean + half}


def cells(topologies, **columns):
    """Rows of a table of the theory: every column a number, a word or a function of (topology, layers)."""
    return [
        {'topology': t, 'scale_init': scaled, 'layers': L, 'activation': 'swiglu', 'first_skip': 'normed', 'embed_std': 1.0}
        | {k: v(t, L) if callable(v) else v for k, v in columns.items()}
        for scaled in ('none', 'sqrt_2L')
        for t in topologies
        for L in (8, 128)
    ]


TABLES = {
    'T1': {
        'cells': cells(('pre', 'post', 'span'), ln_g1_over_gL=lambda t, L: told({'post': -2.0, 'span': -1.0, 'pre': 0.5}[t] * L / 8)),
        'root': cells(('span',), root='holds', factor_500=lambda t, L: 'holds' if L == 128 else '', ln_gain_measured=told(6.2)),
    },
    'T5': {
        'spectrum': cells(
            ('pre', 'post', 'span'), cosine=told(0.9), identity_like='holds', spectrum=lambda t, L: [0.5**i for i in range(16)]
        )
    },
    'T11': {'assumptions': cells(('span', 'post'), assumption='norm Jacobian', value=told(1.0), verdict='holds')},
}


def rows_of(exp, scale, loss, status=lambda name, cfg: 'completed'):
    """Rows of all runs that an experiment comes to ask for, where loss(name, cfg) is what they end with."""
    rng, new, rows = np.random.default_rng(0), exp.runs(scale), {}
    while new:
        rows |= {name: made_up(exp, name, cfg, loss(name, cfg), status(name, cfg), rng) for name, cfg in new.items()}
        new = {k: v for k, v in (exp.more(scale, [*rows.values()]) if exp.more else {}).items() if k not in rows}
    return [*rows.values()]


def bowl(name, cfg):
    """A loss with its best rate at 2e-3; a little better with depth, and with Span; a little noise that a seed shares."""
    better = {'span': 0.05, 'post': -0.1}.get(cfg.model.topology, 0.0)
    return 2.5 + 0.1 * math.log2(cfg.optim.lr_peak / 2e-3) ** 2 - better - 0.02 * math.log2(cfg.model.layers) + 0.01 * cfg.run.seed


def control_lost(name, cfg):
    return 'diverged' if name == 'control' else 'completed'


def test_ids():
    """The order of the paper; every file is an experiment; ids are found in any case, and a mistyped one is helped."""
    assert IDS[:2] == ['fig02', 'fig03'] and IDS.index('table1') < IDS.index('table2') < IDS.index('T2') < IDS.index('T10')
    assert load_experiment('t4').id == 'T4' and load_experiment('FIG02').id == 'fig02'
    with pytest.raises(UserError, match="did you mean 'fig02'"):
        load_experiment('fig002')
    with pytest.raises(MissingInput):
        load_experiment('nix.py')


@pytest.mark.parametrize('id', IDS)
def test_experiment_reads_well(id):
    exp, text = load_experiment(id), experiment.known()[id].read_text()
    assert len(text.splitlines()) <= 110 and exp.question.endswith('?') and exp.claim and exp.title[0].isupper()


@pytest.mark.parametrize('id', IDS)
@pytest.mark.parametrize('scale', SCALES)
def test_runs(id, scale):
    """Valid configurations, each its own run; all of one corpus; those of the paper's size have its depth."""
    runs = load_experiment(id).runs(scale)
    assert runs and all(isinstance(cfg, Config) for cfg in runs.values())
    assert len({run_id(cfg) for cfg in runs.values()}) == len(runs)
    assert len({cfg.data for cfg in runs.values()}) == 1
    if scale == 'smoke':
        assert max(map(sweep.core_seconds, runs.values())) < 60
    if scale == 'nano':
        assert all(cfg.mesh.devices == 1 and cfg.mesh.platform == 'cpu' for cfg in runs.values())
        assert all(cfg.model.embed_std in (None, 0.02, 1.0) and cfg.model.init_std is None for cfg in runs.values())
    if scale == 'paper':
        assert all(cfg.model.dtype == 'bfloat16' and cfg.data.seq >= 2048 for cfg in runs.values())


@pytest.mark.parametrize('id', IDS)
def test_figure_and_verdict(id):
    """Drawn from rows alone; the verdict says why."""
    exp = load_experiment(id)
    rows = json.loads(json.dumps(rows_of(exp, 'smoke', bowl, control_lost)))
    picture = png(exp.figure(rows))
    assert picture.std() > 0.01 and (id != 'fig03' or np.array_equal(picture, png(exp.figure(rows))))
    status, reason = exp.verdict(rows)
    assert status in ('reproduced', 'not reproduced', 'cannot tell') and any(ch.isdigit() for ch in reason)
    if hasattr(exp, 'table') and exp.table:
        assert all(isinstance(line, dict) for line in exp.table(rows))
    lines = by_what_differs(rows)  # the table of an experiment that has none of its own; what was measured is no field to group by
    assert sum(line['runs'] for line in lines) == len(rows) and not any('/condition' in key for line in lines for key in line)
    assert any('test/loss' in line for line in lines) == any(row['run.steps'] for row in rows)


def png(fig):
    fig.canvas.draw()
    return np.asarray(fig.canvas.buffer_rgba())[..., :3] / 255


@pytest.mark.parametrize('id', IDS)
def test_all_may_diverge_at_once(id):
    """A figure and a verdict there are also where every run stopped at its first step: nothing is reproduced then."""
    exp = load_experiment(id)
    rows = rows_of(exp, 'smoke', bowl, lambda name, cfg: 'diverged')
    lost = [row | {'curves': dict.fromkeys(exp.curves, []), 'train/final': None} for row in rows]
    exp.figure(lost)
    found = exp.verdict(lost)
    assert found.status != 'reproduced' or id in ('fig13', 'T1', 'T5', 'T10', 'T11'), found.reason
    assert exp.table is None or exp.table(lost)


WITH_CONTROL = [id for id in IDS if 'control' in load_experiment(id).runs('smoke') and id != 'T10']


def test_comparisons_have_a_control():
    """All but those that compare nothing that could fail: a speed, a slope, a law at initialisation, a check of another's rows."""
    assert set(IDS) - set(WITH_CONTROL) <= {'fig13', 'T1', 'T5', 'T6', 'T10', 'T11'}


@pytest.mark.parametrize('id', WITH_CONTROL)
def test_without_a_failing_control_nothing_can_be_told(id):
    exp = load_experiment(id)
    rows = rows_of(exp, 'smoke', lambda name, cfg: 2.5 if name == 'control' else bowl(name, cfg))
    status, reason = exp.verdict(rows)
    assert status == 'cannot tell' and 'control' in reason


def test_the_control_fails_by_half_a_nat():
    exp = load_experiment('fig02')
    for loss, want in ((3.1, True), (2.9, False)):
        rows = rows_of(exp, 'smoke', lambda name, cfg, loss=loss: loss if name == 'control' else 2.5)
        assert SHARED.control_failed(rows) is want
    assert not SHARED.control_failed(SHARED.without_control(rows))


def by_arm(effect):
    return lambda name, cfg: bowl(name, cfg) + effect(cfg)


def lost_if(test):
    return lambda name, cfg: 'diverged' if name == 'control' or test(cfg) else 'completed'


def of(cfg, topology):
    return cfg.model.topology == topology


def bare(cfg, topology):
    """What a topology loses without Scale Init."""
    return (0.3 + 0.01 * cfg.run.seed) * (of(cfg, topology) and cfg.model.scale_init == 'none')


never = lost_if(lambda cfg: False)
VERDICTS = {
    'table2 holds': ('table2', bowl, never, 'reproduced'),
    'table2 fails': ('table2', by_arm(lambda c: 0.2 * (c.model.topology == 'span')), never, 'not reproduced'),
    'table2 ties': ('table2', by_arm(lambda c: 0.05 * of(c, 'span') + 0.02 * (-1) ** c.run.seed * of(c, 'lns')), never, 'cannot tell'),
    'T4: Span breaks first and ties': (
        'T4', by_arm(lambda c: 0.05 * (c.model.topology == 'span')),
        lost_if(lambda c: c.model.topology == 'span' and c.optim.lr_peak > 4e-3), 'reproduced',
    ),
    'T4: Span is as stable and better': ('T4', bowl, lost_if(lambda c: c.optim.lr_peak > 1.6e-2), 'not reproduced'),
    'T2: needed': ('T2', bowl, lost_if(lambda c: c.model.scale_init == 'none'), 'reproduced'),
    'T2: not needed': ('T2', bowl, never, 'not reproduced'),
    'T2: all collapse': ('T2', by_arm(lambda c: 3.0 * (c.run.seed == 1)), lost_if(lambda c: c.model.scale_init == 'none'), 'cannot tell'),
    'fig11 falls': ('fig11', bowl, never, 'reproduced'),
    'fig11 rises': ('fig11', by_arm(lambda c: 0.1 * math.log2(c.model.layers)), never, 'not reproduced'),
    'T3 both ways': ('T3', bowl, never, 'reproduced'),
    'T3 at fixed width alone': ('T3', by_arm(lambda c: 1.0 * (c.model.layers in (16, 64))), never, 'not reproduced'),
    'fig04 holds': ('fig04', bowl, lost_if(lambda c: c.model.layers == 128 and c.model.topology in ('post', 'hybrid')), 'reproduced'),
    'fig04: nothing diverges': ('fig04', bowl, never, 'not reproduced'),
    'T10 holds': ('T10', bowl, never, 'reproduced'),
    'lrmap holds': ('lrmap', bowl, lost_if(lambda c: c.model.topology == 'post' and c.optim.lr_peak > 2e-3), 'reproduced'),
    'lrmap fails': ('lrmap', bowl, lost_if(lambda c: c.model.topology != 'pre' and c.optim.lr_peak > 2e-3), 'not reproduced'),
    'lrmap: Post is stable': ('lrmap', bowl, never, 'cannot tell'),
    'T8: B is better': ('T8', by_arm(lambda c: 0.1 * (c.model.first_skip == 'raw')), never, 'reproduced'),
    'T8: A is better': ('T8', by_arm(lambda c: 0.1 * (c.model.first_skip != 'raw')), never, 'not reproduced'),
    'T9: the norm is needed': ('T9', by_arm(lambda c: 0.1 * (c.model.block_end == 'affine')), never, 'reproduced'),
    'T9: affine is as good': ('T9', by_arm(lambda c: 0.02 * (c.model.block_end == 'affine') * (c.run.seed - 1)), never, 'cannot tell'),
    'T9: affine is better': ('T9', by_arm(lambda c: 0.1 * (c.model.block_end == 'norm')), never, 'not reproduced'),
    'T9: 1024 do not train': ('T9', bowl, lost_if(lambda c: c.model.layers == 1024 and c.model.block_end == 'norm'), 'not reproduced'),
    'T9: neither end trains at 1024': ('T9', bowl, lost_if(lambda c: c.model.layers == 1024), 'not reproduced'),
    'T7: confounded': ('T7', by_arm(lambda c: bare(c, 'span')), never, 'reproduced'),
    'fig02 holds': ('fig02', by_arm(lambda c: bare(c, 'post')), never, 'reproduced'),
    'fig02: Post without diverges': ('fig02', bowl, lost_if(lambda c: bare(c, 'post')), 'reproduced'),
    'fig02: Post diverges either way': ('fig02', bowl, lost_if(lambda c: of(c, 'post')), 'cannot tell'),
    'fig02: Post trains as well': ('fig02', by_arm(lambda c: -0.5 * (c.model.topology == 'post')), never, 'not reproduced'),
}  # fmt: skip


@pytest.mark.parametrize('id, loss, status, want', VERDICTS.values(), ids=list(VERDICTS))
def test_verdicts_follow_the_rows(id, loss, status, want):
    exp = load_experiment(id)
    found = exp.verdict(rows_of(exp, 'nano', loss, status))
    assert found.status == want, found.reason


def with_curves(rows, key, of):
    return [row | {'curves': row['curves'] | {key: [[t, of(row, t)] for t in (20, 300)]}} for row in rows]


def gradient(row, vanishing):
    L = row['model.layers']
    return [0.001 ** ((L - 1 - l) / (L - 1)) if vanishing(row) else 0.1 for l in range(L)]


GRADIENTS = {
    'fig03 holds': ('fig03', lambda r: r['model.topology'] == 'post', never, 'reproduced'),
    'fig03: both vanish': ('fig03', lambda r: True, never, 'not reproduced'),
    'fig14 holds': ('fig14', lambda r: r['model.scale_init'] == 'none', never, 'reproduced'),
    'fig14: no collapse': ('fig14', lambda r: False, never, 'not reproduced'),
    'fig07 holds': (
        'fig07', lambda r: r['model.topology'] == 'post', lost_if(lambda c: of(c, 'post') and c.optim.lr_peak > 4e-3), 'reproduced',
    ),
    'fig07: Span too': ('fig07', lambda r: r['model.topology'] == 'post', lost_if(lambda c: c.optim.lr_peak > 4e-3), 'not reproduced'),
    'fig07: nothing diverges': ('fig07', lambda r: False, never, 'cannot tell'),
}  # fmt: skip


@pytest.mark.parametrize('id, vanishing, status, want', GRADIENTS.values(), ids=list(GRADIENTS))
def test_verdicts_on_gradients(id, vanishing, status, want):
    exp = load_experiment(id)
    rows = with_curves(rows_of(exp, 'nano', bowl, status), exp.curves[0], lambda row, t: gradient(row, vanishing))
    found = exp.verdict(rows)
    assert found.status == want, found.reason


@pytest.mark.parametrize('power, corr, want', [(-1.0, 0.05, 'reproduced'), (-0.5, 0.05, 'not reproduced'), (-1.0, 0.3, 'not reproduced')])
def test_T6_reads_the_slope(power, corr, want):
    exp = load_experiment('T6')
    rows = with_curves(
        rows_of(exp, 'nano', bowl, never), 'layer/branch_var/ffn', lambda row, t: [2.0 * row['model.layers'] ** power] * row['model.layers']
    )
    rows = with_curves(rows, 'layer/branch_skip_corr/ffn', lambda row, t: [corr] * row['model.layers'])
    found = exp.verdict(rows)
    assert found.status == want and f'slope {power:.2f} early (R^2 1.00)' in found.reason


def with_words(rows, table, field, word, where=lambda cell: True):
    """Rows in which a word of a table of the theory is another one."""
    found = json.loads(json.dumps(rows))
    for row in found:
        for cell in row.get('tables', {}).get(table, ()):
            if where(cell):
                cell[field] = word
    return found


THEORY = {
    'T1 holds': ('T1', 'root', 'root', 'holds', 'reproduced'),
    'T1 fails': ('T1', 'root', 'root', 'fails', 'not reproduced'),
    'T1 open': ('T1', 'root', 'root', 'cannot tell', 'cannot tell'),
    'T1: not 500': ('T1', 'root', 'factor_500', 'fails', 'not reproduced'),
    'T5 holds': ('T5', 'spectrum', 'identity_like', 'holds', 'reproduced'),
    'T5 fails': ('T5', 'spectrum', 'identity_like', 'fails', 'not reproduced'),
    'T11 holds': ('T11', 'assumptions', 'verdict', 'holds', 'reproduced'),
    'T11 fails': ('T11', 'assumptions', 'verdict', 'fails', 'not reproduced'),
}


@pytest.mark.parametrize('id, table, field, word, want', THEORY.values(), ids=list(THEORY))
def test_verdicts_on_the_theory(id, table, field, word, want):
    exp = load_experiment(id)
    of_span = lambda cell: cell['topology'] == 'span'  # noqa: E731
    rows = with_words(rows_of(exp, 'smoke', bowl, never), table, field, word, of_span)
    assert exp.verdict(rows).status == want
    if id == 'T5':  # where Pre itself is not identity-like, the rule says nothing about Span
        assert exp.verdict(with_words(rows, table, field, 'fails')).status == 'cannot tell'


@pytest.mark.parametrize('id', ['fig05', 'fig06', 'fig08', 'fig09', 'fig10'])
def test_verdicts_on_what_was_measured(id):
    """What is made up has Span less alike, of higher rank, flatter and better conditioned; with Span and Pre exchanged, nothing holds."""
    exp, other = load_experiment(id), {'span': 'pre', 'pre': 'span'}
    rows = rows_of(exp, 'nano', bowl, never)
    exchanged = [
        row if row['name'] == 'control' else row | {'model.topology': other.get(row['model.topology'], row['model.topology'])}
        for row in rows
    ]
    assert (exp.verdict(rows).status, exp.verdict(exchanged).status) == ('reproduced', 'not reproduced')


def narrow_best(best_wide):
    """fig12: the best rate is 2e-3 at the narrowest width, best_wide(parametrization) at the widest."""

    def loss(name, cfg):
        at = 2e-3 if cfg.model.width == 32 else best_wide(cfg.model.parametrization)
        return 2.5 + 0.1 * math.log2(cfg.optim.lr_peak / at) ** 2

    return loss


@pytest.mark.parametrize('wide, want', [(2e-3, 'reproduced'), (8e-3, 'not reproduced')])
def test_fig12_reads_the_transfer(wide, want):
    exp = load_experiment('fig12')
    assert exp.verdict(rows_of(exp, 'nano', narrow_best(lambda kind: wide if kind == 'standard' else 2e-3), never)).status == want


def coarse_grid(name, cfg):
    """muP's best rate lies between two rates of the coarse grid, and is better there than anything without width scaling."""
    rate, mup = cfg.optim.lr_peak, cfg.model.parametrization == 'mup'
    if name == 'control':
        return 9.0
    return 2.5 + math.log2(rate / (2.83e-3 if mup else 2e-3)) ** 2 - 0.1 * mup + 0.01 * cfg.run.seed * (1 + 0.1 * mup)


def test_table4_reads_both_grids():
    exp = load_experiment('table4')
    found = exp.verdict(rows_of(exp, 'nano', coarse_grid, never))
    assert found.status == 'reproduced', found.reason
    assert (
        exp.verdict(
            rows_of(exp, 'nano', lambda name, cfg: coarse_grid(name, cfg) + (cfg.model.parametrization == 'standard'), never)
        ).status
        == 'not reproduced'
    )


@pytest.mark.parametrize('factor, want', [(1.0, 'reproduced'), (1.2, 'not reproduced'), (1.03, 'cannot tell')])
def test_fig13_reads_the_ratio(factor, want):
    row = {'step_ms/span': [10 * factor, 11 * factor, 12.1 * factor], 'step_ms/pre': [10.01, 11.0, 12.1]}
    assert load_experiment('fig13').verdict([row]).status == want


def test_shared_runs_are_trained_once():
    """The grid of table 2 lies within T4's; table 1, T10 and the first half of T7 add no run; fig03 and T6 add none to fig02 and fig11."""
    ids = {id: {run_id(cfg) for cfg in load_experiment(id).all_runs('nano').values()} for id in IDS}
    assert ids['table2'] <= ids['T4'] and ids['table1'] <= ids['table2'] == ids['T10'] and ids['fig07'] <= ids['T4']
    assert ids['fig03'] <= ids['fig02'] and ids['T6'] <= ids['fig11'] <= ids['T3'] and ids['fig05'] == ids['fig06']
    assert ids['fig08'] == ids['fig09'] == ids['fig10'] and len(ids['fig08'] & ids['table2']) == 7 + 1
    assert len(ids['T7'] & ids['table2']) == 5 * 4 + 1 and len(ids['fig14'] - ids['fig02']) == 12


def test_the_same_rule_for_every_arm():
    """Whatever the losses, no topology of table 2 gets more than the rule gives: the same number of runs for the same shape of curve."""
    exp = load_experiment('table2')
    rows = rows_of(exp, 'nano', bowl, never)
    counts = {t: len(own) for t, own in group(SHARED.without_control(rows), 'model.topology').items()}
    assert set(counts.values()) == {4 + 6} and set(counts) == set(SHARED.PAPER)
    assert all({r['run.seed'] for r in own if r[RATE] == 2e-3} == {0, 1, 2} for own in group(rows, 'model.topology').values())


def test_names_in_an_installed_wheel(tmp_path, monkeypatch):
    (tmp_path / 'spannorm_jax').mkdir()
    for kind in ('configs', 'experiments'):
        (tmp_path / 'spannorm_jax' / kind).symlink_to(load.folder(kind))
    monkeypatch.setattr(load, '__file__', str(tmp_path / 'spannorm_jax' / 'load.py'))
    exp = load_experiment('fig02')
    assert exp.path.parent == tmp_path / 'spannorm_jax' / 'experiments' and list(experiment.known()) == IDS


@pytest.mark.parametrize(
    'text, message',
    [
        ('x = 1', 'an experiment needs QUESTION'),
        ('def runs(scale):\n  return 1\nundefined', 'line 3: NameError'),
        ('from spannorm_jax import ModelConfig\nModelConfig(heads=7)', 'does not divide'),
    ],
)
def test_file_with_a_mistake(tmp_path, text, message):
    path = tmp_path / 'mine.py'
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_experiment(str(path))


def test_product():
    base = load.load_config('debug')
    runs = experiment.product(base, {'model.layers': (2, 3), RATE: (1e-3,), 'run.seed': (0, 1)})
    assert list(runs)[0] == 'layers=2 lr_peak=0.001 seed=0' and len(runs) == 4
    assert runs['layers=3 lr_peak=0.001 seed=1'] == edit(base, {'model.layers': 3, RATE: 1e-3, 'run.seed': 1})


def test_what_is_measured_of_a_run_is_what_it_trained(trained):
    """A run of a sweep is known by its folder alone: its configuration names no folder."""
    cfg = edit(load.load_config(trained), {'run.dir': None})
    probe, info = diagnose.load(trained, cfg, 2)
    assert info['step'] == cfg.run.steps == 3 and probe.opt_state is not None
    shared = SHARED.probe(cfg, trained)
    initial = LM(cfg.model).init(jax.random.key(cfg.run.seed))
    moved = jax.tree.map(lambda a, b, c: (np.array_equal(a, b), np.array_equal(a, c)), shared.params, probe.params, initial)
    assert all(same and not begun for same, begun in jax.tree.leaves(moved, is_leaf=lambda x: isinstance(x, tuple)))
