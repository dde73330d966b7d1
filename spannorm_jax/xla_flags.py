"""What XLA must be told before it starts. Loaded with the package itself, so it imports nothing that takes time."""

import importlib.metadata
import os

FUSIONS = '--xla_cpu_experimental_ynn_fusion_type'


def sound_products() -> None:
    """Keep jaxlib 0.10 from fusing products on the CPU with what follows them: some of these fusions compute wrong numbers, silently.

    Seen with 0.10.2 in reverse mode under vmap over a scan (off by half), and where a reduction follows a product of more than 2^15 rows
    (jax issues 36958 and 39103); 0.11 is right. Products alone stay with the same library, and a step takes as long. A choice of one's own
    in XLA_FLAGS stays. It has no effect where JAX has started a backend before this package is imported.
    """
    flags = os.environ.get('XLA_FLAGS', '')
    try:
        affected = importlib.metadata.version('jaxlib').startswith('0.10.')
    except importlib.metadata.PackageNotFoundError:
        return
    if affected and FUSIONS not in flags:
        os.environ['XLA_FLAGS'] = f'{flags} {FUSIONS}=individual_dot'.strip()
