"""Who may import whom: the order of style and layers, read off the source without importing anything."""

import ast
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'spannorm_jax'

# A file imports only from above it; a folder counts as one file.
ORDER = (
    'xla_flags errors fields json_file manifest chips topology parametrization model_config config resume load initializers sharding '
    'rollcall launch distributed watchdog embedding blocked_attention attention cache layers streams dispatch mla moe model loss '
    'optim data step program layout checkpoint track nonfinite plot rundir restart host ledger train batched likelihood diagnostics '
    'theory hlo plan search report stats bench figures experiment sweep launchers interop compare catalog sketch diagram audit doctor '
    'score generate harness gallery page diagnose progress worker results_page options commands cli __main__ __init__'
).split()
CORE = ORDER[: ORDER.index('loss') + 1]
CORE_LIBRARIES = {'jax', 'flax', 'jaxtyping', 'numpy'}
LIGHT = set(
    'xla_flags errors fields json_file manifest chips topology parametrization model_config config resume load options commands cli '
    '__main__ __init__'.split()
)


def modules():
    files = {p.stem: [p] for p in sorted(PACKAGE.glob('*.py'))}
    return files | {p.name: sorted(p.rglob('*.py')) for p in sorted(PACKAGE.iterdir()) if (p / '__init__.py').is_file()}


def imports(path, top_level_only=False):
    """(module, names) of every import in a file, those under TYPE_CHECKING left out."""
    tree = ast.parse(path.read_text())
    typing = {
        id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING' for n in ast.walk(node)
    }
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}: imports are absolute'
            yield node.module, tuple(alias.name for alias in node.names)


def ours(path, **kwargs):
    """Names of our modules that a file imports."""
    for module, names in imports(path, **kwargs):
        if module == 'spannorm_jax':
            yield from (name if name in modules() else '__init__' for name in names)
        elif module.startswith('spannorm_jax.'):
            yield module.split('.')[1]


def third_party(path, **kwargs):
    roots = {module.split('.')[0] for module, _ in imports(path, **kwargs)}
    return roots - set(sys.stdlib_module_names) - {'spannorm_jax'}


@pytest.mark.parametrize('name', list(modules()))
def test_imports_only_from_above(name):
    assert name in ORDER, f'say in ORDER where {name} stands'
    above = ORDER[: ORDER.index(name)]
    if name in ('topology', '__init__', 'cli'):  # streams' algebra inside a function; the package's version
        above = [*above, 'streams', '__init__']
    for path in modules()[name]:
        assert {m for m in ours(path) if m != name} <= set(above), path


@pytest.mark.parametrize('name', [m for m in CORE if m in modules()])
def test_core_needs_jax_and_flax_alone(name):
    """A GPU box without grain, TFDS, optax or tyro still imports the modules and trains on arrays."""
    for path in modules()[name]:
        assert third_party(path) <= CORE_LIBRARIES, path


def test_only_the_command_line_knows_tyro():
    users = {name for name, paths in modules().items() for path in paths if 'tyro' in third_party(path)}
    assert users == {'cli', 'options'}


@pytest.mark.parametrize('name', sorted(LIGHT))
def test_light_modules_import_nothing_heavy(name):
    """What `--help` loads: of third parties, tyro alone, at the top of a file."""
    for path in modules()[name]:
        assert third_party(path, top_level_only=True) <= {'tyro'}
        assert set(ours(path, top_level_only=True)) <= LIGHT


def test_environment_is_read_in_few_places():
    """Nothing that computes depends on the environment."""
    readers = {p.stem for p in PACKAGE.rglob('*.py') if 'os.environ' in p.read_text()}
    assert readers <= {'__main__', 'doctor', 'host', 'launch', 'pipeline', 'plan', 'sweep', 'track', 'xla_flags'}


def test_every_library_is_declared():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    listed = [*project['dependencies'], *(r for extra in project['optional-dependencies'].values() for r in extra)]
    declared = {re.match(r'[\w-]+', r)[0].lower().replace('-', '_') for r in listed}
    package_of = {'absl': 'absl_py', 'orbax': 'orbax_checkpoint', 'tensorboardx': 'tensorboardx'}
    used = {lib.lower() for paths in modules().values() for path in paths for lib in third_party(path)}
    # jaxlib comes with jax; sentencepiece, tokenizers, ... are extras and are among the declared
    assert {package_of.get(lib, lib) for lib in used} <= declared


def test_the_finder_finds():
    """The checks above are not empty: they see imports inside functions, and skip those for type checkers."""
    assert 'score' in set(ours(PACKAGE / 'commands.py')) and 'score' not in set(ours(PACKAGE / 'commands.py', top_level_only=True))
    assert 'rich' in third_party(PACKAGE / 'commands.py') and 'cli' not in set(ours(PACKAGE / 'commands.py'))
    assert {'jax', 'flax'} <= third_party(PACKAGE / 'model.py')


def test_every_mutation_still_has_its_text():
    """Else the mutation check would try nothing of it, and it runs in the long mode alone."""
    from mutations import MUTATIONS

    assert {m.what: (PACKAGE / m.file).read_text().count(m.old) for m in MUTATIONS} == dict.fromkeys((m.what for m in MUTATIONS), 1)
