"""What each command of `spannorm` takes: a dataclass per command, whose fields are its options and whose docstrings are its help."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import FlagConversionOff, Positional

from spannorm_jax.config import Config, MeshConfig

Settings = Annotated[Config, tyro.conf.arg(name=''), FlagConversionOff]  # its fields stand at the top: --model.layers
TopologyFile = Annotated[
    str | None,
    tyro.conf.arg(help='Python file that adds the topology of RUN to the table, where that is one of your own; it is run first.'),
]


@dataclass(frozen=True)
class Train:
    """Train CONFIG, or go on with a run that was interrupted.

    Any field can be set by its dotted name. Ctrl-C saves and stops; the same command goes on from there.

    Example: spannorm train nano --model.topology pre --optim.lr-peak 1e-3 --run.steps 500
    """

    config: Annotated[str, Positional, tyro.conf.arg(metavar='CONFIG')]
    """Name of a file in configs/, path of a .py file with get(), or a run's config.json."""
    settings: Settings = field(default_factory=Config)
    profile: bool = False
    """Trace a few steps into <run>/profile, for XProf or Perfetto."""


@dataclass(frozen=True)
class Audit:
    """Draw every parameter of CONFIG and compare it with its recipe: exit 1 where one does not fit.

    Example: spannorm audit nano --model.layers 48 --json
    """

    config: Annotated[str, Positional, tyro.conf.arg(metavar='CONFIG')]
    """Name of a file in configs/, path of a .py file with get(), or a run's config.json."""
    settings: Settings = field(default_factory=Config)
    json: bool = False
    """Print a row per parameter and layer as JSON."""


@dataclass(frozen=True)
class Prepare:
    """Tokenise SOURCE into DIR, in parallel. Stopped at any moment, the same command goes on.

    Example: spannorm prepare 'texts/**/*.jsonl.zst' prepared --tokenizer mistral --workers 8
    """

    source: Annotated[str, Positional, tyro.conf.arg(metavar='SOURCE')]
    """stdlib, a file, folder or glob of text, .jsonl or .parquet (.gz, .zst), or tfds:NAME/CONFIG."""
    dir: Annotated[str, Positional, tyro.conf.arg(metavar='DIR')]
    """New or empty folder for the tokens."""
    tokenizer: str = 'bytes'
    """bytes, mistral, or the path of a SentencePiece .model or a Hugging Face tokenizer.json."""
    text_field: str = 'text'
    """Field of a record that holds the text."""
    workers: int | None = None
    """Processes; None means one per CPU."""
    json: bool = False
    """Print the folder's meta.json."""


