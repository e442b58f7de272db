"""What is looked up: distributions of ids, batches, and groups of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowtt_torchrec.spec import TTSpec

# Hot ids of a Zipf law are the smallest row numbers, so they share prefixes: the best case for a tensor train, and what
# a table sorted by frequency has. "scattered" draws the same law and spreads its ranks over the table by a bijection:
# as skewed, but with hot ids anywhere, as after hashing.
DISTRIBUTIONS = (
    "one_id",
    "zipf_0.8",
    "zipf_1.05",
    "zipf_1.2",
    "scattered_0.8",
    "scattered_1.05",
    "scattered_1.2",
    "uniform",
    "distinct",
)

# The shape of TT-Rec's own kernel benchmark, 11 M addressable rows, for a table of 10 M rows; and a flow shape for it.
ROWS, DIM = 10_000_000, 64
BALANCED = TTSpec(ROWS, DIM, p=(200, 220, 250), q=(4, 4, 4), ranks=(32, 32))
FLOW_SHAPE = TTSpec(ROWS, DIM, p=(50, 40, 5000), q=(4, 4, 4), ranks=(32, 32))


def draw_ids(distribution: str, rows: int, count: int, seed: int) -> Tensor:
    """Row numbers of a table, int64 ``[count]``.

    Args:
        distribution: one of `DISTRIBUTIONS`.
        rows: rows of the table.
        count: how many to draw.
        seed: the same seed gives the same ids.

    Raises:
        ValueError: for an unknown distribution, or more distinct ids than there are rows.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"unknown distribution {distribution!r}; known: {', '.join(DISTRIBUTIONS)}")
    rng = np.random.default_rng(seed)
    if distribution == "one_id":
        ids = np.full(count, rng.integers(rows))
    elif distribution == "uniform":
        ids = rng.integers(rows, size=count)
    elif distribution == "distinct":
        if count > rows:
            raise ValueError(f"{count} distinct ids were asked of a table with {rows} rows")
        start = int(rng.integers(rows))
        ids = scatter((start + np.arange(count)) % rows, rows)
    else:
        # Imports torchrec, which takes seconds; processes that measure memory do without.
        from flowtt_torchrec.datasets.zipf import ZipfMandelbrot

        law, exponent = distribution.split("_")
        ids = ZipfMandelbrot(rows, float(exponent)).sample(rng.random(count)).astype(np.int64)
        if law == "scattered":
            ids = scatter(ids, rows)
    return torch.from_numpy(ids.astype(np.int64))


def scatter(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """A fixed bijection of ``0 .. rows - 1`` that leaves no order.

    Multiplication by an odd number and ``x ^= x >> s`` are bijections of the ``bits``-bit numbers; those that leave the
    table are mapped again until they fall into it (cycle walking), which keeps the map a bijection.
    """
    bits = max(2, (rows - 1).bit_length())
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64((bits + 1) // 2)

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for factor in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x2545F4914F6CDD1D):
            x = x * np.uint64(factor) & mask
            x ^= x >> shift
        return x

    out = mix(ids.astype(np.uint64))
    while (outside := out >= rows).any():
        out[outside] = mix(out[outside])
    return out.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Batch:
    """The lookups of one step, as TorchRec hands them over: feature by feature, int64.

    Args:
        indices: ``[num_features * lookups]``.
        offsets: ``[num_features * batch_size + 1]``.
        grad_output: gradient of the pooled output, ``[batch_size, total_dim]``.
    """

    indices: Tensor
    offsets: Tensor
    grad_output: Tensor

    @property
    def batch_size(self) -> int:
        return self.grad_output.shape[0]

    def to(self, device: str) -> Batch:
        return Batch(self.indices.to(device), self.offsets.to(device), self.grad_output.to(device))


@dataclass(frozen=True)
class Workload:
    """Batches that look up each table of a group once.

    Args:
        specs: the tables; one feature each.
        distribution: one of `DISTRIBUTIONS`.
        lookups: lookups a table and batch.
        pooling: lookups a bag; divides ``lookups``.
    """

    specs: tuple[TTSpec, ...]
    distribution: str
    lookups: int
    pooling: int = 1

    def __post_init__(self) -> None:
        if self.lookups % self.pooling:
            raise ValueError(f"{self.lookups} lookups do not make whole bags of {self.pooling}")

    @property
    def batch_size(self) -> int:
        return self.lookups // self.pooling

    def batches(self, count: int, seed: int = 0) -> list[Batch]:
        """Different batches of the same kind."""
        offsets = torch.arange(0, len(self.specs) * self.lookups + 1, self.pooling)
        columns = sum(spec.embedding_dim for spec in self.specs)
        return [
            Batch(
                torch.cat(
                    [
                        draw_ids(self.distribution, spec.num_embeddings, self.lookups, seed=1000 * (seed + b) + t)
                        for t, spec in enumerate(self.specs)
                    ]
                ),
                offsets,
                torch.randn(self.batch_size, columns, generator=torch.Generator().manual_seed(seed + b)) * 1e-3,
            )
            for b in range(count)
        ]

    def describe(self) -> dict[str, Any]:
        """The workload as the columns of a result row."""
        first = self.specs[0]
        one = len(self.specs) == 1
        return {
            "distribution": self.distribution,
            "lookups": self.lookups,
            "pooling": self.pooling,
            "tables": len(self.specs),
            "rows": first.num_embeddings if one else sum(spec.num_embeddings for spec in self.specs),
            "dim": first.embedding_dim,
            "p": _join(first.p) if one else "",
            "q": _join(first.q),
            "ranks": _join(first.ranks),
            "parameters": sum(spec.num_parameters for spec in self.specs),
        }


def small_tables(count: int) -> tuple[TTSpec, ...]:
    """Tables of 1,000 to 1,600 rows of 32 columns, rank 16: the long tail of a data set with hundreds of features."""
    return tuple(
        TTSpec(100 * (10 + t % 7), 32, p=(10, 10, 10 + t % 7), q=(4, 4, 2), ranks=(16, 16)) for t in range(count)
    )


def mixed_tables(count: int, most_rows: int) -> tuple[TTSpec, ...]:
    """Tables of 1,000 to ``most_rows`` rows of 32 columns, spread evenly on a logarithmic scale, rank 32."""
    sizes = np.geomspace(1000, most_rows, count).round().astype(int)
    return tuple(TTSpec.suggest(int(rows), 32, 32) for rows in sizes)


def _join(values: Sequence[int]) -> str:
    return "·".join(map(str, values))
