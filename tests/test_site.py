"""The documentation builds as a site, without one warning, without the network, and is read without it."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip('mkdocs')
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """`make docs` into another folder, with a network that leads nowhere."""
    folder = tmp_path_factory.mktemp('site')
    nowhere = dict.fromkeys(('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY'), 'http://127.0.0.1:1')
    line = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(folder)]
    done = subprocess.run(line, cwd=ROOT, env=os.environ | nowhere | {'NO_MKDOCS_2_WARNING': '1'}, capture_output=True, text=True)
    assert done.returncode == 0 and 'WARNING' not in done.stderr, done.stderr
    return folder


def pages(site):
    return {path.relative_to(site).as_posix(): path.read_text() for path in sorted(site.rglob('*.html'))}


def test_every_page_is_there(site):
    assert {p.stem for p in (ROOT / 'docs').glob('*.md')} <= {Path(name).stem for name in pages(site)}
    front = (site / 'index.html').read_text()
    assert 'Where should normalization and residual paths go' in front and 'start.html' in front
    assert 'blocks/span.svg' in (site / 'topologies.html').read_text() and (site / 'blocks/span.svg').is_file()


def test_links_lead_somewhere(site):
    """Every file and every anchor, of pages, pictures, scripts and styles."""
    texts = pages(site)
    ids = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in texts.items()}
    for name, text in texts.items():
        for target in map(unescape, re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            path, _, anchor = target.partition('#')
            if re.match(r'[a-z]+:', target) or name == '404.html':
                continue
            found = (site / name).parent / unquote(path) if path else site / name
            assert found.exists(), f'{name}: {target}'
            key = os.path.relpath(found, site)
            assert not anchor or key not in ids or anchor in ids[key] | {'__codelineno'} or '__codelineno' in anchor, f'{name}: {target}'


def test_nothing_is_fetched_when_it_is_read(site):
    fetched = re.compile(r'<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    for name, text in pages(site).items():
        assert not [tag for tag in fetched.findall(text) if 'rel="canonical"' not in tag], name
    for style in site.rglob('*.css'):
        assert not re.search(r'(?:@import|url\()\s*["\']?(?:https?:)?//', style.read_text()), style.name


def test_styles_meet_what_they_are_for(site):
    """A rule for a language of code blocks is dead where blocks do not carry their language as a class."""
    text = ''.join(pages(site).values())
    languages = set(re.findall(r'\.(language-\w+)', (site / 'site.css').read_text()))
    assert languages and all(f'class="{language} highlight"' in text for language in languages)


def test_the_reference_has_every_public_name(site):
    from spannorm_jax import _MODULE_OF

    text = ''.join(text for name, text in pages(site).items() if name.startswith('api/'))
    for name, module in _MODULE_OF.items():
        assert f'<strong>{name}</strong>' in text and f'id="spannorm_jax.{module}' in text, name
    # A docstring is shown as it is, whatever Markdown would make of it.
    assert 'g * A(N1 x)' in text and '&lt;task&gt;/' in text and 'N_ay Y' in text
