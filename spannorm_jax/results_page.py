"""What came out, from kept rows alone: one HTML page, and the same in Markdown. Whatever comes from a row or an experiment is escaped."""

import base64
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spannorm_jax.experiment import SCALES, Experiment, Verdict, known, load_experiment, load_rows, result_path
from spannorm_jax.page import STYLE
from spannorm_jax.stats import SEED, Interval, Row, group, interval

SHOWN = SCALES[1:]  # smoke shows that it works, nothing more
TITLE = 'What came out'
INTRO = (
    'Each experiment asks one question about SpanNorm and the topologies it is compared with. Verdicts follow from the rows by rules that '
    'are code of the experiment and were there before the runs. What holds at nano scale is said of nano scale alone, not of billions '
    'of parameters. Intervals are 95% t intervals over seeds; differences are paired by seed, which fixes the initial numbers and the '
    'order of the data. A run that diverged stays in the table.'
)


class Result(NamedTuple):
    exp: Experiment
    scale: str
    rows: list[Row]
    verdict: Verdict
    table: list[dict[str, Any]]

    @property
    def minutes(self) -> float:
        return sum(row['minutes'] for row in self.rows)

    @property
    def command(self) -> str:
        return f'spannorm experiment {self.exp.id} --scale {self.scale}'

    def ran(self) -> str:
        """Size, budget, seeds, corpus and selection, in words."""
        rows, get = self.rows, lambda f: sorted({row[f] for row in self.rows})
        steps, tokens = get('run.steps'), sorted({row['data.batch'] * row['data.seq'] for row in rows})
        size = f'layers {spread(get("model.layers"))}, width {spread(get("model.width"))}'
        lost = sum(row['status'] == 'diverged' for row in rows)
        rule = 'learning rates chosen on validation by one rule for all, reported on test' if self.exp.more else 'no selection'
        texts = ', '.join(sorted({row['corpus'][:12] for row in rows}))
        return (
            f'{len(rows)} runs ({lost} diverged): {size}; {spread(steps)} steps of {spread(tokens)} tokens; seeds {spread(get(SEED))}; '
            f'{rule}; corpus {texts}; {self.minutes:.0f} core-minutes'
        )


