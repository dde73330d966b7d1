"""What each command of `spannorm` does with its options (the dataclasses of options.py). Results are printed on stdout.

Whatever computes is imported where it is used: jax takes seconds to load, and `--help` must not wait for it.
"""

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spannorm_jax import options
from spannorm_jax.errors import BadData, CheckFailed, UserError
from spannorm_jax.load import define, find_run

if TYPE_CHECKING:
    from rich.table import Table

PROFILED = 4  # steps: enough to see one follow another, few enough to look at


def train(args: options.Train) -> int:
    with preempted_early():
        from spannorm_jax import distributed
        from spannorm_jax.progress import Progress
        from spannorm_jax.score import summary
        from spannorm_jax.train import fit

        with distributed.together():
            with Progress() as progress:
                outcome = fit(args.settings, progress, profile=PROFILED if args.profile else 0)
            if distributed.first():
                print(summary(args.settings, outcome))
        return outcome.exit_code


@contextlib.contextmanager
def preempted_early() -> Iterator[None]:
    """While entered a signal that asks to save ends the process with 75, where `fit` does not listen: it loads, or waits for others.

    Python would call a handler only once the main thread is back from what it waits in, which may be minutes, and in C++. So the signal's
    number goes through a socket to a thread, which leaves unless `fit` has taken the signal over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ours(number: int, frame: Any) -> None:
        """Marks that nobody else has taken the signal over; the thread does what there is to do."""

    def listen() -> None:
        while number := heard.recv(1):  # nothing: the other end is closed
            if signal.getsignal(number[0]) is ours:
                print('spannorm: interrupted before the run began; run the same command again', file=sys.stderr, flush=True)
                os._exit(75)

    heard, tell = socket.socketpair()
    tell.setblocking(False)
    woken = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    before = {n: signal.signal(n, ours) for n in (getattr(signal, name) for name in ('SIGTERM', 'SIGUSR1') if hasattr(signal, name))}
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        tell.close()
        listener.join()
        heard.close()


def prepare(args: options.Prepare) -> int:
    from spannorm_jax import data
    from spannorm_jax.progress import Progress

    with Progress() as progress:
        meta = data.prepare(
            args.source,
            args.dir,
            tokenizer=args.tokenizer,
            text_field=args.text_field,
            workers=args.workers,
            progress=lambda done, total: progress('prepare', {'done': done, 'all': total}),
        )
    if args.json:
        print(meta.to_json(), end='')
        return 0
    print(f'{args.dir}: {meta.source}, tokenizer {meta.tokenizer["name"]}, vocab {meta.tokenizer["vocab"]}, text hash {meta.hash[:12]}')
    for split, s in meta.splits.items():
        print(f'  {split:10} {s.documents:>12,} documents {s.tokens:>15,} tokens {s.bytes:>15,} bytes')
    return 0


def evaluate(args: options.Eval) -> int:
    from spannorm_jax import distributed
    from spannorm_jax.progress import Progress
    from spannorm_jax.score import load_run, score

    for name in ('tokens', 'limit'):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f'eval: --{name} {value} must be at least 1')
    if not args.tasks and (args.task_data, args.limit, args.shots, args.download) != (None, None, None, False):
        raise UserError('eval: --task-data, --limit, --shots and --download belong to --tasks; say which tasks')
    run = run_of(args)
    with distributed.together():
        if args.tasks:
            from spannorm_jax.harness import run_tasks

            loaded, data = load_run(run, args.mesh), None if args.task_data is None else Path(args.task_data)
            found = {'run': str(run), 'step': loaded.step}
            found |= run_tasks(loaded, args.tasks, data, args.limit, args.shots, args.download)
        else:
            what = 'batches' if args.protocol == 'rows' else 'documents'
            with Progress() if distributed.first() else contextlib.nullcontext() as bar:
                tell = lambda done, all: bar and bar.advance('eval', 'evaluating', done, all, f'{done:,} of {all:,} {what}')  # noqa: E731
                found = score(run, args.split, args.tokens, args.source, args.mesh, args.protocol, args.stride, tell)
        speaks = distributed.first()
    if not speaks:
        return 0
    if args.json:
        print_json(found)
    elif args.tasks:
        show_tasks(found)
    else:
        print(f'{found["run"]}, step {found["step"]}, {found["split"]} split of {found["source"]}')
        print(f'  {found["bits_per_byte"]:.4f} bits/byte, {found["loss"]:.4f} nats/token, perplexity {found["perplexity"]:.3f} per token')
        print(f'  perplexity {found["word_perplexity"]:.4g} per word, {found["byte_perplexity"]:.4f} per byte')
        print(f'  {found["tokens"]:,} tokens, {found["words"]:,} words, {found["documents"]:,} documents, {found["bytes"]:,} bytes')
        print(f'  protocol: {found["protocol"]}')
    return 0


def run_of(args: options.Eval | options.Generate | options.Export) -> Path:
    """The folder of the run that a command is about, with a topology of one's own in the table."""
    if args.topology_file is not None:
        define(args.topology_file)
    return find_run(args.run)


