"""Finds the files of a raw Criteo data set and reads their lines as a stream, plain or gzip."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from flowtt_torchrec.datasets.base import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16

# What to read in a folder: the first of these that any name matches.
_FOLDER_PATTERNS = [
    re.compile(r"train\.(txt|tsv)(\.gz)?"),  # Kaggle; its test.txt has no labels
    re.compile(r"day_\d+(\.(txt|tsv))?(\.gz)?"),  # 1TB
    re.compile(r"[^._].*\.(txt|tsv)(\.gz)?"),
]


def find_files(path: str | Path) -> list[Path]:
    """The files of a data set: ``path`` itself, or what a folder holds, in natural order (``day_2`` before ``day_10``).

    In a folder, ``train.txt`` (Kaggle) goes before ``day_0``, ``day_1``, ... (1TB), and these before all other ``.txt``
    and ``.tsv`` files; each may end in ``.gz``.

    Raises:
        DataError: there is nothing to read, or a file is there both plain and gzipped.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"data path {path} does not exist")
    if not path.is_dir():
        return [path]
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    for pattern in _FOLDER_PATTERNS:
        found = sorted((name for name in names if pattern.fullmatch(name)), key=_natural)
        if found:
            for name in found:
                if f"{name}.gz" in found:
                    raise DataError(f"folder {path} holds both {name} and {name}.gz; remove one, or name a file")
            return [path / name for name in found]
    raise DataError(
        f"folder {path} holds no data: expected train.txt, day_0, day_1, ..., or other .txt or .tsv files "
        f"(each also as .gz), found {', '.join(sorted(names)[:5]) or 'nothing'}"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_lines(path: Path) -> Iterator[list[bytes]]:
    """Lists of consecutive lines without their line feeds, about a megabyte each.

    Raises:
        DataError: the file cannot be read, its gzip data is damaged or ends too early, or it is not text.
    """
    count = 0
    try:
        with _open(path) as stream:
            rest = b""
            while chunk := stream.read(_CHUNK_BYTES):
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > _MAX_LINE_BYTES:
                    raise DataError(f"{path}:{count + len(lines) + 1}: the line has no end; is this a text file?")
                count += len(lines)
                yield lines
            if rest:
                yield [rest]
    except EOFError:
        raise DataError(f"{path}: the gzip data ends too early, after line {count}; the file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip data is damaged after line {count} ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read after line {count} ({error.strerror})") from None


def _open(path: Path) -> BinaryIO:
    with open(path, "rb") as stream:
        zipped = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    if path.suffix == ".gz" and not zipped:
        raise DataError(f"{path}: the name ends in .gz, but the content is not gzip data")
    return cast(BinaryIO, gzip.open(path, "rb")) if zipped else open(path, "rb")