def spread(values: list[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f'{values[0]} to {values[-1]}' if len(values) > 4 else ', '.join(map(str, values))


def results(folder: Path) -> Iterator[Result]:
    """Every result that is kept in `folder`, in the order of the paper."""
    for id in known():
        for scale in SHOWN:
            path = result_path(folder, scale, id)
            if path.is_file():
                exp, rows = load_experiment(id), load_rows(path)
                yield Result(exp, scale, rows, exp.verdict(rows), exp.table(rows) if exp.table else by_what_differs(rows))


def by_what_differs(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows that differ in their seed alone are one line. A model that was not trained has no loss worth a column."""
    fields = [k for k in rows[0] if '.' in k and '/' not in k and k != SEED and len({str(row[k]) for row in rows}) > 1]
    metrics = ('test/loss', 'test/bits_per_byte') if any(row['run.steps'] for row in rows) else ()
    table = []
    for key, own in group(rows, *fields, 'name' if not fields else fields[0]).items():
        cells = dict(zip((f.split('.')[-1] for f in fields), key, strict=False))
        lost = sum(row['status'] == 'diverged' for row in own)
        loss = {m: interval(own, m) for m in metrics if any(row.get(m) is not None for row in own)}
        table.append(cells | loss | {'runs': len(own), 'diverged': lost})
    return table


def cell(value: Any) -> str:
    if value is None:
        return ''
    return str(value) if isinstance(value, Interval) else f'{value:g}' if isinstance(value, float) else str(value)


def html_page(folder: Path) -> str:
    """One file that needs nothing but itself."""
    e, found = html.escape, list(results(folder))
    done = [
        f'<tr><td><a href="#{e(r.exp.id)}-{r.scale}">{e(r.exp.id)}</a></td><td>{r.scale}</td><td>{e(r.exp.title)}</td>'
        f'<td>{e(r.verdict.status)}</td></tr>'
        for r in found
    ]
    others = {id: load_experiment(id).title for id in known() if id not in {r.exp.id for r in found}}
    lines = ''.join([*done, *(f'<tr><td>{e(id)}</td><td></td><td>{e(title)}</td><td>not run</td></tr>' for id, title in others.items())])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{TITLE}</title>
<style>{STYLE}
.figure {{ max-width: 100%; height: auto; background: #fff; border-radius: 6px; }} td, th {{ white-space: normal; }}
</style>
</head>
<body>
<main>
<h1>{TITLE}</h1>
<p>{e(INTRO)}</p>
<section><div class="scroll"><table><tr><th></th><th>scale</th><th>what</th><th>verdict</th></tr>{lines}</table></div></section>
{''.join(map(html_section, found))}
</main>
</body>
</html>
"""


def html_section(r: Result) -> str:
    e, image = html.escape, io.BytesIO()
    r.exp.figure(r.rows).savefig(image, format='png')
    heads = list(dict.fromkeys(k for line in r.table for k in line))
    top = ''.join(f'<th>{e(h)}</th>' for h in heads)
    body = ''.join(f'<tr>{"".join(f"<td>{e(cell(line.get(h)))}</td>" for h in heads)}</tr>' for line in r.table)
    said = {
        'question': r.exp.question, 'the claim': r.exp.claim, 'what we ran': r.ran(),
        'verdict': f'{r.verdict.status} at {r.scale} scale: {r.verdict.reason}', 'again': r.command,
    }  # fmt: skip
    words = ''.join(f'<dt>{e(k)}</dt><dd>{e(v)}</dd>' for k, v in said.items())
    return f"""<section id="{e(r.exp.id)}-{r.scale}">
<h2>{e(r.exp.title)}</h2>
<dl>{words}</dl>
<p><img class="figure" alt="{e(r.exp.title)}" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"></p>
<div class="scroll"><table><tr>{top}</tr>{body}</table></div>
</section>
"""


def markdown_page(folder: Path, pictures: str = '../results') -> str:
    """The same for docs/results.md; figures are the kept PNGs, found under `pictures`."""
    found = list(results(folder))
    have = {r.exp.id for r in found}
    missing = [id for id in known() if id not in have]
    lines = [f'# {TITLE}', '', INTRO, '', 'Written by `spannorm report --markdown docs/results.md` from the rows in `results/`.', '']
    if found:
        lines += ['| id | scale | what | verdict |', '|---|---|---|---|']
        lines += [f'| {r.exp.id} | {r.scale} | {md(r.exp.title)} | {md(r.verdict.status)} |' for r in found] + ['']
    if missing:
        lines += [f'Not run yet: {", ".join(missing)}.', '']
    for r in found:
        heads = list(dict.fromkeys(k for line in r.table for k in line))
        lines += [f'## {md(r.exp.title)}', '', f'**{md(r.exp.question)}** {md(r.exp.claim)}', '']
        lines += [f'What we ran: {md(r.ran())}. Again: `{r.command}`', '']
        lines += [f'Verdict: **{r.verdict.status}** at {r.scale} scale. {md(r.verdict.reason)}', '']
        lines += [f'![{md(r.exp.title)}]({pictures}/{r.scale}/{r.exp.id}.png)', '']
        lines += ['| ' + ' | '.join(map(md, heads)) + ' |', '|' + '---|' * len(heads)]
        lines += ['| ' + ' | '.join(md(cell(line.get(h))) for h in heads) + ' |' for line in r.table] + ['']
    return '\n'.join(lines).rstrip() + '\n'


def md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r'([\\`*_{}\[\]<>|])', r'\\\1', text).replace('\n', ' ')