def show_tasks(found: dict[str, Any]) -> None:
    table = new_table('task', 'metric', '>value', '>std error', '>examples', '>shots', '>truncated', 'version')
    for name, task in found['tasks'].items():
        for metric, value in task['metrics'].items():
            if metric.endswith('_stderr'):
                continue
            error = task['metrics'].get(f'{metric}_stderr')
            counts = (task['examples'], task['shots'], task['truncated'], task['version'])
            table.add_row(name, metric, f'{value:.4f}', '' if error is None else f'{error:.4f}', *map(str, counts))
    show(table)
    if found['average'] is not None:
        print(f'average of the accuracies of table 1: {found["average"]:.4f}')
    print(
        f'{found["run"]}, step {found["step"]}, lm-evaluation-harness {found["harness"]}' + (', not all examples' if found['limit'] else '')
    )
    print(f'protocol: {found["protocol"]}')


def verify(args: options.Verify) -> int:
    from spannorm_jax.manifest import verify

    found = verify(find_run(args.run))
    if args.json:
        print_json(found)
    else:
        for row in found['checkpoints']:
            print(f'step {row["step"]:>8}  {row["status"]:11}  {row["files"]:>5} files  {row["bytes"]:>15,} bytes')
            print(''.join(f'  {problem}\n' for problem in row['problems']), end='')
        for name in found['leftovers']:
            print(f'left over: {name} (training removes it when it goes on)')
        print(f'{sum(r["bytes"] for r in found["checkpoints"]) / 1e6:,.1f} MB in {found["seconds"]:.1f} s')
    if bad := [row for row in found['checkpoints'] if row['problems']]:
        raise BadData('; '.join(f'step {row["step"]} of {args.run!r} is damaged: {row["problems"][0]}' for row in bad))
    return 0


def generate(args: options.Generate) -> int:
    from spannorm_jax import generate as g
    from spannorm_jax.score import load_run

    sampling = g.Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    cfg, lm, params, step, tokenizer, mesh = load_run(run_of(args), args.mesh)
    g.check(args.prompt, args.max_tokens, args.seed, args.stop)
    alone = len(args.prompt) == 1 and not args.json
    if alone:
        print(args.prompt[0], end='', flush=True)

    def say(row, piece):
        if alone:
            print(piece, end='', flush=True)

    made = g.generate(lm, params, tokenizer, args.prompt, args.max_tokens, sampling, args.seed, args.stop, say, mesh)
    if alone:
        print()
    elif args.json:
        texts = [c._asdict() for c in made.completions]
        print_json({'run': args.run, 'step': step, 'seed': args.seed, 'completions': texts, 'tokens_per_s': made.tokens_per_s})
    else:
        for c in made.completions:
            print(f'--- {c.prompt!r} ({c.finish})\n{c.prompt}{c.text}')
    count = sum(len(c.tokens) for c in made.completions)
    longest = max(1 + len(tokenizer.encode(c.prompt)) + len(c.tokens) for c in made.completions)
    beyond = f'; longer than the {cfg.data.seq} tokens of a row in training' if longest > cfg.data.seq else ''
    speed = f', {made.tokens_per_s:.0f} tokens/s' if math.isfinite(made.tokens_per_s) else ''  # of one or two tokens there is none
    print(f'step {step}, {count} tokens{speed}{beyond}', file=sys.stderr)
    return 0


