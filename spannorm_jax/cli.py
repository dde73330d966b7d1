"""The `spannorm` command: what is typed -> a dataclass per command -> one function per command. The only importer of tyro.

Results go to stdout, progress and logs to stderr; the exit codes are those of docs/cli.md. Whatever computes is imported by the
command that needs it, so that `--help` answers at once.
"""

import contextlib
import dataclasses
import difflib
import errno
import io
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_origin

import tyro
from tyro.conf import FlagConversionOff, Positional

from spannorm_jax import __version__, commands
from spannorm_jax.config import Config, MeshConfig
from spannorm_jax.errors import UserError, nearest, unheard
from spannorm_jax.fields import check_number
from spannorm_jax.load import load_config, names

Settings = Annotated[Config, tyro.conf.arg(name=''), FlagConversionOff]  # its fields stand at the top: --model.layers
TopologyFile = Annotated[
    str | None,
    tyro.conf.arg(help='Python file that adds the topology of RUN to the table, where that is one of your own; it is run first.'),
]
INTERRUPTED = 130
STORAGE = 74
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG)


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
    """local: runs side by side; None means one per core at smoke and nano, one at gpu and paper."""
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


class Command(NamedTuple):
    options: type
    run: Callable[[Any], int]
    takes_config: bool = False
    takes_configs: bool = False  # any number of them, as `targets`; all get the same settings


COMMANDS = {
    'train': Command(Train, commands.train, True),
    'prepare': Command(Prepare, commands.prepare),
    'eval': Command(Eval, commands.evaluate),
    'verify': Command(Verify, commands.verify),
    'generate': Command(Generate, commands.generate),
    'export': Command(Export, commands.export),
    'import': Command(Import, commands.import_),
    'audit': Command(Audit, commands.audit, True),
    'plan': Command(Plan, commands.plan, True),
    'bench': Command(Bench, commands.bench, True),
    'theory': Command(Theory, commands.theory),
    'experiment': Command(Experiment, commands.experiment),
    'report': Command(Report, commands.report),
    'diagnose': Command(Diagnose, commands.diagnose, takes_configs=True),
    'topologies': Command(Topologies, commands.topologies),
    'doctor': Command(Doctor, commands.doctor),
}


def main(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code; only bugs leave as exceptions."""
    code = 0
    try:
        code = dispatch(list(argv))
        sys.stdout.flush()
        return code
    except UserError as e:
        return complain(str(e), e.exit_code)
    except KeyboardInterrupt:
        return complain('interrupted', INTERRUPTED)
    except ImportError as e:  # Ctrl-C while a library loads can surface as its failure to load
        causes = [e, e.__cause__, e.__context__, getattr(e.__cause__, '__cause__', None), getattr(e.__cause__, '__context__', None)]
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            return complain('interrupted', INTERRUPTED)
        raise
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it flushes stdout at exit.
        unheard(sys.stdout.fileno())
        return code
    except RuntimeError as e:  # jax's own kind is one, and jax need not be loaded
        if 'RESOURCE_EXHAUSTED' not in str(e):
            raise
        return complain(f'out of memory: {str(e).splitlines()[0][:200]}; ask for less at once, or for more devices', UserError.exit_code)
    except OSError as e:
        if e.errno not in DISK:
            raise
        where = f' {e.filename!r}' if e.filename else ''
        return complain(f'disk: {e.strerror}{where}; free space or choose another folder, then run again', STORAGE)


def complain(message: str, code: int) -> int:
    try:
        print(f'spannorm: {message}', file=sys.stderr)
    except OSError:  # no reader, or a log on a disk that is full: the code says it
        unheard(sys.stderr.fileno())
    return code


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ('-h', '--help', 'help'):
        print(overview(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else UserError.exit_code
    if argv[0] == '--version':
        print(f'spannorm {__version__}')
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        raise UserError(f'unknown command {name!r}; {nearest(name, COMMANDS)}')
    args = parse(name, rest)
    return 0 if args is None else COMMANDS[name].run(args)


def overview() -> str:
    lines = [f'  {name:12} {first_line(command.options)}' for name, command in COMMANDS.items()]
    return '\n'.join(
        [
            'usage: spannorm COMMAND ...   (`spannorm COMMAND --help` explains one)',
            '',
            *lines,
            '',
            f"CONFIG is one of {', '.join(names())}; the path of a .py file with get(); or a run's config.json.",
            'Example: spannorm train nano --model.topology pre',
        ]
    )


def first_line(options: type) -> str:
    return (options.__doc__ or '').splitlines()[0]


def parse(name: str, argv: list[str]) -> Any:
    """The options of a command, or None where its help was printed instead.

    Raises: UserError for an unknown option (with the nearest known one), a value of the wrong kind, a missing argument.
    """
    command, helping = COMMANDS[name], not {'-h', '--help'}.isdisjoint(argv)
    default, known = None, dict(options_of(command.options))
    argv = list(spell_out(argv, known))
    if command.takes_config:
        given = positional(argv, known)
        if given is None and not helping:
            raise UserError(f"{name} needs a CONFIG: {', '.join(names())}, a .py file with get(), or a run's config.json")
        default = command.options('CONFIG' if given is None else given, Config() if given is None else load_config(given))
    check_options(name, argv, known)
    args = typed(name, argv, default)
    if command.takes_configs and args is not None:
        read = lambda target: typed(name, argv, command.options(args.targets, load_config(target))).settings  # noqa: E731
        return dataclasses.replace(args, read=read)
    return args


def typed(name: str, argv: list[str], default: Any = None) -> Any:
    """tyro's reading of a command line, or None where it printed the help."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            args = tyro.cli(
                COMMANDS[name].options,
                prog=f'spannorm {name}',
                args=argv,
                config=(tyro.conf.FlagCreatePairsOff,),
                **({} if default is None else {'default': default}),
            )
            check_numbers(name, args)
            return args
        except SystemExit as e:
            if not e.code:
                return None
    raise UserError(f'{name}: {unboxed(said.getvalue())}; `spannorm {name} --help` lists what there is')


