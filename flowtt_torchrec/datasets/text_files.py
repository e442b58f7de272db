"""Reads the lines of a file as a stream, plain or gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from flowtt_torchrec.datasets.base import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16


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
