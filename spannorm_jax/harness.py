"""Our models in lm-evaluation-harness (extra `eval`): its tasks, prompts and metrics, our weights, tokenizer and devices."""

import contextlib
import functools
import itertools
import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from spannorm_jax.errors import BadData, MissingInput, UserError, nearest
from spannorm_jax.generate import Sampling, generate
from spannorm_jax.likelihood import Piece, Scorer, windows
from spannorm_jax.score import LoadedRun

try:
    import datasets
    import huggingface_hub
    from lm_eval.api.metrics import mean
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
except ImportError as e:
    raise UserError(f"--tasks needs lm-evaluation-harness: pip install 'spannorm-jax[eval]' ({e})") from e

# The columns of the paper's table 1 by task and metric. It does not name its metrics: acc_norm is what its HellaSwag and ARC numbers look
# like, and what is usual for these two.
COLUMNS = (
    ('wikitext', 'word_perplexity'),
    ('lambada_openai', 'perplexity'),
    ('lambada_openai', 'acc'),
    ('piqa', 'acc'),
    ('hellaswag', 'acc_norm'),
    ('sciq', 'acc'),
    ('arc_challenge', 'acc_norm'),
    ('winogrande', 'acc'),
)
PRESETS = {'paper': tuple(dict.fromkeys(task for task, _ in COLUMNS))}
PROTOCOL = (
    "every text begins with the tokenizer's beginning of a document, once; what does not fit {seq} tokens loses its beginning; rolling "
    'log-likelihoods go by windows of {seq} tokens, each token counted once, the end of a text not at all; experts drop no token'
)
GENERATED = 256  # tokens, where a task does not say
SPLITS = {'training': 'train', 'validation': 'validation', 'test': 'test'}
SAMPLING = ('temperature', 'top_k', 'top_p', 'min_p')


