"""Runs in lm-evaluation-harness: requests against one forward pass per token, tasks from local files, and its own Hugging Face backend."""

import json
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip('lm_eval')

from test_likelihood import Oracle  # noqa: E402

from spannorm_jax import cli, experiment, generate  # noqa: E402
from spannorm_jax.config import MeshConfig  # noqa: E402
from spannorm_jax.errors import MissingInput, UserError  # noqa: E402
from spannorm_jax.harness import COLUMNS, PRESETS, Harness, datasets, generation, huggingface_hub, load_tasks, offline, run_tasks  # noqa: E402
from spannorm_jax.score import load_run  # noqa: E402

pytestmark = pytest.mark.filterwarnings('ignore')  # the harness's and its libraries' own

CHOICES = [{'q': 'document', 'options': [' 1', ' 12 ', ' no'], 'gold': 1}, {'q': 'ment 2 d', 'options': ['o', 'x'], 'gold': 0}]
LAST = [{'text': 'document 7 document'}, {'text': 'a b'}, {'text': 'document and so on and on 5'}]
PAGES = [{'page': 'x'}, {'page': 'document 5 document 5 and a lot more text\n'}]
ASKED = [{'q': 'docum', 'a': 'ent'}, {'q': 'a question longer than there is room for', 'a': 'x'}]
MEANS = [{'metric': name, 'aggregation': 'mean', 'higher_is_better': True} for name in ('acc', 'acc_norm', 'exact_match')]
TASKS = {
    'choice': (CHOICES, {'output_type': 'multiple_choice', 'doc_to_text': '{{q}}', 'doc_to_choice': 'options', 'doc_to_target': 'gold',
                         'target_delimiter': '', 'metric_list': MEANS[:2]}),
    'last': (LAST, {'output_type': 'loglikelihood', 'doc_to_text': "{{text.split(' ')[:-1]|join(' ')}}",
                    'doc_to_target': "{{' '+text.split(' ')[-1]}}", 'target_delimiter': '',
                    'metric_list': [{'metric': 'perplexity', 'aggregation': 'perplexity', 'higher_is_better': False}, MEANS[0]]}),
    'rolling': (PAGES, {'output_type': 'loglikelihood_rolling', 'doc_to_text': '', 'doc_to_target': '{{page}}',
                        'metric_list': [{'metric': m} for m in ('word_perplexity', 'byte_perplexity', 'bits_per_byte')]}),
    'making': (ASKED, {'output_type': 'generate_until', 'doc_to_text': '{{q}}', 'doc_to_target': '{{a}}',
                       'generation_kwargs': {'until': ['\n\n'], 'max_gen_toks': 5}, 'metric_list': [MEANS[2]]}),
}  # fmt: skip


@pytest.fixture(scope='module')
def run(trained):
    return load_run(pathlib.Path(trained), MeshConfig(devices=1))