def export(args: options.Export) -> int:
    from spannorm_jax.config import MeshConfig
    from spannorm_jax.interop import card, save_hf
    from spannorm_jax.interop.huggingface import default_type
    from spannorm_jax.score import load_run

    if args.shard_gb <= 0:
        raise UserError(f'export: --shard-gb {args.shard_gb} must be above 0')
    run = run_of(args)
    loaded = load_run(run, MeshConfig())
    beside = card.beside(run, loaded.cfg, loaded.tokenizer, loaded.step, args.model_type or default_type(loaded.cfg.model))
    told: dict[str, Any] = {
        'model_type': args.model_type,
        'positions': loaded.cfg.data.seq,
        'shard_bytes': int(min(args.shard_gb * 1e9, sys.maxsize)),
        'beside': beside,
    }
    kind = save_hf(loaded.cfg.model, loaded.params, args.dir, tokenizer=loaded.tokenizer, **told)
    if args.json:
        print_json({'run': args.run, 'step': loaded.step, 'dir': args.dir, 'model_type': kind})
    else:
        print(f'{args.dir}: {kind}, step {loaded.step} of {args.run}')
    return 0


def import_(args: options.Import) -> int:
    from spannorm_jax.interop.runs import import_run
    from spannorm_jax.rundir import model_line

    if args.seq is not None and args.seq < 1:
        raise UserError(f'import: --seq {args.seq} must be at least 1')
    cfg = import_run(Path(args.dir), Path(args.run), args.seq)
    if args.json:
        print_json({'dir': args.dir, 'run': args.run, 'topology': cfg.model.topology, 'tokenizer': cfg.data.tokenizer})
    else:
        print(f'{args.run}: {model_line(cfg).rsplit(", ", 1)[0]}, tokenizer {Path(cfg.data.tokenizer).name}')
    return 0


def audit(args: options.Audit) -> int:
    from spannorm_jax.audit import audit, grouped, span_of

    rows = list(audit(args.settings))
    if args.json:
        print_json([row._asdict() for row in rows])
    else:
        heads = ('parameter', 'layers', 'role', 'shape', '>fan-in', '>mean', '>std', '>intended', 'decays', 'dtype', '>bytes/device', '')
        table = new_table(*heads)
        for (name, role, shape, fan_in, decays, dtype, size), group in grouped(rows).items():
            mean, std, intended = (span_of(getattr(r, field) for r in group) for field in ('mean', 'std', 'intended_std'))
            if any(r.intended_mean for r in group):
                intended = f'{span_of(r.intended_mean for r in group)} + {intended}'
            cells = (name, len(group), role, ' '.join(map(str, shape)), fan_in, mean, std, intended, 'yes' if decays else '', dtype)
            verdict = '' if all(r.ok for r in group) else 'MISMATCH'
            table.add_row(*map(str, cells), f'{size * len(group):,}', verdict)
        show(table)
        count = sum(math.prod(row.shape) for row in rows)
        print(f'{count:,} parameters in {len(rows)} arrays, {sum(r.bytes_per_device for r in rows):,} bytes per device')
    if bad := [row.name for row in rows if not row.ok]:
        raise CheckFailed(f'{len(bad)} of {len(rows)} parameters are not what their recipe intends: {", ".join(bad[:10])}')
    return 0


def plan(args: options.Plan) -> int:
    from spannorm_jax.chips import FORMS, parse_chips

    if not args.chips:
        raise UserError(f'plan: say for what with --chips; {FORMS}')
    chips = parse_chips(args.chips)
    if args.compiles < 1:
        raise UserError(f'plan: --compiles {args.compiles} must be at least 1')

    import jax

    jax.config.update('jax_platforms', 'cpu')  # nothing runs here; what is here is not asked for
    from spannorm_jax.plan import plan
    from spannorm_jax.report import lines
    from spannorm_jax.search import search

    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    made = search(args.settings, chips, args.compiles, tell) if args.search else plan(args.settings, chips)
    if args.json:
        print_json(made.to_json())
    else:
        print('\n'.join(lines(made)))
    if not made.fits:
        raise CheckFailed(f'{made.name} does not fit {made.chips}: {made.why}; more chips, another mesh or remat (--search) may')
    return 0


