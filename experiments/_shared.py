"""What several experiments share: the base of each scale, the grid of learning rates, the positive control, and the forms of verdicts.

Grid: every arm is tried at the same learning rates with one seed, the grid grows at an end where the best rate (or the edge of stability)
lies there, and three seeds run at the best rate and beside it (stats.wanted). Chosen on validation, reported on test.
"""

import math

from spannorm_jax import diagnose
from spannorm_jax.config import Config, edit
from spannorm_jax.diagnostics import DIAGNOSTICS
from spannorm_jax.experiment import Verdict, product, short
from spannorm_jax.load import load_config
from spannorm_jax.rundir import DIVERGED_BY
from spannorm_jax.stats import RATE, at_best, best_rate, edge, group, interval, paired, t_interval, value, wanted
from spannorm_jax.theory import show, theory
from spannorm_jax.track import plain

SEEDS = (0, 1, 2)
GRID = (1e-3, 2e-3, 4e-3, 8e-3)
FIXED = 2e-3  # the one rate of the experiments that have one: in the grid, so that runs are shared
HOT = 3.2e-2  # of the positive control
PAPER = ('pre', 'post', 'span', 'mixln', 'lns', 'hybrid', 'peri')  # the topologies of the paper's table 2, and PostNorm

ONE_CORE = {'mesh.platform': 'cpu', 'mesh.devices': 1}
SMOKE = ONE_CORE | {
    'model.layers': 2, 'model.width': 16, 'model.heads': 2, 'data.seq': 32, 'data.batch': 2, 'run.steps': 12, 'run.eval_every': 0,
    'run.eval_tokens': 1024, 'run.stats_every': 4, 'run.checkpoint_every': 6, 'run.keep': 1, 'optim.warmup_steps': 2,
}  # fmt: skip
NANO = ONE_CORE | {
    'model.layers': 16, 'model.width': 64, 'model.heads': 4, 'optim.lr_peak': FIXED, 'optim.warmup_steps': 20, 'run.steps': 200,
    'run.eval_every': 0, 'run.eval_tokens': 32_768, 'run.stats_every': 20, 'run.checkpoint_every': 100, 'run.keep': 1,
}  # fmt: skip
GPU = {
    'model.layers': 64, 'model.width': 256, 'model.heads': 4, 'model.dtype': 'bfloat16', 'data.seq': 512, 'data.batch': 64,
    'optim.lr_peak': FIXED, 'optim.warmup_steps': 200, 'run.steps': 2000, 'run.eval_every': 500, 'run.eval_tokens': 1_048_576,
    'run.stats_every': 100, 'run.checkpoint_every': 500, 'run.keep': 1,
}  # fmt: skip


def base(scale: str, paper: str = 'dense_5b') -> Config:
    """The configuration that an experiment's runs differ from; `paper` names the one of the published size."""
    if scale == 'paper':
        return edit(load_config(paper), {'run.stats_every': 1000})
    return edit(load_config('debug' if scale == 'smoke' else 'nano'), {'smoke': SMOKE, 'nano': NANO, 'gpu': GPU}[scale])


def by(scale: str, smoke, nano, gpu, paper):
    """The value of a scale."""
    return {'smoke': smoke, 'nano': nano, 'gpu': gpu, 'paper': paper}[scale]


def rates(scale: str):
    return by(scale, (2e-3, 8e-3), GRID, GRID, (1e-4, 2e-4, 4e-4, 8e-4))


def seeds(scale: str):
    return by(scale, (0,), SEEDS, SEEDS, SEEDS)


def narrow(scale: str) -> Config:
    """The base of the depth experiments: width 384 in the paper, less elsewhere."""
    width = {'nano': {'model.width': 32, 'model.heads': 2}, 'gpu': {'model.width': 128, 'model.heads': 2}}
    return edit(base(scale, 'depth_ladder'), width.get(scale, {}))


def arms(cfg: Config, scale: str, axes: dict) -> dict[str, Config]:
    """The first round of the grid: every combination of `axes` (an arm) at every rate, with one seed."""
    return product(cfg, axes | {RATE: rates(scale), 'run.seed': (0,)})


