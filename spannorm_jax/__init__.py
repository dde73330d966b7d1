"""spannorm_jax: where normalization and residual paths go in deep Transformers, in JAX and Flax Linen.

Names are loaded when they are first used, so that `import spannorm_jax` costs nothing and starts no device. It adds to XLA_FLAGS what
keeps XLA's numbers right on a CPU (`xla_flags`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from spannorm_jax import xla_flags

if TYPE_CHECKING:
    from spannorm_jax.config import Config as Config
    from spannorm_jax.config import ModelConfig as ModelConfig
    from spannorm_jax.config import edit as edit
    from spannorm_jax.diagnostics import coordinate_check as coordinate_check
    from spannorm_jax.layers import Attention as Attention
    from spannorm_jax.layers import Mlp as Mlp
    from spannorm_jax.layers import Norm as Norm
    from spannorm_jax.load import load_config as load_config
    from spannorm_jax.mla import LatentAttention as LatentAttention
    from spannorm_jax.model import LM as LM
    from spannorm_jax.model import Block as Block
    from spannorm_jax.model import Stack as Stack
    from spannorm_jax.moe import Moe as Moe
    from spannorm_jax.topology import TOPOLOGIES as TOPOLOGIES
    from spannorm_jax.topology import Topology as Topology
    from spannorm_jax.train import fit as fit

__version__ = '0.1.0'

xla_flags.sound_products()

_HOME = {
    'config': ('Config', 'ModelConfig', 'edit'),
    'diagnostics': ('coordinate_check',),
    'layers': ('Attention', 'Mlp', 'Norm'),
    'load': ('load_config',),
    'mla': ('LatentAttention',),
    'model': ('Block', 'LM', 'Stack'),
    'moe': ('Moe',),
    'topology': ('TOPOLOGIES', 'Topology'),
    'train': ('fit',),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(f'{__name__}.{_MODULE_OF[name]}'), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
