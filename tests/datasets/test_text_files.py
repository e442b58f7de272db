from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pytest

from flowtt_torchrec.datasets import DataError, text_files
from flowtt_torchrec.datasets.text_files import read_lines

LINES = [f"line {number} {'x' * (number % 50)}".encode() for number in range(5000)]


def _read(path: Path) -> list[bytes]:
    return [line for lines in read_lines(path) for line in lines]


@pytest.mark.parametrize("chunk_bytes", [7, 1000, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "zipped_without_suffix"])
def test_lines_are_the_same_however_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: bytes, chunk_bytes: int
) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", chunk_bytes)
    content = b"\n".join(LINES) + end
    (tmp_path / name).write_bytes(content if name == "a.tsv" else gzip.compress(content))
    assert _read(tmp_path / name) == LINES


def test_an_empty_line_is_a_line_and_an_empty_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\n\nb\n")
    assert _read(path) == [b"a", b"", b"b"]
    path.write_bytes(b"")
    assert _read(path) == []


def test_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    content = gzip.compress(b"\n".join(LINES))[:4000]
    path.write_bytes(content)
    whole = zlib.decompressobj(31).decompress(content).count(b"\n")
    assert 100 < whole < len(LINES)
    with pytest.raises(DataError, match=rf"a\.tsv\.gz: the gzip data ends too early, after line {whole}; .* truncated"):
        _read(path)


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    content = bytearray(gzip.compress(b"\n".join(LINES)))
    content[-8] ^= 0xFF  # the check sum
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tsv\.gz: the gzip data is damaged"):
        _read(path)
    content[2000:2100] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tsv\.gz: the gzip data"):
        _read(path)


def test_a_name_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(b"plain text\n")
    with pytest.raises(DataError, match=r"ends in \.gz, but"):
        _read(path)


def test_a_file_without_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"short\n" + bytes(100_000))
    with pytest.raises(DataError, match=r"a\.bin:2: the line has no end"):
        _read(path)
