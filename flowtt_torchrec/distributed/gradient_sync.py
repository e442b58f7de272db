"""Tables whose cores several ranks hold: their gradients are summed once, when backward is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torchrec.distributed.types import ParameterSharding, ShardingType

from flowtt_torchrec.distributed.tables import name_tables


@dataclass
class SharedTable:
    """A table's part of the pending gradient of one kernel."""

    name: str
    grad: Tensor
    touched: Tensor | None


class SharedKernel(Protocol):
    """A kernel whose gradients are summed over ranks."""

    def pending(self) -> Sequence[SharedTable]:
        """Views of what backward has left, to be summed in place; empty if nothing."""

    def step(self) -> None:
        """Steps the optimizer with it."""


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
        if sharding.sharding_type != ShardingType.DATA_PARALLEL.value and sharding.sharding_spec is not None
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
