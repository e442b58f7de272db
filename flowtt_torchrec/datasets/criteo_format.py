"""What all Criteo-like data shares: the columns, their names, and how an integer becomes a dense feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets.base import MAX_ROWS, DataError
from flowtt_torchrec.whole_numbers import whole_number

NUM_DENSE = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_CATEGORIES

# The names that torchrec_dlrm/dlrm_main.py gives them.
FEATURE_NAMES = [f"cat_{i}" for i in range(NUM_CATEGORIES)]
TABLE_NAMES = [f"t_cat_{i}" for i in range(NUM_CATEGORIES)]


def dense_transform(integers: NDArray[np.integer]) -> NDArray[np.float32]:
    """``log(1 + max(x, 0))``, as facebookresearch/dlrm does.

    TorchRec's own preprocessing takes ``log(x - min + 2)`` with the minimum of the whole file, which a stream lacks.
    """
    return np.log1p(np.maximum(integers, 0).astype(np.float32))


def table_sizes(num_embeddings: SupportsIndex | Sequence[SupportsIndex]) -> list[int]:
    """Rows of the 26 tables from one number for all, or 26 numbers."""
    numbers = list(num_embeddings) if isinstance(num_embeddings, Sequence) else [num_embeddings] * NUM_CATEGORIES
    try:
        sizes = [whole_number("num_embeddings", number) for number in numbers]
    except ValueError as error:
        raise DataError(str(error)) from None
    if len(sizes) != NUM_CATEGORIES:
        raise DataError(f"num_embeddings has {len(sizes)} numbers; Criteo data has {NUM_CATEGORIES} categories")
    for table, size in zip(TABLE_NAMES, sizes):
        if size < 1:
            raise DataError(f"table {table} has {size} rows, it must have at least 1")
        if size > MAX_ROWS:
            raise DataError(f"table {table} has {size:,} rows, which is a mistake: at most {MAX_ROWS:,} are taken")
    return sizes
