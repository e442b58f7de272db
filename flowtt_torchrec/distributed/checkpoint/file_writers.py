"""Writing a checkpoint whose tensors are made or read a few rows at a time."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import skip_data

from flowtt_torchrec.distributed.checkpoint.files import (
    HeldTensor,
    Key,
    LazyTensor,
    StoredObject,
    name_of,
    read_entries,
)
from flowtt_torchrec.files import atomic_file

BLOCK_BYTES = 16 << 20
FILE_SUFFIXES = (".pt", ".pth", ".bin")


def write_entries(entries: Mapping[Key, Any], target: str | os.PathLike[str]) -> None:
    """Writes a checkpoint, as `stored.read_entries` reads one.

    Args:
        entries: values by their place: tensors, `LazyTensor`, `StoredObject`, and what ``torch.save`` takes.
        target: a file of ``torch.save`` if it ends in ``.pt``, ``.pth`` or ``.bin``, else a directory of
            ``torch.distributed.checkpoint``. It must not exist.

    Raises:
        ValueError: if ``target`` exists.
    """
    path = check_target(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    lazy = {key: HeldTensor(value) if isinstance(value, Tensor) else value for key, value in entries.items()}
    if path.suffix in FILE_SUFFIXES:
        _write_file(lazy, path)
        return
    planner = _RowBlockPlanner({name_of(key): key for key in lazy})
    dcp.save({name_of(key): value for key, value in lazy.items()}, checkpoint_id=path, planner=planner, no_dist=True)


def check_target(target: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint that is to be written; ``ValueError`` if there is something."""
    path = Path(target)
    if path.exists():
        raise ValueError(f"{path} exists; remove it or write elsewhere")
    return path


class _RowBlockPlanner(dcp.DefaultSavePlanner):
    """Has `LazyTensor` written in blocks of rows, each made when its turn comes.

    Args:
        keys: place of each name in the nested dictionaries that the names stand for.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        super().__init__()
        self._keys = dict(keys)
        self._blocks: dict[MetadataIndex, tuple[int, int]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings, self.is_coordinator = state_dict, self._keys, is_coordinator

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            value = self.state_dict[item.index.fqn]
            items += self._items(item.index.fqn, value) if isinstance(value, LazyTensor) else [item]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _items(self, name: str, value: LazyTensor) -> list[WriteItem]:
        items = []
        for first, last in value.blocks(BLOCK_BYTES):
            offsets = torch.Size([first, *[0] * (len(value.size) - 1)][: len(value.size)])
            sizes = torch.Size([last - first, *value.size[1:]][: len(value.size)])
            index = MetadataIndex(name, offsets)
            self._blocks[index] = (first, last)
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=value.dtype),
                size=value.size,
            )
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, LazyTensor):
            return super().lookup_object(index)
        first, last = self._blocks[index]
        return value.read(first, last).reshape(-1, *value.size[1:]) if value.size else value.read(0, 1).reshape(())

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, StoredObject):
            return io.BytesIO(object.raw())
        return super().transform_object(write_item, object)


def _write_file(entries: Mapping[Key, Any], path: Path) -> None:
    """First a file with room for the tensors, then their numbers."""
    tree: dict[Any, Any] = {}
    with FakeTensorMode():
        for key, value in entries.items():
            node = tree
            for name in key[:-1]:
                node = node.setdefault(name, {})
            node[key[-1]] = _for_file(value)
    with atomic_file(path) as file:
        with skip_data(materialize_fake_tensors=True):
            torch.save(tree, file)
        file.flush()
        written = read_entries(file.name)
        for key, value in entries.items():
            if isinstance(value, LazyTensor):
                position = written[key].position
                for first, last in value.blocks(BLOCK_BYTES):
                    file.seek(position + first * value.row_bytes)
                    numbers = value.read(first, last).contiguous().view(-1).view(torch.uint8)
                    file.write(memoryview(cast(Any, numbers.numpy())))


def _for_file(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return torch.empty(value.size, dtype=value.dtype)
    return value.load() if isinstance(value, StoredObject) else value
