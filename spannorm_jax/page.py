"""The diagnostics of some runs as one HTML page that needs nothing but itself. Everything that comes from a run is escaped."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from spannorm_jax import gallery
from spannorm_jax.diagnostics import Diagnostic
from spannorm_jax.gallery import DARK, LIGHT, TILE, Group

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --back: #f3f5f7; --ink: #22272e; --soft: #5a6470; --line: #d7dce1; --link: #1f5fa8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #171b21; --back: #0e1116; --ink: #dfe4ea; --soft: #98a3b0; --line: #2c333d; --link: #6aa9f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 1.6rem; margin: 0 0 4px; } h2 { font-size: 1.2rem; margin: 0; }
p { margin: 6px 0; max-width: 80ch; } .soft { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 16px 0 24px; } a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin: 0 0 20px; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 18px 14px; align-items: end; }
.panels { margin: 12px 0; }
figure { margin: 0; } figcaption { font-size: .9rem; font-weight: 600; margin: 0 0 4px 4px; overflow-wrap: anywhere; }
.panels img { width: 100%; max-width: 620px; height: auto; display: block; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 8px 0 0; }
dt { color: var(--soft); } dd { margin: 0; max-width: 80ch; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; margin-top: 12px; }
td, th { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: .9rem; max-width: none; }
@media (max-width: 640px) {
  h1 { font-size: 1.25rem; }
  main { padding: 14px 10px 40px; } section { padding: 14px 12px; }
  dl { grid-template-columns: 1fr; gap: 0; } dt { margin-top: 6px; } }
"""
KEYS = '\n'.join(
    f'.k{i} {{ background: {light}; }} @media (prefers-color-scheme: dark) {{ .k{i} {{ background: {dark}; }} }}'
    for i, (light, dark) in enumerate(zip(LIGHT.runs, DARK.runs, strict=True))
)


def page(title: str, runs: Sequence[Mapping[str, Any]], shown: Mapping[str, tuple[Diagnostic, Sequence[Group]]]) -> str:
    """HTML of all diagnostics: what was measured on `runs` ({name, group, and more to list}), pictures for light and dark, and the words
    of each diagnostic. Nothing is loaded from elsewhere, and no script runs."""
    sections = [(name, section(name, entry, groups)) for name, (entry, groups) in shown.items()]
    links = ''.join(f'<a href="#{html.escape(name)}">{html.escape(shown[name][0].title)}</a>' for name, text in sections if text)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{STYLE}{KEYS}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
<p class="soft">Measured on one fixed batch of held-out text. Runs that differ in their seed alone share a colour: the line is their mean,
the band goes from the lowest to the highest. Heat maps show the first seed.</p>
{table(runs)}
<nav>{links}</nav>
{''.join(text for _, text in sections)}
</main>
</body>
</html>
"""


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """What the runs are."""
    heads = list(dict.fromkeys(key for run in runs for key in run if key != 'place'))
    rows = ''
    for run in runs:
        cells = ''.join(f'<td>{html.escape(_short(run.get(key)))}</td>' for key in heads)
        rows += f'<tr><td><span class="key k{run.get("place", 0) % len(LIGHT.runs)}"></span></td>{cells}</tr>'
    return f'<div class="scroll"><table><tr><th></th>{"".join(f"<th>{html.escape(h)}</th>" for h in heads)}</tr>{rows}</table></div>'


def section(name: str, entry: Diagnostic, groups: Sequence[Group]) -> str:
    """One diagnostic; '' where no run has anything to show."""
    pictures = ''.join(pairs(entry, groups))
    if not pictures:
        return ''
    words = (('means', entry.means), ('normal', entry.normal), ('cannot tell', entry.cannot))
    listed = ''.join(f'<dt>{what}</dt><dd>{html.escape(text)}</dd>' for what, text in words)
    return f"""<section id="{html.escape(name)}">
<h2>{html.escape(entry.title)}</h2>
{keys(groups)}
<div class="panels">{pictures}</div>
<dl>{listed}</dl>
{numbers(groups)}
</section>
"""


def keys(groups: Sequence[Group]) -> str:
    """Which colour is whose; '' for one group."""
    each = (f'<span><span class="key k{i % len(LIGHT.runs)}"></span>{html.escape(g.label)}</span>' for i, g in enumerate(groups))
    return f'<p class="keys">{"".join(each)}</p>' if len(groups) > 1 else ''


def pairs(entry: Diagnostic, groups: Sequence[Group]) -> Sequence[str]:
    """A light and a dark picture of each panel (of each group, where it is a heat map)."""
    found = []
    for panel in entry.panels:
        for each in [[g] for g in gallery.drawable(panel, groups)[: gallery.MOST_HEATS]] if panel.heat else [list(groups)]:
            images = [gallery.figure([panel], each, theme=theme, size=TILE) for theme in (LIGHT, DARK)]
            if images[0] is None:
                continue
            light, dark = (base64.b64encode(gallery.png(fig)).decode() for fig in images if fig is not None)
            alt = html.escape(f'{panel.title}, over {panel.over}')
            found.append(
                f'<figure><figcaption>{html.escape(gallery.caption(panel, each))}</figcaption>'
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
                f'<img alt="{alt}" src="data:image/png;base64,{light}"></picture></figure>'
            )
    return found


def numbers(groups: Sequence[Group]) -> str:
    """The single numbers of a diagnostic, by run."""
    rows = [(g.label, {k: v for k, v in run.items() if isinstance(v, int | float)}) for g in groups for run in g.runs]
    heads = list(dict.fromkeys(key for _, found in rows for key in found))
    if not heads:
        return ''
    body = ''.join(
        f'<tr><td>{html.escape(label)}</td>{"".join(f"<td>{html.escape(_short(found.get(k)))}</td>" for k in heads)}</tr>'
        for label, found in rows
    )
    top = ''.join(f'<th>{html.escape(h)}</th>' for h in ('', *heads))
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _short(value: Any) -> str:
    return '' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)
