"""Clicks to train the examples on: skewed ids, and a label that depends on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = {"user": 100_000, "item": 20_000, "shop": 500}  # rows of each table, by feature
NUM_DENSE = 4


def skewed_ids(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Row numbers, int64 ``[count]``: log-uniform, so that a few rows have most of the lookups."""
    return (rows ** torch.rand(count, generator=generator, dtype=torch.float64)).long() - 1


def taste(ids: Tensor) -> Tensor:
    """What an id adds to the log-odds of a click, float32 of ``ids``' shape: 1 or -1, by a hash."""
    return ((ids * 2_654_435_761 >> 13) % 2 * 2 - 1).float()


def batches(batch_size: int, count: int, seed: int) -> Iterator[Batch]:
    """``count`` batches of ``batch_size`` clicks with one id a feature, on the CPU; others for every ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = [skewed_ids(rows, batch_size, generator) for rows in ROWS.values()]
        dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
        log_odds = torch.stack([taste(i) for i in ids]).sum(dim=0) + dense[:, 0]
        yield Batch(
            dense_features=dense,
            sparse_features=KeyedJaggedTensor(
                keys=list(ROWS), values=torch.cat(ids), lengths=torch.ones(len(ROWS) * batch_size, dtype=torch.int64)
            ),
            labels=torch.bernoulli(torch.sigmoid(log_odds), generator=generator),
        )
