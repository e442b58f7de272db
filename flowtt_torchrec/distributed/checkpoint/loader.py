"""Loading a checkpoint into another plan, with the optimizer state of tables that go to or from data-parallel.

Cores have the same names under every plan. Optimizer state has not: what a fused optimizer calls
``<table>.tt_core<k>.momentum1`` is ``sum`` to the dense ``torch.optim.Adagrad`` that steps data-parallel tables, and
likewise ``<table>.momentum1`` of TorchRec's dense tables. Fused Adam's ``momentum1``, ``exp_avg_sq`` and ``step`` are
``exp_avg``, ``exp_avg_sq`` and ``step`` to the dense one; TorchRec's fused tables don't save their ``step``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flowtt_torchrec.cores import core_name
from flowtt_torchrec.distributed.checkpoint.conversion import compress_on_ranks
from flowtt_torchrec.distributed.checkpoint.files import LazyTensor, name_of, read_dcp
from flowtt_torchrec.distributed.checkpoint.names import (
    ROWS,
    WEIGHT,
    SavedTable,
    check_saved,
    saved_tables,
    split_bag,
    split_parameter,
    table_of_state,
)
from flowtt_torchrec.distributed.checkpoint.safe_reading import SafeLoadPlanner, SafeReader, read_metadata
from flowtt_torchrec.distributed.tables import name_tables
from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.spec import TTSpec

Path = tuple[str, ...]
STEP = "step"
_FUSED_NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq", STEP: STEP}  # of dense ones

logger = logging.getLogger(__name__)


@dataclass
class _Leaf:
    """A value of a state dict: where it is, and the name to read it under."""

    path: Path
    holder: MutableMapping[str, Any]
    read_as: Path

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def value(self) -> Any:
        return self.holder[self.path[-1]]


@dataclass
class _Tables:
    """The tables that a state dict asks for, by the beginning of their names."""

    trains: dict[str, SavedTable] = field(default_factory=dict)
    dense: set[str] = field(default_factory=set)


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: dcp.StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    compress_dense: bool = False,
    allow_missing_state: bool = False,
    allow_missing: Collection[str] = (),
) -> None:
    """``torch.distributed.checkpoint.load`` that knows tensor trains, and state of tables that were placed otherwise.

    Where a table was model-parallel when the checkpoint was written and is data-parallel now, or the reverse, the
    accumulators of Adagrad and Adam are read under the names that they had. The number of steps, which a dense Adagrad
    keeps beside them and a fused one does not, is then that of another parameter of the checkpoint. Everything else is
    as in ``torch.distributed.checkpoint.load``: all ranks call it together, and tensors are read in place.

    A tensor train may have more rows here than in the checkpoint, the last ones being new, if its spec differs in the
    first factor of ``p`` at most (`TTSpec.with_rows`): the rows that it had then come back to the bit, slices of the
    first core that are new stay as they are in ``state_dict``, and a warning says which rows are new.

    Args:
        state_dict: nested state dict of model and optimizers, without ``param_groups`` (TorchRec leaves them out unless
            asked by ``save_param_groups``). A dense optimizer's state must exist.
        checkpoint_id: where the checkpoint is.
        storage_reader: reads it; if not given, files of ``checkpoint_id``. Reading files runs no code that they hold:
            their metadata may name classes of ``torch.distributed.checkpoint`` only, and what is no tensor must be what
            ``torch.load(weights_only=True)`` takes.
        process_group: of all ranks that load; the default group if not given.
        compress_dense: brings tables that the checkpoint has dense to the cores that they are here, by TT-SVD on blocks
            of rows (`tt_svd.compress_rows`). All ranks get equal bits. Accumulators of such a table stay as they are
            in ``state_dict``, with a warning: for a fresh model, a fresh start.
        allow_missing_state: leaves optimizer state of tables as it is where the checkpoint has none, with a warning.
        allow_missing: names of tables that stay as they are, with their optimizer state, if the checkpoint has no such
            table, with a warning: tables added to a trained model, or renamed.

    Raises:
        ValueError: naming the table, on all ranks alike, if it is another tensor train in the checkpoint, dense in one
            of the two, or not in it. Also if its state is of another optimizer: row-wise Adagrad has one accumulator a
            slice, Adagrad one an element, Adam two.
        CheckpointException: as ``torch.distributed.checkpoint.load``.
    """
    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("load needs a checkpoint_id or a storage_reader")
        storage_reader = SafeReader(checkpoint_id)
    elif checkpoint_id is not None:
        storage_reader.reset(checkpoint_id)
    stored = read_metadata(storage_reader).state_dict_metadata
    leaves = list(_leaves(state_dict))
    tables = _merge_over_ranks(_asked_for(leaves), process_group)
    saved = saved_tables({name: value.size for name, value in stored.items() if hasattr(value, "size")})
    missing = _missing(tables, stored, allow_missing)
    grown = _check_tables(tables, saved, stored, storage_reader, process_group)
    to_compress = _to_compress(tables, saved, stored, compress_dense)
    dense = {bag: tables.trains[bag].spec(split_bag(bag)) for bag in to_compress}
    compressed = _compress(dense, storage_reader, process_group)
    new = {split_bag(bag) for bag in dense}

    request: dict[str, Any] = {}
    in_place: set[str] = set()
    steps: list[tuple[Tensor, str]] = []
    without_state: set[str] = set()
    for leaf in leaves:
        parts = split_parameter(leaf.name)
        if parts is not None and (parts[2] == ROWS or parts[0] in dense):
            if leaf.name in compressed:
                leaf.value.copy_(compressed[leaf.name])
            continue
        table = table_of_state(leaf.name)
        if (table if parts is None else parts[1]) in missing:
            continue
        value = _part_that_was(leaf, grown)
        _check_not_adams(leaf, stored)
        if leaf.name not in stored and len(leaf.path) > 1:
            leaf.read_as = _other_name(leaf)
            source = _substitute_step(leaf, stored)
            if source is not None:
                steps.append((value, source))
                continue
            if name_of(leaf.read_as) not in stored and table is not None and (allow_missing_state or table in new):
                without_state.add(table)
                continue
            if _seeds_rounding_only(leaf, stored):
                continue
            if leaf.read_as != leaf.path:
                _check_shape(leaf, value, stored.get(name_of(leaf.read_as)))
        request[name_of(leaf.read_as)] = value
        if value is not leaf.value:
            in_place.add(name_of(leaf.read_as))
    if missing:
        logger.warning("the checkpoint has no %s, which stays as it is", name_tables(sorted(missing)))
    if without_state:
        logger.warning(
            "the checkpoint has no optimizer state for %s, which stays as it is", name_tables(sorted(without_state))
        )
    for value, source in steps:
        request.setdefault(source, torch.empty_like(value))
    dcp.load(request, storage_reader=storage_reader, planner=SafeLoadPlanner(), process_group=process_group)
    for leaf in leaves:
        key = name_of(leaf.read_as)
        if key in request and key not in in_place:
            leaf.holder[leaf.path[-1]] = request[key]
    for value, source in steps:
        value.copy_(request[source])


def _asked_for(leaves: list[_Leaf]) -> _Tables:
    """The tables in this rank's state dict."""
    asked = _Tables(saved_tables({leaf.name: leaf.value.shape for leaf in leaves if isinstance(leaf.value, Tensor)}))
    for leaf in leaves:
        parts = split_parameter(leaf.name)
        if parts is not None and parts[2] == WEIGHT:
            asked.dense.add(parts[0])
        elif parts is not None and parts[2] == ROWS and parts[0] in asked.trains:
            asked.trains[parts[0]].rows = int(leaf.value)
    return asked


