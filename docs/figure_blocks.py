"""Draws docs/blocks/*.svg and writes the tables and the pictures of docs/topologies.md: python docs/figure_blocks.py"""

import re
from pathlib import Path

from spannorm_jax import catalog
from spannorm_jax.diagram import svg
from spannorm_jax.topology import TOPOLOGIES

DOCS = Path(__file__).parent
PAGE = DOCS / 'topologies.md'


def drawn() -> dict[Path, str]:
    return {DOCS / 'blocks' / f'{name}.svg': svg(name) for name in TOPOLOGIES}


def with_lists(text: str) -> str:
    """The page, with today's pictures and names."""
    pictures = '\n'.join(f'![{name}: {entry.equation}](blocks/{name}.svg)' for name, entry in TOPOLOGIES.items())
    for what, made in (('blocks', pictures), ('names', catalog.names_markdown(catalog.rows()))):
        text = re.sub(rf'(<!-- {what}:.*?-->\n).*?(<!-- end)', lambda m, made=made: f'{m[1]}\n{made}\n\n{m[2]}', text, flags=re.S)
    return text


if __name__ == '__main__':
    (DOCS / 'blocks').mkdir(exist_ok=True)
    for path, text in drawn().items():
        path.write_text(text)
    PAGE.write_text(with_lists(PAGE.read_text()))
