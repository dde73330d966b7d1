"""Hooks of mkdocs.yml. On a code host the pages are plain Markdown with relative links; the site leads them to where it has things.

The site takes up README.md as its front page, other pages and pictures of the repository that a page links to, and the API reference,
which is made from docstrings. A docstring is plain text, not Markdown: what Markdown would take for markup is escaped.
"""

import ast
import functools
import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {'README.md': 'index.md', 'experiments/README.md': 'experiments/README.md', 'CHANGELOG.md': 'changelog.md'}
LINK = re.compile(r'(\]\()(?!https?:|#)([^)\s#]+)')

# The reference: pages, and the modules whose docstrings stand on each.
API = {
    'models': ('topology', 'model_config', 'model', 'layers', 'mla', 'moe', 'attention', 'cache', 'initializers', 'parametrization'),
    'training': ('config', 'load', 'train', 'optim', 'step', 'sharding', 'checkpoint', 'data', 'plan', 'errors'),
    'evaluation': ('likelihood', 'score', 'harness', 'generate', 'interop', 'interop.card'),
    'analysis': ('diagnostics', 'diagnose', 'theory', 'compare', 'experiment', 'stats', 'catalog', 'diagram'),
}


def on_files(files, config):
    for source, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for page in [*(ROOT / 'docs').glob('*.md'), *(ROOT / source for source in PAGES)]:
        for _, target in LINK.findall(page.read_text()):
            path = posixpath.normpath(posixpath.join(page.parent.relative_to(ROOT).as_posix(), target))
            if not path.startswith('docs/') and path not in PAGES and files.get_file_from_path(path) is None and (ROOT / path).is_file():
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for title, modules in API.items():
        files.append(File.generated(config, f'api/{title}.md', content=reference(title, modules)))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    source = {place: path for path, place in PAGES.items()}.get(here, f'docs/{here}')

    def moved(match):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        place = PAGES.get(path, path.removeprefix('docs/'))
        return match[1] + posixpath.relpath(place, posixpath.dirname(here) or '.')

    return LINK.sub(moved, markdown)


def reference(title, modules):
    """A page of the reference: what a module says of itself, its public functions and classes, and what `spannorm_jax` itself offers."""
    parts = [f'# {title.capitalize()}', 'Names in bold below the heading of a module can be imported from `spannorm_jax` itself.']
    for module in modules:
        offered = ', '.join(f'**{name}**' for name in home().get(module, ()))
        parts += [f'## spannorm_jax.{module}', *([offered] if offered else []), f'::: spannorm_jax.{module}']
    return '\n\n'.join(parts) + '\n'


@functools.cache
def home():
    """Names that the package itself offers, by module."""
    tree = ast.parse((ROOT / 'spannorm_jax/__init__.py').read_text())
    return next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == '_HOME')


class PlainText(griffe.Extension):
    """Docstrings as Markdown that shows them as they are: `code` stays code, indented lines become a block of it."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text):
    parts = re.split(r'((?:^ {2,}.*\n?)+)', text, flags=re.M)
    return ''.join(f'\n```text\n{part.rstrip()}\n```\n' if part.startswith('  ') else escaped(part) for part in parts)


def escaped(text):
    parts = re.split(r'(`[^`]*`)', text)
    return ''.join(part if part.startswith('`') else re.sub(r'([\\*_\[\]<>#|])', r'\\\1', part) for part in parts)
