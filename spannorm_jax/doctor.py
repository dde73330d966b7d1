"""What this machine offers JAX and what JAX makes of it."""

import glob
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jax

from spannorm_jax.host import use_compilation_cache

# What each accelerator needs: the optional extra, and the packages of which one must be there.
PLUGINS = {'gpu': ('cuda', ('jax-cuda12-plugin', 'jax-cuda13-plugin')), 'tpu': ('tpu', ('libtpu',))}
LIBRARIES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy', 'tyro', 'rich', 'matplotlib')


def examine() -> dict[str, Any]:
    """{python, platform, versions, devices, backend, accelerators, compilation_cache, disk, extras}; every value is looked up now."""
    use_compilation_cache()
    error = None
    try:
        devices = jax.devices()
    except RuntimeError as e:  # a platform that JAX_PLATFORMS names and that does not start
        devices, error = [], str(e).splitlines()[0]
    used = {d.platform for d in devices}
    return {
        'python': platform.python_version(),
        'platform': platform.platform(),
        'cpus': os.cpu_count(),
        'versions': {name: version(name) for name in ('spannorm-jax', *LIBRARIES)},
        'backend': devices[0].platform if devices else None,
        'backend_error': error,
        'devices': [{'id': d.id, 'platform': d.platform, 'kind': d.device_kind} for d in devices],
        'accelerators': [a | explain(a, used) for a in visible()],
        'compilation_cache': jax.config.values['jax_compilation_cache_dir'],
        'disk': {'folder': os.getcwd(), 'free_bytes': shutil.disk_usage('.').free},
        'extras': extras(),
    }


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def visible() -> list[dict[str, Any]]:
    """Accelerators the operating system shows, whatever JAX knows of them: {kind, what}."""
    found = []
    if names := _nvidia():
        found.append({'kind': 'gpu', 'what': names})
    if os.environ.get('TPU_NAME') or os.environ.get('TPU_WORKER_ID') or glob.glob('/dev/accel[0-9]*') or glob.glob('/dev/vfio/[0-9]*'):
        found.append({'kind': 'tpu', 'what': 'TPU chips'})
    return found


def _nvidia() -> str:
    """Names of the NVIDIA GPUs, or ''."""
    tool = shutil.which('nvidia-smi')
    if tool:
        try:
            out = subprocess.run([tool, '-L'], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            out = ''
        if names := [line.split(' (UUID')[0] for line in out.splitlines() if line.startswith('GPU')]:
            return ', '.join(names)
    nodes = glob.glob('/dev/nvidia[0-9]*')
    return f'NVIDIA device nodes {", ".join(sorted(nodes))}' if nodes else ''


def explain(accelerator: dict[str, Any], used: set[str]) -> dict[str, Any]:
    """Whether JAX uses an accelerator that is there, and if not, why and what to do: {used, why, mend}."""
    kind = accelerator['kind']
    extra, plugins = PLUGINS[kind]
    if kind in used:
        return {'used': True, 'why': None, 'mend': None}
    if not any(version(p) for p in plugins):
        return {'used': False, 'why': f'JAX is installed without its {extra} plugin', 'mend': f"pip install 'spannorm-jax[{extra}]'"}
    asked = os.environ.get('JAX_PLATFORMS') or os.environ.get('JAX_PLATFORM_NAME')
    if asked and not {kind, extra} & set(asked.split(',')):
        return {'used': False, 'why': f'JAX_PLATFORMS={asked} keeps JAX away from it', 'mend': 'unset JAX_PLATFORMS'}
    try:
        jax.devices(kind)
        why = 'another backend is preferred'
    except RuntimeError as e:
        why = f'its backend does not start: {str(e).splitlines()[0]}'
    return {'used': False, 'why': why, 'mend': f"check the driver, then pip install -U 'spannorm-jax[{extra}]'"}


def extras() -> dict[str, dict[str, str | None]]:
    """Packages of each optional extra with their versions, None where absent; read off the metadata of the installed package."""
    # jax itself is always there; what the accelerators' extras add to it is its plugin.
    found: dict[str, dict[str, str | None]] = {extra: {names[0]: version(names[0])} for extra, names in PLUGINS.values()}
    for requirement in _requirements():
        match = re.match(r'([\w.-]+).*extra == [\'"](\w+)[\'"]', requirement)
        if match and match[1] not in ('spannorm-jax', 'jax'):
            found.setdefault(match[2], {})[match[1]] = version(match[1])
    return found


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires('spannorm-jax') or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        pyproject = Path(__file__).parent.parent / 'pyproject.toml'
        groups = tomllib.loads(pyproject.read_text())['project']['optional-dependencies'] if pyproject.is_file() else {}
        return [f"{package} ; extra == '{extra}'" for extra, packages in groups.items() for package in packages]
