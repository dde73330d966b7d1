"""Writes docs/diagnostics.md's list and its figures: python docs/figure_diagnostics.py [RUN ... | MEASURED.json ...]

With runs: measures them first, as `spannorm diagnose` does, or takes what it measured from its diagnostics.json, and keeps the numbers in
results/diagnostics.json, from which the figures can be drawn again without the runs; it can be given too, and its runs stay.
"""

import io
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from spannorm_jax import gallery
from spannorm_jax.diagnose import as_json, diagnose, groups_of
from spannorm_jax.diagnostics import DIAGNOSTICS

ROOT = Path(__file__).parent.parent
KEPT = ROOT / 'results' / 'diagnostics.json'
PAGE = ROOT / 'docs' / 'diagnostics.md'


def listed() -> str:
    """One paragraph for every diagnostic, and its figure where it has been drawn."""
    return '\n'.join(
        f'### {entry.title}\n\n`{name}`, {entry.source}. {entry.means}\n\n*Normal:* {entry.normal}\n\n*Cannot tell:* {entry.cannot}\n'
        + (f'\n![{entry.title}](diagnostics/{name}.png)\n' if (PAGE.parent / 'diagnostics' / f'{name}.png').is_file() else '')
        for name, entry in DIAGNOSTICS.items()
    )


def with_list(text: str) -> str:
    return re.sub(r'(<!-- diagnostics:.*?-->\n).*?(<!-- end)', lambda m: f'{m[1]}\n{listed()}\n{m[2]}', text, flags=re.S)


def collect(given: list[str]) -> dict[str, Any]:
    """What the figures need: no configuration, four digits."""
    files = [Path(name) for name in given if name.endswith('.json')]
    folders = [name for name in given if not name.endswith('.json')]
    with tempfile.TemporaryDirectory() as folder:
        parts = [diagnose(folders, Path(folder), tell=lambda text: print(text, file=sys.stderr))] if folders else []
    parts = [json.loads(path.read_text()) for path in files] + parts
    found = {'runs': [run for part in parts for run in part['runs']], 'diagnostics': {}}
    for name in DIAGNOSTICS:
        found['diagnostics'][name] = [run for part in parts for run in part['diagnostics'].get(name, [{}] * len(part['runs']))]
    for i, run in enumerate(found['runs']):  # each part counted its groups by itself
        run['place'] = [other['label'] for other in found['runs'][: i + 1]].index(run['label'])
    runs = [{k: v for k, v in run.items() if k not in ('config', 'name')} for run in found['runs']]
    drawn = {name: {key for panel in entry.panels for key in panel.keys} | {'steps'} for name, entry in DIAGNOSTICS.items()}
    # A run with experts is there for their figure alone.
    dense = [not experts for experts in found['diagnostics']['experts']]
    kept = {
        name: [
            {k: v for k, v in run.items() if k in drawn[name] and (here or name == 'experts')}
            for run, here in zip(each, dense, strict=True)
        ]
        for name, each in found['diagnostics'].items()
    }
    return short(as_json({'runs': runs, 'diagnostics': kept}))


def short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [short(v) for v in value]
    return float(f'{value:.4g}') if isinstance(value, float) else value


def numbers(value: Any) -> Any:
    """null is NaN."""
    return [numbers(v) for v in value] if isinstance(value, list) else math.nan if value is None else value


if __name__ == '__main__':
    if sys.argv[1:]:
        KEPT.write_text(json.dumps(collect(sys.argv[1:])) + '\n')
    kept = json.loads(KEPT.read_text())
    (ROOT / 'docs' / 'diagnostics').mkdir(exist_ok=True)
    for name, entry in DIAGNOSTICS.items():
        found = [{k: numbers(v) for k, v in run.items()} for run in kept['diagnostics'][name]]
        if (fig := gallery.figure(entry.panels, groups_of(kept['runs'], found))) is not None:
            small = Image.open(io.BytesIO(gallery.png(fig))).quantize(64, dither=Image.Dither.NONE)
            small.save(ROOT / 'docs' / 'diagnostics' / f'{name}.png', optimize=True)
    PAGE.write_text(with_list(PAGE.read_text()))