@dataclass(frozen=True)
class Eval:
    """Loss, bits per byte and perplexities of RUN's newest checkpoint on held-out text, or tasks of lm-evaluation-harness.

    Example: spannorm eval runs/nano-1a2b3c4d --split test --protocol strided --stride 32 --json
    """

    run: Annotated[str, Positional, tyro.conf.arg(metavar='RUN')]
    """Folder of a run."""
    split: Literal['validation', 'test'] = 'validation'
    tokens: int | None = None
    """At most this many tokens of whole documents, the first one always; None means the whole split."""
    source: str | None = None
    """Other text than the run's own (as data.source); its split of the same name is read."""
    protocol: Literal['rows', 'documents', 'strided'] = 'rows'
    """rows: as in training. documents: each one on its own, in windows of a row. strided: the same in windows that overlap."""
    stride: int | None = None
    """strided: tokens by which a window moves on; None means half a row."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness in place of the text: their names, paths of task files, or paper (the paper's table 1)."""
    task_data: str | None = None
    """--tasks: folder with TASK/test.jsonl (validation.jsonl, train.jsonl) to use in place of a task's own data."""
    limit: int | None = None
    """--tasks: only the first so many examples of each."""
    shots: int | None = None
    """--tasks: solved examples in each prompt; None means as the task says."""
    download: bool = False
    """--tasks: fetch data that is not on this disk; without it nothing touches the network."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    topology_file: TopologyFile = None
    json: bool = False


@dataclass(frozen=True)
class Verify:
    """Check every committed checkpoint of RUN against its manifest: exit 65 where a file is not what was written.

    Example: spannorm verify runs/nano-1a2b3c4d
    """

    run: Annotated[str, Positional, tyro.conf.arg(metavar='RUN')]
    """Folder of a run."""
    json: bool = False


@dataclass(frozen=True)
class Generate:
    """Continue texts with RUN's newest checkpoint.

    A single prompt's text appears as it is made; of several, each when all are done.

    Example: spannorm generate runs/nano-1a2b3c4d --prompt 'def main' --temperature 0.8 --top-p 0.95
    """

    run: Annotated[str, Positional, tyro.conf.arg(metavar='RUN')]
    """Folder of a run."""
    prompt: tuple[str, ...] = ('',)
    """What to continue; several make one batch."""
    max_tokens: int = 128
    temperature: float = 1.0
    """0 takes the most likely token each time."""
    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float | None = None
    """Only the smallest set of the most likely tokens that together have this probability."""
    min_p: float | None = None
    """Only tokens at least this many times as likely as the most likely one."""
    stop: tuple[str, ...] = ()
    """Strings that end a text; they are left out."""
    seed: int = 0
    mesh: MeshConfig = field(default_factory=MeshConfig)
    topology_file: TopologyFile = None
    json: bool = False


@dataclass(frozen=True)
class Export:
    """Write RUN's newest checkpoint to DIR as Hugging Face lays a model out: config.json, model.safetensors, tokenizer files.

    Topology pre becomes a Llama that transformers opens; every other one brings a torch file (trust_remote_code).

    Example: spannorm export runs/nano-1a2b3c4d exported
    """

    run: Annotated[str, Positional, tyro.conf.arg(metavar='RUN')]
    """Folder of a run."""
    dir: Annotated[str, Positional, tyro.conf.arg(metavar='DIR')]
    """New or empty folder."""
    model_type: str | None = None
    """llama, gemma2, olmo2, hyperclovax, deepseek_v2, deepseek_v3 (where they can express the model) or spannorm_jax; None chooses."""
    shard_gb: float = 4.0
    """Largest file, in 10^9 bytes."""
    topology_file: TopologyFile = None
    json: bool = False


@dataclass(frozen=True)
class Import:
    """Make RUN from DIR, a model in Hugging Face's layout on this disk: to evaluate, sample and export it. No code of DIR is run.

    Example: spannorm import exported runs/imported
    """

    dir: Annotated[str, Positional, tyro.conf.arg(metavar='DIR')]
    """Folder with config.json and model.safetensors, or shards of it."""
    run: Annotated[str, Positional, tyro.conf.arg(metavar='RUN')]
    """New or empty folder."""
    seq: int | None = None
    """Tokens per row in evaluations; None means max_position_embeddings."""
    json: bool = False


@dataclass(frozen=True)
class Plan:
    """Compile the train step of CONFIG ahead of time for chips that are not here: memory, FLOPs, collectives; exit 1 if too large.

    Example: spannorm plan dense_5b --chips v5e:16x16
    """

    config: Annotated[str, Positional, tyro.conf.arg(metavar='CONFIG')]
    """Name of a file in configs/, path of a .py file with get(), or a run's config.json."""
    settings: Settings = field(default_factory=Config)
    chips: str = ''
    """v5e:16x16, v5p:4x4x4, v6e:16x16, 2xv5e:16x16 (two slices), h100:8x8 (8 hosts of 8 GPUs; also a100, h200, b200)."""
    search: bool = False
    """Find the mesh and the remat policy that fit with the lowest floor."""
    compiles: int = 4
    """--search: how many candidates to compile at most."""
    json: bool = False
    """Print the plan as JSON."""


@dataclass(frozen=True)
class Bench:
    """What a training step of CONFIG costs here: compilation, step, tokens/s, MFU, memory, data; beside variants in the same run.

    Example: spannorm bench nano --vs model.topology=pre model.remat=full
    """

    config: Annotated[str, Positional, tyro.conf.arg(metavar='CONFIG')]
    """Name of a file in configs/, path of a .py file with get(), or a run's config.json."""
    settings: Settings = field(default_factory=Config)
    vs: tuple[str, ...] = ()
    """NAME=VALUE: a variant each, their steps taken in turn with CONFIG's own; NAME=VALUE,NAME=VALUE changes several fields."""
    rounds: int = 10
    """Steps of each that are counted."""
    json: bool = False


