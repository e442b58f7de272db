"""Rules that choose the factors of a tensor-train table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flowtt_torchrec.step_costs import step_costs

OBJECTIVES = ("balanced", "memory", "flow")
DEFAULT_LOOKUPS = 32_768

# The model errs by a fifth at times, so a flow shape must beat the balanced one by this much in every case, or by
# more in the mean.
_SURELY_FASTER, _CAUTION = 0.95, 10.0
_STEPS_PER_OCTAVE = 4  # how finely factors of the rows are tried
_LEAST_FACTOR = 8  # of the rows, where the table has that many; a core of fewer slices adds next to nothing


class Shape(NamedTuple):
    """Factors of rows ``p`` and columns ``q``, and inner ranks, as `TTSpec` has them."""

    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        r = (1, *self.ranks, 1)
        return sum(self.p[k] * r[k] * self.q[k] * r[k + 1] for k in range(len(self.p)))


def balanced_shape(num_embeddings: int, embedding_dim: int, rank: int, num_cores: int) -> Shape:
    """Nearly equal factors, the largest last, as TT-Rec and its successors choose them (TT-Rec, section 3.1)."""
    p, q = balanced_cover(num_embeddings, num_cores), balanced_factors(embedding_dim, num_cores)
    return Shape(p, q, largest_ranks(p, q, (rank,) * (num_cores - 1)))


@lru_cache(maxsize=4096)
def search_shape(
    objective: str,
    num_embeddings: int,
    embedding_dim: int,
    rank: int,
    cores: tuple[int, ...],
    lookups: int = DEFAULT_LOOKUPS,
    max_parameters: int | None = None,
) -> Shape:
    """The best shape for an objective within a budget of parameters.

    Args:
        objective: ``"memory"``, the fewest parameters, or ``"flow"``, the cheapest training step by
            `flowtt_torchrec.step_costs`, in the mean of its cases and surely no dearer than balanced in any.
        num_embeddings: rows.
        embedding_dim: columns.
        rank: the most that an inner rank may be.
        cores: the numbers of cores to choose from.
        lookups: lookups a batch, for ``"flow"``.
        max_parameters: the budget; what `balanced_shape` with three cores takes if not given.

    Raises:
        ValueError: if no shape fits the budget.
    """
    peers = balanced_shape(num_embeddings, embedding_dim, rank, 3)
    budget = max_parameters or peers.num_parameters
    peers_costs = step_costs(*peers, num_embeddings, lookups)

    def rate(p: Sequence[Any], q: Sequence[int], ranks: Sequence[Any], size: Any) -> Any:
        if objective == "memory":
            return size
        ratios = (step_costs(p, q, ranks, num_embeddings, lookups).T / peers_costs).T
        return ratios.mean(0) + _CAUTION * np.maximum(0, ratios.max(0) - _SURELY_FASTER)

    found = []
    for num_cores in cores:
        shape = balanced_shape(num_embeddings, embedding_dim, rank, num_cores)  # may be tighter than any of the grid
        if shape.num_parameters <= budget:
            rating = 1.0 if shape == peers and objective == "flow" else rate(*shape, shape.num_parameters)
            found.append((float(rating), shape.num_parameters, shape))
        p = _row_factors(num_embeddings, num_cores)
        for q in _column_factors(embedding_dim, num_cores):
            ranks = largest_ranks(p, q, (np.full_like(p[0], rank),) * (num_cores - 1))
            size = sum(p[k] * a * q[k] * b for k, (a, b) in enumerate(zip((1, *ranks), (*ranks, 1))))
            ratings = rate(p, q, ranks, size)
            best = int(np.argmin(np.where(size <= budget, ratings, np.inf)))
            if size[best] <= budget:
                shape = Shape(tuple(int(x[best]) for x in p), q, tuple(int(x[best]) for x in ranks))
                found.append((float(ratings[best]), int(size[best]), shape))
    if not found:
        raise ValueError(
            f"no tensor train of rank {rank} for {num_embeddings:,} x {embedding_dim} has as few as {budget:,} "
            "parameters; lower the rank or raise max_parameters"
        )
    return min(found)[2]


def _row_factors(num_embeddings: int, num_cores: int) -> list[np.ndarray]:
    """Candidates for ``p``: the last two factors from a grid, those before as equal as they can be."""
    least = min(_LEAST_FACTOR, balanced_cover(num_embeddings, num_cores)[0])
    most = -(-num_embeddings // least ** (num_cores - 1))
    steps = int(_STEPS_PER_OCTAVE * math.log2(most / least)) + 2
    grid = np.unique(np.geomspace(least, most, steps).round().astype(np.int64))
    tail = [x.ravel() for x in np.meshgrid(*[grid] * min(num_cores - 1, 2), indexing="ij")]
    left = -(-num_embeddings // np.prod(tail, axis=0))
    head = [left]
    if num_cores == 4:
        first = np.maximum(np.ceil(np.sqrt(left)).astype(np.int64), 1)
        head = [first, -(-left // first)]
    p = [*head, *tail]
    large = np.all([x >= least for x in p], axis=0)
    return [x[large] for x in p]


def _column_factors(embedding_dim: int, num_cores: int) -> list[tuple[int, ...]]:
    """Candidates for ``q``; a core without columns of its own only where the dimension has too few factors."""
    every = list(ordered_factors(embedding_dim, num_cores))
    return [q for q in every if min(q) > 1] or every


def largest_ranks(p: Sequence[Any], q: Sequence[int], wanted: Sequence[Any]) -> tuple[Any, ...]:
    """``wanted``, clipped to the ranks that a tensor of this shape can have; works element by element on arrays.

    Unfolding ``k`` has ``p_k q_k r_{k-1}`` rows once the cores before it are orthogonal, and likewise from the right;
    a larger rank only stores zeros (Oseledets, Tensor-Train Decomposition, SIAM J. Sci. Comput. 2011, section 2).
    """
    ranks = list(wanted)
    cores = len(p)
    bound: Any = 1
    for k in range(cores - 1):
        ranks[k] = bound = _least(bound * p[k] * q[k], ranks[k])
    bound = 1
    for k in range(cores - 1, 0, -1):
        ranks[k - 1] = bound = _least(bound * p[k] * q[k], ranks[k - 1])
    return tuple(ranks)


def _least(a: Any, b: Any) -> Any:
    return np.minimum(a, b) if isinstance(b, np.ndarray) else min(a, b)


def balanced_cover(rows: int, count: int) -> tuple[int, ...]:
    """``count`` nearly equal factors, ascending, whose product is at least ``rows`` and barely more."""
    factors, left = [], rows
    for remaining in range(count, 0, -1):
        root = round(left ** (1 / remaining))
        while root**remaining < left:  # the float root may be off by one
            root += 1
        while root > 1 and (root - 1) ** remaining >= left:
            root -= 1
        factors.append(root)
        left = -(-left // root)
    return tuple(sorted(factors))


def balanced_factors(number: int, count: int) -> tuple[int, ...]:
    """``count`` factors of ``number``, ascending, with the smallest possible sum."""
    return tuple(sorted(min(ordered_factors(number, count), key=lambda factors: (sum(factors), factors))))


def ordered_factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``number`` as a product of ``count`` factors, order counting."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in ordered_factors(number // first, count - 1))
