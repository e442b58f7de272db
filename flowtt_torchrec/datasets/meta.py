"""Meta's synthetic data sets (facebookresearch/dlrm_datasets) as batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.datasets.utils import Batch

from flowtt_torchrec.datasets.base import (
    BestMetrics,
    ClickDataset,
    DataError,
    Sharding,
    Split,
    check_split,
    make_batch,
)
from flowtt_torchrec.datasets.files import find_files, fingerprint, left_out
from flowtt_torchrec.datasets.meta_format import (
    NUM_DENSE,
    MetaLookups,
    dense_features_and_labels,
    feature_name,
    load_lookups,
    no_signal,
    table_name,
)

_FOLDER_PATTERNS = (r"fbgemm_t\d+_bs\d+(_\d+)?\.pt(\.gz)?", r"[^._].*\.pt(\.gz)?")
_EXPECTED = "fbgemm_t788_bs131072_0.pt or other .pt files"


class MetaFiles(ClickDataset):
    """Batches from files in Meta's format, in the order of the files, not shuffled.

    A table has as many rows as its largest index in all files, plus one; a table without lookups is left out. All files
    are read once to find out, and then one after the other, each whole: a plain ``.pt`` is mapped into memory, which
    the processes of a host share, so unpack the ``.gz`` files once where memory or time matters. A batch never spans
    two files. Dense features and labels are random, since the data has none.

    Args:
        paths: a file, a folder, or several of them.
        sharding: batch size, rank and number of ranks.
        num_tables: use the first so many tables (Meta-240: 240); all by default.
        val_fraction: the last samples of each file that are held out.
        seed: of the dense features and labels.

    Raises:
        DataError: a file is missing, damaged, not in the format, or has too few tables.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        sharding: Sharding,
        *,
        num_tables: int | None = None,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        if not 0 < val_fraction < 1:
            raise DataError(f"val_fraction is {val_fraction}, it must be between 0 and 1")
        self.sharding = sharding
        self.num_dense = NUM_DENSE
        self._seed = seed
        folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        self._files = [file for path in folders for file in find_files(path, _FOLDER_PATTERNS, _EXPECTED)]
        if not self._files:
            raise DataError("no data file is given")
        self._loaded: tuple[int, MetaLookups] | None = None
        self._samples: list[int] = []
        self._scan(num_tables)
        self.notes += [note for path in folders if (note := left_out(path, self._files)) is not None]
        self._held_out = [max(1, round(samples * val_fraction)) for samples in self._samples]

    def _scan(self, num_tables: int | None) -> None:
        """Finds the number of rows and lookups of each table, and of samples of each file."""
        rows: list[int] = []
        lookups: list[int] = []
        for number, path in enumerate(self._files):
            content = self._load(number)
            tables, samples = content.lengths.shape
            wanted = tables if num_tables is None else num_tables
            if not 1 <= wanted <= tables:
                raise DataError(f"{path}: num_tables is {wanted}, but the file has {tables} tables")
            if rows and len(rows) != wanted:
                raise DataError(f"{path}: {tables} tables, but {self._files[0]} has {len(rows)}")
            self._samples.append(samples)
            rows, lookups = rows or [0] * wanted, lookups or [0] * wanted
            for table in range(wanted):
                indices = content.table(table)
                if indices.numel():
                    rows[table] = max(rows[table], int(indices.max()) + 1)
                    lookups[table] += indices.numel()
        self._tables = [table for table, count in enumerate(lookups) if count]
        if not self._tables:
            raise DataError(f"{self._files[0]}: no table has any lookups")
        self.feature_names = [feature_name(table) for table in self._tables]
        self.table_names = [table_name(table) for table in self._tables]
        self.num_embeddings = [rows[table] for table in self._tables]
        self.pooling_factors = [lookups[table] / sum(self._samples) for table in self._tables]
        self.notes = ["dense features and labels are random: there is nothing to learn from this data"]
        dropped = [feature_name(table) for table, count in enumerate(lookups) if not count]
        if dropped:
            self.notes.append(f"{len(dropped)} of {len(lookups)} tables have no lookups: {', '.join(dropped)}")

    def batches(self, split: Split, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        check_split(split)
        step = 0
        for number in range(len(self._files)):
            first, rows = self._range(split, number)
            steps = self.sharding.num_batches(rows)
            for within in range(max(start - step, 0), steps):
                done = within * self.sharding.window
                mine = self.sharding.rank_rows(rows - done)
                yield self._batch(number, first + done + mine.start, first + done + mine.stop)
            step += steps

    def num_batches(self, split: Split) -> int:
        check_split(split)
        return sum(self.sharding.num_batches(self._range(split, number)[1]) for number in range(len(self._files)))

    def best_metrics(self, num_batches: int | None = None) -> BestMetrics:
        """Those of the constant 1/2: the labels are random."""
        sizes = [size for number in range(len(self._files)) for size in self._batch_rows("val", number)]
        return no_signal(sum(sizes[:num_batches]))

    def identity(self) -> dict[str, Any]:
        return {"files": [fingerprint(path) for path in self._files]}

    def batches_in(self, rows: int, drop_last: bool = False) -> int | None:
        """Walks through the files, each of which may end with a batch that is not full."""
        batches = 0
        for number in range(len(self._files)):
            for size in self._batch_rows("train", number):
                if rows <= 0:
                    return batches if rows == 0 else None
                batches += 1
                rows -= size if size == self.sharding.window or not drop_last else 0
        return batches if rows == 0 else None

    def _batch_rows(self, split: Split, number: int) -> Iterator[int]:
        """Rows of all ranks in each batch of a file."""
        rows = self._range(split, number)[1]
        for within in range(self.sharding.num_batches(rows)):
            mine = self.sharding.rank_rows(rows - within * self.sharding.window)
            yield (mine.stop - mine.start) * self.sharding.world_size

    def _range(self, split: Split, number: int) -> tuple[int, int]:
        """First sample and number of samples of a split in a file."""
        held_out = self._held_out[number]
        train = self._samples[number] - held_out
        return (0, train) if split == "train" else (train, held_out)

    def _load(self, number: int) -> MetaLookups:
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = None  # frees the memory of the file before
            self._loaded = number, load_lookups(self._files[number])
        return self._loaded[1]

    def _batch(self, number: int, start: int, stop: int) -> Batch:
        """Samples ``start`` to ``stop`` of a file."""
        content = self._load(number)
        samples = self._samples[number]
        tables = torch.tensor(self._tables) * samples
        bounds = torch.stack([content.offsets[tables + start], content.offsets[tables + stop]], dim=1).tolist()
        values = torch.cat([content.indices[first:last] for first, last in bounds]).long()
        lengths = content.lengths[self._tables, start:stop].to(torch.int32).flatten()
        rows = np.arange(start, stop, dtype=np.uint64) + np.uint64(sum(self._samples[:number]))
        dense, labels = dense_features_and_labels(rows, self._seed)
        return make_batch(dense, self.feature_names, values, labels, lengths)
