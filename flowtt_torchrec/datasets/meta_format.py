"""Meta's files of embedding lookups (facebookresearch/dlrm_datasets): how they are laid out, read and written.

A file ``fbgemm_t<tables>_bs<samples>[_<n>].pt[.gz]`` is a pickled tuple ``(indices, offsets, lengths)``: ``lengths`` is
[tables, samples], ``offsets`` is [tables * samples + 1] and table-major, ``indices`` is flat and counts rows of its own
table. There are no dense features, labels, dims or row counts. Meta-N are the first N tables of the 2022 set (788).
"""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowtt_torchrec.datasets import counter_random
from flowtt_torchrec.datasets.base import MAX_ROWS, BestMetrics, DataError, auroc_margin

NUM_DENSE = 13
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


class MetaLookups(NamedTuple):
    """The content of one file."""

    indices: Tensor
    """Rows looked up, [lookups]."""
    offsets: Tensor
    """Where each bag starts, [tables * samples + 1]."""
    lengths: Tensor
    """Size of each bag, [tables, samples]."""

    def table(self, number: int) -> Tensor:
        """All rows looked up in one table."""
        samples = self.lengths.shape[1]
        start, stop = self.offsets[number * samples], self.offsets[(number + 1) * samples]
        return self.indices[start:stop]


def feature_name(table: int) -> str:
    return f"f{table}"


def table_name(table: int) -> str:
    return f"t_f{table}"


def load_lookups(path: Path) -> MetaLookups:
    """Reads a file. A plain ``.pt`` is mapped, not copied, into memory; a ``.pt.gz`` is unpacked into it.

    Raises:
        DataError: the file is damaged or not in the format.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                content = torch.load(cast(BinaryIO, stream), map_location="cpu", weights_only=True)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except MemoryError:
        raise
    except Exception as error:  # the unpickler meets garbage with errors of almost any kind
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable file of torch tensors, or truncated ({reason})") from None
    return _checked(path, content)


def _checked(path: Path, content: object) -> MetaLookups:
    tensors = content if isinstance(content, tuple | list) else ()
    if len(tensors) != 3 or not all(isinstance(x, Tensor) and x.dtype in _INTEGERS for x in tensors):
        found = ", ".join(_kind(x) for x in tensors) or _kind(content)
        raise DataError(
            f"{path}: expected a tuple of three integer tensors, (indices, offsets, lengths), but it holds {found}"
        )
    lookups = MetaLookups(*tensors)
    if lookups.indices.dim() != 1 or lookups.offsets.dim() != 1:
        raise DataError(
            f"{path}: indices and offsets must be flat, not {list(lookups.indices.shape)} and "
            f"{list(lookups.offsets.shape)}; of all tables, one after the other"
        )
    if lookups.lengths.dim() != 2 or lookups.offsets.numel() != lookups.lengths.numel() + 1:
        raise DataError(
            f"{path}: lengths must be [tables, samples] and offsets [tables * samples + 1], "
            f"not {list(lookups.lengths.shape)} and {list(lookups.offsets.shape)}"
        )
    if lookups.offsets[0] != 0 or lookups.offsets[-1] != lookups.indices.numel():
        raise DataError(
            f"{path}: offsets run from {int(lookups.offsets[0])} to {int(lookups.offsets[-1])}, "
            f"they must run from 0 to the number of indices, {lookups.indices.numel()}"
        )
    samples = lookups.lengths.shape[1]
    for number, lengths in enumerate(lookups.lengths):
        offsets = lookups.offsets[number * samples : (number + 1) * samples + 1]
        if not torch.equal(offsets.diff(), lengths.to(offsets.dtype)) or (lengths < 0).any():
            raise DataError(f"{path}: lengths and offsets of table {feature_name(number)} do not agree")
        indices = lookups.table(number)
        if not indices.numel():
            continue
        least, most = (int(x) for x in torch.aminmax(indices))
        if least < 0:
            raise DataError(f"{path}: table {feature_name(number)} has a negative index, {least}")
        if most >= MAX_ROWS:
            raise DataError(
                f"{path}: table {feature_name(number)} has the index {most:,}, for which it would need as many rows; "
                f"at most {MAX_ROWS:,} are taken, and more are taken for damage"
            )
    return lookups


def _kind(value: object) -> str:
    return f"a {str(value.dtype).removeprefix('torch.')} tensor" if isinstance(value, Tensor) else type(value).__name__


def save_lookups(path: Path, indices: Tensor, lengths: Tensor) -> None:
    """Writes a file in Meta's format, gzipped if its name ends in ``.gz``.

    Args:
        path: the file, overwritten if it exists.
        indices: integers [lookups], all bags of the first table, then of the second, ...
        lengths: integers [tables, samples], size of each bag.
    """
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
    if offsets[-1] != indices.numel():
        raise ValueError(f"lengths add up to {int(offsets[-1])}, but there are {indices.numel()} indices")
    if path.suffix == ".gz":
        with gzip.open(path, "wb") as stream:
            torch.save((indices, offsets, lengths), cast(BinaryIO, stream))
    else:
        torch.save((indices, offsets, lengths), path)


def no_signal(rows: int) -> BestMetrics:
    """Best possible scores on ``rows`` rows of this data: those of the constant 1/2, since the labels are random."""
    return BestMetrics(auroc=0.5, ne=1.0, auroc_margin=auroc_margin(0.5, rows // 2, rows - rows // 2))


def dense_features_and_labels(rows: NDArray[np.uint64], seed: int) -> tuple[Tensor, Tensor]:
    """What the data lacks: normal dense features, float32 [rows, 13], and labels from a fair coin, float32 [rows].

    Args:
        rows: numbers of the rows, which decide what they get.
        seed: another seed, other numbers.
    """
    cells = rows[:, None] * np.uint64(NUM_DENSE) + np.arange(NUM_DENSE, dtype=np.uint64)
    dense = counter_random.normal(cells, counter_random.key(seed, "dense")).astype(np.float32)
    labels = counter_random.uniform(rows, counter_random.key(seed, "labels")) < 0.5
    return torch.from_numpy(dense), torch.from_numpy(labels.astype(np.float32))