def check_numbers(name: str, args: Any) -> None:
    """A command's own numbers are finite and within reach, as those of its configuration are. Raises: UserError."""
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        for one in value if isinstance(value, tuple) else (value,):
            check_number(f'{name}: --{f.name.replace("_", "-")}', one)


def options_of(cls: type, at: str = '') -> Iterator[tuple[str, Any]]:
    """(option, type) of every field below a dataclass, as it is typed: --model.kv-heads."""
    for f in dataclasses.fields(cls):
        if isinstance(f.default_factory, type):
            yield from options_of(f.default_factory, '' if f.name == 'settings' else f'{at}{f.name}.')
        elif Positional not in getattr(f.type, '__metadata__', ()):
            yield f'--{at}{f.name}'.replace('_', '-'), f.type


def check_options(name: str, argv: list[str], known: dict[str, Any]) -> None:
    """Raise UserError for a token that looks like an option and is none, naming the closest one."""
    last = ''
    for token in argv:
        typed, equals, value = token.partition('=')
        option = typed.replace('_', '-')
        last = option if option.startswith('--') else last
        if equals and f'--{option}' in known and get_origin(known.get(last)) is not tuple:  # --vs takes such words
            raise UserError(f'{name}: write --{option} {value} instead of {token}')
        if not option.startswith('--') or option in known or option == '--help':
            continue
        close = difflib.get_close_matches(option, known, n=1)
        hint = f'did you mean {close[0]!r}?' if close else f'`spannorm {name} --help` lists them'
        raise UserError(f'{name} has no option {typed!r}; {hint}')


def is_flag(option: str, kind: Any) -> bool:
    """The commands' own switches take no value; a field of a config that is a bool takes True or False."""
    return kind is bool and '.' not in option


def spell_out(argv: list[str], known: dict[str, Any]) -> Iterator[str]:
    """`--model.tie-embeddings` alone means `--model.tie-embeddings True`; true and false may be written small."""
    for i, token in enumerate(argv):
        before = argv[i - 1].replace('_', '-') if i else ''
        yield token.capitalize() if known.get(before) is bool and token in ('true', 'false') else token
        option, after = token.replace('_', '-'), argv[i + 1] if i + 1 < len(argv) else '--'
        if known.get(option) is bool and not is_flag(option, bool) and after.startswith('--'):
            yield 'True'


def positional(argv: list[str], known: dict[str, Any]) -> str | None:
    """The first argument that is neither an option nor the value of one."""
    rest = iter(argv)
    for token in rest:
        if not token.startswith('-'):
            return token
        option = token.replace('_', '-')
        if '=' not in token and option in known and not is_flag(option, known[option]):
            next(rest, None)
    return None


def unboxed(text: str) -> str:
    """tyro's message as one line, without its title, its frame (drawn in ASCII where stdout is), and the help that follows."""
    lines = [line.strip(' │') for line in text.splitlines()[1:]]
    parts = [list(part) for rule, part in itertools.groupby(lines, lambda line: set(line) <= set('-─╰╯')) if not rule]
    return ' '.join(parts[0]).rstrip('.') if parts else text.strip()
