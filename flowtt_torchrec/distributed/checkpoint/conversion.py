"""From dense tables in a checkpoint to tensor trains, and back, with no dense table ever whole in memory.

Weights are converted; the optimizer state of a converted table is left out, since what was summed for the elements or
rows of a table says nothing of those of its cores, nor the reverse. ``python -m flowtt_torchrec compress`` and
``export`` are these functions as commands.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowtt_torchrec.cores import core_name, row_range
from flowtt_torchrec.distributed.checkpoint.file_writers import check_target, write_entries
from flowtt_torchrec.distributed.checkpoint.files import HeldTensor, Key, LazyTensor, name_of, read_entries
from flowtt_torchrec.distributed.checkpoint.names import (
    ROWS,
    WEIGHT,
    saved_tables,
    split_bag,
    split_parameter,
    table_of_state,
)
from flowtt_torchrec.distributed.tables import name_tables
from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.tt_svd import Compressed, compress_rows

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
_SECONDS_BETWEEN_LINES = 5.0
PathLike = str | os.PathLike[str]


def saved_specs(checkpoint: PathLike) -> dict[str, TTSpec]:
    """Spec of each tensor train in a checkpoint: what the sharder's ``compression`` must be to load it.

    Args:
        checkpoint: a directory of ``torch.distributed.checkpoint`` or a file of ``torch.save``.
    """
    return {split_bag(bag): spec for bag, spec in _saved_specs(read_entries(checkpoint)).items()}


@dataclass
class SavedDenseTable:
    """Size of a dense table in a checkpoint, and the type of its numbers."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype


def saved_dense_tables(checkpoint: PathLike) -> list[SavedDenseTable]:
    """The dense tables in a checkpoint."""
    found = _dense_tables(read_entries(checkpoint))
    return [SavedDenseTable(table, value.size[0], value.size[1], value.dtype) for _, table, value in found]


def compress_checkpoint(
    source: PathLike, target: PathLike, specs: Mapping[str, TTSpec], *, say: Say = logger.info
) -> dict[str, float]:
    """Writes a checkpoint in which tables that were dense are tensor trains.

    By TT-SVD on blocks of rows; see `tt_svd.compress_rows` for its error and the memory it takes. Everything else
    is copied, except the optimizer state of these tables and ``param_groups``, which name parameters that are no more.
    A model that loads the result together with an optimizer needs ``checkpoint.load(..., allow_missing_state=True)``.

    Args:
        source: a directory of ``torch.distributed.checkpoint`` or a file of ``torch.save``.
        target: where to write: a file of ``torch.save`` if it ends in .pt, .pth or .bin, else a directory. It must not
            exist.
        specs: of the tables to compress. ``…embedding_bags.<table>.weight`` is what the checkpoint calls a table.
        say: is told how it goes, a line at a time.

    Returns:
        For each table the relative error: the norm of what is lost over that of the table, both Frobenius norms.

    Raises:
        ValueError: naming the table, if the checkpoint has no such dense table, or one of another size.
    """
    check_target(target)
    entries = read_entries(source)
    found = {table: key for key, table, _ in _dense_tables(entries)}
    for table in specs:
        if table not in found:
            raise ValueError(f"{source} has no dense table {table!r}{did_you_mean(table, found)}")
    errors: dict[str, float] = {}
    converted: dict[Key, Any] = {}
    for key, table, weight in list(_dense_tables(entries)):
        if table not in specs:
            continue
        compressed = compress_table(table, weight, specs[table], say)
        errors[table] = compressed.relative_error
        del entries[key]
        for name, value in _parts(compressed.cores, specs[table]).items():
            converted[_sibling(key, WEIGHT, name)] = value
    _write(_without_state(entries, specs, say) | converted, target, say)
    return errors