@pytest.fixture(scope='module')
def oracle(run):
    return Oracle(run.lm, run.params)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Paths of the task files by name."""
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'arrow')
    for name, (rows, task) in TASKS.items():
        (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        data = {'dataset_path': 'json', 'dataset_kwargs': {'data_files': {'test': str(tmp_path / f'{name}.jsonl')}}, 'test_split': 'test'}
        (tmp_path / f'{name}.yaml').write_text(json.dumps({'task': name} | data | task | {'metadata': {'version': 3.0}}))
    return {name: str(tmp_path / f'{name}.yaml') for name in TASKS}


def request(*args):
    return SimpleNamespace(args=args, task_name='asked')


def likelihood(oracle, context, continuation, seq=16):
    """Of bytes after the beginning of a document, the first of all cut off where there are more than seq + 1; a space at the end of the
    context belongs to what is predicted, as the harness has it."""
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    ids, n = [256, *context.encode(), *continuation.encode()][-seq - 1 :], len(continuation.encode())
    found = [oracle(ids[:i], ids[i]) for i in range(len(ids) - n, len(ids))]
    return sum(x for x, _ in found), all(best == ids[len(ids) - n + i] for i, (_, best) in enumerate(found))


def rolling(oracle, text, seq=16):
    ids, total, done = [256, *text.encode()], 0.0, 1
    while done < len(ids):
        upto = min(done + seq, len(ids))
        lo = max(0, upto - seq - 1)
        total, done = total + sum(oracle(ids[lo:i], ids[i])[0] for i in range(done, upto)), upto
    return total


def test_loglikelihood_requests(run, oracle):
    """An empty context, spaces between, a context that is too long (its beginning is lost, and that is counted), the greedy answer."""
    starts = ('doc', 'd', 'x', 'do', 'me', '5 ')
    context, answer = next((c, chr(best)) for c in starts if (best := oracle([256, *c.rstrip().encode()], 0)[1]) < 128)
    asked = [('', 'document'), ('document ', '3'), (context, answer), ('a context of twenty', ' and'), ('é', '€')]
    model = Harness(run)
    got = model.loglikelihood([request(*pair) for pair in asked])
    for (value, best), pair in zip(got, asked, strict=True):
        want, greedy = likelihood(oracle, *pair)
        assert value == pytest.approx(want, rel=1e-5) and best is greedy
    assert got[2][1] and not got[3][1] and model.truncated == {'asked': 1}
    with pytest.raises(UserError, match='continuation of 17 tokens'):
        model.loglikelihood([request('x', 'y' * 17)])


def test_rolling_requests(run, oracle):
    """Texts of no, one, just a row's and several rows' tokens: the beginning once, every window as long as a row, the end not counted."""
    texts = ['', 'a', 'document 3 docum', 'document 3 docume', 'document 3 document 3 document 3 document 3 ']
    got = Harness(run).loglikelihood_rolling([request(text) for text in texts])
    np.testing.assert_allclose(got, [rolling(oracle, text) for text in texts], rtol=1e-5)
    assert got[0] == 0


def test_generation_requests(run, oracle):
    """Greedy texts one token at a time, of two kinds of request in any order; a context beyond the room loses its beginning."""
    model = Harness(run)
    short, long = {'until': ['zz'], 'max_gen_toks': 4}, {'until': 'zz', 'max_gen_toks': 6, 'do_sample': False}
    asked = [('doc', short), ('a context of twenty!', long), ('x', short), ('document 1', long), ('doc', long)]
    got = model.generate_until([request(*pair) for pair in asked])
    for text, (context, said) in zip(got, asked, strict=True):
        n = said['max_gen_toks']
        ids, made = [256, *context.encode()][-(16 - n) :], []
        while len(made) < n and (not made or made[-1] != 256):
            made.append(oracle([*ids, *made], 0)[1])
        assert text == bytes(t for t in made if t < 256).decode(errors='replace')
    assert model.truncated == {'asked': 2}
    sampled = {'until': [], 'max_gen_toks': 5, 'do_sample': True, 'temperature': 1.0}
    made = model.generate_until([request('doc', sampled)] * 6)
    assert made == model.generate_until([request('doc', sampled)] * 6) and len(set(made)) == 6


def test_what_a_task_may_ask_of_generation():
    assert generation('t', {'until': 'a', 'max_new_tokens': 3}, 16) == (generate.Sampling(temperature=0.0), ['a'], 3)
    rules = {'do_sample': True, 'temperature': 0.5, 'top_p': 0.9, 'max_gen_toks': 2, 'until': ['a', '']}
    assert generation('t', rules, 16) == (generate.Sampling(temperature=0.5, top_p=0.9), ['a'], 2)
    for said, match in (
        ({'num_beams': 4, 'max_gen_toks': 2}, 'num_beams, which is not implemented'),
        ({}, '256 tokens, which leaves no room'),
    ):
        with pytest.raises(UserError, match=match):
            generation('t', said, 16)


def test_tasks_from_local_files(run, oracle, files):
    """Every metric from the oracle's numbers, and what goes with them: examples, shots, version, truncations, BOS, length."""
    found = run_tasks(run, list(files.values()))
    best, normed = [], []
    for row in CHOICES:
        values = [likelihood(oracle, row['q'], option)[0] for option in row['options']]
        best.append(int(np.argmax(values)) == row['gold'])
        normed.append(int(np.argmax([v / len(o) for v, o in zip(values, row['options'], strict=True)])) == row['gold'])
    last = [likelihood(oracle, *split) for split in (('document 7', ' document'), ('a', ' b'), ('document and so on and on', ' 5'))]
    pages = [row['page'] for row in PAGES]
    nats, words, count = -sum(rolling(oracle, p) for p in pages), 1 + 10, sum(map(len, pages))
    want = {
        'choice': {'acc': np.mean(best), 'acc_norm': np.mean(normed)},
        'last': {'perplexity': math.exp(-np.mean([x for x, _ in last])), 'acc': np.mean([greedy for _, greedy in last])},
        'rolling': {'word_perplexity': math.exp(nats / words), 'byte_perplexity': math.exp(nats / count)},
    }
    want['rolling']['bits_per_byte'] = math.log2(want['rolling']['byte_perplexity'])
    for name, metrics in want.items():
        got = found['tasks'][name]
        for metric, value in metrics.items():
            assert got['metrics'][metric] == pytest.approx(value, rel=2e-4), (name, metric)
        assert (got['examples'], got['shots'], got['version']) == (len(TASKS[name][0]), 0, 3.0)
    assert {name: task['truncated'] for name, task in found['tasks'].items()} == {'choice': 0, 'last': 2, 'rolling': 0, 'making': 1}
    assert found['tasks']['choice']['metrics']['acc_stderr'] == pytest.approx(np.std(best, ddof=1) / math.sqrt(2))
    assert (found['bos'], found['seq'], found['columns'], found['average']) == (256, 16, {}, None)
    assert 'once' in found['protocol'] and found['harness'].startswith('0.')


