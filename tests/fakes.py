"""A corpus in memory with the interface of spannorm_jax.data.Corpus, and the tiny configuration that goes with it."""

from types import SimpleNamespace

import numpy as np

from spannorm_jax.config import Config, edit
from spannorm_jax.data import Tokenizer

V, T, B = 31, 12, 4
POISON = 30  # a token that no ordinary batch holds

TINY = edit(
    Config(),
    {
        'name': 'tiny', 'model.topology': 'pre', 'model.layers': 2, 'model.width': 16, 'model.heads': 2, 'model.ffn': 24, 'model.vocab': V,
        'model.activation': 'relu', 'model.positions': 'none',
        'data.seq': T, 'data.batch': B, 'optim.warmup_steps': 2, 'optim.lr_peak': 1e-2, 'mesh.devices': 1, 'run.steps': 8,
        'run.eval_every': 3, 'run.checkpoint_every': 2,
    },
)  # fmt: skip


class Batches:
    def __init__(self, make, k, stop=10**9):
        self.make, self.k, self.stop = make, k, stop

    def __iter__(self):
        return self

    def __next__(self):
        if self.k == self.stop:
            raise StopIteration
        self.k += 1
        return self.make(self.k - 1)

    def close(self):
        pass


class FakeTokenizer(Tokenizer):
    """One letter per token."""

    def __init__(self):
        super().__init__('fake', '', V, 0, 0)

    def encode(self, text):
        return np.array([1 + ord(c) % (V - 1) for c in text], np.int32)

    def decode_bytes(self, ids):
        return bytes(64 + int(i) for i in ids if i)


class FakeCorpus:
    """Rows x, 3x + 1, ... mod 30 with noise; an epoch has 10 rows, so batches of 4 cross its edge; row lengths differ (padding)."""

    hash = 'fake'
    rows = 10

    def __init__(self, poison=()):
        self.poison = frozenset(poison)
        self.tokenizer = FakeTokenizer()
        self.meta = SimpleNamespace(unigram=[100] * 30 + [0])

    def train_batches(self, batch, seq, seed, start=0, mine=None, workers=0):
        def make(k):
            places = [divmod(i, self.rows) for i in range(k * batch, (k + 1) * batch)]
            order = {e: np.random.default_rng((seed, e)).permutation(self.rows) for e, _ in places}
            rows = [order[e][i] for e, i in places]
            return self.make(rows if mine is None else [rows[r] for r in mine], seq, k in self.poison)

        return Batches(make, start)

    def make(self, rows, seq, poisoned=False):
        window = np.stack([self.row(r, seq + 1) for r in rows])
        out = {'tokens': window[:, :-1].copy(), 'targets': window[:, 1:].copy(), 'positions': np.tile(np.arange(seq), (len(rows), 1))}
        length = np.array([seq - r % 5 for r in rows])
        out['segments'] = (out['positions'] < length[:, None]) * (1 + out['positions'] // 7)
        if poisoned:
            out['tokens'][0, 0] = POISON
        return {k: v.astype(np.int32) for k, v in out.items()}

    def row(self, r, n):
        noise = np.random.default_rng(int(r)).random(n) < 0.1
        x = [int(r) % 30]
        for t in range(1, n):
            x.append((3 * x[-1] + 1 + 7 * int(noise[t])) % 30)
        return np.array(x)

    def eval_batches(self, split, batch, seq, max_tokens=None):
        at = {'validation': 50, 'test': 60}[split]
        made = [self.make(range(lo, lo + batch), seq) for lo in (at, at + batch)]
        tokens = sum(int((b['segments'] > 0).sum()) for b in made)

        def batches(mine=None):
            rows = slice(None) if mine is None else list(mine)
            return Batches(lambda k: {name: x[rows] for name, x in made[k].items()}, 0, len(made))

        return SimpleNamespace(batches=batches, batch=batch, bytes=tokens + 5, documents=1, tokens=tokens)