@dataclass(frozen=True)
class Experiment:
    """Run what experiment ID lacks and draw its figure; without ID, list all experiments with their cost and state.

    Ctrl-C saves all runs and stops; the same command goes on. Runs that experiments share are trained once.

    Example: spannorm experiment fig02 --scale nano
    """

    id: Annotated[str | None, Positional, tyro.conf.arg(metavar='ID')] = None
    """Name of a file in experiments/ (fig02, table2, T4), or path of such a file."""
    scale: Literal['smoke', 'nano', 'gpu', 'paper'] = 'nano'
    """smoke: seconds, to see that it works. nano: 2 CPU cores. gpu: one GPU. paper: the published size, on a pod."""
    launcher: Literal['local', 'submitit', 'skypilot'] = 'local'
    """local: this machine. submitit: a SLURM job array, one job per run. skypilot: writes a task file for `sky jobs launch`."""
    submit: tuple[str, ...] = ()
    """submitit, skypilot: KEY=VALUE for the scheduler, as in: --submit slurm_partition=gpu gpus_per_node=8 timeout_min=600"""
    jobs: int | None = None
    """local: processes side by side; None means one per core at smoke and nano, one at gpu and paper."""
    together: int | None = None
    """local: runs that differ in seed and learning rate which one process trains as one program; None means up to 8 at gpu, else 1."""
    root: str = 'runs'
    """Folder of the run directories."""
    results: str = 'results'
    """Folder of rows and figures: <results>/<scale>/<ID>.json and .png."""
    redraw: bool = False
    """Run nothing; draw the figure again from the rows in `results`."""
    configs: bool = False
    """Run nothing; write config.json of each missing run into its folder, as for `spannorm plan` or `train`, and print the paths."""
    json: bool = False
    """Print the list, or the rows, as JSON."""


@dataclass(frozen=True)
class Report:
    """All kept results as one HTML page: question, what was run, figure, table, verdict, cost, and how to run it again.

    Example: spannorm report --out report.html
    """

    results: str = 'results'
    """Folder of rows, as `spannorm experiment` writes them."""
    out: str = 'report.html'
    markdown: str | None = None
    """Also write the page as Markdown to this file."""
    json: bool = False
    """Print {id, scale, status, reason, runs, minutes} of each result."""


@dataclass(frozen=True)
class Theory:
    """SpanNorm's theory against measurements at initialisation: gradient law, identity path, branches, first block, assumptions.

    Example: spannorm theory --only T1 --depths 8 32 128 --seeds 5
    """

    only: tuple[str, ...] = ()
    """Some of T1 T5 T6 T8 T11; all by default."""
    depths: tuple[int, ...] = (8, 32, 128, 512)
    """Numbers of blocks."""
    seeds: int = 5
    """How many seeds, 0, 1, ...; intervals are over them."""
    activations: tuple[str, ...] = ('swiglu', 'gelu', 'relu')
    """FFN kinds of T1 and T6; the others use the first."""
    json: bool = False


@dataclass(frozen=True)
class Diagnose:
    """Measure runs (newest checkpoint) and configurations (initial values): JSON, pictures and one HTML page. Seeds become a band.

    Any field can be set by its dotted name, for all of them: --data.source measures on other text.

    Example: spannorm diagnose runs/nano-1a2b3c4d runs/nano-5e6f7a8b --dir compared
    """

    targets: Annotated[tuple[str, ...], Positional, tyro.conf.arg(metavar='RUN_OR_CONFIG')]
    """Folders of runs, names of files in configs/, paths of .py files with get()."""
    settings: Settings = field(default_factory=Config)
    read: tyro.conf.Suppress[Any] = None  # str -> Config: a target with the settings that were typed
    dir: str = 'diagnostics'
    """Folder for diagnostics.json, one PNG per diagnostic, and index.html."""
    only: tuple[str, ...] = ()
    """Some diagnostics by name (docs/diagnostics.md lists them); none means all."""
    rows: int = 8
    """Rows of the probe batch, the first ones of the validation split."""
    json: bool = False
    """Print what diagnostics.json holds."""


@dataclass(frozen=True)
class Topologies:
    """The table of topologies: name, aliases, equation, source, norm sites, parameters of their own, options they read.

    Example: spannorm topologies --json
    """

    json: bool = False
    markdown: bool = False
    """Print the table of the README."""


@dataclass(frozen=True)
class Doctor:
    """Devices, versions, and why an accelerator that is there is not used.

    Example: spannorm doctor
    """

    json: bool = False
