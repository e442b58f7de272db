"""What a prepared folder says about itself: ``manifest.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flowtt_torchrec.datasets.base import SPLITS, DataError, Split

MANIFEST = "manifest.json"
VERSION = 1

IdRule = Literal["modulo", "hash", "contiguous"]
ID_RULES: tuple[IdRule, ...] = get_args(IdRule)
KAGGLE_FRACTIONS = (6 / 7, 1 / 14, 1 / 14)
"""Six of Kaggle's seven days for training, the halves of the seventh for validation and test."""


class RowRange(NamedTuple):
    """Rows ``start`` to ``stop`` of a part."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """One source file, prepared: three npy files of as many rows.

    Attributes:
        name: the files are ``<name>_dense.npy``, ``<name>_sparse.npy`` and ``<name>_labels.npy``.
        source: name of the file that it was made of.
        source_bytes: size of that file.
        rows: number of rows.
        skipped: bad rows that were left out.
        sha256: of the arrays' bytes, by kind (``dense``, ``sparse``, ``labels``).
    """

    name: str
    source: str
    source_bytes: int
    rows: int
    skipped: int
    sha256: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """All that a reader must know of a prepared folder.

    Attributes:
        dense: names of the dense features, the columns of ``_dense.npy`` (float32).
        sparse: names of the sparse features, the columns of ``_sparse.npy`` (int32), one table a feature.
        tables: name of each feature's table.
        num_embeddings: rows of each table.
        ids: how a source id became a row: ``modulo``, ``hash`` (modulo of a 64-bit mix of the id), or ``contiguous``
            (numbered from 1 by falling frequency; row 0 is for ids that are rare or not in the vocabulary).
        frequency_threshold: for ``contiguous``: ids that occur less often share row 0.
        parts: the source files, in order.
        split: ranges of rows of each split.
    """

    dense: list[str]
    sparse: list[str]
    tables: list[str]
    num_embeddings: list[int]
    ids: IdRule
    frequency_threshold: int
    parts: list[Part]
    split: dict[Split, list[RowRange]]
    version: int = field(default=VERSION)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def to_json(self) -> str:
        """The manifest as JSON text, the same for the same content."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a prepared folder.

        Raises:
            DataError: there is none, or it is damaged or of a later version.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text())
            if content.get("version") != VERSION:
                raise DataError(
                    f"{path}: version {content.get('version')!r} is not known here ({VERSION} is); prepare the data "
                    "again, or upgrade flowtt-torchrec"
                )
            return cls._from(content)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: the manifest is damaged ({error}); prepare the data again") from None

    @classmethod
    def _from(cls, content: Mapping[str, Any]) -> Manifest:
        values = dict(content)
        values["parts"] = [Part(**part) for part in values["parts"]]
        values["split"] = {name: [RowRange(*rows) for rows in values["split"][name]] for name in SPLITS}
        manifest = cls(**values)
        rows = {part.name: part.rows for part in manifest.parts}
        for name, ranges in manifest.split.items():
            for part, start, stop in ranges:
                if not 0 <= start <= stop <= rows[part]:
                    raise ValueError(f"split {name}: rows {start} to {stop} of {part}, which has {rows[part]}")
        check_disjoint(manifest.split)
        return manifest


def check_disjoint(split: Mapping[Split, Sequence[RowRange]]) -> None:
    """Raises `DataError` if a row is in two splits, or twice in one."""
    by_part: dict[str, list[tuple[int, int, Split]]] = {}
    for name, ranges in split.items():
        for part, start, stop in ranges:
            if stop > start:
                by_part.setdefault(part, []).append((start, stop, name))
    for part, used in by_part.items():
        used.sort()
        for (_, stop, first), (start, _, second) in pairwise(used):
            if start < stop:
                raise DataError(f"rows {start} to {stop} of {part} are in {first} and in {second}")


def time_split(parts: Sequence[tuple[str, int]], fractions: tuple[float, float, float]) -> dict[Split, list[RowRange]]:
    """The first rows for training, the next for validation, the last for test.

    Args:
        parts: names and rows, in order of time.
        fractions: shares of train, val and test; they sum to 1.
    """
    total = sum(rows for _, rows in parts)
    borders = [0, round(total * fractions[0]), round(total * (fractions[0] + fractions[1])), total]
    return {name: _cut(parts, borders[i], borders[i + 1]) for i, name in enumerate(SPLITS)}


def last_part_split(parts: Sequence[tuple[str, int]]) -> dict[Split, list[RowRange]]:
    """All parts but the last for training, the halves of the last for validation and test, as 1TB's day 23."""
    total = sum(rows for _, rows in parts)
    last = parts[-1][1]
    middle = total - last + last // 2
    borders = [0, total - last, middle, total]
    return {name: _cut(parts, borders[i], borders[i + 1]) for i, name in enumerate(SPLITS)}


def _cut(parts: Sequence[tuple[str, int]], start: int, stop: int) -> list[RowRange]:
    """Rows ``start`` to ``stop`` of all parts in a row."""
    ranges = []
    first = 0
    for name, rows in parts:
        low, high = max(start - first, 0), min(stop - first, rows)
        if high > low:
            ranges.append(RowRange(name, low, high))
        first += rows
    return ranges
