"""A generated stand-in for Meta's 2022 set of 788 tables, calibrated to its published statistics.

The tables' numbers (``data/meta788_inferred.csv``) are inferred, not Meta's data. What a row looks up is a function of
the seed and the row's number, so any rank can start anywhere:

* bag sizes: 1 plus a geometric number with the table's mean (one lookup or none if the mean is below 1); the real
  distribution is not published;
* ids: Zipf-Mandelbrot ranks over the table's vocabulary, each at a random row of the table. The published counts of
  distinct prefixes are those of ids scattered at random, so hot rows must not lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from flowtt_torchrec.datasets import counter_random
from flowtt_torchrec.datasets.base import (
    BestMetrics,
    ClickDataset,
    DataError,
    Sharding,
    Split,
    make_batch,
)
from flowtt_torchrec.datasets.meta_format import (
    NUM_DENSE,
    dense_features_and_labels,
    feature_name,
    no_signal,
    table_name,
)
from flowtt_torchrec.datasets.package_data import read_columns
from flowtt_torchrec.datasets.row_numbers import RowNumbers
from flowtt_torchrec.datasets.zipf import ZipfMandelbrot

_MAX_BAG = 1 << 20


class SyntheticMeta(ClickDataset):
    """Generated batches of the first ``num_tables`` tables. See the module's text.

    Training rows are never repeated: an epoch is the next ``num_train_rows`` rows of an endless stream. Dense features
    and labels are random, as in `MetaFiles`.

    Args:
        sharding: batch size, rank and number of ranks.
        num_tables: 1 to 788.
        num_train_rows: rows in an epoch.
        num_val_rows: held-out rows.
        seed: chooses the data.

    Raises:
        DataError: an argument is out of range.
    """

    def __init__(
        self,
        sharding: Sharding,
        *,
        num_tables: int = 240,
        num_train_rows: int = 131_072,
        num_val_rows: int = 8_192,
        seed: int = 0,
    ) -> None:
        numbers = read_columns("meta788_inferred.csv")
        available = len(numbers["table"])
        if not 1 <= num_tables <= available:
            raise DataError(f"num_tables is {num_tables}, it must be between 1 and {available}")
        self.sharding = sharding
        self.feature_names = [feature_name(table) for table in range(num_tables)]
        self.table_names = [table_name(table) for table in range(num_tables)]
        self.num_embeddings = [int(rows) for rows in numbers["num_embeddings"][:num_tables]]
        self.pooling_factors = numbers["pooling_factor"][:num_tables]
        self.num_dense = NUM_DENSE
        self.notes = [
            "table sizes and skew are inferred from published statistics, they are not Meta's data",
            "dense features and labels are random: there is nothing to learn from this data",
        ]
        self._numbers = RowNumbers(sharding, num_train_rows, num_val_rows)
        self._seed = seed
        self._laws = [
            ZipfMandelbrot(int(numbers["vocab"][table]), numbers["zipf_s"][table], numbers["zipf_q"][table])
            for table in range(num_tables)
        ]
        self._keys = [
            tuple(counter_random.key(seed, name, what) for what in ("lengths", "ranks", "rows"))
            for name in self.table_names
        ]

    def batches(self, split: Split, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        for rows in self._numbers.batches(split, epoch, start):
            bags = [self.lookups(table, rows) for table in range(len(self.table_names))]
            dense, labels = dense_features_and_labels(rows, self._seed)
            yield make_batch(
                dense,
                self.feature_names,
                torch.from_numpy(np.concatenate([indices for indices, _ in bags])),
                labels,
                torch.from_numpy(np.concatenate([lengths for _, lengths in bags])),
            )

    def num_batches(self, split: Split) -> int:
        return self._numbers.num_batches(split)

    def best_metrics(self, num_batches: int | None = None) -> BestMetrics:
        """Those of the constant 1/2: the labels are random."""
        return no_signal(len(self._numbers.held_out(num_batches)))

    def lookups(self, table: int, rows: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Rows that some samples look up in one table, and the size of each sample's bag.

        Args:
            table: number of the table.
            rows: uint64 [samples], numbers of the samples.
        """
        length_key, rank_key, row_key = self._keys[table]
        lengths = _bag_sizes(counter_random.uniform(rows, length_key), self.pooling_factors[table])
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        counter = np.repeat(rows * np.uint64(_MAX_BAG), lengths) + place.astype(np.uint64)
        ranks = self._laws[table].sample(counter_random.uniform(counter, rank_key))
        indices = counter_random.permute(ranks, self.num_embeddings[table], row_key)
        return indices.astype(np.int64), lengths


def _bag_sizes(u: NDArray[np.float64], mean: float) -> NDArray[np.int32]:
    """Bag sizes with this mean from uniform numbers in [0, 1)."""
    if mean <= 1:
        return (u < mean).astype(np.int32)
    more = np.floor(np.log1p(-u) / np.log1p(-1 / mean))
    return np.minimum(1 + more, _MAX_BAG - 1).astype(np.int32)
