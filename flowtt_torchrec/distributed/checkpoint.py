"""Loading a checkpoint into another plan, with the optimizer state of tables that go to or from data-parallel.

Cores have the same names under every plan. Optimizer state has not: what a fused optimizer calls
``<table>.tt_core<k>.momentum1`` is ``sum`` to the dense ``torch.optim.Adagrad`` that steps data-parallel tables, and
likewise ``<table>.momentum1`` of TorchRec's dense tables. Fused Adam's ``momentum1``, ``exp_avg_sq`` and ``step`` are
``exp_avg``, ``exp_avg_sq`` and ``step`` to the dense one; TorchRec's fused tables don't save their ``step``.
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
STEP = "step"
_FUSED_NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq", STEP: STEP}  # of dense ones


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
    """``torch.distributed.checkpoint.load`` that also reads Adagrad's and Adam's state of tables placed otherwise.

    Where a table was model-parallel when the checkpoint was written and is data-parallel now, or the reverse, its
    accumulators are read under the names that they had. The number of steps, which a dense Adagrad keeps beside them
    and a fused one does not, is then that of another parameter of the checkpoint. Everything else is as in
    ``torch.distributed.checkpoint.load``: all ranks call it together, and tensors are read in place.

    Args:
        state_dict: nested state dict of model and optimizers, without ``param_groups`` (TorchRec leaves them out unless
            asked by ``save_param_groups``). A dense optimizer's state must exist.
        checkpoint_id: where the checkpoint is.
        storage_reader: reads it; ``FileSystemReader(checkpoint_id)`` if not given.
        process_group: of all ranks that load; the default group if not given.

    Raises:
        ValueError: naming the table, if its state in the checkpoint is of another optimizer: row-wise Adagrad has one
            accumulator a slice, Adagrad one an element, Adam two.
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
        _check_not_adams(leaf, stored)
        if ".".join(leaf.path) not in stored and len(leaf.path) > 1:
            leaf.read_as = _other_name(leaf)
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


def _fused_prefix(path: Path) -> str | None:
    """What precedes the names of a fused optimizer's state of a table's parameter; none for other values."""
    match = _PARAMETER.fullmatch(path[-2]) if len(path) > 1 else None
    if match is None:
        return None
    table, part = match.groups()
    return f"{table}." if part == "weight" else f"{table}.{part}."


def _other_name(leaf: _Leaf) -> Path:
    """Name of a table's optimizer state under the other kind of placement; the same for what is none."""
    prefix, name = _fused_prefix(leaf.path), leaf.path[-1]
    if prefix is None:
        return leaf.path
    if name in _FUSED_NAMES:
        return (*leaf.path[:-1], prefix + _FUSED_NAMES[name])
    adam = f"{prefix}exp_avg_sq" in leaf.holder
    dense_names = {
        prefix + fused: dense for dense, fused in _FUSED_NAMES.items() if dense != ("sum" if adam else "exp_avg")
    }
    return (*leaf.path[:-1], dense_names.get(name, name))


def _check_not_adams(leaf: _Leaf, stored: Mapping[str, Any]) -> None:
    """Adagrad's accumulator has the name and the shape of Adam's average."""
    prefix, name = _fused_prefix(leaf.path), leaf.path[-1]
    if prefix is None or name not in ("sum", f"{prefix}momentum1") or f"{prefix}exp_avg_sq" in leaf.holder:
        return
    beginning = ".".join(leaf.path[:-1])
    if any(f"{beginning}.{second}" in stored for second in ("exp_avg_sq", f"{prefix}exp_avg_sq")):
        raise ValueError(
            f"table {prefix.split('.')[0]!r}: the checkpoint has Adam's state, but the optimizer here has one "
            "accumulator; use the optimizer of the checkpoint"
        )


def _a_step_like(leaf: _Leaf, stored: Mapping[str, Any]) -> str | None:
    """The number of steps of another parameter, where the checkpoint has none of this one."""
    prefix = _fused_prefix(leaf.path)
    if prefix is None or leaf.path[-1] not in (STEP, prefix + STEP) or ".".join(leaf.read_as) in stored:
        return None
    beginning = ".".join(leaf.path[:-2]) + "."
    return min((key for key in stored if key.startswith(beginning) and key.endswith(f".{STEP}")), default=None)


def _check_shape(leaf: _Leaf, value: Any, stored: Any) -> None:
    if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) == tuple(value.size()):
        return
    prefix = _fused_prefix(leaf.path)
    assert prefix is not None
    raise ValueError(
        f"table {prefix.split('.')[0]!r}: {leaf.path[-1]!r} is {list(value.size())} here, but the checkpoint has "
        f"{leaf.read_as[-1]!r} of {list(stored.size)}: row-wise Adagrad keeps one number a slice, Adagrad one an "
        "element. Keep the table's kind of placement, or use the optimizer of the checkpoint"
    )
