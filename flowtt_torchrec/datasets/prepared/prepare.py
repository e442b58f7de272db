"""Preparing click data once: source files in, npy parts and a manifest out."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets.base import DataError, Split
from flowtt_torchrec.datasets.criteo_format import TABLE_NAMES, table_sizes
from flowtt_torchrec.datasets.files import find_files
from flowtt_torchrec.datasets.prepared import ids as id_rules
from flowtt_torchrec.datasets.prepared.manifest import (
    ID_RULES,
    KAGGLE_FRACTIONS,
    MANIFEST,
    IdRule,
    Manifest,
    Part,
    RowRange,
    last_part_split,
    time_split,
)
from flowtt_torchrec.datasets.prepared.npy_files import NpyWriter, checksum, open_array, open_npy
from flowtt_torchrec.datasets.prepared.source_files import CRITEO, Columns, Rows, read_rows, source_format
from flowtt_torchrec.files import atomic_file, write_atomically

Say = Callable[[str], None]
SplitRule = Literal["auto", "time", "last_part", "none"]
_PATTERNS = (
    r"train\.(txt|tsv)(\.gz|\.zst)?",
    r"day_\d+(\.(txt|tsv|csv))?(\.gz|\.zst)?|day_\d+\.parquet",
    r"[^._].*\.(parquet|csv(\.gz|\.zst)?|(txt|tsv)(\.gz|\.zst)?)",
)
_EXPECTED = "train.txt, or day_0, day_1, ..., or other .txt, .tsv, .csv or .parquet files"
_SECONDS_BETWEEN_LINES = 5.0
_MAX_NAMED = 5
_TOP_COUNTS = 1 << 20
_MAP_ROWS = 1 << 18


@dataclass(frozen=True)
class _Job:
    """What must be the same for a run to go on where an earlier one was stopped."""

    columns: Columns
    ids: IdRule
    num_embeddings: list[int] | None
    frequency_threshold: int
    skip_bad_rows: bool
    vocabulary_from: str | None
    sources: list[tuple[str, str, int, int]]

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def prepare(
    source: str | Path,
    target: str | Path,
    *,
    columns: Columns = CRITEO,
    tables: Sequence[str] | None = None,
    ids: IdRule = "modulo",
    num_embeddings: int | Sequence[int] | None = None,
    frequency_threshold: int = 1,
    like: str | Path | None = None,
    split: SplitRule = "auto",
    skip_bad_rows: bool = False,
    max_bad_share: float = 0.001,
    workers: int | None = None,
    say: Say = print,
) -> Manifest:
    """Prepares a file, or all files of a folder.

    A run that was stopped goes on where it was: parts that are whole are kept, and the bytes are those of a run that
    was not stopped. Memory stays below 2 GiB for Criteo's sizes; ``contiguous`` needs 16 bytes more for every
    distinct id.

    Args:
        source: raw Criteo text (Kaggle or 1TB; plain, ``.gz``, ``.zst``), CSV, or Parquet; a file or a folder.
        target: the folder to write; made if it is not there.
        columns: which columns are what, in CSV and Parquet.
        tables: name of each sparse feature's table; ``t_<feature>`` by default.
        ids: how ids become rows; see `Manifest.ids`.
        num_embeddings: rows of the tables, one number or one a table; for ``modulo`` and ``hash``.
        frequency_threshold: for ``contiguous``: how often an id must occur to have a row of its own.
        like: a prepared folder whose rule of ids, vocabulary included, is taken: for data that its model is to score.
        split: ``time`` (the first six sevenths for training, the halves of the last for validation and test),
            ``last_part`` (the halves of the last file), ``none`` (all for training). ``auto`` is ``last_part`` for
            several files and ``time`` for one.
        skip_bad_rows: leaves bad rows of raw Criteo text out, and says how many, in place of stopping at the first.
        max_bad_share: the run stops when more than this share of the rows so far is bad.
        workers: threads that parse; by default one a CPU.
        say: takes a line of text now and then.

    Returns:
        The manifest, as it is in the folder.

    Raises:
        DataError: a source cannot be read, a row is bad, or the target holds something else; nothing half-written has
            the name of a whole file.
    """
    target = Path(target)
    if ids not in ID_RULES:
        raise DataError(f"ids={ids!r} is unknown; known: {', '.join(ID_RULES)}")
    files = find_files(source, _PATTERNS, _EXPECTED)
    names = _part_names(files)
    reference = None if like is None else Manifest.read(Path(like))
    if reference is not None:
        columns = _columns_like(columns, reference)
        ids, num_embeddings = reference.ids, reference.num_embeddings
        frequency_threshold, tables = reference.frequency_threshold, reference.tables
    features = list(columns.sparse)
    tables = list(tables) if tables is not None else _table_names(features)
    sizes = None
    if ids != "contiguous" or reference is not None:
        sizes = _sizes(num_embeddings, tables)
    elif num_embeddings is not None:
        raise DataError("num_embeddings is for ids=modulo and ids=hash; with ids=contiguous the vocabulary decides")
    stats = [path.stat() for path in files]
    job = _Job(
        columns,
        ids,
        sizes,
        frequency_threshold,
        skip_bad_rows,
        None if like is None or ids != "contiguous" else str(Path(like).resolve()),
        [(name, path.name, stat.st_size, stat.st_mtime_ns) for name, path, stat in zip(names, files, stats)],
    )
    work = _Target(target, job)
    started = time.monotonic()
    for name, path, stat in zip(names, files, stats):
        work.make_part(name, path, stat.st_size, columns, max_bad_share, workers or os.cpu_count() or 1, say)
    if ids == "contiguous":
        sizes = work.number_ids(None if like is None else Path(like), tables, say)
    parts = work.parts()
    rows = sum(part.rows for part in parts)
    if not rows:
        raise DataError(f"{source}: no rows in {len(files)} file(s)")
    assert sizes is not None
    manifest = Manifest(
        dense=list(columns.dense),
        sparse=features,
        tables=tables,
        num_embeddings=sizes,
        ids=ids,
        frequency_threshold=frequency_threshold,
        parts=parts,
        split=_split(split, [(part.name, part.rows) for part in parts]),
    )
    _write_counts(target, manifest, say)
    seconds = time.monotonic() - started
    work.finish(manifest)
    skipped = sum(part.skipped for part in parts)
    say(
        f"{rows:,} rows in {len(parts)} part(s) in {seconds:,.0f} s ({rows / max(seconds, 1e-9):,.0f} rows/s)"
        + (f"; {skipped:,} bad rows left out" if skipped else "")
    )
    return manifest


def verify(folder: str | Path, say: Say = print) -> Manifest:
    """Checks a prepared folder's files against the checksums in its manifest.

    Raises:
        DataError: naming the file that differs.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    for part in manifest.parts:
        for kind, expected in part.sha256.items():
            path = folder / f"{part.name}_{kind}.npy"
            array = open_array(folder, part.name, kind, len(manifest.dense), len(manifest.sparse))
            if len(array) != part.rows:
                raise DataError(f"{path}: {len(array)} rows, but the manifest says {part.rows}; prepare the data again")
            if checksum(array) != expected:
                raise DataError(f"{path}: the content is not what was prepared (SHA-256 differs); prepare it again")
        say(f"{part.name}: {part.rows:,} rows are as they were prepared")
    return manifest


