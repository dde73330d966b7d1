"""Tasks for lm-evaluation-harness out of held-out text, for models too small for the published ones; each has the form of one of those.

pages      whole documents: perplexity per word (wikitext)
last_word  a passage without its last word: its perplexity, and whether it is the likeliest (lambada_openai)
next_line  which of four lines of a document goes on with a passage of it (hellaswag)
"""

import json
import random
import re
import tempfile
from pathlib import Path

from spannorm_jax.data import open_data
from spannorm_jax.errors import UserError
from spannorm_jax.experiment import short
from spannorm_jax.score import load_run
from spannorm_jax.track import plain

EXAMPLES, PER_DOCUMENT = 64, 4
HELD_OUT = 1 << 17  # tokens of the test split that examples are taken from
COLUMNS = ('pages/word_perplexity', 'last_word/perplexity', 'last_word/acc', 'next_line/acc_norm')
ACCURACY = {'aggregation': 'mean', 'higher_is_better': True}
TASKS = {
    'pages': {'output_type': 'loglikelihood_rolling', 'doc_to_text': '', 'doc_to_target': '{{page}}',
              'metric_list': [{'metric': 'word_perplexity', 'aggregation': 'weighted_perplexity', 'higher_is_better': False}]},
    'last_word': {'output_type': 'loglikelihood', 'doc_to_text': '{{passage}}', 'doc_to_target': ' {{word}}', 'target_delimiter': '',
                  'metric_list': [{'metric': 'perplexity', 'aggregation': 'perplexity', 'higher_is_better': False},
                                  {'metric': 'acc'} | ACCURACY]},
    'next_line': {'output_type': 'multiple_choice', 'doc_to_text': '{{passage}}', 'doc_to_choice': 'lines', 'doc_to_target': 'gold',
                  'target_delimiter': '', 'metric_list': [{'metric': 'acc_norm'} | ACCURACY]},
}  # fmt: skip


def last_words(text: str, room: int) -> list[dict]:
    found = [m for m in re.finditer(r' ([A-Za-z]{3,12})\b', text) if m.start() >= room]
    return [{'passage': text[m.start() - room : m.start()], 'word': m[1]} for m in found]


def next_lines(text: str, room: int) -> list[dict]:
    found, rng = [], random.Random(text)
    lines = [m for m in re.finditer(rf'^.{{8,{room}}}$', text, re.M) if not m[0].isspace()]
    for m in lines:
        others = sorted({other[0] for other in lines} - {m[0]})
        if m.start() >= room and len(others) >= 3:
            choices = [m[0], *rng.sample(others, 3)]
            rng.shuffle(choices)
            found.append({'passage': text[m.start() - room : m.start()], 'lines': choices, 'gold': choices.index(m[0])})
    return found


def examples(texts: list[str], room: int) -> dict[str, list[dict]]:
    """By task; of a document at most four each, spread over it. `room`: characters of a passage, and at most of a line."""
    found: dict[str, list[dict]] = {'pages': [{'page': text} for text in texts[: EXAMPLES // PER_DOCUMENT]]}
    for name, make in (('last_word', last_words), ('next_line', next_lines)):
        each = [made[:: -(-len(made) // PER_DOCUMENT)] for text in texts if (made := make(text, room))]
        found[name] = [example for some in each for example in some][:EXAMPLES]
    return found


def write(found: dict[str, list[dict]], folder: Path) -> list[str]:
    """Task files, with their data beside them."""
    for name, rows in found.items():
        data = {'data_files': {'test': str(folder / f'{name}.jsonl')}, 'cache_dir': str(folder / 'cache')}
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows), 'utf-8')
        task = {'task': name, 'dataset_path': 'json', 'dataset_kwargs': data, 'test_split': 'test', 'metadata': {'version': 1}}
        (folder / f'{name}.yaml').write_text(json.dumps(task | TASKS[name]), 'utf-8')
    return [str(folder / f'{name}.yaml') for name in found]


def harness_columns(cfg, folder) -> dict:
    """The columns, and the harness's version, of a finished run; nothing where lm-evaluation-harness is not installed."""
    try:
        from spannorm_jax.harness import run_tasks
    except UserError:
        return {}
    run = load_run(folder, cfg.mesh)
    texts = open_data(cfg.data).eval_batches('test', 1, cfg.data.seq, HELD_OUT).texts()
    with tempfile.TemporaryDirectory() as at:
        found = run_tasks(run, write(examples([run.tokenizer.decode(ids) for ids in texts], cfg.data.seq // 2), Path(at)))
    metrics = {f'{task}/{name}': value for task, row in found['tasks'].items() for name, value in row['metrics'].items()}
    return {f'harness/{name}': short(plain(metrics[name])) for name in COLUMNS} | {'harness': found['harness']}
