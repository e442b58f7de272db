"""From the ids of a source to the rows of tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets import counter_random

Ids = NDArray[np.uint64]
Counts = tuple[NDArray[np.integer], NDArray[np.int64]]
"""Distinct ids, ascending, and how often each occurs."""

_MERGE_ROWS = 1 << 20
_MAX_ARRAY_ROWS = 1 << 26


def modulo(ids: Ids, sizes: NDArray[np.uint64]) -> NDArray[np.int32]:
    """``id % rows of the table``, as TorchRec's loader. ``ids`` are ``[rows, features]``."""
    return (ids % sizes).astype(np.int32)


def hashed(ids: Ids, sizes: NDArray[np.uint64], names: Sequence[str]) -> NDArray[np.int32]:
    """A 64-bit mix of the id, another for each table, modulo the table's rows: ids that share a row do so by chance."""
    keys = np.array([counter_random.key("id", name) for name in names], dtype=np.uint64)
    return modulo(counter_random.hash64(ids, keys), sizes)


class IdCounter:
    """Counts ids of one feature that come in pieces; holds the distinct ones and at most a million that are new."""

    def __init__(self) -> None:
        self._counted: Counts = (np.empty(0, np.uint64), np.empty(0, np.int64))
        self._new: list[NDArray[np.integer]] = []
        self._pending = 0

    def add(self, ids: NDArray[np.integer]) -> None:
        self._new.append(ids)
        self._pending += len(ids)
        if self._pending >= max(_MERGE_ROWS, len(self._counted[0])):
            self.counts()

    def counts(self) -> Counts:
        """What has been added so far."""
        if self._new:
            values, counts = np.unique(np.concatenate(self._new), return_counts=True)
            self._counted = merge([self._counted, (values, counts.astype(np.int64))])
            self._new, self._pending = [], 0
        return self._counted


class RowCounter:
    """Counts rows of one table in an array of its size."""

    def __init__(self, num_embeddings: int) -> None:
        self._counts = np.zeros(num_embeddings, np.uint32)

    def add(self, rows: NDArray[np.integer]) -> None:
        np.add.at(self._counts, rows, 1)

    def counts(self) -> Counts:
        rows = np.flatnonzero(self._counts)
        return rows, self._counts[rows].astype(np.int64)


def row_counter(num_embeddings: int) -> IdCounter | RowCounter:
    """What counts the rows of a table: an array where one is not too large, which is several times as fast."""
    return RowCounter(num_embeddings) if num_embeddings <= _MAX_ARRAY_ROWS else IdCounter()


def merge(counted: Sequence[Counts]) -> Counts:
    """The counts of several sets of ids together."""
    ids, inverse = np.unique(np.concatenate([ids for ids, _ in counted]), return_inverse=True)
    total = np.zeros(len(ids), np.int64)
    np.add.at(total, inverse, np.concatenate([counts for _, counts in counted]))
    return ids, total


class Vocabulary:
    """The ids of one feature that have a row of their own.

    Args:
        ids: uint64, in the order of their rows: ``ids[0]`` has row 1.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]

    @classmethod
    def of(cls, counted: Counts, frequency_threshold: int) -> Vocabulary:
        """Numbers ids by falling frequency, equal ones by id; those below the threshold have no row."""
        ids, counts = counted
        kept = counts >= frequency_threshold
        ids, counts = ids[kept], counts[kept]
        return cls(ids[np.argsort(-counts, kind="stable")].astype(np.uint64))

    @property
    def num_embeddings(self) -> int:
        """Rows of the table, with row 0 for all other ids."""
        return len(self.ids) + 1

    def rows(self, ids: Ids) -> NDArray[np.int32]:
        """The row of each id."""
        if not len(self.ids):
            return np.zeros(len(ids), np.int32)
        place = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        return np.where(self._sorted[place] == ids, self._order[place] + 1, 0).astype(np.int32)
