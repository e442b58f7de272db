"""Random numbers that are functions of a counter: any row of a generated data set can be made without the others.

Each function maps an array of counters and a key to an array of the same shape, always the same one. The mixer is that
of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), of which a counter gives the n-th number directly.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

U64: TypeAlias = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
_ROUNDS = 3


def key(*parts: int | str) -> np.uint64:
    """A 64-bit key for a seed and the names of what is drawn."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def hash64(counter: ArrayLike, stream: np.uint64 | U64) -> U64:
    """64 random bits for each counter of a stream. ``counter`` and ``stream`` (a key) broadcast."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        bits = np.atleast_1d(np.asarray(counter, dtype=np.uint64) * _STEP + stream)
        for shift, factor in _MIX:
            bits ^= bits >> shift
            bits *= factor
        bits ^= bits >> _LAST_SHIFT
    return bits


def uniform(counter: ArrayLike, stream: np.uint64 | U64) -> NDArray[np.float64]:
    """Uniform in [0, 1), 53 bits."""
    return (hash64(counter, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(counter: ArrayLike, stream: np.uint64 | U64) -> NDArray[np.float64]:
    """Standard normal (Box and Muller), from two halves of one hash."""
    bits = hash64(counter, stream)
    radius = np.sqrt(-2.0 * np.log(((bits >> np.uint64(32)) + 0.5) * 2.0**-32))
    return radius * np.cos((bits & np.uint64(0xFFFFFFFF)) * (2.0 * np.pi * 2.0**-32))


def permute(values: U64, size: int | U64, stream: np.uint64 | U64) -> U64:
    """A random permutation of ``0 .. size - 1``, evaluated at ``values``; nothing of length ``size`` is stored.

    A Feistel network on numbers ``left * b + right`` with ``a * b >= size`` and ``a, b`` about ``sqrt(size)``; results
    outside the range are put through again until they fall inside (Black and Rogaway, CT-RSA 2002).

    Args:
        values: uint64, each below ``size``.
        size: number of values, below 2^62; one number, or one for each value (broadcast).
        stream: key of the permutation, likewise.
    """
    size = np.asarray(size, dtype=np.uint64)
    a = np.ceil(np.sqrt(size)).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    result = np.array(np.broadcast_to(_feistel(values, a, b, stream), np.shape(values)))
    outside = np.flatnonzero((result >= size).ravel())
    if outside.size:  # at most about one value in sqrt(size)
        flat = result.reshape(-1)
        sizes, a, b, stream = (np.broadcast_to(x, result.shape).reshape(-1)[outside] for x in (size, a, b, stream))
        walking = np.arange(outside.size)
        while walking.size:
            flat[outside[walking]] = _feistel(flat[outside[walking]], a[walking], b[walking], stream[walking])
            walking = walking[flat[outside[walking]] >= sizes[walking]]
    return result


def _feistel(values: U64, a: U64, b: U64, stream: np.uint64 | U64) -> U64:
    left, right = np.divmod(values, b)
    for number in range(_ROUNDS):
        with np.errstate(over="ignore"):
            round_key = stream + np.uint64(2 * number) * _STEP
            left = (left + hash64(right, round_key)) % a
            right = (right + hash64(left, round_key ^ _STEP)) % b
    return left * b + right
