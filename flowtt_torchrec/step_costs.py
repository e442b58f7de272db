"""What a training step costs on a CPU, from the shape of a tensor train and how its ids are distributed.

A batch of ``U`` distinct rows, scattered over the table, meets about ``C (1 - exp(-U / C))`` of its ``C`` prefixes
(occupancy). A step makes the product of every prefix in forward and takes three such products in backward: the same
again, and a gradient towards either side. Every distinct row takes one product with the last core in forward and two in
backward. So fewer prefixes, that is a larger last factor, make a step cheaper, until the last core leaves the cache:
then every row waits for its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Constants(NamedTuple):
    """What the parts of a step take, in ns on one thread.

    Fitted to steps with row-wise Adagrad of 458 random shapes of 100,000 to 4 billion rows under three distributions
    (docs/notes/cpu_kernels.md). Half of predictions are within 0.89 and 1.06 of the time, 90 % within 0.74 and 1.23.
    ``python -m flowtt_torchrec calibrate --model step`` fits them anew.

    Attributes:
        step: whatever the shape.
        lookup: a lookup.
        lookup_element: an element of its row.
        row: taking up a distinct row.
        row_flop: an operation of its product.
        near_last_byte: a byte of its slice of a last core that is out of the nearer cache.
        far_last_byte: of one that is out of both caches.
        prefix: taking up a distinct prefix.
        prefix_flop: an operation of its product.
        outer_byte: a byte of its slices before the middle one.
        far_outer_byte: what comes on top where such a core is out of both caches.
        middle_byte: a byte of the middle slices in use, each read and updated once.
        core_byte: a byte of all cores.
    """

    step: float = 240_000.0
    lookup: float = 30.0
    lookup_element: float = 0.83
    row: float = 31.0
    row_flop: float = 0.015
    near_last_byte: float = 0.032
    far_last_byte: float = 0.23
    prefix: float = 114.0
    prefix_flop: float = 0.028
    outer_byte: float = 0.05
    far_outer_byte: float = 0.1
    middle_byte: float = 0.2
    core_byte: float = 0.06


MEASURED = Constants()
_NEAR_CACHE, _CACHE = 1 << 16, 1 << 20  # what a thread finds near of a core and its gradient
_LEAST_COLUMNS = 4  # a product with fewer takes as long
ZIPF = 1.2  # the skew assumed, where ids are skewed

# Ids that are all different; skewed ids anywhere in the table, as after hashing; skewed ids with hot rows in front.
CASES = ("uniform", "scattered", "sorted")


def step_costs(
    p: Sequence[Any],
    q: Sequence[int],
    ranks: Sequence[Any],
    num_embeddings: int,
    lookups: int,
    constants: Constants = MEASURED,
) -> np.ndarray:
    """Nanoseconds of a step on one thread: the sum of the constants times how often each occurs.

    Args:
        p: factors of the rows, numbers or arrays of shape ``[n]``.
        q: factors of the columns.
        ranks: inner ranks, as ``p``.
        num_embeddings: rows of the table.
        lookups: lookups a batch.
        constants: of the machine.

    Returns:
        ``[len(CASES)]``, or ``[len(CASES), n]``.
    """
    amounts = step_amounts(p, q, ranks, num_embeddings, lookups)
    return sum((getattr(constants, name) * amount for name, amount in amounts.items()), np.zeros(()))


def step_amounts(
    p: Sequence[Any], q: Sequence[int], ranks: Sequence[Any], num_embeddings: int, lookups: int
) -> dict[str, Any]:
    """How often each of the `Constants` occurs in a step, as expected: arrays that broadcast to `step_costs`'."""
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
    rows, prefixes = _counts(p[-1], num_embeddings, lookups)
    middle = p[-2] * -np.expm1(-prefixes / p[-2])
    return {
        "step": 1.0,
        "lookup": float(lookups),
        "lookup_element": float(lookups * columns * q[-1]),
        "row": rows,
        "row_flop": rows * (2 * columns * max(q[-1], _LEAST_COLUMNS) * r[-2]),
        "near_last_byte": rows * (slices[-1] * (near[-1] - far[-1])),
        "far_last_byte": rows * (slices[-1] * far[-1]),
        "prefix": prefixes,
        "prefix_flop": prefixes * prefix_flops,
        "outer_byte": prefixes * sum((slices[k] for k in outer), np.zeros(())),
        "far_outer_byte": prefixes * sum((slices[k] * far[k] for k in outer), np.zeros(())),
        "middle_byte": middle * slices[-2],
        "core_byte": sum(sizes),
    }


def _counts(last: np.ndarray, num_embeddings: int, lookups: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows and distinct prefixes expected in each of `CASES`: ``[len(CASES), …]``."""
    last, where = np.unique(last, return_inverse=True)  # a search tries each with many others
    blocks = np.ceil(num_embeddings / last)
    edges = np.geomspace(1, num_embeddings + 1, 257)
    ranks, widths = np.sqrt(edges[1:] * edges[:-1]), np.diff(edges)
    hits = ranks**-ZIPF
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