def test_a_model_too_bad_for_its_perplexity(run, files, monkeypatch):
    """exp of more than 709 nats a word is infinite, and the other numbers stay."""
    monkeypatch.setattr(Harness, 'loglikelihood_rolling', lambda self, requests: [-1e5] * len(requests))
    found = run_tasks(run, [files['rolling']])['tasks']['rolling']['metrics']
    assert found['word_perplexity'] == math.inf and found['bits_per_byte'] == pytest.approx(2e5 / 44 / math.log(2), rel=0.05)


def test_the_columns_of_table_1(trained, run, monkeypatch):
    """Tasks made of texts: what is asked for follows the passage in its document; the columns of a run are the harness's numbers."""
    tasks = experiment.sibling('_tasks')
    text = '\n'.join(f'{i:02d} = other' for i in range(30))
    made = tasks.examples([text, 'short'], 12)
    assert [len(made[name]) for name in tasks.TASKS] == [2, 4, 4] and made == tasks.examples([text, 'short'], 12)
    for row in made['last_word']:
        assert len(row['passage']) == 12 and f'{row["passage"]} {row["word"]}' in text
    for row in made['next_line']:
        assert row['passage'] + row['lines'][row['gold']] + '\n' in text + '\n' and len(set(row['lines'])) == 4
        assert all(row['passage'] + line + '\n' not in text + '\n' for i, line in enumerate(row['lines']) if i != row['gold'])
    assert len({row['gold'] for row in made['next_line']}) > 1
    monkeypatch.setattr(tasks, 'examples', lambda texts, room: made | {'pages': [{'page': texts[0]}]})
    found = tasks.harness_columns(run.cfg, pathlib.Path(trained))
    assert set(found) == {f'harness/{name}' for name in tasks.COLUMNS} | {'harness'}
    assert found['harness/last_word/acc'] in (0, 0.25, 0.5, 0.75, 1) and found['harness/pages/word_perplexity'] > 1


def test_shots_and_limit(run, files, tmp_path):
    """A solved example before each question; the first example alone."""
    with pytest.raises(MissingInput, match='must not be among those that are asked'):
        run_tasks(run, [files['choice']], limit=1, shots=1)
    task, (rows, _) = json.loads(pathlib.Path(files['choice']).read_text()), TASKS['choice']
    (tmp_path / 'shots.jsonl').write_text(json.dumps(rows[1]) + '\n')
    task['dataset_kwargs']['data_files']['train'] = str(tmp_path / 'shots.jsonl')
    pathlib.Path(files['choice']).write_text(json.dumps(task | {'training_split': 'train'}))
    found = run_tasks(run, [files['choice']], limit=1, shots=1)['tasks']['choice']
    assert (found['examples'], found['shots'], found['truncated']) == (1, 1, 3)