def export_checkpoint(source: PathLike, target: PathLike, *, say: Say = logger.info) -> list[str]:
    """Writes a checkpoint in which all tensor trains are dense tables, which a stock TorchRec model loads.

    Rows are computed when they are written. Everything else is copied, except the optimizer state of these tables and
    ``param_groups``. Without that state ``torch.distributed.checkpoint.load`` takes the model's part of a state dict,
    or everything with ``planner=DefaultLoadPlanner(allow_partial_load=True)``.

    Args:
        source: a directory of ``torch.distributed.checkpoint`` or a file of ``torch.save``.
        target: where to write, as for `compress_checkpoint`.
        say: is told how it goes, a line at a time.

    Returns:
        Names of the tables.

    Raises:
        ValueError: if there is no tensor train, or one is not whole.
    """
    check_target(target)
    entries = read_entries(source)
    names = {name_of(key): key for key in entries}
    specs = _saved_specs(entries)
    if not specs:
        raise ValueError(f"{source} has no tensor trains")
    dense: dict[Key, Any] = {}
    for bag, spec in specs.items():
        first = names[bag + core_name(0)]
        cores = [_whole(entries.pop(names[bag + core_name(k)])) for k in range(spec.num_cores)]
        del entries[names[bag + ROWS]]
        dense[_sibling(first, core_name(0), WEIGHT)] = _Materialised(split_bag(bag), cores, spec, say)
    tables = [split_bag(bag) for bag in specs]
    _write(_without_state(entries, tables, say) | dense, target, say)
    return tables


def compress_state_dict(
    state_dict: Mapping[str, Any],
    specs: Mapping[str, TTSpec],
    *,
    process_group: dist.ProcessGroup | None = None,
    say: Say = logger.info,
) -> dict[str, Any]:
    """A model's state dict with cores in the place of dense tables, for ``load_state_dict`` of a model with TT tables.

    The tables may be mapped from a file (``torch.load(path, mmap=True)``): they are read in blocks of rows. Under an
    initialised process group all ranks call it together with the same arguments; each compresses some of the tables and
    all get the same bits.

    Args:
        state_dict: whole tensors by name.
        specs: of the tables to compress.
        process_group: of all ranks that call; the default group if not given.
        say: is told how it goes, a line at a time.

    Raises:
        ValueError: naming the table, if it is not there, sharded, or of another size.
    """
    result = dict(state_dict)
    tables: dict[str, tuple[str, LazyTensor, TTSpec]] = {}
    for name, value in state_dict.items():
        parts = split_parameter(name)
        if parts is not None and parts[2] == WEIGHT and parts[1] in specs:
            if type(value) not in (Tensor, torch.nn.Parameter):
                raise ValueError(f"table {parts[1]!r} is a {type(value).__name__}; a full state dict is needed")
            tables[parts[0]] = (parts[1], HeldTensor(value.detach().cpu()), specs[parts[1]])
            del result[name]
    missing = specs.keys() - {table for table, _, _ in tables.values()}
    if missing:
        raise ValueError(f"the state dict has no dense {name_tables(sorted(missing))}")
    for bag, cores in compress_on_ranks(tables, process_group, say).items():
        for name, value in _parts(cores, tables[bag][2]).items():
            result[bag + name] = value
    return result


def compress_on_ranks(
    tables: Mapping[str, tuple[str, LazyTensor, TTSpec]], process_group: dist.ProcessGroup | None, say: Say
) -> dict[str, list[Tensor]]:
    """Cores of tables, the same bits on all ranks; each rank compresses some, the largest tables first.

    Args:
        tables: name, values and spec of each table; the same on all ranks.
        process_group: the default group if not given; there may be none.
        say: is told how it goes, on the rank that does it.
    """
    together = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(process_group), dist.get_world_size(process_group)) if together else (0, 1)
    order = sorted(tables, key=lambda bag: (-tables[bag][2].num_embeddings * tables[bag][2].embedding_dim, bag))
    cores: dict[str, list[Tensor]] = {}
    failure: Exception | None = None
    try:
        for number, bag in enumerate(order):
            if number % world_size == rank:
                cores[bag] = compress_table(*tables[bag], say).cores
    except (ValueError, OSError, RuntimeError) as error:  # the others would wait for this rank
        failure = error
    if not together:
        if failure is not None:
            raise failure
        return cores
    failures: list[Exception | None] = [None] * world_size
    dist.all_gather_object(failures, failure, group=process_group)
    for failure in failures:
        if failure is not None:
            raise failure
    for number, bag in enumerate(order):
        owner = number % world_size
        sent = [cores.get(bag)]
        source = owner if process_group is None else dist.get_global_rank(process_group, owner)
        dist.broadcast_object_list(sent, src=source, group=process_group)
        assert sent[0] is not None
        cores[bag] = sent[0]
    return cores


