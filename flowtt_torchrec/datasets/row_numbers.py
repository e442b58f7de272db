"""Which rows of an endless generated stream belong to a split, an epoch, and a rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flowtt_torchrec.datasets.base import DataError, Sharding, Split, check_split
from flowtt_torchrec.datasets.counter_random import U64

_FIRST_VAL_ROW = 1 << 40
FIRST_SPARE_ROW = 1 << 41
"""No split has this row or later ones."""


class RowNumbers:
    """Training rows are never repeated: epoch ``e`` is rows ``e * num_train_rows`` to ``(e + 1) * num_train_rows``.

    The held-out rows are the same in every epoch.

    Args:
        sharding: batch size, rank and number of ranks.
        num_train_rows: rows in an epoch.
        num_val_rows: held-out rows.

    Raises:
        DataError: there is less than a row for each rank, or too many rows.
    """

    def __init__(self, sharding: Sharding, num_train_rows: int, num_val_rows: int) -> None:
        for name, rows in (("num_train_rows", num_train_rows), ("num_val_rows", num_val_rows)):
            if not sharding.world_size <= rows < _FIRST_VAL_ROW:
                raise DataError(
                    f"{name} is {rows}, it must be at least the number of ranks, {sharding.world_size}, and below 2^40"
                )
        self._sharding = sharding
        self._rows = {"train": num_train_rows, "val": num_val_rows}

    def batches(self, split: Split, epoch: int = 0, start: int = 0) -> Iterator[U64]:
        """This rank's row numbers, one array a batch, as `ClickDataset.batches`."""
        total = self._rows[check_split(split)]
        first = epoch * total if split == "train" else _FIRST_VAL_ROW
        for step in range(start, self._sharding.num_batches(total)):
            done = step * self._sharding.window
            mine = self._sharding.rank_rows(total - done)
            yield np.arange(first + done + mine.start, first + done + mine.stop, dtype=np.uint64)

    def num_batches(self, split: Split) -> int:
        return self._sharding.num_batches(self._rows[check_split(split)])

    def held_out(self, num_batches: int | None = None) -> U64:
        """The rows that all ranks together see in the first ``num_batches`` (default: all) held-out batches."""
        total = self._rows["val"]
        total -= total % self._sharding.window % self._sharding.world_size
        if num_batches is not None:
            total = min(total, num_batches * self._sharding.window)
        return np.arange(_FIRST_VAL_ROW, _FIRST_VAL_ROW + total, dtype=np.uint64)
