"""How good a run is: its newest checkpoint on held-out text, and one line that sums a run up."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spannorm_jax import distributed, sharding
from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import Config, MeshConfig, edit
from spannorm_jax.data import Tokenizer, open_data, tokenizer_of
from spannorm_jax.data.baselines import MOST_IDS, bigram_bits_per_byte
from spannorm_jax.errors import BadData, MissingInput
from spannorm_jax.host import use_compilation_cache
from spannorm_jax.initializers import is_param
from spannorm_jax.load import read_config
from spannorm_jax.model import LM, infos
from spannorm_jax.rundir import Outcome, model_line
from spannorm_jax.step import evaluate, make_eval_step
from spannorm_jax.track import read_rows

PROTOCOL = (
    'rows of {seq} tokens, cut from whole documents without overlap; a token sees its own document from the start of its row; '
    'bits/byte = all nats, those of document ends included, / ln 2 / bytes of text; perplexity = exp(nats per token)'
)


def score(run: Path, split: str, max_tokens: int | None, source: str | None, mesh_cfg: MeshConfig) -> dict[str, Any]:
    """{run, step, split, source, corpus, loss, bits_per_byte, perplexity, tokens, documents, bytes, protocol} of the newest checkpoint.

    `source` is other text than the run's own. How many rows go through the model at once does not change the result.

    Raises: MissingInput (no checkpoint yet), BadData (the run's source has changed since; damaged checkpoint), UserError (mesh).
    """
    cfg = read_config(run)
    if source is not None:
        cfg = edit(cfg, {'data.source': source})
    use_compilation_cache()
    mesh = sharding.make_mesh(mesh_cfg)
    distributed.check_mesh(mesh)
    corpus = distributed.prepared_by_first('the data', lambda: open_data(cfg.data))
    params, step, trained_on = restore_params(run, cfg, mesh)
    if source is None and trained_on != corpus.hash:
        raise BadData(
            f'{str(run)!r} was trained on another text (hash {trained_on[:12]}) than {cfg.data.source!r} is now (hash {corpus.hash[:12]}), '
            f'so its held-out documents may have been trained on; to evaluate on it all the same, name it with --source'
        )
    rows, shards = cfg.data.batch // cfg.optim.accumulate, math.prod(mesh.shape[axis] for axis in sharding.BATCH)
    held_out = corpus.eval_batches(split, -(-rows // shards) * shards, cfg.data.seq, max_tokens)
    eval_step = jax.jit(make_eval_step(cfg, LM(cfg.model)), out_shardings=sharding.replicated(mesh))
    with jax.set_mesh(mesh), held_out.batches(sharding.local_rows(mesh, held_out.batch)) as batches:
        found = evaluate(eval_step, params, (sharding.put_batch(b, mesh, held_out.batch) for b in batches), held_out.bytes)
    assert found is not None  # only a `stop` makes it so
    return {
        'run': str(run),
        'step': step,
        'split': split,
        'source': cfg.data.source,
        'corpus': corpus.hash,
        'loss': found.loss,
        'bits_per_byte': found.bits_per_byte,
        'perplexity': math.exp(found.loss) if found.loss < 700 else math.inf,
        'tokens': found.tokens,
        'documents': held_out.documents,
        'bytes': held_out.bytes,
        'protocol': PROTOCOL.format(seq=cfg.data.seq),
    }


class LoadedRun(NamedTuple):
    cfg: Config
    lm: LM
    params: Any
    step: int
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh


def load_run(run: Path, mesh_cfg: MeshConfig) -> LoadedRun:
    """The model of a run's newest checkpoint, and the tokenizer that goes with it; its data is not touched.

    Raises: MissingInput (no checkpoint yet), BadData (a damaged one), UserError (mesh, tokenizer).
    """
    cfg = read_config(run)
    use_compilation_cache()
    mesh, tokenizer = sharding.make_mesh(mesh_cfg), tokenizer_of(cfg.data)
    params, step, _ = restore_params(run, cfg, mesh)
    return LoadedRun(cfg, LM(cfg.model), params, step, tokenizer, mesh)


def restore_params(run: Path, cfg: Config, mesh: jax.sharding.Mesh) -> tuple[Any, int, str]:
    """Parameters of the newest checkpoint, its step, and the hash of the text it was trained on."""
    if not (run / 'checkpoints').is_dir():
        raise MissingInput(f'{str(run)!r} has no checkpoint yet; train it first: spannorm train {run / "config.json"}')
    tree = infos(cfg.model)
    places, _ = sharding.param_shardings(tree, mesh)
    like = jax.tree.map(
        lambda info, place: jax.ShapeDtypeStruct(info.value.shape, info.value.dtype, sharding=place), tree, places, is_leaf=is_param
    )
    with Checkpoints(run / 'checkpoints', read_only=True) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise MissingInput(f'{str(run)!r} has no whole checkpoint yet; train it first: spannorm train {run / "config.json"}')
        return checkpoints.restore_params(step, like), step, str(checkpoints.meta(step).get('text', ''))


def summary(cfg: Config, outcome: Outcome) -> str:
    """One line (two with the picture) on a run that has ended: status, held-out bits/byte beside the bigram baseline, where it is."""
    folder = Path(outcome.dir)
    last: dict[str, Any] = {}
    for row in read_rows(folder / 'metrics.jsonl'):
        last |= row
    parts = [f'{folder.name} ({model_line(cfg)}): {outcome.status} at step {outcome.step}']
    if outcome.reason:
        parts.append(outcome.reason)
    if 'eval/bits_per_byte' in last:
        parts.append(f'validation {last["eval/bits_per_byte"]:.3f} bits/byte{_bigram(cfg) if outcome.status == "completed" else ""}')
    if 'test/bits_per_byte' in last:
        parts.append(f'test {last["test/bits_per_byte"]:.3f}')
    picture = folder / 'loss.png'
    return ', '.join(parts) + (f'\nloss curve: {picture}' if picture.is_file() else '')


def _bigram(cfg: Config) -> str:
    corpus = open_data(cfg.data)
    if corpus.meta.tokenizer['vocab'] > MOST_IDS:
        return ''
    return f' (bigram model: {bigram_bits_per_byte(corpus, "validation", cfg.run.eval_tokens):.3f})'
