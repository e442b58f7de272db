"""Reads source files, raw Criteo text, CSV or Parquet, as blocks of rows, with pyarrow."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets.base import DataError
from flowtt_torchrec.datasets.criteo_format import FEATURE_NAMES, NUM_CATEGORIES, NUM_DENSE, dense_transform
from flowtt_torchrec.datasets.criteo_parser import HEXADECIMAL, NOT_A_DIGIT, parse_lines

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv
    import pyarrow.parquet
except ImportError as error:
    raise ImportError("preparing data needs pyarrow: pip install 'flowtt-torchrec[data]'") from error

SourceFormat = Literal["criteo", "csv", "parquet"]
BLOCK_BYTES = 16 << 20
_PARQUET_ROWS = 1 << 16
_PARQUET_MAGIC = b"PAR1"
_READ_ERRORS = (OSError, pa.ArrowInvalid)


@dataclass(frozen=True)
class Columns:
    """Which columns of a source are what.

    Attributes:
        label: column of zeros and ones; None for rows without labels, which get -1.
        dense: columns of numbers; missing ones are 0, and ``log(1 + max(x, 0))`` is stored.
        sparse: columns of ids: whole numbers, or text. Missing ones are id 0.
        hexadecimal: whether text ids are hexadecimal numbers, as Criteo's; else they are hashed to 64 bits.
    """

    label: str | None
    dense: Sequence[str]
    sparse: Sequence[str]
    hexadecimal: bool = True


CRITEO = Columns("label", [f"int_{i}" for i in range(NUM_DENSE)], FEATURE_NAMES)


class Rows(NamedTuple):
    """A block of rows, and how many bad ones were left out of it."""

    labels: NDArray[np.int32]
    """[rows], 0 or 1, or -1 where there is none"""
    dense: NDArray[np.float32]
    """[rows, dense features]"""
    ids: NDArray[np.uint64]
    """[rows, sparse features]"""
    skipped: list[str]
    """What was wrong with each bad row, with its place."""


class _Text(NamedTuple):
    """Whole lines of a text file, the first of them ``number``."""

    data: bytes
    number: int


def source_format(path: Path) -> SourceFormat:
    """What a file looks like, by its name and its first bytes."""
    name = path.name.lower()
    with open(path, "rb") as stream:
        if stream.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC:
            return "parquet"
    if name.endswith((".parquet", ".parq")):
        raise DataError(f"{path}: the name is that of a Parquet file, but the content is not Parquet")
    return "csv" if re.search(r"\.csv(\.gz|\.zst)?$", name) else "criteo"


def read_rows(
    path: Path,
    kind: SourceFormat,
    columns: Columns,
    *,
    skip_bad_rows: bool = False,
    workers: int = 1,
) -> Iterator[Rows]:
    """The rows of a file in order, in blocks.

    Args:
        path: a file, plain, or text that is compressed by gzip or Zstandard (``.gz``, ``.zst``).
        kind: format of the file.
        columns: which columns are what; `CRITEO` for raw Criteo text.
        skip_bad_rows: whether rows that are not in the format are left out, else they are errors.
        workers: threads that parse; memory is about 100 MB each.

    Raises:
        DataError: with the place in the file.
    """
    if kind == "parquet":
        yield from _in_order(_parquet_blocks(path, columns), lambda table: _table_rows(path, table, columns), workers)
        return
    convert: Callable[[_Text], Rows]
    if kind == "criteo":
        first, names = None, _wanted(CRITEO)

        def convert(text: _Text) -> Rows:
            return _criteo_rows(path, text, names, skip_bad_rows)
    else:
        first, names = _csv_header(path, columns)

        def convert(text: _Text) -> Rows:
            return _table_rows(path, _parse_csv(path, text, names, ",", columns), columns)

    yield from _in_order(_text_blocks(path, skip_first=first is not None), convert, workers)


def _in_order(blocks: Iterator[Any], convert: Callable[[Any], Rows], workers: int) -> Iterator[Rows]:
    """Converts blocks in threads, a few ahead, and gives them out in order. pyarrow and numpy release the GIL."""
    waiting: deque[Future[Rows]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for block in blocks:
                waiting.append(pool.submit(convert, block))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _text_blocks(path: Path, skip_first: bool = False) -> Iterator[_Text]:
    """Whole lines, about `BLOCK_BYTES` each."""
    number = 1
    rest = b""
    try:
        with pa.input_stream(str(path), compression="detect", buffer_size=1 << 20) as stream:
            while data := stream.read(BLOCK_BYTES):
                data = rest + data
                cut = data.rfind(b"\n") + 1
                if not cut and len(data) > 4 * BLOCK_BYTES:
                    raise DataError(f"{path}:{number}: the line has no end; is this a text file?")
                data, rest = data[:cut], data[cut:]
                if data:
                    yield from _without_first(_Text(data, number), skip_first)
                    number += data.count(b"\n")
        if rest:
            yield from _without_first(_Text(rest, number), skip_first)
    except _READ_ERRORS as error:
        raise DataError(
            f"{path}: cannot be read after line {number - 1}; is it damaged or truncated? ({error})"
        ) from None


def _without_first(text: _Text, skip_first: bool) -> Iterator[_Text]:
    if not (skip_first and text.number == 1):
        yield text
        return
    data = text.data[text.data.find(b"\n") + 1 :] if b"\n" in text.data else b""
    if data:
        yield _Text(data, 2)


def _criteo_rows(path: Path, text: _Text, names: Sequence[str], skip: bool) -> Rows:
    """Raw Criteo text. pyarrow does the work; where it finds a fault our own parser says which and where."""
    try:
        table = _parse_csv(path, text, names, "\t", CRITEO)
        rows = _table_rows(path, table, CRITEO)
    except (DataError, pa.ArrowInvalid):
        return _criteo_rows_by_line(path, text, skip)
    return rows


def _criteo_rows_by_line(path: Path, text: _Text, skip: bool) -> Rows:
    lines = text.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    numbers = np.arange(text.number, text.number + len(lines))
    bad: list[str] = []
    good = np.ones(len(lines), bool)

    def check(first: int, last: int) -> None:
        try:
            parse_lines(lines[first:last], lambda i: f"{path}:{numbers[first + i]}")
        except DataError as error:
            if not skip:
                raise
            if last - first == 1:
                bad.append(str(error))
                good[first] = False
                return
            middle = (first + last) // 2
            check(first, middle)
            check(middle, last)

    check(0, len(lines))
    kept = [line for line, fine in zip(lines, good) if fine]
    if not kept:
        return Rows(
            np.empty(0, np.int32),
            np.empty((0, NUM_DENSE), np.float32),
            np.empty((0, NUM_CATEGORIES), np.uint64),
            bad,
        )
    parsed = parse_lines(kept, lambda i: str(path))
    return Rows(parsed.labels.astype(np.int32), dense_transform(parsed.integers), parsed.categories, bad)


def _parse_csv(path: Path, text: _Text, names: Sequence[str], delimiter: str, columns: Columns) -> pa.Table:
    types: dict[str, pa.DataType] = {name: pa.float64() for name in columns.dense}
    if names[1:2] == CRITEO.dense[:1]:  # raw Criteo has whole numbers only
        types = {name: pa.int64() for name in columns.dense}
    if columns.label is not None:
        types[columns.label] = pa.int8()
    types |= {name: pa.string() for name in columns.sparse}
    return pyarrow.csv.read_csv(
        pa.BufferReader(text.data),
        read_options=pyarrow.csv.ReadOptions(column_names=names, use_threads=False, block_size=4 * BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if delimiter == "," else False, ignore_empty_lines=False
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=True
        ),
    )


def _wanted(columns: Columns) -> list[str]:
    return [name for name in (columns.label, *columns.dense, *columns.sparse) if name is not None]


def _csv_header(path: Path, columns: Columns) -> tuple[bool | None, list[str]]:
    """Whether the first line is a header, and the names of the columns: the header's, or the wanted ones in order."""
    wanted = _wanted(columns)
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            first = stream.read(1 << 20).split(b"\n", 1)[0].decode("utf-8-sig").rstrip("\r")
    except (*_READ_ERRORS, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error})") from None
    fields = [field.strip().strip('"') for field in first.split(",")]
    if set(wanted) <= set(fields):
        return True, fields
    if len(fields) == len(wanted) and not any(field in wanted for field in fields):
        return None, wanted
    missing = [name for name in wanted if name not in fields]
    raise DataError(
        f"{path}: the first line has {len(fields)} columns ({', '.join(fields[:5])}, ...), among them no "
        f"{', '.join(missing[:5])}; name the columns with --label, --dense and --sparse, or give a file without a "
        f"header and with these {len(wanted)} columns"
    )


