"""Reading a checkpoint of ``torch.distributed.checkpoint`` (DCP) without running code that it may hold.

``FileSystemReader`` unpickles ``.metadata``, and ``DefaultLoadPlanner`` what is no tensor, without a restriction: who
can write the folder can have anything run by who reads it. Here a ``.metadata`` may name the classes that DCP itself
writes and no other, and values are what ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import re
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # a look-up in a dictionary of torch's layouts
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),  # older torch
}
# The folder's name where it was written, perhaps under another system.
_PATHS = {
    "PosixPath": pathlib.PurePosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows DCP's own classes, torch's types of numbers, and paths."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which torch.distributed.checkpoint does not write there and which might run "
            "code, so it was not loaded"
        )


class SafeReader(dcp.FileSystemReader):
    """``FileSystemReader`` whose `read_metadata` takes classes of DCP only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        name = ".metadata" if rank is None else f"__{rank}.metadata"
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage_meta.load_id = self.load_id
        metadata.storage_meta = storage_meta
        return metadata


class SafeLoadPlanner(dcp.DefaultLoadPlanner):
    """``DefaultLoadPlanner`` that loads what is no tensor as ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        load_object(read_item.dest_index.fqn, value)
        value.seek(0)
        super().load_bytes(read_item, value)  # the same bytes, which hold nothing but data


def load_object(name: str, value: io.BytesIO) -> Any:
    """What ``torch.save`` wrote, if that is data.

    Raises:
        ValueError: with the name, if it holds anything that is not safe to load.
    """
    try:
        return torch.load(value, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{name} is a Python object that is not safe to load: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Why ``torch.load(weights_only=True)`` failed, without its advice to load without a restriction."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"it names {named[1]}, which might run code" if named else str(error).partition("\n")[0]


def read_metadata(reader: dcp.StorageReader) -> Metadata:
    """What a DCP checkpoint has.

    Args:
        reader: of files, or one that a user gave, which reads as it does.

    Raises:
        ValueError: if that is missing, damaged, or might run code.
    """
    try:
        if isinstance(reader, dcp.FileSystemReader):
            return SafeReader.read_metadata(reader)  # type: ignore[arg-type]  # also of one that is not safe by itself
        return reader.read_metadata()
    except Exception as error:  # unpickling damaged bytes raises anything
        where = getattr(reader, "path", "the checkpoint")
        raise ValueError(f"{where} has no readable .metadata of torch.distributed.checkpoint: {error}") from None