def _merge_over_ranks(mine: _Tables, process_group: dist.ProcessGroup | None) -> _Tables:
    if not (dist.is_available() and dist.is_initialized()):
        return mine
    every: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(every, mine, group=process_group)
    union = _Tables()
    for of_rank in every:
        union.trains |= of_rank.trains
        union.dense |= of_rank.dense
    return union


def _check_tables(
    tables: _Tables,
    saved: Mapping[str, SavedTable],
    stored: Mapping[str, Any],
    storage_reader: dcp.StorageReader,
    process_group: dist.ProcessGroup | None,
) -> dict[str, int]:
    """Compares the tensor trains of all ranks with the checkpoint's, so that all ranks fail or none.

    Returns:
        Of each table that has more rows here, by name, the first factor of ``p`` that it has in the checkpoint.
    """
    grown: dict[str, int] = {}
    rows = {bag + ROWS: torch.zeros((), dtype=torch.int64) for bag in sorted(saved) if bag + ROWS in stored}
    if rows:
        dcp.load(rows, storage_reader=storage_reader, process_group=process_group)
    for bag, table in saved.items():
        if bag + ROWS in rows:
            table.rows = int(rows[bag + ROWS])
        if bag in tables.trains:
            name, here = split_bag(bag), tables.trains[bag]
            if not table.grows_to(here):
                check_saved(name, table, here, "the checkpoint")
                continue
            grown[name] = table.shapes[0][0]
            logger.warning(
                "table %r has %d rows in the checkpoint, %d here: the last are new", name, table.rows, here.rows
            )
        elif bag in tables.dense and bag + WEIGHT not in stored:
            raise ValueError(
                f"table {split_bag(bag)!r} is dense here, but a tensor train in the checkpoint: {table}. Give the "
                "sharder its spec, or make it dense with python -m flowtt_torchrec export"
            )
    return grown


