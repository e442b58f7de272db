"""What a data set offers to the training loop: tables, features, and batches for one rank.

All ranks of a job make the same data set with the same arguments except ``rank``. The rows of a split form one global
order that does not depend on the number of ranks. Step ``s`` takes the next ``world_size * batch_size`` rows of it (a
*window*), and rank ``r`` gets rows ``r * batch_size`` to ``(r + 1) * batch_size`` of the window. When a split ends with
``n`` rows left, fewer than a window, each rank gets ``n // world_size`` of them (none if that is 0), so all ranks see
the same number of batches of the same sizes, and at most ``world_size - 1`` rows are left out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
MAX_ROWS = 1 << 36
"""Of a table: ten times the people on Earth. What asks for more is damaged data, or a slip."""


class DataError(ValueError):
    """The data, or what was said about it, is wrong. The message is for the user and needs no traceback."""


class BestMetrics(NamedTuple):
    """What a model that knew every row's true click probability would score on the held-out rows."""

    auroc: float
    ne: float
    """Normalised entropy: mean log loss over the entropy of the rows' mean label (He et al., ADKDD 2014)."""
    auroc_margin: float
    """Half the width of the 95 % confidence interval of an AUROC on so many rows: luck may carry a model so far."""


def auroc_margin(auroc: float, clicks: int, others: int) -> float:
    """Half the width of an AUROC's 95 % confidence interval, from its standard error (Hanley & McNeil, Radiology 1982).

    Args:
        auroc: the area.
        clicks: rows of label 1.
        others: rows of label 0.
    """
    if not clicks or not others:
        return math.nan
    two_clicks, two_others = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)
    variance = auroc * (1 - auroc) + (clicks - 1) * (two_clicks - auroc**2) + (others - 1) * (two_others - auroc**2)
    return 1.96 * math.sqrt(variance / (clicks * others))


@dataclass(frozen=True)
class Sharding:
    """Which rows are this rank's: see the module's text.

    Args:
        batch_size: rows of one rank in one step.
        rank: this process, from 0.
        world_size: number of processes.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size is {self.batch_size}, it must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"rank {self.rank} is not one of {self.world_size} ranks (0 to {self.world_size - 1})")

    @property
    def window(self) -> int:
        """Rows that all ranks take together in one step."""
        return self.batch_size * self.world_size

    def rank_rows(self, window_rows: int) -> slice:
        """This rank's part of a window that holds ``window_rows`` rows."""
        rows = min(window_rows // self.world_size, self.batch_size)
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def num_batches(self, rows: int) -> int:
        """Batches that every rank gets out of ``rows`` rows."""
        full, rest = divmod(rows, self.window)
        return full + int(rest >= self.world_size)


class ClickDataset(ABC):
    """Rows of (dense features, categories, click or not) as batches for one rank. One table a feature.

    Attributes:
        sharding: batch size, rank and number of ranks.
        feature_names: keys of the sparse features, in the order of the batches.
        table_names: name of the table that each feature looks up.
        num_embeddings: rows of each table.
        pooling_factors: lookups a row and table, on average.
        num_dense: number of dense features.
        splits: names of its splits.
        notes: what the user should know about the data (dropped tables, inferred numbers), one sentence each.
    """

    sharding: Sharding
    feature_names: list[str]
    table_names: list[str]
    num_embeddings: list[int]
    pooling_factors: list[float]
    num_dense: int
    splits: tuple[Split, ...] = ("train", "val")
    notes: list[str]

    @abstractmethod
    def batches(self, split: Split, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """This rank's batches of one pass over a split, in a fixed order.

        Args:
            split: one of `splits`.
            epoch: number of the pass, from 0; may choose the order of the rows.
            start: batches to skip. What follows is the same as in a pass that was not interrupted.

        Yields:
            ``dense_features`` float32 [batch, num_dense], ``sparse_features`` with int64 values, ``labels`` float32
            [batch] of zeros and ones. The last batch may be smaller.

        Raises:
            DataError: a file is missing, damaged or not in the format, with its name and line.
        """

    @abstractmethod
    def num_batches(self, split: Split) -> int | None:
        """Number of batches of one pass, or None if only reading all of the data would tell."""

    def best_metrics(self, num_batches: int | None = None) -> BestMetrics | None:
        """Best possible scores on the first ``num_batches`` (default: all) held-out batches of all ranks, if known."""
        return None

    def check_rows(self, split: Split) -> None:
        """Tries a split before minutes go into a plan and an epoch: has it rows for each rank, can they be read?

        Raises:
            DataError: no, and why.
        """
        if self.num_batches(split) == 0:
            raise DataError(f"split {split!r} has fewer rows than there are ranks, {self.sharding.world_size}")

    def identity(self) -> dict[str, Any]:
        """What tells this data from other data, for JSON: by kind of file, `files.fingerprint` of each.

        Nothing for generated rows, which the arguments decide.
        """
        return {}

    def batches_in(self, rows: int, drop_last: bool = False) -> int | None:
        """The number of training batches whose rows, of all ranks, are the first ``rows`` of a pass.

        None if a batch ends on either side of there, as it may if the batch size or the number of ranks was another.

        Args:
            rows: training rows.
            drop_last: count batches that are not full, but not their rows.
        """
        batches, rest = divmod(rows, self.sharding.window)
        return None if rest else batches


def check_split(split: Split, splits: Sequence[Split] = ClickDataset.splits) -> Split:
    """``split``, or a `DataError` if it is none of ``splits``."""
    if split not in splits:
        raise DataError(f"split {split!r} is unknown; there are {', '.join(map(repr, splits))}")
    return split


def make_batch(
    dense: Tensor, keys: Sequence[str], values: Tensor, labels: Tensor, lengths: Tensor | None = None
) -> Batch:
    """A TorchRec batch.

    Args:
        dense: float32 [batch, num_dense].
        keys: names of the sparse features.
        values: int64 ids, feature-major: all bags of the first feature, then of the second, ...
        labels: float32 [batch].
        lengths: int32 [features * batch], ids in each bag; one id each if left out.
    """
    if lengths is None:
        lengths = torch.ones(len(keys) * len(labels), dtype=torch.int32)
    sparse = KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths, stride=len(labels))
    return Batch(dense_features=dense, sparse_features=sparse, labels=labels)