class _Target:
    """The folder that is written: which parts are whole, and that it belongs to one job."""

    def __init__(self, folder: Path, job: _Job) -> None:
        self._folder, self._job = folder, job
        self._state = folder / ".job.json"
        self._parts: dict[str, Part] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            known = self._state.read_text() if self._state.exists() else None
            if known is not None:
                job, parts = json.loads(known)
                if job != self._job.text():
                    raise DataError(
                        f"{self._folder} holds the beginning of another preparation (other files or settings); finish "
                        "it with its own settings, choose another folder, or remove this one"
                    )
                self._parts = {part["name"]: Part(**part) for part in parts}
            elif any(self._folder.iterdir()):
                raise DataError(f"{self._folder} is not empty; choose another folder, or remove it")
            self._save()
        except (FileExistsError, NotADirectoryError):
            raise DataError(f"{self._folder} is a file, it must be a folder") from None
        except OSError as error:
            raise DataError(f"{self._folder}: cannot be written ({error.strerror})") from None

    def _save(self) -> None:
        write_atomically(self._state, json.dumps([self._job.text(), [asdict(part) for part in self._parts.values()]]))

    def parts(self) -> list[Part]:
        """In the order of the sources."""
        return [self._parts[name] for name, *_ in self._job.sources]

    def finish(self, manifest: Manifest) -> None:
        write_atomically(self._folder / MANIFEST, manifest.to_json())
        self._state.unlink()
        for raw in self._folder.glob(".*_ids.npy"):
            raw.unlink()
        for counts in self._folder.glob(".*_counts.npz"):
            counts.unlink()

    def make_part(
        self, name: str, path: Path, size: int, columns: Columns, max_bad_share: float, workers: int, say: Say
    ) -> None:
        """Makes a part of a source file, unless it is whole already."""
        if name in self._parts:
            say(f"{name}: {self._parts[name].rows:,} rows are there already")
            return
        job = self._job
        raw = job.ids == "contiguous"
        counters = [id_rules.IdCounter() for _ in columns.sparse] if raw else []
        sizes = np.array(job.num_embeddings or [], np.uint64)
        sparse_name = f".{name}_ids.npy" if raw else f"{name}_sparse.npy"
        writers: list[NpyWriter] = []
        skipped: list[str] = []
        skipped_count = 0
        progress = _Progress(name, say)
        try:
            dense = NpyWriter(self._folder / f"{name}_dense.npy", (len(columns.dense),), np.float32)
            writers.append(dense)
            sparse = NpyWriter(self._folder / sparse_name, (len(columns.sparse),), np.uint64 if raw else np.int32)
            writers.append(sparse)
            labels = NpyWriter(self._folder / f"{name}_labels.npy", (1,), np.int32)
            writers.append(labels)
            kind = source_format(path)
            for rows in read_rows(path, kind, columns, skip_bad_rows=job.skip_bad_rows, workers=workers):
                dense.append(rows.dense)
                labels.append(rows.labels[:, None])
                sparse.append(self._rows_of(rows, sizes, columns))
                for k, counter in enumerate(counters):
                    counter.add(rows.ids[:, k])
                for text in rows.skipped[: max(0, _MAX_NAMED - len(skipped))]:
                    skipped.append(text)
                    say(f"left out: {text}")
                skipped_count += len(rows.skipped)
                if skipped_count > max_bad_share * (labels.rows + skipped_count):
                    raise DataError(
                        f"{path}: {skipped_count:,} of the first {labels.rows + skipped_count:,} rows are bad, more "
                        f"than a share of {max_bad_share:g}; the first: {skipped[0]}"
                    )
                progress(labels.rows)
            if counters:
                arrays = {f"{what}_{k}": a for k, c in enumerate(counters) for what, a in zip("nc", c.counts())}
                with atomic_file(self._folder / f".{name}_counts.npz") as stream:
                    np.savez(stream, **arrays)  # type: ignore[arg-type]
            sums = {"dense": dense.commit(), "sparse": sparse.commit(), "labels": labels.commit()}
        except OSError as error:
            what = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
            raise DataError(f"{self._folder}: part {name} cannot be written ({what})") from None
        finally:
            for writer in writers:  # of what has been committed nothing is left to discard
                writer.discard()
        self._parts[name] = Part(name, path.name, size, labels.rows, skipped_count, sums)
        self._save()
        say(f"{name}: {labels.rows:,} rows")

    def _rows_of(self, rows: Rows, sizes: NDArray[np.uint64], columns: Columns) -> NDArray:
        if self._job.ids == "modulo":
            return id_rules.modulo(rows.ids, sizes)
        if self._job.ids == "hash":
            return id_rules.hashed(rows.ids, sizes, columns.sparse)
        return rows.ids

    def number_ids(self, like: Path | None, tables: Sequence[str], say: Say) -> list[int]:
        """Makes the vocabulary, or takes that of another folder, and turns all parts' ids into rows.

        Returns:
            Rows of each table.
        """
        folder = self._folder / "vocabulary"
        folder.mkdir(exist_ok=True)
        vocabularies = []
        for k, table in enumerate(tables):
            if like is None:
                counted = []
                for name in self._parts:
                    with np.load(self._folder / f".{name}_counts.npz", allow_pickle=False) as counts:
                        counted.append((counts[f"n_{k}"], counts[f"c_{k}"]))
                vocabulary = id_rules.Vocabulary.of(id_rules.merge(counted), self._job.frequency_threshold)
            else:
                vocabulary = id_rules.Vocabulary(open_npy(like / "vocabulary" / f"{table}.npy", None, (np.uint64,))[:])
            vocabularies.append(vocabulary)
            writer = NpyWriter(folder / f"{table}.npy", (), np.uint64)
            writer.append(vocabulary.ids)
            writer.commit()
        for name, part in self._parts.items():
            raw = self._folder / f".{name}_ids.npy"
            if not raw.exists():  # an earlier run has done it
                continue
            say(f"{name}: numbering ids")
            ids = open_npy(raw, len(tables), (np.uint64,))
            writer = NpyWriter(self._folder / f"{name}_sparse.npy", (len(tables),), np.int32)
            for first in range(0, len(ids), _MAP_ROWS):
                block = ids[first : first + _MAP_ROWS]
                writer.append(np.stack([v.rows(block[:, k]) for k, v in enumerate(vocabularies)], axis=1))
            self._parts[name] = Part(**{**asdict(part), "sha256": {**part.sha256, "sparse": writer.commit()}})
            self._save()
            raw.unlink()
        return [vocabulary.num_embeddings for vocabulary in vocabularies]