class Harness(TemplateLM):
    """A run as a model of the harness. `truncated` counts, by task, the requests that lost tokens of their beginning."""

    def __init__(self, run: LoadedRun, seed: int = 0):
        super().__init__()
        self.run, self.seed, self.truncated = run, seed, Counter()
        self.rows = run.cfg.data.batch // run.cfg.optim.accumulate
        self.score = Scorer(run.lm, run.params, run.mesh, run.cfg.data.seq, self.rows, run.cfg.optim.loss_chunk)
        self.names: list[str] = []  # the task of each request of log-likelihood under way

    @property
    def eot_token_id(self) -> int:
        return self.run.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        return self.run.tokenizer.bos

    @property
    def max_length(self) -> int:
        return self.run.cfg.data.seq

    @property
    def tokenizer_name(self) -> str:
        return self.run.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, after the beginning of a document unless `add_special_tokens` is False."""
        before = [] if add_special_tokens is False else [self.run.tokenizer.bos]
        return [*before, *self.run.tokenizer.encode(string).tolist()]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self.names = [str(request.task_name) for request in requests]
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        pieces = []
        for name, (_, context, continuation) in zip(self.names, requests, strict=True):
            if len(continuation) > self.max_length:
                raise UserError(f'task {name!r} has a continuation of {len(continuation)} tokens, more than the {self.max_length} of a row')
            ids = np.array([*context, *continuation], np.int32)
            self.truncated[name] += len(ids) > self.max_length + 1
            pieces.append(Piece(ids[-self.max_length - 1 :], len(continuation)))
        found = dict(self.score(pieces))
        return [(-float(found[i].nats.sum(dtype=np.float64)), found[i].greedy) for i in range(len(pieces))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts: all tokens, each once, without the end."""
        texts = [np.array(self.tok_encode(request.args[0]), np.int32) for request in requests]
        found = [list(windows(ids, self.max_length, self.max_length)) for ids in texts]
        of = [i for i, pieces in enumerate(found) for _ in pieces]
        total = [0.0] * len(texts)
        for i, scored in self.score(itertools.chain(*found)):
            total[of[i]] -= float(scored.nats.sum(dtype=np.float64))
        return total

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Texts up to a stop string, which is left out, or the end of the document; requests of equal settings and like length together."""
        found: dict[int, str] = {}
        length = [len(self.tok_encode(request.args[0])) for request in requests]
        key = lambda i: json.dumps(requests[i].args[1], sort_keys=True)  # noqa: E731
        order = sorted(range(len(requests)), key=lambda i: (key(i), length[i]))
        for _, group in itertools.groupby(order, key):
            same = list(group)
            sampling, stop, limit = generation(str(requests[same[0]].task_name), requests[same[0]].args[1], self.max_length)
            for lo in range(0, len(same), self.rows):
                batch = same[lo : lo + self.rows]
                for i in batch:
                    self.truncated[str(requests[i].task_name)] += length[i] > self.max_length - limit
                prompts = [requests[i].args[0] for i in batch]
                prompts += prompts[-1:] * (self.rows - len(batch))  # one shape for all
                run, room, seed = self.run, self.max_length - limit, self.seed + lo  # a text asked for twice is drawn twice
                made = generate(run.lm, run.params, run.tokenizer, prompts, limit, sampling, seed, stop, mesh=run.mesh, room=room)
                found |= {i: c.text for i, c in zip(batch, made.completions, strict=False)}
        return [found[i] for i in range(len(requests))]


def generation(task: str, said: dict[str, Any], seq: int) -> tuple[Sampling, list[str], int]:
    """How a task wants its texts made: sampling rules, stop strings, most tokens. Raises: UserError for what we cannot do."""
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(said, GENERATED))
    stop, limit, sample = kwargs.pop('until', None) or [], kwargs.pop('max_gen_toks'), kwargs.pop('do_sample')
    rules = {name: kwargs.pop(name) for name in SAMPLING if kwargs.get(name) is not None}
    if kwargs:
        raise UserError(f'task {task!r} asks for {", ".join(sorted(kwargs))}, which is not implemented; known: {", ".join(SAMPLING)}')
    if limit >= seq:
        raise UserError(f'task {task!r} wants up to {limit} tokens, which leaves no room for its texts in rows of {seq} tokens')
    sampling = Sampling(**rules) if sample else Sampling(temperature=0.0)
    return sampling, [stop] if isinstance(stop, str) else [s for s in stop if s], limit


def run_tasks(
    run: LoadedRun,
    names: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    download: bool = False,
) -> dict[str, Any]:
    """{tasks, groups, columns, average, protocol, bos, seq, harness, limit}: what the harness's tasks say of a run.

    names: tasks or groups of the harness, `paper` (the columns of the paper's table 1), or paths of task files. data: a folder whose
    <task>/{train,validation,test}.jsonl take the place of that task's own data. limit: only the first so many examples of a task.
    shots: solved examples in each prompt, None as the task says. Without `download` nothing is fetched: what is not here is an error.

    tasks: by name {metrics, examples, shots, version, truncated}. A metric that is a mean has its standard error beside it.

    Raises: UserError (unknown task, what a task wants and we cannot), MissingInput (data that is not here), BadData.
    """
    asked = [task for name in names for task in PRESETS.get(name, (name,))]
    with contextlib.nullcontext() if download else offline():
        loaded = load_tasks(asked, data)
        means = {name: {metric for metric, fn in task.aggregation().items() if fn is mean} for name, task in loaded['tasks'].items()}
        for task in loaded['tasks'].values():
            if shots is not None or task.get_config('num_fewshot') is None:
                task.set_config(key='num_fewshot', value=shots or 0)
            check_shots(task)
            task.set_fewshot_seed(seed=0)
            task.aggregation = functools.partial(tolerant, task.aggregation())
        model = Harness(run)
        found: Any = evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=True)  # pyright: ignore
    tasks = {}
    for name in loaded['tasks']:
        tasks[name] = {
            'metrics': metrics(found['results'][name], means[name], found['samples'][name]),
            'examples': found['n-samples'][name]['effective'],
            'shots': found['n-shot'][name],
            'version': found['versions'].get(name),
            'truncated': model.truncated[name],
        }
    groups = {name: metrics(row) for name, row in found.get('groups', {}).items()}
    columns = {f'{task}/{metric}': tasks[task]['metrics'].get(metric) for task, metric in COLUMNS if task in tasks}
    accuracies = [value for name, value in columns.items() if '/acc' in name]
    whole = len(columns) == len(COLUMNS) and None not in accuracies
    return {
        'tasks': tasks,
        'groups': groups,
        'columns': columns,
        'average': sum(accuracies) / len(accuracies) if whole else None,
        'limit': limit,
        'seq': model.max_length,
        'bos': model.prefix_token_id,
        'harness': version('lm_eval'),
        'protocol': PROTOCOL.format(seq=model.max_length),
    }


def check_shots(task: Any) -> None:
    """Raises: MissingInput where the solved examples would be drawn from those that are asked, the one being asked among them."""
    shots, name = task.config.num_fewshot, task.config.task
    apart = task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs())
    if shots and not apart and task.fewshot_cfg.split is None and task.fewshot_cfg.samples is None:
        raise MissingInput(
            f'task {name!r}: the {shots} solved examples of a prompt must not be among those that are asked; put others into '
            f'DIR/{name}/train.jsonl and give --task-data DIR, or take --shots 0'
        )


def tolerant(aggregation: dict[str, Any]) -> dict[str, Any]:
    """The same functions, infinite where a number is too large: the perplexity of a bad model is no reason to lose all others."""

    def one(aggregate: Any, items: Any) -> Any:
        try:
            return aggregate(items)
        except OverflowError:
            return math.inf

    return {name: functools.partial(one, aggregate) for name, aggregate in aggregation.items()}


def metrics(row: dict[str, Any], means: Collection[str] = (), samples: Sequence[dict[str, Any]] = ()) -> dict[str, float]:
    """The metrics of a task, `name` or `name,filter`; of `means` also name_stderr, the standard error over the examples.

    The harness itself would bootstrap it, for minutes, in forked processes.
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        name, comma, rule = key.partition(',')
        if not comma or '_stderr' in name or not isinstance(value, int | float):
            continue
        label = name if rule == 'none' else key
        found[label] = float(value)
        each = [float(s[name]) for s in samples if s['filter'] == rule and name in s] if name in means else []
        if len(each) > 1:
            found[f'{label}_stderr'] = statistics.stdev(each) / math.sqrt(len(each))
    return found


def load_tasks(names: Sequence[str], data: Path | None) -> dict[str, dict[str, Any]]:
    """{tasks, groups, group_map} for the harness. Raises: UserError (no such task), MissingInput (what is not here), BadData (no task)."""
    if data is not None and not data.is_dir():
        raise MissingInput(f'--task-data {str(data)!r} is not a folder')
    manager = manager_of(not all(is_file(name) for name in names))
    loaded: dict[str, dict[str, Any]] = {'tasks': {}, 'groups': {}, 'group_map': {}}
    for name in names:
        if is_file(name) and not Path(name).is_file():
            raise MissingInput(f'task file {name!r} does not exist')
        if not is_file(name) and name not in manager.all_tasks:
            raise UserError(f'unknown task {name!r}; {nearest(name, [*manager.all_tasks, *PRESETS])} (or a task file, by its path)')
        try:
            with spec(manager, name, data) as wanted:
                for kind, found in manager.load([wanted]).items():
                    loaded[kind] |= found
        except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetsError) as e:
            raise MissingInput(
                f'task {name!r}: its data is not on this disk ({said(e)}); put it into DIR/{Path(name).stem}/test.jsonl and give '
                f'--task-data DIR, or allow the download with --download'
            ) from e
        except Exception as e:  # a task file can hold and call anything
            raise BadData(f'task {name!r} does not load: {type(e).__name__}: {said(e)}') from e
    return loaded


