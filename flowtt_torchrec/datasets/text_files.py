"""Reads the lines of a file as a stream, plain or gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from flowtt_torchrec.datasets.base import DataError
from flowtt_torchrec.datasets.diagnosis import LONGEST_MAGIC, describe_file

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16


def read_lines(path: Path) -> Iterator[list[bytes]]:
    """Lists of consecutive lines without their line feeds, about a megabyte each.

    Raises:
        DataError: the file cannot be read, its gzip data is damaged or ends too early, or it is not text; the message
            names the format where it is a known one.
    """
    count = 0
    try:
        with _open(path) as stream:
            rest = b""
            for chunk in _chunks(stream):
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


def _chunks(stream: BufferedIOBase) -> Iterator[bytes]:
    """About a megabyte each. What can be read before an error is given out first, so that its line is counted."""
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            piece = stream.read1(_CHUNK_BYTES)
        except Exception:
            yield b"".join(pieces)
            raise
        pieces.append(piece)
        size += len(piece)
        if size >= _CHUNK_BYTES or not piece:
            yield b"".join(pieces)
            pieces, size = [], 0
        if not piece:
            return


def _open(path: Path) -> BufferedIOBase:
    with open(path, "rb") as stream:
        beginning = stream.read(LONGEST_MAGIC)
    zipped = beginning.startswith(_GZIP_MAGIC)
    if (kind := describe_file(beginning)) is not None:
        raise DataError(f"{path}: {kind}")
    if path.suffix == ".gz" and not zipped:
        raise DataError(f"{path}: the name ends in .gz, but the content is not gzip data")
    return gzip.open(path, "rb") if zipped else open(path, "rb")