def bench(args: options.Bench) -> int:
    from spannorm_jax.bench import MFU, bench, variants

    found = bench(variants(args.settings, args.vs), args.rounds, lambda text: print(text, file=sys.stderr))
    if args.json:
        rows = [m._asdict() | {'speed': m.speed and m.speed._asdict()} for m in found]
        print_json(rows[0] | {'mfu_formula': MFU, 'variants': rows[1:]})
        return 0
    table = new_table('variant', '>tokens/s', '>step ms', '>compile s', '>peak MB', '>MFU', '>data tokens/s', '>speed over base')
    for m in found:
        speed = '' if m.speed is None else f'{m.speed.mean:.3f} [{m.speed.low:.3f}, {m.speed.high:.3f}]'
        mfu = 'unknown' if m.mfu is None else f'{m.mfu:.1%}'
        cells = (
            f'{m.tokens_per_s:,.0f}',
            f'{m.step_ms:.1f}',
            f'{m.compile_s:.1f}',
            f'{m.peak_bytes / 1e6:.1f}',
            mfu,
            f'{m.data_tokens_per_s:,.0f}',
        )
        table.add_row(m.name, *cells, speed)
    show(table)
    print(f'step: median of {args.rounds}, in turn; peak: of a device, as compiled; speed: ratio of tokens/s, 95% interval over rounds')
    print(f'{MFU}; {found[0].flops_per_token:,.0f} FLOPs per token')
    return 0


def experiment(args: options.Experiment) -> int:
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f'experiment: --jobs {args.jobs} must be at least 1')
    if args.together is not None and args.together < 1:
        raise UserError(f'experiment: --together {args.together} must be at least 1')
    import jax

    jax.config.update('jax_platforms', 'cpu')  # the runs compute, in processes of their own: this one must not take their devices
    from spannorm_jax import launchers, sweep
    from spannorm_jax.experiment import known, load_experiment, load_rows, result_path
    from spannorm_jax.progress import Progress

    results = Path(args.results)
    if args.id is None:
        rows = [sweep.state(load_experiment(id, args.root), args.scale, results) for id in known()]
        if args.json:
            print_json(rows)
            return 0
        table = new_table('id', 'what', '>runs', '>core-min', 'state')
        for r in rows:
            cost = f'{r["minutes_spent"]:.0f}' + (f' + about {r["minutes_left"]:.0f}' if r['minutes_left'] else '')
            table.add_row(r['id'], r['title'], str(r['runs']), cost, r['state'])
        show(table)
        print(f'scale {args.scale}; runs that experiments share are trained once, and counted in each')
        return 0
    exp = load_experiment(args.id, args.root)
    path = result_path(results, args.scale, exp.id)
    if args.redraw:
        rows = load_rows(path)
        sweep.draw(exp, rows, path.with_suffix('.png'))
    elif args.configs or args.launcher != 'local':
        exp = sweep.with_rows(exp, results, args.scale)
        todo = sweep.missing(exp, exp.all_runs(args.scale))
        configs = sweep.write_configs(todo)
        if configs and args.launcher != 'local':
            print(launchers.launch(args.launcher, exp.id, args.scale, configs, args.submit))
        else:
            print('\n'.join(map(str, configs)) if configs else f'{exp.id}: no run is missing at scale {args.scale}')
        return 0
    else:
        with Progress() as progress:
            rows = sweep.run(exp, args.scale, results, args.jobs, lambda *now: progress.advance('sweep', exp.id, *now), args.together)
    if rows is None:
        print(f'spannorm: {exp.id}: interrupted, all runs have saved; run the same command again to go on', file=sys.stderr)
        return sweep.INTERRUPTED
    if args.json:
        print_json(rows)
        return 0
    status, reason = exp.verdict(rows)
    lost = sum(row['status'] == 'diverged' for row in rows)
    print(f'{exp.id}, scale {args.scale}: {len(rows)} runs, {lost} diverged, {sum(row["minutes"] for row in rows):.1f} core-minutes')
    print(f'  {exp.question}\n  {status}: {reason}\n  rows: {path}\n  figure: {path.with_suffix(".png")}')
    return 0


def report(args: options.Report) -> int:
    from spannorm_jax import results_page
    from spannorm_jax.checkpoint import disk_errors

    folder = Path(args.results)
    pages = {args.out: results_page.html_page(folder)}
    if args.markdown is not None:
        pages[args.markdown] = results_page.markdown_page(folder, os.path.relpath(folder, Path(args.markdown).parent))
    for name, text in pages.items():
        with disk_errors('write', Path(name)):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, 'utf-8')
    found = list(results_page.results(folder))
    if args.json:
        print_json([r.verdict._asdict() | {'id': r.exp.id, 'scale': r.scale, 'runs': len(r.rows), 'minutes': r.minutes} for r in found])
        return 0
    for r in found:
        print(f'{r.exp.id:8} {r.scale:6} {r.verdict.status:15} {r.exp.title}')
    print(f'{len(found)} results: {", ".join(pages)}')
    return 0