def _parquet_blocks(path: Path, columns: Columns) -> Iterator[pa.Table]:
    wanted = _wanted(columns)
    try:
        source = pyarrow.parquet.ParquetFile(path)
        names = source.schema_arrow.names
        missing = [name for name in wanted if name not in names]
        if missing:
            raise DataError(
                f"{path}: no column {', '.join(missing[:5])}; there are {', '.join(names[:50])}. Name the columns with "
                "--label, --dense and --sparse"
            )
        for batch in source.iter_batches(_PARQUET_ROWS, columns=wanted):
            yield pa.Table.from_batches([batch])
    except _READ_ERRORS as error:
        raise DataError(f"{path}: cannot be read as Parquet; is it damaged or truncated? ({error})") from None


def _table_rows(path: Path, table: pa.Table, columns: Columns) -> Rows:
    count = table.num_rows
    try:
        labels = _labels(path, table, columns.label)
        dense = np.empty((count, len(columns.dense)), np.float32)
        for k, name in enumerate(columns.dense):
            values = _numbers(table[name])
            dense[:, k] = dense_transform(values)
        ids = np.empty((count, len(columns.sparse)), np.uint64)
        for k, name in enumerate(columns.sparse):
            ids[:, k] = _ids(path, name, table[name], columns.hexadecimal)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: {error}") from None
    return Rows(labels, dense, ids, [])