def grow(cfg: Config, rows, scale: str, fields=('model.topology',), to_edge: bool = False) -> dict[str, Config]:
    """What the rule of the grid asks for next, arm by arm; `fields` are those that tell arms apart. The smoke scale does not grow."""
    new = {}
    for key, own in group([row for row in rows if not is_control(row)], *fields).items():
        arm = dict(zip(fields, key if len(fields) > 1 else (key,), strict=True))
        bounds = (1.0, 0.0) if scale == 'smoke' else by(scale, None, (2.4e-4, 0.065), (2.4e-4, 0.065), (1.25e-5, 2e-2))
        for rate, seed in sorted(wanted(own, rates(scale), seeds(scale), bounds=bounds, to_edge=to_edge)):
            new |= product(cfg, {f: (v,) for f, v in arm.items()} | {RATE: (rate,), 'run.seed': (seed,)})
    return new


def control(cfg: Config, scale: str) -> dict[str, Config]:
    """Post without Scale Init far above its edge: it must fail, or the comparison cannot tell a failure from a success."""
    hot = by(scale, HOT, HOT, HOT, 1e-2)
    return {'control': edit(cfg, {'model.topology': 'post', 'model.scale_init': 'none', RATE: hot, 'run.seed': 0})}


def is_control(row) -> bool:
    return row['name'] == 'control'


def without_control(rows):
    return [row for row in rows if not is_control(row)]


def fails(row, best: float) -> bool:
    """Whether a run diverged, or its validation loss ended more than 0.5 nat above `best`."""
    return value(row, 'eval/loss') > best + DIVERGED_BY


def control_failed(rows) -> bool:
    """Whether the control fails where the best of the others does not."""
    best = min((value(row, 'eval/loss') for row in without_control(rows)), default=math.inf)
    controls = [row for row in rows if is_control(row)]
    return math.isfinite(best) and bool(controls) and all(fails(row, best) for row in controls)


UNSEPARATED = Verdict('cannot tell', 'the positive control (Post without Scale Init at a high rate) did not fail')


def bottom_over_top(row, key: str = 'layer/grad_rms/write') -> float:
    """Gradient of the first block over that of the last: the geometric mean over the kept steps."""
    pairs = [(v[0], v[-1]) for _, v in row['curves'][key] if v[0] and v[-1]]
    return math.exp(sum(math.log(a / b) for a, b in pairs) / len(pairs)) if pairs else 0.0


def judged(holds: bool, reason: str) -> Verdict:
    return Verdict('reproduced' if holds else 'not reproduced', reason)


def lower(a, b, names: tuple[str, str], metric: str = 'test/loss') -> Verdict:
    """Whether a's metric is below b's: by the 95% interval of the difference, paired by seed."""
    if not a or not b:
        return Verdict('cannot tell', f'{names[0] if not a else names[1]} diverged at every rate')
    shared = {row['run.seed'] for row in a} & {row['run.seed'] for row in b}
    lost = [sum(not math.isfinite(value(row, metric)) for row in rows if row['run.seed'] in shared) for rows in (a, b)]
    if any(lost):
        text = ', '.join(f'{name} diverges in {n} of {len(shared)} seeds' for name, n in zip(names, lost, strict=True))
        sure = {(0, len(shared)): 'reproduced', (len(shared), 0): 'not reproduced'}
        return Verdict(sure.get((lost[0], lost[1]), 'cannot tell'), text)
    d = paired(a, b, metric)
    text = f'{metric} of {names[0]} - {names[1]}: {d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}] nats, {d.n} seeds paired by data order'
    return Verdict('reproduced' if d.high < 0 else 'not reproduced' if d.low > 0 else 'cannot tell', text)


def all_of(*verdicts: Verdict) -> Verdict:
    """Reproduced where every part is; not reproduced where one part is not."""
    states = {v.status for v in verdicts}
    status = 'not reproduced' if 'not reproduced' in states else 'cannot tell' if 'cannot tell' in states else 'reproduced'
    return Verdict(status, '; '.join(v.reason for v in verdicts))