def theory(args: options.Theory) -> int:
    from spannorm_jax.theory import show as shown
    from spannorm_jax.theory import theory

    found = theory(args.only, args.depths, args.seeds, args.activations, lambda text: print(text, file=sys.stderr))
    if args.json:
        print_json(shown.plain(found))
        return 0
    for title, heads, rows in (*shown.comparison(found), *shown.tables(found)):
        table = new_table(*heads)
        for row in rows:
            table.add_row(*row)
        print(f'{title} (mean and 95% interval over {args.seeds} seeds)')
        show(table)
    return 0


def diagnose(args: options.Diagnose) -> int:
    from spannorm_jax.diagnose import as_json, diagnose

    if not args.targets:
        raise UserError('diagnose needs at least one RUN_OR_CONFIG')
    configs = [args.read(target) for target in args.targets]
    found = diagnose(args.targets, Path(args.dir), args.only, args.rows, lambda text: print(text, file=sys.stderr), configs)
    if args.json:
        print_json(as_json(found))
        return 0
    for run in found['runs']:
        print(f'{run["name"]}: {run["label"]}, step {run["step"]}, loss {run["loss on the probe"]:.4f} on {run["tokens"]:,} tokens')
    print(Path(args.dir) / 'index.html')
    return 0


def topologies(args: options.Topologies) -> int:
    from spannorm_jax import catalog

    rows = catalog.rows()
    if args.json:
        print_json(rows)
    elif args.markdown:
        print(catalog.markdown(rows))
    else:
        table = new_table('name', 'equation', 'norm sites', '>own', 'options', 'aliases', 'source')
        for row in rows:
            lists = [', '.join(row[key]) for key in ('norm_sites', 'options', 'aliases')]
            table.add_row(row['name'], row['equation'], lists[0], str(len(row['extra_parameters']) or ''), *lists[1:], row['source'])
        show(table)
        print('own: number of parameters besides norms and matrices; --json names them')
    return 0


def doctor(args: options.Doctor) -> int:
    from spannorm_jax.doctor import examine

    found = examine()
    if args.json:
        print_json(found)
        return 0
    print(f'python {found["python"]} on {found["platform"]}, {found["cpus"]} CPUs')
    print('  ' + ', '.join(f'{name} {v or "absent"}' for name, v in found['versions'].items()))
    kinds = [d['kind'] for d in found['devices']]
    counts = ', '.join(f'{kinds.count(k)} x {k}' for k in dict.fromkeys(kinds))
    print(f'devices: {found["backend"] or "none"}: {counts or found["backend_error"]}')
    for a in found['accelerators']:
        print(f'{a["kind"]}: {a["what"]}: ' + ('used' if a['used'] else f'NOT USED: {a["why"]}; {a["mend"]}'))
    if not found['accelerators']:
        print('accelerators: the system shows none')
    print(f'compilation cache: {found["compilation_cache"]}')
    print(f'disk: {found["disk"]["free_bytes"] / 1e9:.1f} GB free in {found["disk"]["folder"]}')
    for extra, packages in found['extras'].items():
        missing = [name for name, v in packages.items() if v is None]
        print(f'extra {extra}: ' + (f"lacks {', '.join(missing)} (pip install 'spannorm-jax[{extra}]')" if missing else 'complete'))
    return 0


def print_json(value: Any) -> None:
    """JSON has no NaN and no infinity: they become null."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_table(*heads: str) -> 'Table':
    """An empty table; a head that begins with > is of a column of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head.removeprefix('>'), justify='right' if head.startswith('>') else 'left', overflow='fold')
    return table


def show(table: 'Table') -> None:
    """On a terminal as wide as that is, elsewhere as wide as the table needs, so that every row is one line to search in."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        needs = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        console = Console(highlight=False, markup=False, width=needs)
    with console.capture() as captured:
        console.print(table)
    print('\n'.join(line.rstrip() for line in captured.get().strip('\n').splitlines()))
