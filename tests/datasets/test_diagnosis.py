"""What is said of input that is not raw Criteo text. Each case is written to a file and read as a user would."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from flowtt_torchrec.datasets import CriteoTSV, DataError, Sharding

Lines = Callable[..., list[str]]
HEADER = "\t".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])


def _join(lines: list[str], change: Callable[[str], str] = str) -> bytes:
    return ("\n".join(map(change, lines)) + "\n").encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: _join([*lines[:7], "", *lines[7:]]), r"rows:8: .* the line is empty; remove empty lines"),
        (lambda lines: _join([*lines, "", " "]), r"rows, line 2 from the end: .* the line is empty"),
        (lambda lines: _join([*lines, ""], lambda line: line + "\r"), r"line 1 from the end: .* the line is empty"),
        (lambda lines: _join(lines)[:-150], r"rows, line 1 from the end: \d+ fields"),
        (lambda lines: _join(lines, lambda line: line.replace("\t", ",")), r"rows:1: 1 fields.*\(CSV\).*prepare"),
        (lambda lines: _join([HEADER, *lines], lambda line: line.replace("\t", ",")), r"rows:1: .*\(CSV\)"),
        (lambda lines: _join(lines, lambda line: line.replace("\t", ";")), r"rows:1: .*separated by semicolons"),
        (lambda lines: _join(lines, lambda line: line.replace("\t", " ")), r"rows:1: .*separated by spaces"),
        (lambda lines: b"\xef\xbb\xbf" + _join(lines), r"rows:1: .*byte order mark \(BOM\); remove it"),
        (lambda lines: _join([HEADER, *lines]), r"rows:1: it looks like a header row; remove it"),
        (lambda lines: _join([*lines[:30], HEADER, *lines[30:]]), r"rows:31: it looks like a header row"),
        (lambda lines: _join(lines, lambda line: line[2:]), r"rows:1: 39 fields.*test file without labels"),
        (lambda lines: "\n".join(lines).encode("utf-16"), r"rows: it is text in UTF-16"),
        (lambda lines: b"PAR1" + bytes(100), r"rows: it is a Parquet file, not text; .*prepare"),
        (lambda lines: b"\x28\xb5\x2f\xfd" + bytes(100), r"rows: it is compressed by Zstandard, .*zstd -d"),
        (lambda lines: b"PK\x03\x04" + bytes(100), r"rows: it is a ZIP archive"),
        (lambda lines: gzip.compress(_join([HEADER, *lines])), r"rows:1: it looks like a header row"),
        (lambda lines: b"a\x00" * 40 + b"\n", r"rows:1: .*binary"),
        (lambda lines: b"", r"rows: 0 rows for split 'train'"),
    ],
)
def test_what_a_file_looks_like_is_told_before_it_is_read_whole(
    tmp_path: Path, criteo_lines: Lines, damage: Callable[[list[str]], bytes], message: str
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(damage(criteo_lines(300)))
    data = CriteoTSV(path, 10, Sharding(8), val_every=2)
    with pytest.raises(DataError, match=message):
        data.check_rows("train")


def test_good_rows_are_good(tmp_path: Path, criteo_lines: Lines) -> None:
    path = tmp_path / "rows"
    for content in (
        _join(criteo_lines(500)),
        _join(criteo_lines(500))[:-1],
        _join(criteo_lines(9)).replace(b"\n", b"\r\n"),
    ):
        path.write_bytes(content)
        data = CriteoTSV(path, 10, Sharding(8, 1, 2), val_every=4)
        data.check_rows("train")
        data.check_rows("val")


def test_rows_to_evaluate_on_are_tried_as_well(tmp_path: Path, criteo_lines: Lines) -> None:
    lines = criteo_lines(30)
    (tmp_path / "rows").write_bytes(_join(lines))
    for content, message in (
        (_join(lines, lambda line: line[2:]), "val:1: 39 fields.*without labels"),
        (b"", "val: 0 rows for split 'val'"),
        (_join(lines[:1]), "val: 1 rows for split 'val' .* at least one a rank, 2"),
    ):
        (tmp_path / "val").write_bytes(content)
        data = CriteoTSV(tmp_path / "rows", 10, Sharding(8, 0, 2), val_path=tmp_path / "val")
        data.check_rows("train")
        with pytest.raises(DataError, match=message):
            data.check_rows("val")
    data = CriteoTSV(tmp_path / "rows", 10, Sharding(8, 0, 2), val_every=20)  # holds out one row
    with pytest.raises(DataError, match="1 rows for split 'val'"):
        data.check_rows("val")