def compress_table(table: str, weight: LazyTensor, spec: TTSpec, say: Say) -> Compressed:
    """Cores of one dense table, in float32, or float64 if the table is.

    Raises:
        ValueError: naming the table, if it is not of the spec's size or not of finite floating-point numbers.
    """
    if len(weight.size) != 2 or not weight.dtype.is_floating_point:
        raise ValueError(f"table {table!r} is a {weight.dtype} tensor of {list(weight.size)}, not a matrix of numbers")
    spec.check_table(table, *weight.size)
    progress = _Progress(f"table {table!r}: {spec.num_embeddings:,} x {spec.embedding_dim} to cores", say)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    try:
        compressed = compress_rows(weight.read, spec, dtype=dtype, progress=progress)
    except ValueError as error:
        raise ValueError(f"table {table!r}: {error}") from None
    say(
        f"table {table!r}: {spec.num_embeddings:,} x {spec.embedding_dim} to p {spec.p}, q {spec.q}, ranks "
        f"{spec.ranks}: {spec.compression_ratio:,.0f} times smaller, relative error {compressed.relative_error:.4g}"
    )
    return compressed


class _Materialised(LazyTensor):
    """The dense table that cores stand for."""

    def __init__(self, table: str, cores: list[Tensor], spec: TTSpec, say: Say) -> None:
        super().__init__((spec.num_embeddings, spec.embedding_dim), cores[0].dtype)
        self._cores = [core.to(torch.promote_types(core.dtype, torch.float32)) for core in cores]
        self._progress = _Progress(f"table {table!r}: {spec.num_embeddings:,} x {spec.embedding_dim} from cores", say)

    def read(self, first: int, last: int) -> Tensor:
        self._progress(last / self.num_rows)
        return row_range(self._cores, first, last).to(self.dtype)


class _Progress:
    """Says how far something is, now and then."""

    def __init__(self, what: str, say: Say) -> None:
        self._what, self._say = what, say
        self._last = time.monotonic()

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._say(f"{self._what}, {done:.0%}")


def _dense_tables(entries: Mapping[Key, Any]) -> Iterable[tuple[Key, str, LazyTensor]]:
    for key, value in entries.items():
        parts = split_parameter(name_of(key))
        if parts is not None and parts[2] == WEIGHT and isinstance(value, LazyTensor) and len(value.size) == 2:
            yield key, parts[1], value


def _saved_specs(entries: Mapping[Key, Any]) -> dict[str, TTSpec]:
    """Spec of each tensor train by the beginning of its names."""
    tensors = {name_of(key): value for key, value in entries.items() if isinstance(value, LazyTensor)}
    specs = {}
    for bag, saved in saved_tables({name: value.size for name, value in tensors.items()}).items():
        if bag + ROWS in tensors:
            saved.rows = int(tensors[bag + ROWS].read(0, 1))
        specs[bag] = saved.spec(split_bag(bag))
    return specs


def _parts(cores: Iterable[Tensor], spec: TTSpec) -> dict[str, Tensor]:
    """What a state dict has of a tensor train, by the end of its names."""
    return {**{core_name(k): core for k, core in enumerate(cores)}, ROWS: torch.tensor(spec.num_embeddings)}


def _sibling(key: Key, part: str, other: str) -> Key:
    """The place beside ``key`` of the same table's ``other`` part."""
    return (*key[:-1], key[-1].removesuffix(part) + other)


def _whole(tensor: LazyTensor) -> Tensor:
    return tensor.read(0, tensor.num_rows).reshape(tensor.size)


def _without_state(entries: Mapping[Key, Any], tables: Iterable[str], say: Say) -> dict[Key, Any]:
    """Without the optimizer state of tables, and without ``param_groups``."""
    tables, kept, dropped = set(tables), {}, set()
    for key, value in entries.items():
        if any(here == "state" and isinstance(below, int) for here, below in itertools.pairwise(key)):
            raise ValueError(
                f"the optimizer state {name_of(key)} is numbered, so it cannot be told to which table it belongs; use "
                "TorchRec's KeyedOptimizer, or leave the optimizer out of the checkpoint"
            )
        table = table_of_state(name_of(key))
        if table in tables:
            dropped.add(table)
        elif "param_groups" in key:
            say(f"{name_of(key)} is left out: it names the parameters")
        else:
            kept[key] = value
    if dropped:
        say(f"the optimizer state of {name_tables(sorted(dropped))} is left out: it cannot be converted")
    return kept


def _write(entries: Mapping[Key, Any], target: PathLike, say: Say) -> None:
    write_entries(entries, target)
    say(f"wrote {target}")
