"""Eight CPU devices, a compilation cache shared by runs and workers."""

import gc
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import pytest

# Most of what the suite does is tracing and compiling. Programs this small are compiled in one part, and with four times less work where
# the older way to fuse exists; traces make many objects that live long, which Python would search for garbage again and again.
flags = ['--xla_cpu_parallel_codegen_split_count=1', *(['--xla_cpu_use_fusion_emitters=false'] if jax.__version_info__ < (0, 11) else [])]
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *flags])
gc.set_threshold(200_000, 50, 1000)
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
# The numbers are checked against tolerances that do not need the optimiser.
jax.config.update('jax_disable_most_optimizations', True)
_cache = pathlib.Path(os.environ.get('JAX_COMPILATION_CACHE_DIR', pathlib.Path(tempfile.gettempdir()) / 'spannorm_jax_test_cache'))
jax.config.update('jax_compilation_cache_dir', str(_cache))
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


def pytest_addoption(parser):
    parser.addoption('--golden-dir', default=None, help='folder of goldens to run instead of tests/golden')
    parser.addoption('--full', action='store_true', help='run the long modes too')


def pytest_collection_modifyitems(config, items):
    if not config.getoption('--full'):
        long = [item for item in items if item.get_closest_marker('full')]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker('full')]


@pytest.fixture(scope='session')
def tokens():
    return jax.random.randint(jax.random.key(7), (2, 12), 0, 61, jnp.int32)


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """The folder of a tiny SpanNorm run with a checkpoint."""
    from spannorm_jax import cli

    folder = tmp_path_factory.mktemp('trained')
    (folder / 'text').mkdir()
    for i in range(80):
        (folder / 'text' / f'{i}.txt').write_text(f'document {i} ' * 20)
    tiny = (
        '--model.layers 2 --model.width 16 --model.heads 2 --data.seq 16 --data.batch 2 --run.steps 3 --run.eval-tokens 64 '
        f'--mesh.devices 1 --data.source {folder / "text"} --data.cache {folder / "cache"} --run.dir {folder / "run"}'
    )
    assert cli.main(f'train debug {tiny}'.split()) == 0
    return str(folder / 'run')


@pytest.fixture(scope='module')
def compiled_once():
    """Starts of the same program share its compilation, which is most of what a start costs here."""
    from types import SimpleNamespace

    from spannorm_jax import program, train
    from spannorm_jax.batched import shape
    from spannorm_jax.topology import TOPOLOGIES

    made = {}

    def once(what, cfg, make):
        key = what, shape(cfg), program.LM, program.LM.features, TOPOLOGIES[cfg.model.topology].block
        if key not in made:
            made[key] = make()
        return made[key]

    class Shared(program.Program):
        def shared(self, what, jitted):
            make = lambda *shapes: lambda: once((self.mesh, what), self.cfg, lambda: jitted.lower(*shapes).compile())  # noqa: E731
            return SimpleNamespace(lower=lambda *shapes: SimpleNamespace(compile=make(*shapes)))

        def step(self, stats=False):
            return self.shared(('step', stats), super().step(stats))

        def eval_step(self):
            return self.shared('evaluation', super().eval_step())

    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, 'program', lambda cfg, mesh: Shared(*program.program(cfg, mesh)))
        yield
