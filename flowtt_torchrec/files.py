"""Files that, at any moment, are either the old ones or the whole new ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class AtomicFile:
    """A file that gets its name when it is whole and on the disk.

    Args:
        path: the name; what is there under it stays until `commit`.

    Attributes:
        stream: where to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.writing")
        self.stream: BinaryIO = open(self._unfinished, "wb+")  # noqa: SIM115 - closed by commit or discard

    def commit(self) -> None:
        """Gives the file its name."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        os.replace(self._unfinished, self._path)
        sync_directory(self._path.parent)

    def discard(self) -> None:
        """Removes what has been written."""
        with contextlib.suppress(OSError):  # closing writes what is buffered, which a full disk does not take
            self.stream.close()
        self._unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """An `AtomicFile`'s stream; committed at the end, discarded by an exception."""
    file = AtomicFile(path)
    try:
        yield file.stream
        file.commit()
    except BaseException:
        file.discard()
        raise


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as stream:
        stream.write(text.encode())


def sync_directory(directory: Path) -> None:
    """Brings the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
