"""Batches from a prepared folder, read by position: any batch of any epoch without the ones before it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from flowtt_torchrec.datasets.base import SPLITS, ClickDataset, DataError, Sharding, Split, check_split, make_batch
from flowtt_torchrec.datasets.criteo_format import FEATURE_NAMES, NUM_CATEGORIES, NUM_DENSE, TABLE_NAMES, table_sizes
from flowtt_torchrec.datasets.files import fingerprint
from flowtt_torchrec.datasets.prepared.manifest import (
    KAGGLE_FRACTIONS,
    MANIFEST,
    Manifest,
    RowRange,
    last_part_split,
    time_split,
)
from flowtt_torchrec.datasets.prepared.npy_files import ARRAYS, open_array
from flowtt_torchrec.datasets.prepared.row_order import Places, RowOrder


def is_prepared(path: str | Path) -> bool:
    """Whether a path is a folder of npy files, with a manifest or without."""
    folder = Path(path)
    return folder.is_dir() and ((folder / MANIFEST).exists() or any(folder.glob("*_sparse.npy")))


@dataclass(frozen=True)
class _Arrays:
    """A part, mapped into memory."""

    dense: NDArray[np.float32]
    sparse: NDArray[np.integer]
    labels: NDArray[np.int32]


class PreparedClicks(ClickDataset):
    """Batches of a folder that `prepare` or TorchRec's preprocessing scripts have written.

    Training rows come in a new order each epoch, see `flowtt_torchrec.datasets.prepared.row_order.RowOrder`. Each rank
    reads its own rows only.

    Args:
        path: the folder.
        sharding: batch size, rank and number of ranks.
        num_embeddings: rows of the tables, one number for all or one a table, for folders without a manifest, whose ids
            are taken modulo these. A manifest says how large its tables are; another wish is noted, and has no effect.
        shuffle: whether training rows are shuffled.
        seed: of the shuffle.

    Raises:
        DataError: a file is missing, damaged, or of another shape or type than the others say.
    """

    splits = SPLITS

    def __init__(
        self,
        path: str | Path,
        sharding: Sharding,
        *,
        num_embeddings: int | Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        folder = self._folder = Path(path)
        self.sharding = sharding
        self._shuffle, self._seed = shuffle, seed
        self._modulo: NDArray[np.int64] | None = None
        manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
        if manifest is not None:
            names = [part.name for part in manifest.parts]
            self.feature_names, self.table_names = manifest.sparse, manifest.tables
            self.num_embeddings = manifest.num_embeddings
            self.num_dense = len(manifest.dense)
        else:
            names = _parts_without_manifest(folder)
            self.feature_names, self.table_names = list(FEATURE_NAMES), list(TABLE_NAMES)
            self.num_dense = NUM_DENSE
            if num_embeddings is None:
                raise DataError(f"{folder} has no {MANIFEST}, so the rows of its tables must be given (num_embeddings)")
            self.num_embeddings = table_sizes(num_embeddings)
            self._modulo = np.array(self.num_embeddings, np.int64)
            assert len(self.feature_names) == NUM_CATEGORIES
        self.pooling_factors = [1.0] * len(self.feature_names)
        self._parts = {name: self._open(folder, name) for name in names}
        rows = {name: len(part.labels) for name, part in self._parts.items()}
        for part in manifest.parts if manifest is not None else ():
            if rows[part.name] != part.rows:
                raise DataError(
                    f"{folder / part.name}_labels.npy has {rows[part.name]} rows, but the manifest says {part.rows}; "
                    "prepare the data again"
                )
        if manifest is not None:
            split = manifest.split
        elif len(rows) > 1:
            split = last_part_split(list(rows.items()))
        else:
            split = time_split(list(rows.items()), KAGGLE_FRACTIONS)
        self._ranges: Mapping[Split, Sequence[RowRange]] = split
        self.notes = [self._note(name) for name in SPLITS if name != "train" and split[name]]
        if manifest is not None and num_embeddings is not None:
            wanted = [num_embeddings] * len(self.num_embeddings) if isinstance(num_embeddings, int) else num_embeddings
            if list(wanted) != self.num_embeddings:
                self.notes.append("tables are as large as the folder was prepared for, not as num_embeddings says")

    def _note(self, split: Split) -> str:
        ranges = ", ".join(f"{part} from row {start:,} to {stop:,}" for part, start, stop in self._ranges[split])
        return f"{split}: {ranges}"

    def _open(self, folder: Path, name: str) -> _Arrays:
        dense, sparse, labels = (
            open_array(folder, name, kind, self.num_dense, len(self.feature_names)) for kind in ARRAYS
        )
        labels = labels.reshape(-1)
        if not len(dense) == len(sparse) == len(labels):
            raise DataError(
                f"{folder / name}: {len(dense)} rows of dense features, {len(sparse)} of sparse ones and {len(labels)} "
                "labels; they must be as many; prepare the data again"
            )
        return _Arrays(dense, sparse, labels)

    def num_rows(self, split: Split) -> int:
        """Rows of a split, of all ranks together."""
        return sum(stop - start for _, start, stop in self._ranges[check_split(split, self.splits)])

    def num_batches(self, split: Split) -> int:
        return self.sharding.num_batches(self.num_rows(split))

    def identity(self) -> dict[str, Any]:
        names = [f"{part}_{kind}.npy" for part in self._parts for kind in ARRAYS]
        return {"arrays": [fingerprint(self._folder / name) for name in names]}

    def batches(self, split: Split, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        rows = self.num_rows(split)
        if rows < self.sharding.world_size:
            raise DataError(
                f"split {split!r} has {rows} rows, there must be at least one a rank, {self.sharding.world_size}"
            )
        shuffle = (self._seed, epoch) if self._shuffle and split == "train" else None
        order = RowOrder(self._ranges[split], {name: number for number, name in enumerate(self._parts)}, shuffle)
        for step in range(start, self.num_batches(split)):
            first = step * self.sharding.window
            mine = self.sharding.rank_rows(min(self.sharding.window, rows - first))
            yield self._batch(order.places(first + mine.start, first + mine.stop))

    def _batch(self, places: Places) -> Batch:
        count = len(places.row)
        dense = np.empty((count, self.num_dense), np.float32)
        sparse = np.empty((count, len(self.feature_names)), np.int64)
        labels = np.empty(count, np.float32)
        for number, part in enumerate(self._parts.values()):
            at = np.flatnonzero(places.part == number) if len(self._parts) > 1 else slice(None)
            rows = places.row[at]
            if len(rows):
                dense[at], sparse[at], labels[at] = part.dense[rows], part.sparse[rows], part.labels[rows]
        if self._modulo is not None:
            sparse %= self._modulo
        return make_batch(
            torch.from_numpy(dense),
            self.feature_names,
            torch.from_numpy(np.ascontiguousarray(sparse.T).reshape(-1)),
            torch.from_numpy(labels),
        )


def _parts_without_manifest(folder: Path) -> list[str]:
    """Names of the parts of a folder as TorchRec's scripts write it: ``train``, or ``day_0``, ``day_1``, ..."""
    names = {path.name[: -len("_sparse.npy")] for path in folder.glob("*_sparse.npy")}
    if "train" in names:
        return ["train"]
    days = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"day_(\d+)", name)))
    if not days:
        raise DataError(f"{folder} has neither train_sparse.npy nor day_0_sparse.npy, day_1_sparse.npy, ...")
    for day in range(days[0], days[-1]):
        if day not in days:
            raise DataError(f"{folder}: day_{day}_sparse.npy is missing between day_{days[0]} and day_{days[-1]}")
    return [f"day_{day}" for day in days]