def grid_table(rows, fields=('model.topology',)) -> list[dict]:
    """Per arm: its best rate (validation), test loss and bits/byte there, its highest stable rate, and how many runs were spent on it."""
    table = []
    for key, own in group(without_control(rows), *fields).items():
        best, (stable, bad) = at_best(own), edge(own)
        table.append(
            dict(zip((f.split('.')[-1] for f in fields), key if len(fields) > 1 else (key,), strict=True))
            | {'best rate': best[0][RATE] if best else None, 'highest stable rate': stable, 'diverges at': bad}
            | {m: interval(best, m) if best else None for m in ('test/loss', 'test/bits_per_byte')}
            | {'runs': len(own), 'diverged': sum(row['status'] == 'diverged' for row in own)}
        )
    return table


def probe(cfg: Config, folder):
    """A finished run on the first rows of its validation split (spannorm_jax.diagnostics)."""
    return diagnose.load(str(folder), cfg, 8)[0]


def kept(found: dict, *keys: str) -> dict:
    """Some measurements as JSON, with digits enough to draw."""
    return {k: short(plain(found[k])) for k in keys if k in found}


def spectra(cfg: Config, folder) -> dict:
    """Of figures 8, 9 and 10: effective ranks per block, eigenvalues of the embedding, condition numbers of the FFN's matrices."""
    model = probe(cfg, folder)
    ranks, weights = DIAGNOSTICS['ranks'].measure(model), DIAGNOSTICS['weights'].measure(model)
    eigen = DIAGNOSTICS['spectra'].measure(model)
    what = ('hard', 'soft', 'concentration', 'utilisation')
    found = kept(ranks, *(f'{at}/{name}' for at in ('ffn_hidden', 'state') for name in what)) | kept(eigen, 'embedding')
    return found | kept(weights, *(k for k in weights if k.endswith('/condition') and 'ffn.' in k))


def similarity(cfg: Config, folder) -> dict:
    """Of figures 5 and 6: cosine of every pair of layers' outputs, and its mean by distance."""
    return kept(DIAGNOSTICS['similarity'].measure(probe(cfg, folder)), 'cosine', 'by_distance', 'mean')


def trained(scale: str) -> dict[str, Config]:
    """The models that are looked into after training: table 2's topologies at one rate of its grid, all seeds."""
    return product(base(scale), {'model.topology': PAPER, RATE: rates(scale)[1:2], 'run.seed': seeds(scale)})


def at_init(scale: str, depth: int = 512) -> dict[str, Config]:
    """A run of no steps: what `theory` measures at initialisation hangs on it. Its depth is the largest that is measured."""
    tiny = {'run.steps': 0, 'run.eval_tokens': 1024, 'model.layers': by(scale, 4, depth, depth, depth)}
    return {'theory': edit(narrow(scale), tiny)}


def theory_of(claim: str):
    """The measurement of a claim of spannorm_jax.theory at depths 8, 32, ... with five seeds (2 and 4 with two at the smoke scale)."""

    def measure(cfg: Config, folder) -> dict:
        if cfg.run.steps:
            return {}
        most = cfg.model.layers
        depths, n = ((2, 4), 2) if most == 4 else ([L for L in (8, 32, 128, 512) if L <= most], 5)
        found = theory((claim,), depths, n, ('swiglu', 'gelu', 'relu') if most > 4 else ('swiglu',), print)
        return {'tables': short(show.plain(found[claim]))}

    return measure


def tables(rows) -> dict[str, list[dict]]:
    """What `theory_of` measured."""
    return next(row['tables'] for row in rows if row['name'] == 'theory')


def lines(table: list[dict]) -> list[dict]:
    """The rows of a table of `theory` with its estimates as intervals; longer lists are left out."""
    found = []
    for row in table:
        cells: dict = {}
        for key, v in row.items():
            nested = v.items() if isinstance(v, dict) and 'mean' not in v else [('', v)]
            cells |= {f'{key} {k}'.strip(): text(x) for k, x in nested if not isinstance(x, list)}
        found.append(cells)
    return found


def text(v):
    return f'{v["mean"]:.3g} [{v["low"]:.3g}, {v["high"]:.3g}]' if isinstance(v, dict) else v


__all__ = ['RATE', 'at_best', 'best_rate', 'edge', 'edit', 'group', 'interval', 'paired', 'product', 't_interval', 'value']
