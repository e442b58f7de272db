"""Turns lines of raw Criteo text into arrays, and says what is wrong with a line that is not in the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets.base import DataError
from flowtt_torchrec.datasets.criteo_format import NUM_CATEGORIES, NUM_DENSE, NUM_FIELDS
from flowtt_torchrec.datasets.diagnosis import describe_line

MAX_HEX_DIGITS = 16
MAX_DECIMAL_DIGITS = 18
_FIRST_CATEGORY = 1 + NUM_DENSE
NOT_A_DIGIT = 255
_TAB, _LINE_FEED, _MINUS, _ZERO, _ONE = b"\t\n-01"


def _digit_values(digits: bytes) -> NDArray[np.uint8]:
    values = np.full(256, NOT_A_DIGIT, dtype=np.uint8)
    for digit in digits:
        values[digit] = int(chr(digit), 16)
    return values


HEXADECIMAL = _digit_values(b"0123456789abcdefABCDEF")
_DECIMAL = _digit_values(b"0123456789")


class ParsedLines(NamedTuple):
    """The numbers in some lines; what is missing is 0."""

    labels: NDArray[np.float32]
    """[lines]"""
    integers: NDArray[np.int64]
    """[lines, 13]"""
    categories: NDArray[np.uint64]
    """[lines, 26]"""


def parse_lines(lines: list[bytes], where: Callable[[int], str]) -> ParsedLines:
    """Parses lines of 40 fields separated by tabs: label, 13 integers, 26 hexadecimal categories.

    Args:
        lines: without line feeds.
        where: tells the file and line number of ``lines[i]``, for messages.

    Raises:
        DataError: a line is not in the format.
    """
    text = b"\n".join(lines) + b"\n"
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    buffer = np.frombuffer(text, dtype=np.uint8)
    separators = np.flatnonzero((buffer == _TAB) | (buffer == _LINE_FEED))
    if (
        separators.size != len(lines) * NUM_FIELDS
        or (buffer[separators[NUM_FIELDS - 1 :: NUM_FIELDS]] != _LINE_FEED).any()
    ):
        _raise_field_count(lines, where)
    ends = separators.reshape(-1, NUM_FIELDS)
    starts = np.concatenate(([0], separators[:-1] + 1)).reshape(-1, NUM_FIELDS)

    label_bytes = buffer[starts[:, 0]]
    good = np.empty(ends.shape, dtype=bool)
    good[:, 0] = (ends[:, 0] - starts[:, 0] == 1) & ((label_bytes == _ZERO) | (label_bytes == _ONE))

    columns = slice(1, _FIRST_CATEGORY)
    negative = (buffer[starts[:, columns]] == _MINUS) & (starts[:, columns] < ends[:, columns])
    digits = ends[:, columns] - starts[:, columns] - negative
    magnitudes, good[:, columns] = _numbers(buffer, ends[:, columns], digits, _DECIMAL, 10, MAX_DECIMAL_DIGITS)
    good[:, columns] &= ~negative | (digits > 0)
    integers = np.where(negative, -magnitudes.astype(np.int64), magnitudes.astype(np.int64))

    columns = slice(_FIRST_CATEGORY, NUM_FIELDS)
    digits = ends[:, columns] - starts[:, columns]
    categories, good[:, columns] = _numbers(buffer, ends[:, columns], digits, HEXADECIMAL, 16, MAX_HEX_DIGITS)

    if not good.all():
        row, field = divmod(int(np.argmin(good)), NUM_FIELDS)
        _raise_field(where(row), field, text[starts[row, field] : ends[row, field]], lines[row])
    return ParsedLines((label_bytes == _ONE).astype(np.float32), integers, categories)


def _numbers(
    buffer: NDArray[np.uint8],
    ends: NDArray[np.intp],
    digits: NDArray[np.intp],
    values: NDArray[np.uint8],
    base: int,
    max_digits: int,
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Unsigned numbers of ``digits`` digits that stop before ``ends``, and whether each is well formed."""
    numbers = np.zeros(ends.shape, dtype=np.uint64)
    good = digits <= max_digits
    for place in range(min(int(digits.max()), max_digits)):
        present = place < digits
        digit = values[buffer[np.where(present, ends - 1 - place, 0)]]
        good &= ~present | (digit != NOT_A_DIGIT)
        numbers += np.where(present, digit, 0) * np.uint64(base**place)
    return numbers, good


def _raise_field_count(lines: list[bytes], where: Callable[[int], str]) -> NoReturn:
    fields = [line.count(b"\t") + 1 for line in lines]
    row = next(i for i, count in enumerate(fields) if count != NUM_FIELDS)
    kind = describe_line(lines[row])
    raise DataError(
        f"{where(row)}: {fields[row]} fields, but a Criteo line has {NUM_FIELDS}, separated by tabs: "
        f"label, {NUM_DENSE} integers, {NUM_CATEGORIES} categories{'' if kind is None else f'; {kind}'}"
    )


def _raise_field(where: str, field: int, content: bytes, line: bytes) -> NoReturn:
    value = repr(content[:40].decode("utf-8", "backslashreplace"))
    kind = describe_line(line)
    if kind is not None:
        raise DataError(f"{where}: {kind}")
    if field == 0:
        raise DataError(f"{where}: the label is {value}, it must be 0 or 1")
    if field < _FIRST_CATEGORY:
        name, kind = f"integer {field}", f"a whole number of at most {MAX_DECIMAL_DIGITS} digits"
    else:
        name = f"category {field - NUM_DENSE}"
        kind = f"a hexadecimal number of at most {MAX_HEX_DIGITS} digits"
    raise DataError(f"{where}: {name} (field {field + 1} of {NUM_FIELDS}) is {value}, it must be {kind}, or empty")
