"""The `spannorm` command: what is typed -> a dataclass of options.py -> a function of commands.py. Tyro is known here and in options.py.

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
from typing import Any, NamedTuple, get_origin

import tyro
from tyro.conf import Positional

from spannorm_jax import __version__, commands, options
from spannorm_jax.config import Config
from spannorm_jax.errors import BadData, MissingInput, UserError, nearest, unheard
from spannorm_jax.fields import check_number
from spannorm_jax.load import load_config, names

INTERRUPTED = 130
STORAGE = 74
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG)


class Command(NamedTuple):
    options: type
    run: Callable[[Any], int]
    takes_config: bool = False
    takes_configs: bool = False  # any number of them, as `targets`; all get the same settings


COMMANDS = {
    'train': Command(options.Train, commands.train, True),
    'prepare': Command(options.Prepare, commands.prepare),
    'eval': Command(options.Eval, commands.evaluate),
    'verify': Command(options.Verify, commands.verify),
    'generate': Command(options.Generate, commands.generate),
    'export': Command(options.Export, commands.export),
    'import': Command(options.Import, commands.import_),
    'audit': Command(options.Audit, commands.audit, True),
    'plan': Command(options.Plan, commands.plan, True),
    'bench': Command(options.Bench, commands.bench, True),
    'theory': Command(options.Theory, commands.theory),
    'experiment': Command(options.Experiment, commands.experiment),
    'report': Command(options.Report, commands.report),
    'diagnose': Command(options.Diagnose, commands.diagnose, takes_configs=True),
    'topologies': Command(options.Topologies, commands.topologies),
    'doctor': Command(options.Doctor, commands.doctor),
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
        if type(e).__name__ != 'JaxRuntimeError' or 'RESOURCE_EXHAUSTED' not in str(e):
            raise
        return complain(f'out of memory: {str(e).splitlines()[0][:200]}; ask for less at once, or for more devices', UserError.exit_code)
    except OSError as e:
        if e.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # whatever was to be read there is not
            return complain(f'there is no {str(e.filename)[:100]!r}...: {e.strerror}', MissingInput.exit_code)
        if e.errno in (errno.EISDIR, errno.ENOTDIR):
            return complain(f'{str(e.filename)!r} cannot be read as a file: {e.strerror}; mend the folder it lies in', BadData.exit_code)
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
