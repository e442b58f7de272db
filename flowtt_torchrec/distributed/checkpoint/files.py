"""Tensors of a checkpoint on disk, of which a few rows are read at a time.

A checkpoint is a directory of ``torch.distributed.checkpoint`` (DCP) or a file of ``torch.save``. In both a tensor is
an uncompressed member of a zip archive, so its rows lie at a known place of a file. Loading under a ``FakeTensorMode``
tells the place without reading the numbers (torch, "Serialization semantics").
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flowtt_torchrec.distributed.checkpoint.safe_reading import SafeReader, load_object, read_metadata, reason

Key = tuple[Any, ...]
"""Where a value is in the nested dictionaries of a checkpoint. Joined by dots it is the name that DCP stores."""


def name_of(key: Key) -> str:
    return ".".join(map(str, key))


class LazyTensor:
    """A tensor of which a few rows (of the first dimension) are made or read at a time.

    Args:
        size: of the whole tensor; without dimensions it counts as one row.
        dtype: of its elements.
    """

    def __init__(self, size: Sequence[int], dtype: torch.dtype) -> None:
        self.size = torch.Size(size)
        self.dtype = dtype

    @property
    def num_rows(self) -> int:
        return self.size[0] if self.size else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.size[1:]) * self.dtype.itemsize

    def blocks(self, block_bytes: int) -> Iterator[tuple[int, int]]:
        """First and last row of blocks of about that size."""
        step = max(1, block_bytes // max(1, self.row_bytes))
        for first in range(0, max(self.num_rows, 1), step):  # an empty tensor too has a block
            yield first, min(first + step, self.num_rows)

    def read(self, first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last - 1``, ``[last - first, ...]``; a tensor without dimensions as ``[1]``."""
        raise NotImplementedError


class HeldTensor(LazyTensor):
    """A tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.size(), tensor.dtype)
        self._tensor = tensor

    def read(self, first: int, last: int) -> Tensor:
        return self._tensor.reshape(self._tensor.shape or (1,))[first:last]


@dataclass(frozen=True)
class _Archive:
    """A part of a file that ``torch.save`` wrote."""

    path: Path
    offset: int
    length: int

    def describe(self) -> Any:
        """What was saved, with fake tensors."""
        with open(self.path, "rb") as file:
            try:
                with FakeTensorMode():
                    return torch.load(cast(BinaryIO, _Part(file, self.offset, self.length)), weights_only=True)
            except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
                raise ValueError(
                    f"{self.path} cannot be read: it must hold tensors in plain dictionaries, as torch.save writes "
                    f"them: {reason(error)}"
                ) from None

    def position(self, tensor: Tensor, name: str) -> int:
        """The byte of the file at which a fake tensor's numbers begin."""
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is stored with strides {tensor.stride()}; save a contiguous copy of it")
        storage: Any = tensor.untyped_storage()
        return self.offset + int(storage._checkpoint_offset) + int(tensor.storage_offset()) * tensor.element_size()


