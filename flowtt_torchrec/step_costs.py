"""What a training step costs on a CPU, from the shape of a tensor train and how its ids are distributed.

A batch of ``U`` distinct rows, scattered over the table, meets about ``C (1 - exp(-U / C))`` of its ``C`` prefixes
(occupancy). A step makes the product of every prefix in forward and takes three such products in backward: the same
again, and a gradient towards either side. Every distinct row takes one product with the last core in forward and two in
backward. So fewer prefixes, that is a larger last factor, make a step cheaper, until the last core leaves the cache:
then every row waits for its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Constants in ns on one thread, fitted to steps with row-wise Adagrad of 458 random shapes of 100,000 to 4 billion rows
# under three distributions (docs/notes/cpu_kernels.md). Half of predictions are within 0.89 and 1.06 of the time, 90 %
# within 0.74 and 1.23.
_STEP, _LOOKUP, _LOOKUP_ELEMENT = 240_000.0, 30.0, 0.83  # the same for all shapes
_ROW, _ROW_FLOP = 31.0, 0.015  # a distinct row; its product
_NEAR_LAST_BYTE, _FAR_LAST_BYTE = 0.032, 0.23  # its slice of a last core out of the nearer cache; of both
_PREFIX, _PREFIX_FLOP = 114.0, 0.028
_OUTER_BYTE, _FAR_OUTER_BYTE = 0.05, 0.1  # of slices before the middle one, for each prefix
_MIDDLE_BYTE = 0.2  # of middle slices in use, each read and updated once
_CORE_BYTE = 0.06
_NEAR_CACHE, _CACHE = 1 << 16, 1 << 20  # what a thread finds near of a core and its gradient
_LEAST_COLUMNS = 4  # a product with fewer takes as long
_ZIPF = 1.2  # the skew assumed, where ids are skewed

# Ids that are all different; skewed ids anywhere in the table, as after hashing; skewed ids with hot rows in front.
CASES = ("uniform", "scattered", "sorted")


def step_costs(
    p: Sequence[Any], q: Sequence[int], ranks: Sequence[Any], num_embeddings: int, lookups: int
) -> np.ndarray:
    """Nanoseconds of a step on one thread.

    Args:
        p: factors of the rows, numbers or arrays of shape ``[n]``.
        q: factors of the columns.
        ranks: inner ranks, as ``p``.
        num_embeddings: rows of the table.
        lookups: lookups a batch.

    Returns:
        ``[len(CASES)]``, or ``[len(CASES), n]``.
    """
    p = [np.asarray(x, dtype=np.float64) for x in p]
    r: tuple[Any, ...] = (1.0, *(np.asarray(x, dtype=np.float64) for x in ranks), 1.0)
    slices = [4 * r[k] * q[k] * r[k + 1] for k in range(len(q))]
    sizes = [factor * size for factor, size in zip(p, slices)]
    near, far = ([np.maximum(0, 1 - cache / size) for size in sizes] for cache in (_NEAR_CACHE, _CACHE))
    outer = range(len(q) - 2)

    columns, prefix_flops = q[0], np.zeros_like(p[-1])
    for k in range(1, len(q) - 1):
        prefix_flops = prefix_flops + 2 * columns * r[k] * q[k] * r[k + 1]
        columns *= q[k]
    a_row = _ROW + _ROW_FLOP * 2 * columns * max(q[-1], _LEAST_COLUMNS) * r[-2]
    a_row = a_row + slices[-1] * (_NEAR_LAST_BYTE * (near[-1] - far[-1]) + _FAR_LAST_BYTE * far[-1])
    a_prefix = _PREFIX + _PREFIX_FLOP * prefix_flops
    for k in outer:
        a_prefix = a_prefix + slices[k] * (_OUTER_BYTE + _FAR_OUTER_BYTE * far[k])
    rows, prefixes = _counts(p[-1], num_embeddings, lookups)
    middle = p[-2] * -np.expm1(-prefixes / p[-2])
    every = _STEP + lookups * (_LOOKUP + _LOOKUP_ELEMENT * columns * q[-1])
    return every + rows * a_row + prefixes * a_prefix + _MIDDLE_BYTE * middle * slices[-2] + _CORE_BYTE * sum(sizes)


def _counts(last: np.ndarray, num_embeddings: int, lookups: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows and distinct prefixes expected in each of `CASES`: ``[len(CASES), …]``."""
    last, where = np.unique(last, return_inverse=True)  # a search tries each with many others
    blocks = np.ceil(num_embeddings / last)
    edges = np.geomspace(1, num_embeddings + 1, 257)
    ranks, widths = np.sqrt(edges[1:] * edges[:-1]), np.diff(edges)
    hits = ranks**-_ZIPF
    hits *= lookups / (hits * widths).sum()  # expected lookups of the row of each rank
    skewed = float((widths * -np.expm1(-hits)).sum())
    uniform = num_embeddings * -np.expm1(-lookups / num_embeddings)
    # The first rows of a sorted table are the hottest, so the first prefix occurs; others have as many lookups as rows.
    block = np.expand_dims(last, -1)
    sorted_prefixes = 1 + np.where(ranks > block, widths / block * -np.expm1(-block * hits), 0).sum(-1)
    rows = np.stack([np.full_like(last, count) for count in (uniform, skewed, skewed)])
    prefixes = np.stack(
        [*(blocks * -np.expm1(-count / blocks) for count in (uniform, skewed)), np.minimum(sorted_prefixes, skewed)]
    )
    return rows[:, where], prefixes[:, where]
