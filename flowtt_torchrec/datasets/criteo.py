"""Raw Criteo click logs (Kaggle or 1TB layout) as a stream: text in, batches out, never the whole data in memory.

Each rank reads all lines and parses those that are its own (see `flowtt_torchrec.datasets.base` for which they are).
Category ``x`` becomes id ``x % num_embeddings``, as in TorchRec's loader; a missing one becomes id 0, a missing integer
becomes 0, and dense features are ``log(1 + max(x, 0))``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from flowtt_torchrec.datasets import counter_random
from flowtt_torchrec.datasets.base import ClickDataset, DataError, Sharding, Split, check_split, make_batch
from flowtt_torchrec.datasets.criteo_format import (
    FEATURE_NAMES,
    NUM_CATEGORIES,
    NUM_DENSE,
    NUM_FIELDS,
    TABLE_NAMES,
    dense_transform,
    table_sizes,
)
from flowtt_torchrec.datasets.criteo_parser import parse_lines
from flowtt_torchrec.datasets.diagnosis import describe_line
from flowtt_torchrec.datasets.files import find_files, fingerprint, left_out
from flowtt_torchrec.datasets.text_files import read_lines

# What is read in a folder: Kaggle's train.txt (its test.txt has no labels), or the days of 1TB, or all text files.
_FOLDER_PATTERNS = (r"train\.(txt|tsv)(\.gz)?", r"day_\d+(\.(txt|tsv))?(\.gz)?", r"[^._].*\.(txt|tsv)(\.gz)?")
_TRIED_LINES = 100
_TRIED_BYTES = 1 << 14
_EXPECTED = "train.txt, or day_0, day_1, ..., or other .txt or .tsv files"


class _Block(NamedTuple):
    """Lines, and where each is from: files[file[i]], line number[i]."""

    lines: list[bytes]
    file: NDArray[np.int64]
    number: NDArray[np.int64]

    def select(self, rows: slice | NDArray[np.intp]) -> _Block:
        lines = self.lines[rows] if isinstance(rows, slice) else [self.lines[row] for row in rows]
        return _Block(lines, self.file[rows], self.number[rows])


class CriteoTSV(ClickDataset):
    """Batches from raw Criteo files.

    Args:
        path: a file, plain or gzip, or a folder. In a folder, ``train.txt`` (Kaggle) goes before ``day_0``, ``day_1``
            etc. (1TB), and these before all other ``.txt`` and ``.tsv`` files whose first line has 40 fields; files are
            read in natural order.
        num_embeddings: rows of the tables, one number for all or 26 numbers.
        sharding: batch size, rank and number of ranks.
        val_path: file or folder of held-out rows; its files are left out of training where ``path`` holds them too,
            or copies. Without it, every ``val_every``-th row of ``path`` is held out: rows ``val_every - 1``,
            ``2 * val_every - 1``, ... of all files together, from 0.
        val_every: at least 2.
        shuffle_rows: training rows are shuffled within consecutive blocks of this many (about 250 bytes each in
            memory), anew in each epoch; 0 keeps the order of the files.
        seed: of the shuffle.

    Raises:
        DataError: a path does not exist or holds no data, nothing is left to train on, or an argument is out of range.
    """

    def __init__(
        self,
        path: str | Path,
        num_embeddings: int | Sequence[int],
        sharding: Sharding,
        *,
        val_path: str | Path | None = None,
        val_every: int = 10,
        shuffle_rows: int = 0,
        seed: int = 0,
    ) -> None:
        if val_every < 2:
            raise DataError(f"val_every is {val_every}, it must be at least 2")
        if shuffle_rows < 0:
            raise DataError(f"shuffle_rows is {shuffle_rows}, it must be at least 0")
        self.sharding = sharding
        self.feature_names = list(FEATURE_NAMES)
        self.table_names = list(TABLE_NAMES)
        self.num_embeddings = table_sizes(num_embeddings)
        self.pooling_factors = [1.0] * NUM_CATEGORIES
        self.num_dense = NUM_DENSE
        self.notes = [] if val_path else [f"one row in {val_every} of {path} is held out for evaluation"]
        self._train_files = find_files(path, _FOLDER_PATTERNS, _EXPECTED, _why_not)
        self._val_files = find_files(val_path, _FOLDER_PATTERNS, _EXPECTED, _why_not) if val_path else None
        read = [*self._train_files, *(self._val_files or [])]
        for folder in dict.fromkeys([Path(path), *([Path(val_path)] if val_path else [])]):
            if (note := left_out(folder, read)) is not None:
                self.notes.append(note)
        if self._val_files is not None:
            self._hold_out(self._val_files, path, val_path)
        self._val_every = val_every
        self._shuffle_rows = shuffle_rows
        self._seed = seed
        self._hash_sizes = np.array(self.num_embeddings, dtype=np.uint64)

    def batches(self, split: Split, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        blocks = self._rows(check_split(split))
        if split == "train" and self._shuffle_rows:
            blocks = self._shuffled(blocks, epoch)
        rows = 0
        for step, window in enumerate(_regroup(blocks, self.sharding.window)):
            rows += len(window.lines)
            mine = self.sharding.rank_rows(len(window.lines))
            if step >= start and mine.stop > mine.start:
                yield self._batch(window.select(mine), self._files(split))
        if rows < self.sharding.world_size:
            self._raise_too_few(split, rows)

    def num_batches(self, split: Split) -> None:
        """Always None: only reading all files would tell."""

    def identity(self) -> dict[str, Any]:
        val_files = None if self._val_files is None else [fingerprint(path) for path in self._val_files]
        return {"train": [fingerprint(path) for path in self._train_files], "val": val_files}

    def check_rows(self, split: Split) -> None:
        """Counts rows until there are enough, and parses the first rows of every file, and the last of plain ones."""
        if split == "train" or self._val_files is not None:
            for path in self._files(split):
                _try_ends(path)
        rows = 0
        for block in self._rows(split):
            rows += len(block.lines)
            if rows >= self.sharding.world_size:
                return
        self._raise_too_few(split, rows)

    def _hold_out(self, val_files: list[Path], path: str | Path, val_path: str | Path | None) -> None:
        """Takes out of training what is there to evaluate on."""
        held_out = {(file.stat().st_dev, file.stat().st_ino) for file in val_files}
        sizes = {file.stat().st_size for file in val_files}
        copies = [{**fingerprint(file), "name": None} for file in val_files]

        def is_held_out(file: Path) -> bool:
            status = file.stat()
            same = (status.st_dev, status.st_ino) in held_out
            return same or (status.st_size in sizes and {**fingerprint(file), "name": None} in copies)

        left = [file for file in self._train_files if not is_held_out(file)]
        taken = [file.name for file in self._train_files if file not in left]
        if not left:
            raise DataError(
                f"val_path {val_path} holds all that path {path} does, so that nothing is left to train on; give other "
                "files to evaluate on, or leave val_path out to hold out every val_every-th row"
            )
        if taken:
            self.notes.append(f"left out of training, since val_path holds it: {', '.join(taken)}")
        self._train_files = left

    def _files(self, split: Split) -> list[Path]:
        return self._val_files if split == "val" and self._val_files else self._train_files

    def _raise_too_few(self, split: Split, rows: int) -> NoReturn:
        raise DataError(
            f"{self._files(split)[0]}: {rows} rows for split {split!r} in {len(self._files(split))} file(s), "
            f"there must be at least one a rank, {self.sharding.world_size}"
        )

    def _rows(self, split: Split) -> Iterator[_Block]:
        """All lines of a split, in the order of the files."""
        row = 0
        for file, path in enumerate(self._files(split)):
            number = 1
            for lines in read_lines(path):
                block = _Block(lines, np.full(len(lines), file), np.arange(number, number + len(lines)))
                if self._val_files is None:
                    held_out = (np.arange(row, row + len(lines)) + 1) % self._val_every == 0
                    block = block.select(np.flatnonzero(held_out == (split == "val")))
                row += len(lines)
                number += len(lines)
                yield block

    def _shuffled(self, blocks: Iterable[_Block], epoch: int) -> Iterator[_Block]:
        for number, block in enumerate(_regroup(blocks, self._shuffle_rows)):
            stream = counter_random.key(self._seed, "shuffle", epoch, number)
            yield block.select(np.argsort(counter_random.hash64(np.arange(len(block.lines)), stream), kind="stable"))

    def _batch(self, block: _Block, files: list[Path]) -> Batch:
        parsed = parse_lines(block.lines, lambda i: f"{files[block.file[i]]}:{block.number[i]}")
        ids = (parsed.categories % self._hash_sizes).astype(np.int64)
        return make_batch(
            torch.from_numpy(dense_transform(parsed.integers)),
            self.feature_names,
            torch.from_numpy(ids.T.ravel()),
            torch.from_numpy(parsed.labels),
        )


def _why_not(path: Path) -> str | None:
    """Why a file of any name is no data, by its first line; None if it is."""
    try:
        lines = next(read_lines(path), [])
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    line = next((line for line in lines if line.strip()), None)
    if line is None:
        return "empty"
    fields = line.count(b"\t") + 1
    return None if fields == NUM_FIELDS else describe_line(line) or f"{fields} fields in its first line"


def _try_ends(path: Path) -> None:
    """Parses the first and the last lines of a file."""
    if first := next(read_lines(path), [])[:_TRIED_LINES]:
        parse_lines(first, lambda i: f"{path}:{i + 1}")
    if last := _last_lines(path):
        parse_lines(last, lambda i: f"{path}, line {len(last) - i} from the end")


def _last_lines(path: Path) -> list[bytes]:
    """The last lines of a plain file, to see whether it is whole; none of a gzip one, which tells by itself."""
    with open(path, "rb") as stream:
        if stream.read(2) == b"\x1f\x8b":
            return []
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - _TRIED_BYTES, 0))
        lines = stream.read().split(b"\n")
    if size > _TRIED_BYTES:
        lines = lines[1:]  # the first may not be whole
    return lines if lines and lines[-1] else lines[:-1]


def _regroup(blocks: Iterable[_Block], size: int) -> Iterator[_Block]:
    """The same rows in blocks of ``size``; the last may be smaller."""
    pending: list[_Block] = []
    count = 0
    for block in blocks:
        pending.append(block)
        count += len(block.lines)
        if count < size:
            continue
        joined = _join(pending)
        whole = count - count % size
        for first in range(0, whole, size):
            yield joined.select(slice(first, first + size))
        pending, count = [joined.select(slice(whole, None))], count - whole
    if count:
        yield _join(pending)


def _join(blocks: list[_Block]) -> _Block:
    lines = [line for block in blocks for line in block.lines]
    return _Block(lines, np.concatenate([b.file for b in blocks]), np.concatenate([b.number for b in blocks]))