class _Progress:
    """A line every few seconds."""

    def __init__(self, name: str, say: Say) -> None:
        self._name, self._say = name, say
        self._started = self._last = time.monotonic()

    def __call__(self, rows: int) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._say(f"{self._name}: {rows:,} rows, {rows / (now - self._started):,.0f} rows/s")


def _write_counts(folder: Path, manifest: Manifest, say: Say) -> None:
    """How often the rows of each table occur in training data: ``counts/<table>.npz``.

    ``rows`` are the most frequent ones, at most 2^20, by falling frequency, and ``counts`` how often they occur;
    ``distinct`` rows occur ``total`` times.
    """
    say("counting rows")
    counters = [id_rules.row_counter(size) for size in manifest.num_embeddings]
    for name, start, stop in manifest.split["train"]:
        sparse = open_array(folder, name, "sparse", len(manifest.dense), len(manifest.sparse))
        for first in range(start, stop, _MAP_ROWS):
            block = np.ascontiguousarray(sparse[first : min(first + _MAP_ROWS, stop)].T)
            for counter, column in zip(counters, block):
                counter.add(column)
    (folder / "counts").mkdir(exist_ok=True)
    for table, counter in zip(manifest.tables, counters):
        rows, counts = counter.counts()
        order = np.argsort(-counts, kind="stable")[:_TOP_COUNTS]
        with atomic_file(folder / "counts" / f"{table}.npz") as stream:
            np.savez(stream, rows=rows[order], counts=counts[order], distinct=np.int64(len(rows)), total=counts.sum())


