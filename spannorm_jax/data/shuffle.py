"""A permutation of any number of rows in no memory. grain's index_shuffle would do, but holds 32-bit indices only (a
trillion tokens in rows of 128 are more) and costs 8 us a row; this one is computed for a thousand rows at a time.
"""

import hashlib
from functools import lru_cache

import numpy as np

ROUNDS = 6
CHUNK = 1024


def row_of(seed: int, epoch: int, i: int, rows: int) -> int:
    """The i-th row of an epoch: a bijection of 0..rows-1 that depends on (seed, epoch) alone."""
    return int(_chunk(seed, epoch, i // CHUNK, rows)[i % CHUNK])


@lru_cache(maxsize=8)
def _chunk(seed: int, epoch: int, chunk: int, rows: int) -> np.ndarray:
    at = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, rows), dtype=np.uint64)
    return permute(at, rows, _keys(seed, epoch))


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> np.ndarray:
    return np.frombuffer(hashlib.sha512(f'{seed} {epoch}'.encode()).digest(), '<u8')[:ROUNDS]


def permute(index_R: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Images of indices below n under a keyed bijection of 0..n-1.

    A Feistel network permutes the 4^h >= n numbers of 2h bits: (left, right) -> (right, left ^ f(right ^ key)); an image
    that is not below n is sent through again until it is ("cycle walking", Black and Rogaway 2002).
    """
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    image_R = index_R.astype(np.uint64)
    walking = np.arange(len(image_R))
    while len(walking):
        left, right = image_R[walking] >> half, image_R[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        image_R[walking] = left << half | right
        walking = walking[image_R[walking] >= n]
    return image_R.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Finalizer of splitmix64 (Steele, Lea and Flood 2014): every bit of x reaches every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
