"""The kernel of row-wise and column-wise tables, whose cores several ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding, ShardingType

from flowtt_torchrec import ops
from flowtt_torchrec.deferred import deferred_lookup, in_backward
from flowtt_torchrec.distributed.column_shards import ColumnShard, ColumnShards
from flowtt_torchrec.distributed.kernel import TTFusedEmbeddingBag
from flowtt_torchrec.distributed.row_shards import RowShards
from flowtt_torchrec.distributed.sharding_types import DATA_PARALLEL, ROW_TYPES
from flowtt_torchrec.distributed.tables import name_tables
from flowtt_torchrec.optimizers import leave_out, touched_slices


class TTSharedEmbeddingBag(TTFusedEmbeddingBag):
    """TT tables of which this rank computes some rows or columns, with all of their cores.

    A shard of rows gets row numbers of its own, from which it makes those of the table; see `RowShards`. A shard of
    columns is looked up with a part of the first core; see `ColumnShards`. A table may have several shards here.
    Backward leaves the gradient of the cores with a `CoreGradientSync`, which sums it over the ranks and has every rank
    make the same step.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        whole = self._emb_module.layout
        shards: list[ColumnShard] = []
        feature_shards: list[int] = []
        for i, table in enumerate(config.embedding_tables):
            assert table.local_metadata is not None
            column = table.local_metadata.shard_offsets[1]
            shards.append(ColumnShard(whole.names.index(table.name), column, table.local_cols))
            feature_shards += [i] * len(table.feature_names)
        whole_tables = all(shard.width == whole.specs[shard.table].embedding_dim for shard in shards)
        self._columns = None if whole_tables else ColumnShards(whole, shards, feature_shards)
        row_wise = sharding_type is not None and sharding_type.value in ROW_TYPES
        self._row_shards = RowShards(config.embedding_tables, device) if row_wise else None
        self._sync: CoreGradientSync | None = None
        self._trained = torch.empty(0, device="cpu", requires_grad=True)
        self._lookups = 0  # of those that can go backward: the same number on all ranks
        self._left: dict[int, _Gradient] = {}  # by lookup

    def share(self, sync: CoreGradientSync) -> None:
        """Tells who sums the gradients; once, before the first backward."""
        self._sync = sync

    def _lookup_to_step(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        bags = self._emb_module
        layout = bags.layout if self._columns is None else self._columns.layout
        if self._row_shards is not None:
            indices = self._row_shards.row_numbers(indices, offsets)
        cores = bags.current_cores()
        trained = [torch.is_grad_enabled() and core.requires_grad for core in cores]
        flat = bags.flat_to_step(cores)
        if flat is None:
            if any(trained):
                raise NotImplementedError(
                    f"{self._named}: tensors that were put in the place of parameters get no gradient where ranks "
                    "share a table; place it table_wise, or look up without gradients"
                )
            flat = bags.weights
        if self._columns is not None:
            flat = self._columns.gather(flat)
        elif self._tables.keep_forward_weights:
            flat = flat.clone()
        options: dict[str, Any] = {
            "per_sample_weights": weights,
            "pooling": self._pooling,
            "bounds_check_mode": self._bounds_check_mode,
        }
        if not any(trained):
            return ops.lookup(flat, layout, indices, offsets, **options)
        if not in_backward():  # where a checkpointed forward is made again
            self._left.clear()  # by a backward that failed before its end
        self._lookups += 1
        number = self._lookups
        assert bags.optimizer is not None
        return deferred_lookup(
            self._trained,
            layout,
            indices,
            offsets,
            read=lambda: flat,
            leave=lambda grad, row_keys: self._leave(number, trained, grad, row_keys),
            with_row_keys=bags.optimizer.needs_touched,
            **options,
        )

    @torch.no_grad()
    def _leave(self, number: int, trained: Sequence[bool], grad: Tensor, row_keys: Tensor | None) -> None:
        """Keeps the gradient of a lookup. A model may look up several times before it goes backward."""
        whole = self._emb_module.layout
        touched = None
        if self._columns is not None:
            of_columns, grad = grad, grad.new_zeros(whole.num_parameters)
            self._columns.scatter_add(of_columns, grad)
        if row_keys is not None and self._columns is None:
            touched = touched_slices(whole, row_keys)
        elif row_keys is not None and self._columns is not None:
            touched = torch.zeros(whole.num_slices, dtype=torch.bool, device=grad.device)
            self._columns.scatter_touched(touched_slices(self._columns.layout, row_keys), touched)
        leave_out(whole, trained, grad, touched)
        self._left[number] = _Gradient(grad, touched)
        if self._sync is None:
            raise RuntimeError(f"{self._named}: these tables are shared by ranks, but nothing sums their gradients")
        self._sync.schedule(self)

    def _in_order(self) -> list[_Gradient]:
        """What waits, the last lookup first: the order of backward, and the same on all ranks."""
        return [self._left[number] for number in sorted(self._left, reverse=True)]

    def pending(self) -> Sequence[SharedTable]:
        layout = self._emb_module.layout
        tables = []
        for left in self._in_order():
            grads = left.grad.split([spec.num_parameters for spec in layout.specs])
            touched: Sequence[Tensor | None] = [None] * layout.num_tables
            if left.touched is not None:
                touched = left.touched.split([spec.num_slices for spec in layout.specs])
            tables += [SharedTable(*of_table) for of_table in zip(layout.names, grads, touched)]
        return tables

    def step(self) -> None:
        left = self._in_order()
        self._left.clear()
        for gradient in left:
            self._emb_module.apply_gradient(gradient.grad, gradient.touched)


@dataclass
class _Gradient:
    """Of all cores of a kernel, from one lookup."""

    grad: Tensor
    touched: Tensor | None


@dataclass
class SharedTable:
    """A table's part of a pending gradient of one kernel."""

    name: str
    grad: Tensor
    touched: Tensor | None


class SharedKernel(Protocol):
    """A kernel whose gradients are summed over ranks."""

    def pending(self) -> Sequence[SharedTable]:
        """Views of what backward has left, to be summed in place; empty if nothing."""

    def step(self) -> None:
        """Steps the optimizer with it, once for every lookup."""


class CoreGradientSync:
    """Sums the core gradients of one sharded collection over the ranks that share a table, then has them applied.

    A collective inside an autograd function would run in an order that autograd chooses. So the kernels only leave
    their gradients, and a callback at the end of backward sums them, one all-reduce for each set of ranks, in plan
    order: the same on all ranks. A plain sum is right, because TorchRec divides gradients by the number of ranks on
    their way to the lookup.

    Args:
        groups: the process group of each table that this rank shares, in plan order; tables with the same ranks have
            the same group.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = dict(groups)
        self._place = {name: i for i, name in enumerate(self._groups)}
        self._waiting: list[SharedKernel] = []

    def schedule(self, kernel: SharedKernel) -> None:
        """Called by a kernel in backward, when it has left a gradient."""
        if kernel not in self._waiting:
            self._waiting.append(kernel)
        # Once a call: the first callback takes all that wait, and one queued by a backward that failed is lost.
        Variable._execution_engine.queue_callback(self._run)

    @torch.no_grad()
    def _run(self) -> None:
        kernels, self._waiting = self._waiting, []
        tables = [table for kernel in kernels for table in kernel.pending() if table.name in self._groups]
        tables.sort(key=lambda table: self._place[table.name])
        buckets: dict[dist.ProcessGroup, list[SharedTable]] = {}
        for table in tables:
            buckets.setdefault(self._groups[table.name], []).append(table)
        for group, of_group in buckets.items():
            _sum(of_group, group)
        for kernel in kernels:
            kernel.step()


def _sum(tables: Sequence[SharedTable], group: dist.ProcessGroup) -> None:
    pieces = [table.grad for table in tables]
    pieces += [table.touched.to(table.grad.dtype) for table in tables if table.touched is not None]
    flat = torch.cat(pieces)
    dist.all_reduce(flat, group=group)
    summed = iter(flat.split([piece.numel() for piece in pieces]))
    for table in tables:
        table.grad.copy_(next(summed))
    for table in tables:
        if table.touched is not None:
            table.touched.copy_(next(summed) > 0)


def sharing_groups(
    plan: Mapping[str, ParameterSharding], process_group: dist.ProcessGroup
) -> dict[str, dist.ProcessGroup]:
    """The process group of each table that this rank shares with others, in plan order. All ranks call it together.

    Args:
        plan: the tensor-train tables of one collection.
        process_group: all ranks of the plan.

    Raises:
        ValueError: naming the table, if only some of the ranks share it, but these are not all ranks of the job.
    """
    shards = {
        name: sharding.sharding_spec.shards
        for name, sharding in plan.items()
        if sharding.sharding_type != DATA_PARALLEL and sharding.sharding_spec is not None
    }
    placed = {name: sorted({shard.placement.rank() for shard in of_table}) for name, of_table in shards.items()}
    shared = {name: ranks for name, ranks in placed.items() if len(ranks) > 1}
    if not shared:
        return {}
    every = dist.get_process_group_ranks(process_group)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(sorted(every)): process_group}
    groups = {}
    for name, group_ranks in shared.items():
        ranks = tuple(sorted(every[rank] for rank in group_ranks))
        if ranks not in made:
            if len(every) != dist.get_world_size():
                raise ValueError(
                    f"{name_tables([name])} is shared by ranks {ranks} of a process group that is a part of the job; "
                    "place it on one rank or on all ranks of the group, or shard with the default process group"
                )
            made[ranks] = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            groups[name] = made[ranks]
    return groups
