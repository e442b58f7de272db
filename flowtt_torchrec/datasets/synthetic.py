"""A generated Criteo-like stream: Kaggle's table sizes and skew, clicks from a planted model.

Every row is a function of the seed and its number, so that any rank and any number of ranks can start anywhere and see
the same data, and nothing is stored.

Columns are independent of each other. Ids follow a Zipf-Mandelbrot law fitted to the real column (see
``data/criteo_kaggle_categories.csv``) and lie at random rows of the table; a missing category is row 0. Integers are
log-normal with the measured median and 99 % quantile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
from flowtt_torchrec.datasets.criteo_format import (
    FEATURE_NAMES,
    NUM_CATEGORIES,
    NUM_DENSE,
    TABLE_NAMES,
    dense_transform,
)
from flowtt_torchrec.datasets.package_data import read_columns
from flowtt_torchrec.datasets.planted import PlantedModel, score
from flowtt_torchrec.datasets.row_numbers import FIRST_SPARE_ROW, RowNumbers
from flowtt_torchrec.datasets.zipf import ZipfMandelbrot

KAGGLE_NUM_EMBEDDINGS = [int(n) for n in read_columns("criteo_kaggle_categories.csv")["num_embeddings"]]
"""Categories of the 26 columns in the Kaggle training file, the missing value included."""

# Columns of very different sizes, so that interactions run between tables that are likely compressed and dense ones.
_PAIRS = [(2, 3), (11, 13), (15, 20)]
_MIN_ROWS = 4
_CALIBRATION_ROWS = 16_384
_CHUNK = 8192
_Z99 = 2.3263478740408408  # the standard normal's 99 % quantile


class Rows(NamedTuple):
    """Generated rows."""

    dense: NDArray[np.float32]
    """[rows, 13]"""
    ids: NDArray[np.uint64]
    """[rows, 26]"""
    probabilities: NDArray[np.float64]
    """[rows], the true click probabilities"""
    labels: NDArray[np.float32]
    """[rows], drawn from them"""


class SyntheticCriteo(ClickDataset):
    """Generated rows of 13 dense features and 26 categories. See the module's text.

    Training rows are never repeated: an epoch is the next ``num_train_rows`` rows of an endless stream.

    Args:
        sharding: batch size, rank and number of ranks.
        num_train_rows: rows in an epoch.
        num_val_rows: held-out rows.
        scale: factor on Kaggle's table sizes.
        max_rows: upper limit of a table's size, after scaling.
        seed: chooses the data and the planted model.
        group_share: share of ids' effects that is their latent groups', 0 to 1; see `PlantedModel`.

    Raises:
        DataError: an argument is out of range.
    """

    def __init__(
        self,
        sharding: Sharding,
        *,
        num_train_rows: int = 1_000_000,
        num_val_rows: int = 65_536,
        scale: float = 1.0,
        max_rows: int | None = None,
        seed: int = 0,
        group_share: float = 0.0,
    ) -> None:
        if not 0 <= group_share <= 1:
            raise DataError(f"group_share is {group_share}, it must be from 0 to 1")
        if scale <= 0:
            raise DataError(f"scale is {scale}, it must be above 0")
        if max_rows is not None and max_rows < _MIN_ROWS:
            raise DataError(f"max_rows is {max_rows}, it must be at least {_MIN_ROWS}")
        self.sharding = sharding
        self.feature_names = list(FEATURE_NAMES)
        self.table_names = list(TABLE_NAMES)
        scaled = [max(round(size * scale), min(size, _MIN_ROWS)) for size in KAGGLE_NUM_EMBEDDINGS]
        self.num_embeddings = [size if max_rows is None else min(size, max_rows) for size in scaled]
        self.pooling_factors = [1.0] * NUM_CATEGORIES
        self.num_dense = NUM_DENSE
        self.notes = []
        self._numbers = RowNumbers(sharding, num_train_rows, num_val_rows)
        self._best: dict[int, BestMetrics] = {}
        self._init_columns(seed)

        dense, ids, ranks = self._features(np.arange(_CALIBRATION_ROWS, dtype=np.uint64) + np.uint64(FIRST_SPARE_ROW))
        self._model = PlantedModel(seed, _PAIRS, dense, ids, ranks, group_share)

    def _init_columns(self, seed: int) -> None:
        categories = read_columns("criteo_kaggle_categories.csv")
        self._missing = np.array(categories["missing"])
        # A column that can be missing keeps row 0 for it.
        self._first_row = (self._missing > 0).astype(np.uint64)
        self._num_values = np.array(self.num_embeddings, dtype=np.uint64) - self._first_row
        self._laws = [
            ZipfMandelbrot(int(size), s, q)
            for size, s, q in zip(self._num_values, categories["zipf_s"], categories["zipf_q"])
        ]
        integers = read_columns("criteo_kaggle_integers.csv")
        self._missing_integer = np.array(integers["missing"])
        self._log_median = np.log1p(integers["p50"])
        self._log_spread = (np.log1p(integers["p99"]) - self._log_median) / _Z99
        self._keys = {
            name: counter_random.key(seed, name) for name in ("categories", "integers", "missing integers", "labels")
        }
        self._row_keys = np.array([counter_random.key(seed, "rows", name) for name in TABLE_NAMES], dtype=np.uint64)

    def batches(self, split: Split, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        for numbers in self._numbers.batches(split, epoch, start):
            rows = self.rows(numbers)
            yield make_batch(
                torch.from_numpy(rows.dense),
                self.feature_names,
                torch.from_numpy(rows.ids.T.astype(np.int64).ravel()),
                torch.from_numpy(rows.labels),
            )

    def num_batches(self, split: Split) -> int:
        return self._numbers.num_batches(split)

    def best_metrics(self, num_batches: int | None = None) -> BestMetrics:
        """Scores of the true probabilities as predictions of the same clicks that a model is evaluated on."""
        numbers = self._numbers.held_out(num_batches)
        if numbers.size not in self._best:
            chunks = [self.rows(numbers[first : first + _CHUNK]) for first in range(0, numbers.size, _CHUNK)]
            self._best[numbers.size] = score(
                np.concatenate([chunk.probabilities for chunk in chunks]),
                np.concatenate([chunk.labels for chunk in chunks]),
            )
        return self._best[numbers.size]

    def rows(self, numbers: NDArray[np.uint64]) -> Rows:
        """The rows with these numbers, uint64 [rows]."""
        dense, ids, ranks = self._features(numbers)
        probabilities = self._model.probabilities(dense, ids, ranks)
        labels = counter_random.uniform(numbers, self._keys["labels"]) < probabilities
        return Rows(dense, ids, probabilities, labels.astype(np.float32))

    def _features(
        self, numbers: NDArray[np.uint64]
    ) -> tuple[NDArray[np.float32], NDArray[np.uint64], NDArray[np.uint64]]:
        """Dense features [rows, 13], and the ids [rows, 26] with their ranks by frequency."""
        cells = numbers[:, None] * np.uint64(NUM_DENSE) + np.arange(NUM_DENSE, dtype=np.uint64)
        logs = counter_random.normal(cells, self._keys["integers"]) * self._log_spread + self._log_median
        present = counter_random.uniform(cells, self._keys["missing integers"]) >= self._missing_integer
        dense = dense_transform(np.where(present, np.expm1(np.maximum(logs, 0.0)), 0.0).astype(np.int64))

        cells = numbers[:, None] * np.uint64(NUM_CATEGORIES) + np.arange(NUM_CATEGORIES, dtype=np.uint64)
        u = counter_random.uniform(cells, self._keys["categories"])
        missing = u < self._missing
        u = np.where(missing, 0.0, (u - self._missing) / (1.0 - self._missing))
        ranks = np.stack([law.sample(u[:, column]) for column, law in enumerate(self._laws)], axis=1)
        ids = counter_random.permute(ranks, self._num_values, self._row_keys) + self._first_row
        ids[missing] = 0
        return dense, ids, ranks
