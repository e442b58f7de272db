"""Writing npy files a block at a time, so that a kill leaves either the whole file or none; and checking them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets.base import DataError
from flowtt_torchrec.files import AtomicFile

ARRAYS = ("dense", "sparse", "labels")


class NpyWriter:
    """Appends rows to a npy file whose length is not known yet. The file has its name only when it is whole.

    Args:
        path: of the file.
        row: shape of a row, ``()`` or ``(columns,)``.
        dtype: of the elements.
    """

    def __init__(self, path: Path, row: tuple[int, ...], dtype: type) -> None:
        self._row, self._dtype = row, np.dtype(dtype)
        self._file = AtomicFile(path)
        self._hash = hashlib.sha256()
        self.rows = 0
        self._header()
        self._start = self._file.stream.tell()

    def _header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.rows, *self._row)}
        np.lib.format.write_array_header_1_0(self._file.stream, header)  # leaves room for the first number to grow

    def append(self, rows: NDArray) -> None:
        """Adds rows, ``[rows, *row]``."""
        data = np.ascontiguousarray(rows, self._dtype)
        assert data.shape[1:] == self._row
        self._file.stream.write(data.data)
        self._hash.update(data.data)
        self.rows += len(data)

    def commit(self) -> str:
        """Gives the file its name. Returns the SHA-256 of its rows' bytes."""
        self._file.stream.seek(0)
        self._header()
        assert self._file.stream.tell() == self._start
        self._file.commit()
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Removes what has been written, unless it is committed."""
        self._file.discard()


def open_npy(path: Path, columns: int | None, dtypes: tuple[type, ...]) -> NDArray:
    """A npy file, mapped into memory.

    Args:
        path: of the file.
        columns: how many it must have; None for one number a row, ``[rows]`` or ``[rows, 1]``.
        dtypes: what its elements may be.

    Raises:
        DataError: it is missing, damaged, or of another shape or type.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is no whole npy file ({error}); prepare the data again") from None
    allowed = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    if array.dtype not in dtypes:
        raise DataError(f"{path}: the elements are {array.dtype}, they must be {allowed}")
    good = array.ndim == 1 or array.shape[1:] == (1,) if columns is None else array.shape[1:] == (columns,)
    if not good:
        expected = "[rows] or [rows, 1]" if columns is None else f"[rows, {columns}]"
        raise DataError(f"{path}: the shape is {list(array.shape)}, it must be {expected}")
    return array


def open_array(folder: Path, part: str, kind: str, num_dense: int, num_sparse: int) -> NDArray:
    """One array of a part, ``dense``, ``sparse`` or ``labels``, mapped into memory; errors as `open_npy`."""
    path = folder / f"{part}_{kind}.npy"
    if kind == "dense":
        return open_npy(path, num_dense, (np.float32,))
    if kind == "sparse":
        return open_npy(path, num_sparse, (np.int32, np.int64))
    return open_npy(path, None, (np.int32,))


def checksum(array: NDArray) -> str:
    """SHA-256 of an array's bytes, in its own order."""
    digest = hashlib.sha256()
    step = max(1, (1 << 24) // max(1, array[:1].nbytes))
    for first in range(0, len(array), step):
        digest.update(np.ascontiguousarray(array[first : first + step]).data)
    return digest.hexdigest()