@functools.cache
def manager_of(own: bool) -> Any:
    """Who knows tasks by name. The harness's own are some ten thousand files, which take their time and are not always needed."""
    return TaskManager(include_defaults=own)


def is_file(name: str) -> bool:
    return Path(name).suffix in ('.yaml', '.yml')


def said(e: Exception) -> str:
    return ' '.join(str(e).split())[:300]


@contextlib.contextmanager
def spec(manager: Any, name: str, data: Path | None) -> Iterator[str]:
    """What the harness is to load for a name: itself, or a task file that includes it and reads the files of data/<name> in its place."""
    files = {} if data is None else {p.stem: str(p.resolve()) for p in sorted((data / name).glob('*.jsonl'))}
    if not files:
        yield name
        return
    splits = {f'{kind}_split': split if split in files else None for kind, split in SPLITS.items()}
    own = {'include': str(manager.task_index[name].yaml_path), 'task': name, 'dataset_path': 'json', 'dataset_name': None}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f'{name}.yaml'
        file.write_text(json.dumps(own | {'dataset_kwargs': {'data_files': files}, 'fewshot_split': None} | splits))
        yield str(file)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """While entered, neither the hub's client nor the data sets' loader uses the network."""
    places = ((huggingface_hub.constants, 'HF_HUB_OFFLINE'), (datasets.config, 'HF_HUB_OFFLINE'), (datasets.config, 'HF_DATASETS_OFFLINE'))
    before = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, True)
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