def _missing(tables: _Tables, stored: Mapping[str, Any], allowed: Collection[str]) -> set[str]:
    """Names of the tables that the checkpoint does not have, if those may be missing."""
    bags = sorted({*tables.trains, *tables.dense})
    names = {split_bag(bag) for bag in bags}
    for name in allowed:
        if name not in names:
            raise ValueError(
                f"allow_missing names a table {name!r}, which the model does not have{did_you_mean(name, names)}"
            )
    known = {parts[0] for parts in map(split_parameter, stored) if parts is not None}
    missing = {split_bag(bag) for bag in bags if bag not in known}
    refused = sorted(missing - set(allowed))
    if refused:
        saved = {split_bag(bag) for bag in known}
        raise ValueError(
            f"the checkpoint has no {name_tables(refused)}; with allow_missing={refused} what is new stays as it is"
            f"{did_you_mean(refused[0], saved)}"
        )
    return missing


def _part_that_was(leaf: _Leaf, grown: Mapping[str, int]) -> Any:
    """The part of a value that the checkpoint has: of a grown table's first core, and its state, the first slices."""
    parts = split_parameter(leaf.name) or (split_parameter(leaf.path[-2]) if len(leaf.path) > 1 else None)
    if parts is None or parts[1] not in grown or parts[2] != core_name(0) or leaf.value.dim() == 0:
        return leaf.value
    return leaf.value.detach().narrow(0, 0, grown[parts[1]])


def _to_compress(
    tables: _Tables, saved: Mapping[str, SavedTable], stored: Mapping[str, Any], compress_dense: bool
) -> list[str]:
    """The tables that are tensor trains here and dense in the checkpoint."""
    dense = sorted(bag for bag in tables.trains if bag not in saved and bag + WEIGHT in stored)
    if dense and not compress_dense:
        raise ValueError(
            f"{name_tables(map(split_bag, dense))}: dense in the checkpoint, a tensor train here; load with "
            "compress_dense=True, or convert the checkpoint once with python -m flowtt_torchrec compress"
        )
    return dense


def _compress(
    specs: Mapping[str, TTSpec], storage_reader: dcp.StorageReader, process_group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Cores of tables that the checkpoint has dense, by their names in the state dict."""
    if not specs:
        return {}
    if not isinstance(storage_reader, dcp.FileSystemReader):
        raise ValueError(f"compress_dense reads files; it cannot with a {type(storage_reader).__name__}")
    entries = {name_of(key): value for key, value in read_dcp(storage_reader).items()}
    sources: dict[str, tuple[str, LazyTensor, TTSpec]] = {
        bag: (split_bag(bag), entries[bag + WEIGHT], spec) for bag, spec in specs.items()
    }
    cores = compress_on_ranks(sources, process_group, logger.info)
    return {f"{bag}{core_name(k)}": core for bag, of_table in cores.items() for k, core in enumerate(of_table)}


def _leaves(node: MutableMapping[str, Any], path: Path = ()) -> Iterator[_Leaf]:
    for key, value in node.items():
        here = (*path, str(key))
        if isinstance(value, MutableMapping):
            yield from _leaves(value, here)
        else:
            yield _Leaf(here, node, here)


def _fused_prefix(path: Path) -> str | None:
    """What precedes the names of a fused optimizer's state of a table's parameter; none for other values."""
    parts = split_parameter(path[-2]) if len(path) > 1 else None
    if parts is None or parts[2] == ROWS:
        return None
    _, table, part = parts
    return f"{table}." if part == WEIGHT else f"{table}.{part}."


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
    beginning = name_of(leaf.path[:-1])
    if any(f"{beginning}.{second}" in stored for second in ("exp_avg_sq", f"{prefix}exp_avg_sq")):
        raise ValueError(
            f"table {prefix.split('.')[0]!r}: the checkpoint has Adam's state, but the optimizer here has one "
            "accumulator; use the optimizer of the checkpoint"
        )


def _substitute_step(leaf: _Leaf, stored: Mapping[str, Any]) -> str | None:
    """The number of steps of another parameter, where the checkpoint has this one's state but not its number."""
    prefix, own = _fused_prefix(leaf.path), name_of(leaf.path[:-1]) + "."
    if prefix is None or leaf.path[-1] not in (STEP, prefix + STEP) or name_of(leaf.read_as) in stored:
        return None
    if not any(key.startswith(own) for key in stored):
        return None
    beginning = name_of(leaf.path[:-2]) + "."
    return min((key for key in stored if key.startswith(beginning) and key.endswith(f".{STEP}")), default=None)


def _seeds_rounding_only(leaf: _Leaf, stored: Mapping[str, Any]) -> bool:
    """Whether this is a number of steps that the checkpoint has not and that no step depends on.

    Fused optimizers count the steps of 16-bit cores to have other random bits in each. Dense ones may not count.
    """
    prefix = _fused_prefix(leaf.path)
    fused = prefix is not None and leaf.path[-1] == prefix + STEP
    return fused and f"{prefix}exp_avg_sq" not in leaf.holder and name_of(leaf.read_as) not in stored


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
