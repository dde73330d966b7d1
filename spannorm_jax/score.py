"""How good a run is: its newest checkpoint on held-out text, and one line that sums a run up."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from spannorm_jax import distributed, ledger, likelihood, sharding
from spannorm_jax.checkpoint import Checkpoints
from spannorm_jax.config import Config, MeshConfig, edit
from spannorm_jax.data import Tokenizer, open_data, tokenizer_of
from spannorm_jax.data.baselines import MOST_IDS, bigram_bits_per_byte
from spannorm_jax.errors import BadData, MissingInput, UserError
from spannorm_jax.host import peak_flops, use_compilation_cache
from spannorm_jax.initializers import is_param
from spannorm_jax.load import read_config
from spannorm_jax.model import LM, flops_per_token, infos
from spannorm_jax.rundir import Outcome, model_line
from spannorm_jax.step import evaluate, make_eval_step
from spannorm_jax.track import read_rows

COUNTED = (
    'bits/byte = all nats, those of document ends included, / ln 2 / bytes of text; perplexities = exp of all nats per token, word or byte'
)
PROTOCOLS = {
    'rows': 'rows of {seq} tokens, cut from whole documents without overlap; a token sees its own document from the start of its row; ',
    'documents': 'each document on its own, after the token that begins one, in windows of {seq} tokens that move on by as many; each '
    'token counts once, and the last window reaches back as far as the others; experts drop no token; ',
    'strided': 'each document on its own, after the token that begins one, in windows of {seq} tokens that move on by {stride}; each token '
    'counts once, with at least {least} before it or all that its document has; experts drop no token; ',
}


def score(
    run: Path,
    split: str,
    max_tokens: int | None,
    source: str | None,
    mesh_cfg: MeshConfig,
    protocol: str = 'rows',
    stride: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """{run, step, split, source, corpus, loss, bits_per_byte, perplexity (per token), word_perplexity, byte_perplexity, tokens, words,
    bytes, documents, protocol} of the newest checkpoint; by document and strided also `text_alone`, the same measures without the ends of
    documents, as lm-evaluation-harness has them.

    `source` is other text than the run's own. `rows` is what training itself measures, to the last bit on the same devices. `stride` is
    for `strided`: None means half a row. How many rows go through the model at once does not change the result. `progress` hears of the
    batches, by document and strided of the documents, that are done.

    Raises: MissingInput (no checkpoint yet), BadData (the run's source has changed since; damaged checkpoint), UserError (mesh, stride).
    """
    cfg = read_config(run)
    if source is not None:
        cfg = edit(cfg, {'data.source': source})
    stride = stride_of(protocol, stride, cfg.data.seq)
    use_compilation_cache()
    mesh = sharding.make_mesh(mesh_cfg)
    distributed.check_mesh(mesh)
    corpus = distributed.prepared_by_first('the data', lambda: open_data(cfg.data))
    params, step, meta = restore_params(run, cfg, mesh)
    check_tokenizer(run, corpus.tokenizer, meta)
    trained_on = str(meta.get('text', ''))
    if source is None and not trained_on:
        raise UserError(f'{str(run)!r} was imported and does not say what it was trained on; name the text to evaluate on with --source')
    if source is None and trained_on != corpus.hash:
        raise BadData(
            f'{str(run)!r} was trained on another text (hash {trained_on[:12]}) than {cfg.data.source!r} is now (hash {corpus.hash[:12]}), '
            f'so its held-out documents may have been trained on; to evaluate on it all the same, name it with --source'
        )
    rows, shards = cfg.data.batch // cfg.optim.accumulate, math.prod(mesh.shape[axis] for axis in sharding.BATCH)
    held_out = corpus.eval_batches(split, likelihood.up(rows, shards), cfg.data.seq, max_tokens)
    words, alone = sum(count_words(corpus.tokenizer.decode(ids)) for ids in held_out.texts()), {}
    if protocol == 'rows':
        eval_step = jax.jit(make_eval_step(cfg, LM(cfg.model)), out_shardings=sharding.replicated(mesh))
        with jax.set_mesh(mesh), held_out.batches(sharding.local_rows(mesh, held_out.batch)) as batches:
            placed = (sharding.put_batch(b, mesh, held_out.batch) for b in batches)
            found = evaluate(eval_step, params, counted(placed, len(held_out), progress), held_out.bytes)
        assert found is not None  # only a `stop` makes it so
        nats, tokens = found.nats, found.tokens
    else:
        scorer = likelihood.Scorer(LM(cfg.model), params, mesh, cfg.data.seq, rows, cfg.optim.loss_chunk)
        nats, tokens, ends = nats_by_document(scorer, counted(held_out.texts(), held_out.documents, progress), stride)
        alone = {'text_alone': measures(nats - ends, tokens - held_out.documents, words, held_out.bytes)}
    return {
        'run': str(run),
        'step': step,
        'split': split,
        'source': cfg.data.source,
        'corpus': corpus.hash,
        **measures(nats, tokens, words, held_out.bytes),
        **alone,
        'tokens': tokens,
        'words': words,
        'bytes': held_out.bytes,
        'documents': held_out.documents,
        'protocol': (PROTOCOLS[protocol] + COUNTED).format(seq=cfg.data.seq, stride=stride, least=cfg.data.seq - stride + 1),
    }


def counted(items: Iterable[Any], total: int, progress: Callable[[int, int], None]) -> Iterator[Any]:
    for done, item in enumerate(items):
        progress(done, total)
        yield item
    progress(total, total)


def stride_of(protocol: str, stride: int | None, seq: int) -> int:
    """Tokens by which a window moves on. Raises: UserError."""
    if stride is None:
        return max(1, seq // 2) if protocol == 'strided' else seq
    if protocol != 'strided':
        raise UserError(f'a stride belongs to the protocol strided, not to {protocol}; leave it out, or choose strided')
    if not 1 <= stride <= seq:
        raise UserError(f'stride = {stride} is outside [1, {seq}], the tokens of a row')
    return stride


def count_words(text: str) -> int:
    """Pieces between white space, an empty one at an end included, as lm-evaluation-harness counts them."""
    return len(re.split(r'\s+', text))


def measures(nats: float, tokens: int, words: int, n_bytes: int) -> dict[str, float]:
    """Loss in nats per token, bits per byte, and exp of the nats per token, word and byte."""
    per = {'perplexity': tokens, 'word_perplexity': words, 'byte_perplexity': n_bytes}
    exponents = {name: nats / n if n else math.inf for name, n in per.items()}
    found = {'loss': nats / tokens, 'bits_per_byte': nats / math.log(2) / n_bytes}
    return found | {name: math.exp(x) if x < 700 else math.inf for name, x in exponents.items()}


def nats_by_document(scorer: likelihood.Scorer, texts: Iterable[np.ndarray], stride: int) -> tuple[float, int, float]:
    """Nats of all tokens, how many they are, and nats of the ends of documents alone."""
    ends: list[bool] = []

    def pieces():
        for ids in texts:
            found = list(likelihood.windows(ids, scorer.seq, stride))
            ends.extend([False] * (len(found) - 1) + [True])
            yield from found

    nats, tokens, last = 0.0, 0, 0.0
    for i, scored in scorer(pieces()):
        nats, tokens = nats + float(scored.nats.sum(dtype=np.float64)), tokens + len(scored.nats)
        last += float(scored.nats[-1]) if ends[i] else 0.0
    return nats, tokens, last


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
    distributed.check_mesh(mesh)
    params, step, meta = restore_params(run, cfg, mesh)
    check_tokenizer(run, tokenizer, meta)
    return LoadedRun(cfg, LM(cfg.model), params, step, tokenizer, mesh)


def check_tokenizer(run: Path, tokenizer: Tokenizer, meta: dict[str, Any]) -> None:
    """Raises: UserError where the weights belong to another tokenizer: what they say of its ids would mean nothing."""
    if meta.get('tokenizer', tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(
            f'the tokenizer of {str(run)!r} ({tokenizer.name}) has changed since its weights were saved; put back the one they belong to'
        )


def restore_params(run: Path, cfg: Config, mesh: jax.sharding.Mesh) -> tuple[Any, int, dict[str, Any]]:
    """Parameters of the newest checkpoint, its step, and its meta: the hash of the text, the tokenizer, ..."""
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
        return checkpoints.restore_params(step, like), step, checkpoints.meta(step)


def summary(cfg: Config, outcome: Outcome) -> str:
    """One line (two with the picture) on a run that has ended: status, held-out bits/byte beside the bigram baseline, where it is."""
    folder = Path(outcome.dir)
    last: dict[str, Any] = {}
    for row in read_rows(folder / 'metrics.jsonl', outcome.step):
        last |= row
    parts = [f'{folder.name} ({model_line(cfg)}): {outcome.status} at step {outcome.step}']
    if outcome.reason:
        parts.append(outcome.reason)
    if 'eval/bits_per_byte' in last:
        parts.append(f'validation {last["eval/bits_per_byte"]:.3f} bits/byte{_bigram(cfg) if outcome.status == "completed" else ""}')
    if 'test/bits_per_byte' in last:
        parts.append(f'test {last["test/bits_per_byte"]:.3f}')
    parts += _time(cfg, folder)
    picture = folder / 'loss.png'
    return ', '.join(parts) + (f'\nloss curve: {picture}' if picture.is_file() else '')


def _time(cfg: Config, folder: Path) -> list[str]:
    """Goodput with the causes that took a hundredth or more, and MFU where the devices' peak is known."""
    told = ledger.read(folder)
    if told is None:
        return []
    useful, others = ledger.goodput(told)
    causes = ', '.join(f'{cause} {share:.0%}' for cause, share in others.items() if share >= 0.01)
    parts = [f'goodput {useful:.0%}' + (f' ({causes})' if causes else '')]
    mesh = sharding.make_mesh(cfg.mesh)
    if (peak := peak_flops(mesh.devices.flat[0])) and told['seconds']['step']:
        parts.append(f'MFU {told["tokens"] * flops_per_token(cfg.model, cfg.data.seq) / told["seconds"]["step"] / peak / mesh.size:.1%}')
    return parts


def _bigram(cfg: Config) -> str:
    corpus = open_data(cfg.data)
    if corpus.meta.tokenizer['vocab'] > MOST_IDS:
        return ''
    return f' (bigram model: {bigram_bits_per_byte(corpus, "validation", cfg.run.eval_tokens):.3f})'
