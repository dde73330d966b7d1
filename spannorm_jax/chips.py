"""The accelerators that can be planned for: what their vendors state, and `--chips` as a number of them. Imports no jax.

Sources: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e), NVIDIA's data sheets (A100 SXM 80 GB, H100 SXM, H200 SXM, B200); memory of a TPU as
its compiler offers it to a program.
"""

import difflib
import math
import re
from dataclasses import dataclass

from spannorm_jax.errors import UserError

# Dense bfloat16 peak of one chip in FLOP/s, as its vendor states it without sparsity, by a part of JAX's device_kind.
PEAK_FLOPS = {
    'B200': 2250e12, 'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'L4': 121e12, 'V100': 125e12,
    'TPU v6': 918e12, 'TPU v5p': 459e12, 'TPU v5 lite': 197e12, 'TPU v5e': 197e12, 'TPU v5': 459e12, 'TPU v4': 275e12,
}  # fmt: skip
GIB = 2**30
GPU_SHARE = 0.75  # of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


@dataclass(frozen=True)
class Chip:
    """One accelerator. Bandwidths are bytes/s, those of links in one direction and over all links of the chip."""

    kind: str  # key of PEAK_FLOPS
    hbm_bytes: float  # that a program may use
    hbm_bandwidth: float
    link_bandwidth: float  # within a slice (ICI) or a host (NVLink)
    network_bandwidth: float  # between slices or hosts, per chip

    @property
    def peak_flops(self) -> float:
        return PEAK_FLOPS[self.kind]


@dataclass(frozen=True)
class Tpu(Chip):
    dimensions: int = 2  # of the torus
    accelerator: str = ''  # what libtpu calls it, before the number of cores
    cores: int = 1  # per chip, in that number


@dataclass(frozen=True)
class Gpu(Chip):
    """What XLA wants to know of a GPU: sizes in bytes, clock in GHz."""

    name: str = ''
    capability: int = 90
    multiprocessors: int = 132
    fpus: int = 128
    memory: int = 0
    l2: int = 0
    shared: int = 0  # per multiprocessor
    clock: float = 0.0


CHIPS: dict[str, Tpu | Gpu] = {
    'v4': Tpu('TPU v4', 30.75 * GIB, 1228e9, 300e9, 3.1e9, 3, 'v4-', 2),
    'v5e': Tpu('TPU v5e', 15.75 * GIB, 819e9, 200e9, 3.1e9, 2, 'v5litepod-', 1),
    'v5p': Tpu('TPU v5p', 95.74 * GIB, 2765e9, 600e9, 6.2e9, 3, 'v5p-', 2),
    'v6e': Tpu('TPU v6', 31.25 * GIB, 1640e9, 448e9, 12.5e9, 2, 'v6e-', 1),
    'a100': Gpu(
        'A100', GPU_SHARE * 85100068864, 2039e9, 300e9, 25e9, 'NVIDIA A100-SXM4-80GB', 80, 108, 64, 85100068864, 41943040, 167936, 1.41
    ),
    'h100': Gpu(
        'H100', GPU_SHARE * 84942979072, 3350e9, 450e9, 50e9, 'NVIDIA H100 80GB HBM3', 90, 132, 128, 84942979072, 52428800, 233472, 1.98
    ),
    'h200': Gpu('H200', GPU_SHARE * 151397597184, 4800e9, 450e9, 50e9, 'NVIDIA H200', 90, 132, 128, 151397597184, 52428800, 233472, 1.98),
    'b200': Gpu(
        'B200', GPU_SHARE * 191514411008, 8000e9, 900e9, 50e9, 'NVIDIA B200', 100, 148, 128, 191514411008, 132644864, 233472, 1.965
    ),
}
FORMS = 'expected v5e:16x16, v5p:4x4x4, 2xv5e:16x16 (two slices), or h100:8x8 (8 hosts of 8 GPUs)'


