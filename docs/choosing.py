"""Writes docs/choosing.md from the committed rows: python docs/choosing.py

For each depth that was run: which topologies reach the lowest validation loss when one learning rate is tried, the first grid of them, or
as many as the rule of the grid asks for. Every sentence of the answer follows from the rows.
"""

import math
from pathlib import Path

from spannorm_jax.experiment import known, load_rows, result_path, sibling
from spannorm_jax.stats import RATE, SEED, at_best, edge, group, interval, value

ROOT = Path(__file__).parent.parent
PAGE = ROOT / 'docs' / 'choosing.md'
shared = sibling('_shared')
BUDGETS = {'one rate': (shared.FIXED,), 'four rates': shared.GRID, 'the whole rule': None}
VARIED = ('model.topology', 'model.layers', RATE, SEED)  # what may differ among the rows of the page; no other field of a configuration
LIMITS = """\
## What this cannot tell

- It is measured on small models, with few steps, on one corpus. Nothing here was run at the size of the paper, and the order
  may be another there: `spannorm experiment T4 --scale paper` is the same question at 5B.
- All topologies have Scale Init `sqrt_2L`, the same warm-up, weight decay and optimizer. One that its authors train otherwise
  may do better their way (experiment T7).
- "One rate" is {fixed:g}, which was fixed before the runs. Whoever guesses another rate has another answer: the columns on
  stability say how far off a guess may be.
- A difference below the noise between seeds counts as none. Most cells are one seed; the noise is
  that of the best rates, which have three.
"""


def kept(root: Path) -> list[dict]:
    """Rows of trained models at nano scale, each run once: the largest set of them that are alike but for VARIED."""
    runs = {}
    for id in known():
        path = result_path(root, 'nano', id)
        for row in load_rows(path) if path.is_file() else []:
            if row['run.steps'] and not shared.is_control(row):
                alike = str(sorted((k, str(v)) for k, v in row.items() if '.' in k and '/' not in k and k not in VARIED))
                runs[row['run']] = row | {'alike': alike}
    return max(group(runs.values(), 'alike').values(), key=len, default=[])


def noise(rows: list[dict]) -> float:
    """Twice the standard error of the difference of two single runs: the spread over seeds, pooled over the best rates of all arms (near
    an edge of stability runs differ far more)."""
    squares, degrees = 0.0, 0
    for own in group(rows, 'model.topology', 'model.layers').values():
        losses = [value(row, 'eval/loss') for row in at_best(own)]
        mean = sum(losses) / len(losses) if losses else 0.0
        squares, degrees = squares + sum((v - mean) ** 2 for v in losses), degrees + max(len(losses) - 1, 0)
    return 2 * math.sqrt(2 * squares / degrees) if degrees else math.nan


def reached(own: list[dict], rates: tuple[float, ...] | None) -> float:
    """Validation loss, mean over seeds, at the best of `rates`; infinite where all diverged."""
    allowed = [row for row in own if rates is None or row[RATE] in rates]
    best = at_best(allowed)
    return interval(best, 'eval/loss').mean if best else math.inf


def answer(losses: dict[str, float], tie: float) -> str:
    best = min(losses.values())
    near = sorted((t for t, v in losses.items() if v <= best + tie), key=losses.get)
    return ' or '.join(f'`{t}`' for t in near) if math.isfinite(best) else 'none: all diverged'


def section(depth: int, rows: list[dict], tie: float) -> list[str]:
    arms = group(rows, 'model.topology')
    full = {t: own for t, own in arms.items() if set(shared.GRID) <= {row[RATE] for row in own}}
    if len(full) < 2:
        return []
    found = {name: {t: reached(own, rates) for t, own in full.items()} for name, rates in BUDGETS.items()}
    lines = [f'## {depth} layers', '', '| you try | take |', '|---|---|']
    lines += [f'| {name} | {answer(losses, tie)} |' for name, losses in found.items()]
    lines += ['', '| topology | ' + ' | '.join(BUDGETS) + ' | best rate | highest stable rate | diverges at | runs |', '|' + '---|' * 8]
    for t in sorted(full, key=found['the whole rule'].get):
        own, best, (stable, bad) = full[t], at_best(full[t]), edge(full[t])
        cells = [cell(found[name][t]) for name in BUDGETS]
        rates = [f'{r:g}' if r else 'not found' for r in (best[0][RATE] if best else None, stable, bad)]
        lines.append(' | '.join([f'| `{t}`', *cells, *rates, f'{len(own)} |']))
    return [*lines, '']


def cell(loss: float) -> str:
    return f'{loss:.3f}' if math.isfinite(loss) else 'diverged'


def page(root: Path) -> str:
    rows = kept(root)
    tie = noise(rows)
    lines = [
        '# Which topology should I use?',
        '',
        'Written by `python docs/choosing.py` from the rows in `results/`; the rows come from the experiments of [results.md](results.md).',
        'Numbers are validation losses in nats per token, each at the best of the learning rates that were tried. Topologies that',
        f'are named together differ by less than the noise of two single runs ({tie:.3f} nats).',
        '',
    ]
    for depth, own in sorted(group(rows, 'model.layers').items()):
        lines += section(depth, own, tie)
    return '\n'.join(lines).rstrip() + '\n\n' + LIMITS.format(fixed=shared.FIXED)


if __name__ == '__main__':
    PAGE.write_text(page(ROOT / 'results'))