def test_nothing_is_fetched_unless_asked(run, files, monkeypatch):
    """A data set that is not here is named, with what to do, and the hub's client is told to stay at home before it is asked for it."""
    task = json.loads(pathlib.Path(files['choice']).read_text())
    task |= {'dataset_path': 'nobody/nothing', 'dataset_kwargs': None}
    pathlib.Path(files['choice']).write_text(json.dumps(task))
    states, real = [], datasets.load_dataset

    def watched(*args, **kwargs):
        states.append((huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        return real(*args, **kwargs)

    monkeypatch.setattr(datasets, 'load_dataset', watched)
    before = (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    with pytest.raises(MissingInput, match='--task-data'):
        run_tasks(run, [files['choice']])
    assert states == [(True, True)] and (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == before


PIQA = [{'goal': 'open', 'sol1': 'pull', 'sol2': 'push', 'label': 0}, {'goal': 'close', 'sol1': 'ab', 'sol2': 'c', 'label': 1}]
DATA = {
    'wikitext/test': [{'page': ' = A title = \n a text about the world .\n'}],
    'lambada_openai/test': [{'text': 'document 5 document'}, {'text': 'hello to the world'}],
    'piqa/validation': PIQA,
    'hellaswag/validation': [{'ctx_a': 'A.', 'ctx_b': 'he', 'activity_label': 'S', 'endings': ['up.', 'a [b] c', 'x'], 'label': '1'}],
    'sciq/test': [{'support': 'W', 'question': 'w?', 'distractor1': 'a', 'distractor2': 'b', 'distractor3': 'c', 'correct_answer': 'd'}],
    'arc_challenge/test': [{'question': 'q?', 'choices': {'text': ['a', 'b'], 'label': ['A', 'B']}, 'answerKey': 'B'}],
    'winogrande/validation': [{'sentence': 'Cats _ on', 'option1': 'it', 'option2': 'to', 'answer': '1'}],
}


def test_the_papers_columns(trained, tmp_path, capsys, monkeypatch):
    """`--tasks paper` on data of ours: the harness's own prompts and metrics, eight columns and their average."""
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'arrow')
    for name, rows in DATA.items():
        path = tmp_path / 'data' / f'{name}.jsonl'
        path.parent.mkdir(parents=True)
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    line = ['eval', trained, '--mesh.devices', '1', '--tasks', 'paper', '--task-data', str(tmp_path / 'data')]
    assert cli.main([*line, '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found['columns']) == [f'{task}/{metric}' for task, metric in COLUMNS] and None not in found['columns'].values()
    assert list(found['tasks']) == list(PRESETS['paper']) and found['tasks']['piqa']['examples'] == 2
    accuracies = [value for name, value in found['columns'].items() if '/acc' in name]
    assert len(accuracies) == 6 and found['average'] == pytest.approx(np.mean(accuracies)) and found['step'] == 3
    assert {name: task['version'] for name, task in found['tasks'].items()}['wikitext'] == 2.0


def test_own_tasks_by_command(trained, files, capsys):
    assert cli.main(['eval', trained, '--mesh.devices', '1', '--tasks', files['choice'], files['rolling']]) == 0
    out = capsys.readouterr().out
    assert 'acc_norm' in out and 'bits_per_byte' in out and 'lm-evaluation-harness 0.' in out and 'average' not in out


@pytest.mark.parametrize(
    ('tasks', 'code', 'message'),
    [
        ('nix.yaml', 66, "task file 'nix.yaml' does not exist"),
        ('BROKEN', 65, 'does not load'),
        ('choice.yaml --task-data nix', 66, "'nix' is not a folder"),
        ('choice.yaml --limit 0', 2, '--limit 0'),
    ],
)
def test_bad_input(tasks, code, message, trained, tmp_path, capsys):
    (tmp_path / 'broken.yaml').write_text('task: [unclosed')
    line = tasks.replace('BROKEN', str(tmp_path / 'broken.yaml'))
    assert cli.main(['eval', trained, '--mesh.devices', '1', '--tasks', *line.split()]) == code
    assert message in capsys.readouterr().err


def test_unknown_task():
    with offline(), pytest.raises(UserError, match="did you mean 'piqa'"):
        load_tasks(['piqua'], None)


@pytest.mark.parametrize('topology', ['pre', pytest.param('span', marks=pytest.mark.full)])
def test_the_harness_own_backend_agrees(topology, tmp_path, files, monkeypatch):
    """Exported weights through `hf`, request by request. That backend begins a text by its tokenizer's template, which stands before
    rolling texts a second time: for these it must be told not to (add_bos_token)."""
    pytest.importorskip('torch')
    hf = pytest.importorskip('lm_eval.models.huggingface')
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv('HF_MODULES_CACHE', str(tmp_path / 'modules'))
    (tmp_path / 'text').mkdir()
    for i in range(80):
        (tmp_path / 'text' / f'{i}.txt').write_text(f'document {i} ' * 20)
    tiny = (
        f'--model.topology {topology} --model.layers 2 --model.width 16 --model.heads 2 --data.seq 16 --data.batch 2 --run.steps 3 '
        f'--mesh.devices 1 --data.source {tmp_path / "text"} --data.cache {tmp_path / "cache"} --run.dir {tmp_path / "run"}'
    )
    assert cli.main(f'train debug {tiny}'.split()) == 0 and cli.main(['export', str(tmp_path / 'run'), str(tmp_path / 'hf')]) == 0
    ours = Harness(load_run(tmp_path / 'run', MeshConfig(devices=1)))
    theirs = {
        bos: hf.HFLM(
            str(tmp_path / 'hf'), device='cpu', dtype='float32', batch_size=3, max_length=16, add_bos_token=bos, trust_remote_code=True
        )
        for bos in (None, False)
    }

    def answers(model, name):
        with offline():
            loaded = TaskManager(include_defaults=False).load([files[name]])
        for task in loaded['tasks'].values():
            task.set_config(key='num_fewshot', value=0)
            task.set_fewshot_seed(seed=0)
        found = evaluate(model, loaded, bootstrap_iters=0)
        return found['results'][name], [sample['resps'] for sample in found['samples'][name]]

    for name in TASKS:
        mine, hers = answers(ours, name), answers(theirs[False if name == 'rolling' else None], name)
        if name == 'making':
            assert mine[1] == hers[1]
            continue
        for a, b in zip(mine[1], hers[1], strict=True):
            np.testing.assert_allclose(np.array(a, float), np.array(b, float), rtol=1e-5, atol=1e-5)
        numbers = {k: v for k, v in hers[0].items() if ',' in k and 'stderr' not in k}
        assert numbers == pytest.approx({k: mine[0][k] for k in numbers}, rel=1e-4) and numbers


@pytest.mark.full
def test_two_processes_evaluate_as_one(tmp_path, files, capsys, monkeypatch):
    """By document, strided, and all three kinds of request: what one process with eight devices says, and one of the two says it."""
    from test_distributed import SHORT, Two

    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'arrow'))
    two = Two(tmp_path, 'two', 'fsdp_tensor', SHORT)
    assert two.start().ended(180) == [0, 0], two.said()
    mesh = ['--mesh.fsdp', '4', '--mesh.tensor', '2']
    for asked in (['--protocol', 'documents'], ['--protocol', 'strided', '--stride', '5'], ['--tasks', *files.values()]):
        two.args = ['eval', str(two.folder), *mesh, '--tokens', '200', *asked, '--json']
        two.args = [word for word in two.args if '--tasks' not in asked or word not in ('--tokens', '200')]
        assert two.start().ended(180) == [0, 0], two.said()
        found = json.loads((tmp_path / 'out0').read_text())
        assert (tmp_path / 'out1').read_text() == ''
        assert cli.main(two.args) == 0
        alone = json.loads(capsys.readouterr().out)
        numbers = lambda tree: {k: v for k, v in tree.items() if isinstance(v, float)}  # noqa: E731
        if '--tasks' in asked:
            assert list(found['tasks']) == list(TASKS)
            for name, task in alone['tasks'].items():
                assert found['tasks'][name]['metrics'] == pytest.approx(task['metrics'], rel=1e-5), name
                assert found['tasks'][name]['truncated'] == task['truncated']
        else:
            assert numbers(found) == pytest.approx(numbers(alone), rel=1e-5) and found['text_alone'] == pytest.approx(alone['text_alone'])