def _split(rule: SplitRule, parts: list[tuple[str, int]]) -> dict[Split, list[RowRange]]:
    if rule == "auto":
        rule = "last_part" if len(parts) > 1 else "time"
    if rule == "none":
        return time_split(parts, (1.0, 0.0, 0.0))
    if rule == "time":
        return time_split(parts, KAGGLE_FRACTIONS)
    if rule == "last_part":
        return last_part_split(parts)
    raise DataError(f"split={rule!r} is unknown; known: auto, time, last_part, none")


def _part_names(files: Sequence[Path]) -> list[str]:
    """``day_3`` for ``day_3.gz``: names without endings, which must differ."""
    names = [path.name.split(".")[0] for path in files]
    for first, name in enumerate(names):
        if name in names[:first]:
            raise DataError(
                f"{files[names.index(name)]} and {files[first]} would both become part {name!r}; rename one"
            )
    days = sorted(int(name[4:]) for name in names if name.startswith("day_") and name[4:].isdigit())
    missing = sorted(set(range(days[0], days[-1])) - set(days)) if days else []
    if missing:
        raise DataError(f"{files[0].parent}: day_{missing[0]} is missing between day_{days[0]} and day_{days[-1]}")
    return names


def _table_names(features: Sequence[str]) -> list[str]:
    return list(TABLE_NAMES) if list(features) == list(CRITEO.sparse) else [f"t_{name}" for name in features]


def _sizes(num_embeddings: int | Sequence[int] | None, tables: Sequence[str]) -> list[int]:
    if num_embeddings is None:
        raise DataError("num_embeddings is needed: rows of every table, or of each; or number the ids: ids=contiguous")
    if list(tables) == list(TABLE_NAMES):
        return table_sizes(num_embeddings)
    sizes = [num_embeddings] * len(tables) if isinstance(num_embeddings, int) else list(num_embeddings)
    if len(sizes) != len(tables):
        raise DataError(f"num_embeddings has {len(sizes)} numbers for {len(tables)} tables")
    for table, size in zip(tables, sizes):
        if not 1 <= size < 2**31:
            raise DataError(f"table {table} has {size} rows, it must have 1 to {2**31 - 1}")
    return sizes


def _columns_like(columns: Columns, reference: Manifest) -> Columns:
    if len(reference.dense) != len(columns.dense) or list(columns.sparse) != reference.sparse:
        raise DataError(
            f"the other folder has {len(reference.dense)} dense and {len(reference.sparse)} sparse features "
            f"({', '.join(reference.sparse[:5])}, ...), this source {len(columns.dense)} and {len(columns.sparse)}"
        )
    return columns
