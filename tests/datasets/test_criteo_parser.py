from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flowtt_torchrec.datasets import DataError
from flowtt_torchrec.datasets.criteo_parser import parse_lines


def _where(row: int) -> str:
    return f"day_0:{row + 1}"


def test_equals_plain_python(criteo_lines: Callable[..., list[str]]) -> None:
    lines = criteo_lines(300)
    parsed = parse_lines([line.encode() for line in lines], _where)
    fields = [line.split("\t") for line in lines]
    assert parsed.labels.tolist() == [float(row[0]) for row in fields]
    assert parsed.integers.tolist() == [[int(x or 0) for x in row[1:14]] for row in fields]
    assert parsed.categories.tolist() == [[int(x or "0", 16) for x in row[14:]] for row in fields]
    assert parsed.integers.min() < 0
    assert parsed.categories.max() >= 2**31


def test_widest_numbers(criteo_lines: Callable[..., list[str]]) -> None:
    row = ["1"] + ["-999999999999999999", "7"] + [""] * 11 + ["FfffFfffFfffFfff", "0"] + [""] * 24
    parsed = parse_lines(["\t".join(row).encode()], _where)
    assert parsed.integers[0, :3].tolist() == [-(10**18) + 1, 7, 0]
    assert parsed.categories[0, :3].tolist() == [2**64 - 1, 0, 0]


def test_line_ends_of_windows(criteo_lines: Callable[..., list[str]]) -> None:
    lines = [line.encode() for line in criteo_lines(20)]
    plain, windows = parse_lines(lines, _where), parse_lines([line + b"\r" for line in lines], _where)
    assert all(np.array_equal(a, b) for a, b in zip(plain, windows))


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        (0, "2", r"day_0:4: the label is '2', it must be 0 or 1"),
        (0, "", r"day_0:4: the label is '', it must be 0 or 1"),
        (0, "01", r"day_0:4: the label is '01'"),
        (1, "1.5", r"day_0:4: integer 1 \(field 2 of 40\) is '1\.5', it must be a whole number"),
        (13, "-", r"day_0:4: integer 13 \(field 14 of 40\) is '-'"),
        (5, "1-2", r"day_0:4: integer 5 .* is '1-2'"),
        (5, "ab", r"day_0:4: integer 5 .* is 'ab'"),
        (5, "1" * 19, r"day_0:4: integer 5 .* of at most 18 digits"),
        (14, "xyz", r"day_0:4: category 1 \(field 15 of 40\) is 'xyz', it must be a hexadecimal number"),
        (39, "68fd1e6g", r"day_0:4: category 26 \(field 40 of 40\) is '68fd1e6g'"),
        (20, "-1", r"day_0:4: category 7 .* is '-1'"),
        (20, " 1", r"day_0:4: category 7 .* is ' 1'"),
        (20, "0" * 17, r"day_0:4: category 7 .* of at most 16 digits"),
        (20, "\xff\x00", r"day_0:4: category 7"),
    ],
)
def test_a_bad_field_is_named(criteo_lines: Callable[..., list[str]], field: int, content: str, message: str) -> None:
    rows = [line.split("\t") for line in criteo_lines(6)]
    rows[3][field] = content
    with pytest.raises(DataError, match=message):
        parse_lines(["\t".join(row).encode("latin-1") for row in rows], _where)


@pytest.mark.parametrize(("count", "hint"), [(38, ""), (39, "test file without labels"), (41, ""), (1, "")])
def test_a_wrong_number_of_fields_is_named(criteo_lines: Callable[..., list[str]], count: int, hint: str) -> None:
    rows = [line.split("\t") for line in criteo_lines(6)]
    rows[2] = (rows[2] + ["0"])[:count]
    with pytest.raises(DataError, match=rf"day_0:3: {count} fields, but a Criteo line has 40.*{hint}"):
        parse_lines(["\t".join(row).encode() for row in rows], _where)


def test_two_lines_whose_fields_add_up(criteo_lines: Callable[..., list[str]]) -> None:
    rows = [line.split("\t") for line in criteo_lines(4)]
    rows[1], rows[2] = rows[1][:39], [*rows[2], "0"]
    with pytest.raises(DataError, match="day_0:2: 39 fields"):
        parse_lines(["\t".join(row).encode() for row in rows], _where)