def _labels(path: Path, table: pa.Table, name: str | None) -> NDArray[np.int32]:
    if name is None:
        return np.full(table.num_rows, -1, np.int32)
    column = table[name]
    if column.null_count:
        raise DataError(f"{path}: column {name!r} has rows without a label; all must be 0 or 1")
    labels = column.cast(pa.int32()).to_numpy()
    wrong = np.flatnonzero((labels != 0) & (labels != 1))
    if wrong.size:
        raise DataError(f"{path}: column {name!r} has the label {labels[wrong[0]]}, it must be 0 or 1")
    return labels


def _numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    return pc.fill_null(column, pa.scalar(0, column.type)).to_numpy()


def _ids(path: Path, name: str, column: pa.ChunkedArray, hexadecimal: bool) -> NDArray[np.uint64]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return _hexadecimal(column) if hexadecimal else _hashed_text(column)
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}: column {name!r} has type {column.type}; ids are whole numbers or text")
    return _numbers(column.cast(pa.uint64()))


def _hexadecimal(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """The numbers that text of hexadecimal digits spells; 0 where it is missing.

    Criteo's ids have eight digits each. For these numpy takes a tenth of the time of pyarrow's cast.
    """
    array = column.cast(pa.string()).combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    there = ~array.is_null().to_numpy(zero_copy_only=False)
    text = np.frombuffer(_text_bytes(array), np.uint8)
    if len(text) == 8 * np.count_nonzero(there) and (pc.fill_null(pc.binary_length(array), 8).to_numpy() == 8).all():
        digits = HEXADECIMAL[text].reshape(-1, 4, 2)
        if digits.size and digits.max() == NOT_A_DIGIT:
            raise pa.ArrowInvalid("an id is not a hexadecimal number")
        numbers = np.zeros(len(array), np.uint64)
        numbers[there] = (digits[..., 0] << 4 | digits[..., 1]).view(">u4")[:, 0]
        return numbers
    return _numbers(pc.binary_join_element_wise("0x", array, "").cast(pa.uint64()))


def _text_bytes(array: pa.StringArray) -> bytes:
    """The bytes of all texts, one after the other."""
    _, offsets, data = array.buffers()
    if data is None:
        return b""
    places = np.frombuffer(offsets, np.int32)
    return data[int(places[array.offset]) : int(places[array.offset + len(array)])].to_pybytes()


def _hashed_text(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """64 bits of each text, the same on every machine; 0 where it is missing."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in encoded.dictionary.to_pylist()]
    hashes = np.array([0, *(int.from_bytes(digest, "little") for digest in digests)], np.uint64)
    return hashes[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False) + 1]