class _Part(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return int(count)


@dataclass
class _Chunk:
    """A box of a stored tensor: an archive that holds it and nothing else, or a known place in a file."""

    name: str
    archive: _Archive
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    known_position: int | None = None

    @functools.cached_property
    def position(self) -> int:
        """The byte of the file at which the numbers begin."""
        if self.known_position is not None:
            return self.known_position
        tensor = self.archive.describe()
        described = (tuple(tensor.shape) or (1,), tensor.dtype) if isinstance(tensor, Tensor) else None
        if described != (self.sizes, self.dtype):
            raise ValueError(f"{self.archive.path} is damaged: {self.name} is not the tensor that its metadata names")
        return self.archive.position(tensor, self.name)

    def read(self, first: int, last: int) -> Tensor:
        """Rows of the chunk, counted from its own first."""
        row_bytes = math.prod(self.sizes[1:]) * self.dtype.itemsize
        buffer = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        with open(self.archive.path, "rb") as file:
            file.seek(self.position + first * row_bytes)
            if file.readinto(memoryview(cast(Any, buffer.numpy()))) != buffer.numel():
                raise ValueError(f"{self.archive.path} is damaged: it ends within {self.name}")
        return buffer.view(self.dtype).view(last - first, *self.sizes[1:])


class StoredTensor(LazyTensor):
    """A tensor in the files of a checkpoint, in one or several chunks."""

    def __init__(self, size: Sequence[int], dtype: torch.dtype, chunks: Sequence[_Chunk]) -> None:
        super().__init__(size, dtype)
        self._chunks = chunks

    @property
    def position(self) -> int:
        """The byte of the file at which a tensor of one chunk begins."""
        [chunk] = self._chunks
        return chunk.position

    def read(self, first: int, last: int) -> Tensor:
        rows = torch.empty(last - first, *self.size[1:], dtype=self.dtype)
        for chunk in self._chunks:
            start = chunk.offsets[0]
            begin, end = max(first, start), min(last, start + chunk.sizes[0])
            if begin < end:
                box = (slice(begin - first, end - first), *map(_range, chunk.offsets[1:], chunk.sizes[1:]))
                rows[box] = chunk.read(begin - start, end - start)
        return rows


def _range(offset: int, size: int) -> slice:
    return slice(offset, offset + size)


@dataclass(frozen=True)
class StoredObject:
    """Something else in a DCP checkpoint, as the bytes that it was saved in."""

    name: str
    archive: _Archive

    def raw(self) -> bytes:
        with open(self.archive.path, "rb") as file:
            file.seek(self.archive.offset)
            return file.read(self.archive.length)

    def load(self) -> Any:
        return load_object(f"{self.name} of {self.archive.path.parent}", io.BytesIO(self.raw()))


def read_entries(checkpoint: str | os.PathLike[str]) -> dict[Key, Any]:
    """All that a checkpoint has, by its place: `StoredTensor`, `StoredObject` (of DCP), or plain values.

    Args:
        checkpoint: a directory of ``torch.distributed.checkpoint`` or a file of ``torch.save``, on a local or mounted
            file system.

    Raises:
        ValueError: naming the file, if it is neither, or is damaged.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return read_dcp(SafeReader(path))
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    archive = _Archive(path, 0, path.stat().st_size)
    entries: dict[Key, Any] = {}
    _collect(archive, archive.describe(), (), entries)
    return entries


def _collect(archive: _Archive, value: Any, key: Key, entries: dict[Key, Any]) -> None:
    if isinstance(value, dict) and (value or not key):
        for name, inner in value.items():
            _collect(archive, inner, (*key, name), entries)
        return
    if isinstance(value, Tensor):
        sizes = tuple(value.shape) or (1,)
        position = archive.position(value, name_of(key))
        chunk = _Chunk(name_of(key), archive, (0,) * len(sizes), sizes, value.dtype, position)
        entries[key] = StoredTensor(value.shape, value.dtype, [chunk])
        return
    if _has_tensors(value):
        raise ValueError(f"{archive.path}: {name_of(key)} has tensors inside a list; only dictionaries are supported")
    entries[key] = value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensors, value)))


def read_dcp(reader: dcp.FileSystemReader) -> dict[Key, Any]:
    """`read_entries` of a reader of local files."""
    folder = Path(reader.path)
    metadata = read_metadata(reader)
    keys: dict[str, Key] = metadata.planner_data or {}
    entries: dict[Key, Any] = {}
    archives: dict[str, list[tuple[tuple[int, ...] | None, _Archive]]] = {}
    for index, info in (metadata.storage_data or {}).items():
        if info.transform_descriptors:
            raise ValueError(f"{folder}: {index.fqn} is stored with {list(info.transform_descriptors)}, not plainly")
        archive = _Archive(folder / info.relative_path, info.offset, info.length)
        offsets = None if index.offset is None else tuple(index.offset)
        archives.setdefault(index.fqn, []).append((offsets, archive))
    for name, stored in metadata.state_dict_metadata.items():
        key = tuple(keys.get(name, (name,)))
        if not isinstance(stored, TensorStorageMetadata):
            entries[key] = StoredObject(name, archives[name][0][1])
            continue
        placed = dict(archives[name])
        dtype = stored.properties.dtype
        chunks = [
            _Chunk(name, placed[tuple(c.offsets)], tuple(c.offsets) or (0,), tuple(c.sizes) or (1,), dtype)
            for c in stored.chunks
        ]
        entries[key] = StoredTensor(stored.size, dtype, chunks)
    return entries
