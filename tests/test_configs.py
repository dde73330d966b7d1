"""Every file of configs/ gives a configuration that is valid, saved and read back, and small enough to read."""

import math
import shutil

import pytest

from spannorm_jax import cli, load
from spannorm_jax.config import Config, edit, from_dict, run_id, to_dict
from spannorm_jax.model import count_params
from spannorm_jax.topology import TOPOLOGIES

CONFIGS = load.names()


@pytest.mark.parametrize('name', list(CONFIGS))
def test_config(name):
    cfg = load.load_config(name)
    assert isinstance(cfg, Config) and cfg.name == name and run_id(cfg).startswith(f'{name}-')
    assert from_dict(Config, to_dict(cfg)) == cfg
    assert count_params(cfg.model) > 0
    assert load.load_config(str(CONFIGS[name])) == cfg == cli.parse('train', [name]).settings


@pytest.mark.parametrize('name', list(CONFIGS))
def test_config_file_reads_well(name):
    text = CONFIGS[name].read_text()
    assert text.startswith('"""') and len(text.splitlines()) <= 40
    assert 'ost' in text.split('"""')[1] or 'seconds' in text.split('"""')[1], 'the header says what a run costs'


def test_names():
    assert {'nano', 'debug'} <= set(CONFIGS)


def test_names_in_an_installed_wheel(tmp_path, monkeypatch):
    """There the folders lie inside the package."""
    shutil.copytree(load.folder('configs'), tmp_path / 'spannorm_jax' / 'configs')
    monkeypatch.setattr(load, '__file__', str(tmp_path / 'spannorm_jax' / 'load.py'))
    assert load.names().keys() == CONFIGS.keys() and load.folder('configs') == tmp_path / 'spannorm_jax' / 'configs'
    assert load.load_config('debug').name == 'debug'


@pytest.mark.parametrize('topology', list(TOPOLOGIES))
def test_the_demo_takes_every_topology(topology):
    """Same learning rate, same data, same seed: only the topology differs, and so the run."""
    base = load.load_config('nano')
    cfg = edit(base, {'model.topology': topology})
    assert (run_id(cfg) == run_id(base)) == (topology == base.model.topology)
    assert (cfg.optim, cfg.data, cfg.run) == (base.optim, base.data, base.run)


def test_the_demo_reads_less_than_an_epoch_of_the_library():
    cfg = load.load_config('nano')
    assert math.prod((cfg.run.steps, cfg.data.batch, cfg.data.seq)) < 5_000_000
