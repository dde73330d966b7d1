"""Log-likelihood of pieces of text, each given what stands before it, in a few fixed shapes. Axes: B rows, T positions."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from spannorm_jax import sharding
from spannorm_jax.loss import token_scores
from spannorm_jax.model import LM

SHORTEST = 32  # positions of the shortest shape; the others double, up to the length of a row in training
MOST_ROWS = 128  # at a time on a device, however short: a few questions to a model of long rows must not become thousands of empty ones


class Piece(NamedTuple):
    """Ids (n,) that begin a row; the last `counted` of them are predicted (the first never is), those before are context."""

    ids: np.ndarray
    counted: int


class Scored(NamedTuple):
    nats: np.ndarray  # of each counted token, float32
    greedy: bool  # whether each of them was the most likely one


def windows(ids: np.ndarray, seq: int, stride: int) -> Iterator[Piece]:
    """Every id but the first, counted once: the first window predicts `seq` of them, each later one up to `stride` more.

    A window reads `seq` ids wherever there are so many, the last one too; so past the first window a token has at least
    seq - stride + 1 ids before it.
    """
    done = 1
    while done < len(ids):
        upto = min(done + (seq if done == 1 else stride), len(ids))
        yield Piece(ids[max(0, upto - seq - 1) : upto], upto - done)
        done = upto


class Scorer:
    """Scores pieces of at most `seq` + 1 ids under a model whose parameters lie on `mesh`.

    A piece becomes a row of the next length in SHORTEST, 2 SHORTEST, ..., seq. Of each length as many rows go through the model at a
    time as make `rows` x `seq` tokens, at most MOST_ROWS a device. No score depends on the pieces beside it: experts drop no token.
    chunk: as in `loss.token_scores`.
    """

    def __init__(self, lm: LM, params: Any, mesh: jax.sharding.Mesh, seq: int, rows: int, chunk: int | None = None):
        self.params, self.mesh, self.seq = params, mesh, seq
        shards = math.prod(mesh.shape[axis] for axis in sharding.BATCH)
        lengths = [*(SHORTEST << i for i in range(seq.bit_length()) if SHORTEST << i < seq), seq]
        self.rows = {up(t, mesh.shape['sequence']): up(max(1, min(rows * seq // t, MOST_ROWS * shards)), shards) for t in lengths}
        lm = LM(dataclasses.replace(lm.cfg, capacity_factor=None))

        def step(params, batch):
            x_BTD, _ = lm.features(params, batch['tokens'], batch['segments'], batch['positions'])
            return token_scores(lambda x: lm.logits(params, x), x_BTD, batch['targets'], chunk)

        self.step = jax.jit(step, out_shardings=sharding.replicated(mesh))

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[tuple[int, Scored]]:
        """(index, score) of every piece, in the order in which their rows fill."""
        pending = None
        for t, batch in self._batches(pieces):
            launched = batch, self._launch(t, [piece for _, piece in batch])
            if pending is not None:
                yield from _collect(*pending)
            pending = launched
        if pending is not None:
            yield from _collect(*pending)

    def _batches(self, pieces: Iterable[Piece]) -> Iterator[tuple[int, list[tuple[int, Piece]]]]:
        held: dict[int, list] = {t: [] for t in self.rows}
        for i, piece in enumerate(pieces):
            t = next(t for t in self.rows if t >= len(piece.ids) - 1)
            held[t].append((i, piece))
            if len(held[t]) == self.rows[t]:
                yield t, held[t]
                held[t] = []
        yield from ((t, rest) for t, rest in held.items() if rest)

    def _launch(self, T: int, pieces: list[Piece]) -> Any:
        B = self.rows[T]
        batch = {k: np.zeros((B, T), np.int32) for k in ('tokens', 'targets', 'segments')} | {'positions': np.tile(np.arange(T), (B, 1))}
        for row, piece in enumerate(pieces):
            n = len(piece.ids) - 1
            batch['tokens'][row, :n], batch['targets'][row, :n], batch['segments'][row, :n] = piece.ids[:-1], piece.ids[1:], 1
        mine = sharding.local_rows(self.mesh, B)
        with jax.set_mesh(self.mesh):
            placed = sharding.put_batch({k: a_BT[mine].astype(np.int32) for k, a_BT in batch.items()}, self.mesh, B)
            return self.step(self.params, placed)


def _collect(batch: list[tuple[int, Piece]], found: Any) -> Iterator[tuple[int, Scored]]:
    nats_BT, greedy_BT = jax.device_get(found)
    for row, (i, piece) in enumerate(batch):
        n = len(piece.ids) - 1
        at = slice(n - piece.counted, n)
        yield i, Scored(nats_BT[row, at], bool(greedy_BT[row, at].all()))


def up(n: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-n // to) * to
