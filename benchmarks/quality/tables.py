"""Compressed tables that TT is compared with, in plain PyTorch, each as its paper defines it.

A contender makes the tables of some columns within a number of weights for all of them together; every table gets the
same ratio. It is a module from ids ``[batch, tables]`` to rows ``[batch, tables, dim]``. A contender that cannot be
made so small raises `DoesNotFitError`. Numbers that hash functions need are not weights and not counted, and neither is
the numbering of ids by frequency, which a prepared data set has anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowtt_torchrec.cores import default_std

_PRIME = 2**31 - 1
_SPARSE_FROM = 1 << 16  # weights


class DoesNotFitError(ValueError):
    """The method has no table of so few weights, or takes too long to be run."""


@dataclass(frozen=True)
class Table:
    """What a contender knows of a table.

    Attributes:
        rows: ids.
        dim: columns.
        counts: how often each id is in the training part, ``[rows]``.
        label_rates: mean label of each id in the training part, smoothed, ``[rows]``.
    """

    rows: int
    dim: int
    counts: Tensor
    label_rates: Tensor


class Tables(nn.Module):
    """One module a table; the output ``[batch, tables, dim]`` is their rows, side by side."""

    def __init__(self, tables: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids[:, column]) for column, table in enumerate(self.tables)], dim=1)


class UniversalHash(nn.Module):
    """``(a x + b mod prime) mod size`` with random ``a, b`` (Carter and Wegman, 1979); int64 to int64, any shape.

    Args:
        size: values go from 0 to ``size - 1``.
        functions: how many functions; the output has one more dimension, last, if more than one.
    """

    a: Tensor
    b: Tensor

    def __init__(self, size: int, functions: int = 1) -> None:
        super().__init__()
        self.size = size
        shape = (functions,) if functions > 1 else ()
        self.register_buffer("a", torch.randint(1, _PRIME, shape))
        self.register_buffer("b", torch.randint(0, _PRIME, shape))

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.unsqueeze(-1) if self.a.ndim else ids
        return (ids * self.a + self.b) % _PRIME % self.size


def embedding(rows: int, dim: int, std: float) -> nn.Embedding:
    """A table, uniform with a standard deviation; its gradients are sparse where that is the faster way."""
    table = nn.Embedding(rows, dim, sparse=rows * dim > _SPARSE_FROM)
    nn.init.uniform_(table.weight, -math.sqrt(3) * std, math.sqrt(3) * std)
    return table


def dense(table: Table, budget: int) -> nn.Module:
    """The uncompressed table, whatever the budget."""
    return embedding(table.rows, table.dim, default_std(table.rows))


class Hashing(nn.Module):
    """Ids share rows by their hash (Weinberger et al., ICML 2009, without the sign)."""

    def __init__(self, table: Table, budget: int) -> None:
        super().__init__()
        rows = _at_least_one(budget // table.dim)
        self.hash = UniversalHash(rows)
        self.rows = embedding(rows, table.dim, default_std(table.rows))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(self.hash(ids))


class Buckets(nn.Module):
    """Neighbours share a row: what an order of ids is worth by itself, the control of contenders that are ordered."""

    def __init__(self, table: Table, budget: int) -> None:
        super().__init__()
        self.num_ids = table.rows
        self.rows = embedding(min(table.rows, _at_least_one(budget // table.dim)), table.dim, default_std(table.rows))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids * self.rows.num_embeddings // self.num_ids)


class HashEmbedding(nn.Module):
    """The sum of two hashed rows with weights of the id (Svenstrup et al., NeurIPS 2017, eq. 1).

    Half of the budget is weights, two for each value of a hash of the id, or for each id if that fits.
    """

    def __init__(self, table: Table, budget: int) -> None:
        super().__init__()
        importances = min(table.rows, budget // 4)
        rows = _at_least_one((budget - 2 * importances) // table.dim)
        self.importance_hash = UniversalHash(importances) if importances < table.rows else nn.Identity()
        self.importances = nn.Embedding(_at_least_one(importances), 2, sparse=True)
        nn.init.normal_(self.importances.weight, 1.0, 0.1)
        self.hash = UniversalHash(rows, 2)
        self.rows = embedding(rows, table.dim, default_std(table.rows))

    def forward(self, ids: Tensor) -> Tensor:
        weights = self.importances(self.importance_hash(ids))
        return torch.einsum("nk,nkd->nd", weights, self.rows(self.hash(ids)))


class QuotientRemainder(nn.Module):
    """A row from the quotient and one from the remainder, multiplied or side by side (Shi et al., KDD 2020).

    Args:
        table: the table.
        budget: weights.
        concatenate: side by side, half of the columns each.
    """

    def __init__(self, table: Table, budget: int, concatenate: bool = False) -> None:
        super().__init__()
        dim = table.dim // 2 if concatenate else table.dim
        rows = budget // dim  # of both tables; the larger solution of m + rows / m = both
        if rows < 2 or rows**2 < 4 * table.rows:
            raise DoesNotFitError("two tables of sqrt(rows) rows need more weights")
        self.divisor = min(table.rows, int((rows + math.sqrt(rows**2 - 4 * table.rows)) / 2))
        while self.divisor + -(-table.rows // self.divisor) > rows:  # the quotients are a whole number
            self.divisor -= 1
            if self.divisor < 1:
                raise DoesNotFitError("two tables of sqrt(rows) rows need more weights")
        self.concatenate = concatenate
        std = default_std(table.rows)
        factor = std if concatenate else math.sqrt(std)
        self.remainders = embedding(self.divisor, dim, factor)
        self.quotients = embedding(-(-table.rows // self.divisor), dim, factor)

    def forward(self, ids: Tensor) -> Tensor:
        left, right = self.remainders(ids % self.divisor), self.quotients(ids // self.divisor)
        return torch.cat([left, right], dim=-1) if self.concatenate else left * right


class Narrow(nn.Module):
    """A table of few columns and a projection to all of them: a matrix of low rank.

    Args:
        table: the table.
        budget: weights, not looked at where columns are given.
        columns: of the narrow table.
    """

    def __init__(self, table: Table, budget: int, columns: int | None = None) -> None:
        super().__init__()
        columns = min(table.dim, budget // (table.rows + table.dim)) if columns is None else columns
        if columns < 1:
            raise DoesNotFitError("one column of all rows needs more weights")
        self.rows = embedding(table.rows, columns, 1 / math.sqrt(columns))
        self.projection = nn.Linear(columns, table.dim, bias=False)
        nn.init.normal_(self.projection.weight, std=default_std(table.rows))

    def forward(self, ids: Tensor) -> Tensor:
        return self.projection(self.rows(ids))


class MixedDimensions(nn.Module):
    """More columns for frequent rows (Ginart et al., ISIT 2021): blocks of ids, each a narrow table and a projection.

    Blocks hold ids by falling frequency, each twice as many as the one before; a block's columns grow with its mean
    frequency to the power of 0.3 and are scaled until the budget is used.
    """

    POWER, FIRST_BLOCK = 0.3, 64
    place: Tensor
    starts: Tensor

    def __init__(self, table: Table, budget: int) -> None:
        super().__init__()
        edges = [0]
        while edges[-1] < table.rows:
            edges.append(min(table.rows, edges[-1] + self.FIRST_BLOCK * 2 ** (len(edges) - 1)))
        by_frequency = torch.argsort(table.counts, descending=True, stable=True)
        counts = table.counts[by_frequency].double()
        sizes = [end - start for start, end in itertools.pairwise(edges)]
        means = [float(counts[start:end].mean()) + 1e-3 for start, end in itertools.pairwise(edges)]

        def columns_at(scale: float) -> list[int]:
            return [max(1, min(table.dim, int(scale * (mean / means[0]) ** self.POWER))) for mean in means]

        def weights(columns: Sequence[int]) -> int:
            return sum(size * c + (c * table.dim if c < table.dim else 0) for size, c in zip(sizes, columns))

        low, high = 0.0, float(table.dim) * 1000
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if weights(columns_at(middle)) <= budget else (low, middle)
        columns = columns_at(low)
        if weights(columns) > budget:
            raise DoesNotFitError("one column of all rows needs more weights")
        place = torch.empty(table.rows, dtype=torch.int64)
        place[by_frequency] = torch.arange(table.rows)
        self.register_buffer("place", place)
        self.register_buffer("starts", torch.tensor(edges[:-1]))
        std = default_std(table.rows)
        self.blocks = nn.ModuleList(
            embedding(n, c, std if c == table.dim else 1 / math.sqrt(c)) for n, c in zip(sizes, columns)
        )
        self.projections = nn.ModuleList(
            nn.Identity() if c == table.dim else nn.Linear(c, table.dim, bias=False) for c in columns
        )
        for projection in self.projections:
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=std)
        self.dim = table.dim

    def forward(self, ids: Tensor) -> Tensor:
        places = self.place[ids]
        block = torch.bucketize(places, self.starts, right=True) - 1
        out = self.starts.new_zeros((len(ids), self.dim), dtype=torch.float32)
        for number, (rows, projection) in enumerate(zip(self.blocks, self.projections)):
            members = torch.nonzero(block == number).squeeze(1)
            values = projection(rows(places[members] - self.starts[number]))
            out = out.index_add(0, members, values)
        return out


class Robe(nn.Module):
    """Random offset block embedding (Desai et al., MLSys 2022): blocks of rows lie in one circular array of all tables.

    Args:
        tables: the tables.
        budget: weights of all of them.
        block: numbers of a row that lie side by side.
    """

    starts: Tensor

    def __init__(self, tables: Sequence[Table], budget: int, block: int = 8) -> None:
        super().__init__()
        dim = tables[0].dim
        self.block = math.gcd(block, dim)
        self.chunks = dim // self.block
        self.hash = UniversalHash(budget)
        array = math.sqrt(3) * max(default_std(table.rows) for table in tables)
        self.array = nn.Parameter(torch.empty(budget).uniform_(-array, array))
        starts = torch.tensor([0, *(table.rows for table in tables[:-1])]).cumsum(0)
        self.register_buffer("starts", starts)

    def forward(self, ids: Tensor) -> Tensor:
        keys = (ids + self.starts).unsqueeze(-1) * self.chunks + torch.arange(self.chunks)
        places = (self.hash(keys).unsqueeze(-1) + torch.arange(self.block)) % len(self.array)
        return F.embedding(places.flatten(2), self.array.unsqueeze(1)).squeeze(-1)


class DeepHash(nn.Module):
    """Deep hash embedding (Kang et al., KDD 2021): hash values in [-1, 1] through a network of two hidden layers.

    As many hash functions as hidden units. Rows are made once for all of a batch that are equal.
    """

    MOST_WORK = 6e7  # products a batch of 2,048; more would take minutes an epoch

    def __init__(self, table: Table, budget: int) -> None:
        super().__init__()
        # k k + k k + k dim weights, 4 k of the two normalisations
        units = int((math.sqrt((table.dim + 4) ** 2 + 8 * budget) - (table.dim + 4)) / 4)
        if units < 2:
            raise DoesNotFitError("a network of two hidden units needs more weights")
        if min(table.rows, 2048) * budget > self.MOST_WORK:
            raise DoesNotFitError("the network would take too long")
        self.hash = UniversalHash(1_000_000, units)
        self.network = nn.Sequential(
            nn.Linear(units, units, bias=False),
            nn.BatchNorm1d(units),
            nn.Mish(),
            nn.Linear(units, units, bias=False),
            nn.BatchNorm1d(units),
            nn.Mish(),
            nn.Linear(units, table.dim, bias=False),
        )

    def forward(self, ids: Tensor) -> Tensor:
        if len(ids) < 2:
            raise ValueError("batch normalisation needs two rows")
        distinct, inverse = torch.unique(ids, return_inverse=True)
        codes = self.hash(distinct).float() / ((self.hash.size - 1) / 2) - 1
        return self.network(codes)[inverse]


def hot_ids(table: Table, number: int) -> Tensor:
    """Place of each id among the ``number`` most frequent ones, or -1; ``[rows]``."""
    place = torch.full((table.rows,), -1)
    place[torch.argsort(table.counts, descending=True, stable=True)[:number]] = torch.arange(min(number, table.rows))
    return place


class HotRows(nn.Module):
    """Rows of their own for the most frequent ids, beside another table for the rest.

    Args:
        table: the table.
        budget: weights of both.
        rest: makes the other table from a table and a budget.
        share: of the budget, for rows of their own.
    """

    place: Tensor

    def __init__(self, table: Table, budget: int, rest: Callable[[Table, int], nn.Module], share: float = 0.5) -> None:
        super().__init__()
        rows = _at_least_one(int(share * budget) // table.dim)
        self.register_buffer("place", hot_ids(table, rows))
        self.hot = embedding(rows, table.dim, default_std(table.rows))
        self.rest = rest(table, budget - rows * table.dim)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.place[ids]
        hot = (places >= 0).unsqueeze(1)
        return torch.where(hot, self.hot(places.clamp(min=0)), self.rest(ids))


class Sum(nn.Module):
    """The sum of the rows of two tables."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, ids: Tensor) -> Tensor:
        return self.left(ids) + self.right(ids)


class Ordered(nn.Module):
    """A table whose rows lie in another order than the ids' numbers: by the mean label of each id.

    The order is as large as one number a row; like the numbering by frequency it is not counted.
    """

    place: Tensor

    def __init__(self, table: Table, make: Callable[[Table], nn.Module]) -> None:
        super().__init__()
        order = torch.argsort(table.label_rates, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(table.rows)
        self.register_buffer("place", place)
        self.rest = make(Table(table.rows, table.dim, table.counts[order], table.label_rates[order]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rest(self.place[ids])


def _at_least_one(rows: int) -> int:
    if rows < 1:
        raise DoesNotFitError("one row needs more weights")
    return rows
