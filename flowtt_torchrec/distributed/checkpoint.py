"""Loading a checkpoint into another plan, with the optimizer state of tables that go to or from data-parallel.

Cores have the same names under every plan. Optimizer state has not: what a fused optimizer calls
``<table>.tt_core<k>.momentum1`` is ``sum`` to the dense ``torch.optim.Adagrad`` that steps data-parallel tables, and
likewise ``<table>.momentum1`` of TorchRec's dense tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Path = tuple[str, ...]
_PARAMETER = re.compile(r"(?:.*\.)?embedding_bags\.([^.]+)\.(tt_core\d+|weight)")
DENSE_SUM, STEP = "sum", "step"


@dataclass
class _Leaf:
    """A value of a state dict: where it is, and the name to read it under."""

    path: Path
    holder: MutableMapping[str, Any]
    read_as: Path


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: dcp.StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """``torch.distributed.checkpoint.load``, which also reads Adagrad's state of a table that was placed otherwise.

    Where a table was model-parallel when the checkpoint was written and is data-parallel now, or the reverse, its
    accumulators are read under the names that they had. The number of steps that a dense Adagrad keeps beside them,
    which matters with ``lr_decay`` only, is taken from another parameter of the checkpoint. Everything else is as in
    ``torch.distributed.checkpoint.load``: all ranks call it together, and tensors are read in place.

    Args:
        state_dict: nested state dict of model and optimizers, without ``param_groups`` (TorchRec leaves them out unless
            asked by ``save_param_groups``). A dense optimizer's state must exist.
        checkpoint_id: where the checkpoint is.
        storage_reader: reads it; ``FileSystemReader(checkpoint_id)`` if not given.
        process_group: of all ranks that load; the default group if not given.

    Raises:
        ValueError: naming the table, if its state in the checkpoint is of another optimizer: row-wise Adagrad has one
            accumulator a slice, Adagrad one an element.
        CheckpointException: as ``torch.distributed.checkpoint.load``.
    """
    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("load needs a checkpoint_id or a storage_reader")
        storage_reader = dcp.FileSystemReader(checkpoint_id)
    elif checkpoint_id is not None:
        storage_reader.reset(checkpoint_id)
    stored = storage_reader.read_metadata().state_dict_metadata
    leaves = list(_leaves(state_dict))
    request: dict[str, Any] = {}
    steps: list[tuple[Tensor, str]] = []
    for leaf in leaves:
        value = leaf.holder[leaf.path[-1]]
        if ".".join(leaf.path) not in stored and len(leaf.path) > 1:
            leaf.read_as = _other_name(leaf.path)
            source = _a_step_like(leaf, stored)
            if source is not None:
                steps.append((value, source))
                continue
            if leaf.read_as != leaf.path:
                _check_shape(leaf, value, stored.get(".".join(leaf.read_as)))
        request[".".join(leaf.read_as)] = value
    for value, source in steps:
        request.setdefault(source, torch.empty_like(value))
    dcp.load(request, storage_reader=storage_reader, process_group=process_group)
    for leaf in leaves:
        key = ".".join(leaf.read_as)
        if key in request:
            leaf.holder[leaf.path[-1]] = request[key]
    for value, source in steps:
        value.copy_(request[source])


def _leaves(node: MutableMapping[str, Any], path: Path = ()) -> Iterator[_Leaf]:
    for key, value in node.items():
        here = (*path, str(key))
        if isinstance(value, MutableMapping):
            yield from _leaves(value, here)
        else:
            yield _Leaf(here, node, here)


def _other_name(path: Path) -> Path:
    """Name of an accumulator under the other kind of placement; the same for what is none."""
    match = _PARAMETER.fullmatch(path[-2])
    if match is None:
        return path
    table, part = match.groups()
    fused = f"{table}.momentum1" if part == "weight" else f"{table}.{part}.momentum1"
    return (*path[:-1], {DENSE_SUM: fused, fused: DENSE_SUM}.get(path[-1], path[-1]))


def _a_step_like(leaf: _Leaf, stored: Mapping[str, Any]) -> str | None:
    """The number of steps of another parameter, for a dense optimizer's that the checkpoint has not."""
    if leaf.path[-1] != STEP or _PARAMETER.fullmatch(leaf.path[-2]) is None:
        return None
    beginning = ".".join(leaf.path[:-2]) + "."
    return min((key for key in stored if key.startswith(beginning) and key.endswith(f".{STEP}")), default=None)


def _check_shape(leaf: _Leaf, value: Any, stored: Any) -> None:
    if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) == tuple(value.size()):
        return
    match = _PARAMETER.fullmatch(leaf.path[-2])
    assert match is not None
    raise ValueError(
        f"table {match[1]!r}: {leaf.path[-1]!r} is {list(value.size())} here, but the checkpoint has "
        f"{leaf.read_as[-1]!r} of {list(stored.size)}: row-wise Adagrad keeps one number a slice, Adagrad one an "
        "element. Keep the table's kind of placement, or use the optimizer of the checkpoint"
    )