@dataclass(frozen=True)
class Chips:
    """So many chips: `slices` tori of the shape `sizes` (TPU), or hosts x GPUs per host in `sizes` (GPU, one 'slice')."""

    name: str
    slices: int
    sizes: tuple[int, ...]

    @property
    def chip(self) -> Tpu | Gpu:
        return CHIPS[self.name]

    @property
    def platform(self) -> str:
        return 'tpu' if isinstance(self.chip, Tpu) else 'gpu'

    @property
    def count(self) -> int:
        return self.slices * math.prod(self.sizes)

    @property
    def island(self) -> int:
        """Chips that are joined by the fast links: those of a slice, or of a host."""
        return math.prod(self.sizes) if self.platform == 'tpu' else self.sizes[1]

    @property
    def topology(self) -> str:
        """The name that JAX wants: v5e:16x16, or slices x hosts x GPUs per host."""
        sizes = 'x'.join(map(str, self.sizes))
        return f'{self.name}:{sizes}' if self.platform == 'tpu' else f'1x{sizes}'

    @property
    def environment(self) -> dict[str, str]:
        """What libtpu must find, before it is loaded, on a machine that is no part of such a slice."""
        chip = self.chip
        if not isinstance(chip, Tpu):
            return {}
        kind = f'{chip.accelerator}{math.prod(self.sizes) * chip.cores}'
        alone = {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
        return alone | {'TPU_ACCELERATOR_TYPE': kind}

    @property
    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text; limits that all of CUDA's devices share are written out."""
        gpu = self.chip
        assert isinstance(gpu, Gpu)
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared} shared_memory_per_block_optin: {gpu.shared - 1024}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              core_count: {gpu.multiprocessors} fpus_per_core: {gpu.fpus} clock_rate_ghz: {gpu.clock}
              memory_bandwidth: {int(gpu.hbm_bandwidth)} device_memory_size: {gpu.memory} l2_cache_size: {gpu.l2}
              cuda_compute_capability {{ major: {gpu.capability // 10} minor: {gpu.capability % 10} }}
            }}
            platform_name: "CUDA"
            device_description_str: "{gpu.name}"
        """

    def __str__(self) -> str:
        return (f'{self.slices}x' if self.slices > 1 else '') + f'{self.name}:{"x".join(map(str, self.sizes))}'


def parse_chips(text: str) -> Chips:
    """`[SLICESx]NAME:AxB[xC]`. Raises: UserError that says what is wrong with it and which forms there are."""
    match = re.fullmatch(r'(?:(\d+)x)?([a-z]\w*)(?::(\d+(?:x\d+)*))?', text.strip().lower())
    if match is None:
        raise UserError(f'--chips {text!r} is not understood; {FORMS}')
    slices, name, sizes = int(match[1] or 1), match[2], tuple(int(n) for n in (match[3] or '').split('x') if n)
    if name not in CHIPS:
        close = difflib.get_close_matches(name, CHIPS, n=1)
        hint = f'did you mean {close[0]!r}?' if close else f'known chips: {", ".join(CHIPS)}'
        raise UserError(f'--chips {text!r}: unknown chip {name!r}; {hint}')
    chip = CHIPS[name]
    wanted = chip.dimensions if isinstance(chip, Tpu) else 2
    what = f'the {wanted} sides of its torus' if isinstance(chip, Tpu) else 'hosts and GPUs per host'
    if len(sizes) != wanted:
        raise UserError(f'--chips {text!r}: {name} takes {what}, as in {name}:{"x".join("8" * wanted)}; {FORMS}')
    if 0 in sizes or slices == 0:
        raise UserError(f'--chips {text!r}: a size of 0; {FORMS}')
    if slices > 1 and isinstance(chip, Gpu):
        raise UserError(f'--chips {text!r}: only TPUs come in slices; give all hosts at once, as in {name}:{slices * sizes[0]}x{sizes[1]}')
    return Chips(name, slices, sizes)
