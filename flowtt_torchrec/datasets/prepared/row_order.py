"""The order in which an epoch takes the rows of a split, found by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets import counter_random
from flowtt_torchrec.datasets.prepared.manifest import RowRange

SHUFFLE_ROWS = 1 << 20
"""Rows that are shuffled together; 12 bytes each are in memory."""
CHUNK_ROWS = 1 << 12
_GROUP = SHUFFLE_ROWS // CHUNK_ROWS


class Places(NamedTuple):
    """Rows of a prepared folder: number of the part, and row in it."""

    part: NDArray[np.int32]
    row: NDArray[np.int64]


class RowOrder:
    """The rows of some ranges, as they lie or shuffled.

    A shuffle puts chunks of `CHUNK_ROWS` neighbouring rows into a random order, and then the rows of each group of
    `SHUFFLE_ROWS` rows of chunks. With no more rows than that, every order is as likely as any other.

    Args:
        ranges: the rows.
        numbers: number of each part, by name.
        shuffle: seed and epoch of the shuffle; None keeps the rows as they lie.
    """

    def __init__(self, ranges: Sequence[RowRange], numbers: Mapping[str, int], shuffle: tuple[int, int] | None) -> None:
        chunks = [
            (numbers[part], first, min(CHUNK_ROWS, stop - first))
            for part, start, stop in ranges
            for first in range(start, stop, CHUNK_ROWS)
        ]
        table = np.array(chunks, np.int64).reshape(-1, 3)
        self._shuffle = shuffle
        if shuffle is not None:
            table = table[_permutation(len(table), "chunks", *shuffle)]
        self._part, self._start, self._size = table.T
        self._firsts = np.concatenate([[0], np.cumsum(self._size)])
        self._group: tuple[int, Places] | None = None

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def places(self, first: int, last: int) -> Places:
        """Where the rows at positions ``first`` to ``last`` of the order are."""
        found = []
        group = int(np.searchsorted(self._firsts, first, side="right") - 1) // _GROUP
        while first < last:
            places = self._places_of(group)
            group_first = int(self._firsts[group * _GROUP])
            taken = slice(first - group_first, last - group_first)
            found.append(Places(places.part[taken], places.row[taken]))
            first += len(found[-1].row)
            group += 1
        return Places(*(np.concatenate(arrays) for arrays in zip(*found)))

    def _places_of(self, group: int) -> Places:
        """The rows of a group of chunks, in order; the last group asked for is kept."""
        if self._group is None or self._group[0] != group:
            chunks = slice(group * _GROUP, (group + 1) * _GROUP)
            sizes = self._size[chunks]
            within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            places = Places(
                np.repeat(self._part[chunks], sizes).astype(np.int32), np.repeat(self._start[chunks], sizes) + within
            )
            if self._shuffle is not None:
                order = _permutation(len(within), f"rows/{group}", *self._shuffle)
                places = Places(places.part[order], places.row[order])
            self._group = (group, places)
        return self._group[1]


def _permutation(count: int, what: str, seed: int, epoch: int) -> NDArray[np.intp]:
    stream = counter_random.key(seed, what, epoch)
    return np.argsort(counter_random.hash64(np.arange(count), stream), kind="stable")
