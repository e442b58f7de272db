"""What all contenders of the lookup benchmark offer, and FlowTT itself as one of them."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Action
from benchmarks.workloads import Batch
from flowtt_torchrec import ablation, native, ops
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags
from flowtt_torchrec.optimizers import OptimizerSpec
from flowtt_torchrec.spec import TTSpec

LEARNING_RATE = 0.01
EPS = 1e-8
# What can be timed. A training step is forward, backward and optimizer; FlowTT's forward and step include the plan.
OPERATIONS = ("plan", "forward", "forward_planned", "backward", "step")


class Contender(abc.ABC):
    """A way to look up a group of tables and to train them.

    Attributes:
        name: what tables and figures call it.
        optimizer: ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"``, or none: a step is then forward
            and backward alone.
    """

    name: str
    optimizer: str | None
    is_tensor_train = True

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Pooled rows ``[batch_size, total_dim]``, features side by side, differentiable."""

    @abc.abstractmethod
    def update(self) -> None:
        """Whatever is left to do for the optimizer after backward; drops the gradients."""

    @property
    @abc.abstractmethod
    def num_parameters(self) -> int:
        """Numbers in the weights."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of weights and optimizer state."""

    def step(self, batch: Batch) -> None:
        """One training step."""
        self.forward(batch).backward(batch.grad_output)
        self.update()

    def action(self, operation: str, batches: Sequence[Batch]) -> Action:
        """One of `OPERATIONS`, over the batches in turn.

        Raises:
            ValueError: if the contender has no such part.
        """

        def batch(call: int) -> Batch:
            return batches[call % len(batches)]

        def forward_first(call: int) -> tuple[Tensor, Batch]:
            return self.forward(batch(call)), batch(call)

        def backward(argument: tuple[Tensor, Batch]) -> None:
            output, of = argument
            output.backward(of.grad_output)
            self.update()

        if operation == "forward":
            return Action(torch.no_grad()(self.forward), batch)
        if operation == "step":
            return Action(self.step, batch)
        if operation == "backward":
            return Action(backward, forward_first)
        raise ValueError(f"{self.name} has no operation {operation!r}")


class FlowTT(Contender):
    """This project's ops, all tables in one call.

    Args:
        specs: the tables.
        optimizer: see `Contender`.
        flow: how lookups are grouped, see `flowtt_torchrec.ops.flow_plan`.
        name: what to call it.
        device: where the cores are.
        materialised_bytes: memory for rows that are made once, for forward passes without gradients.
        dtype: of the cores.
    """

    def __init__(
        self,
        specs: Sequence[TTSpec],
        optimizer: str | None = "rowwise_adagrad",
        *,
        flow: str = "prefix",
        name: str = "flowtt",
        device: str = "cpu",
        materialised_bytes: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.flow = flow
        fused = None if optimizer is None else OptimizerSpec(optimizer, LEARNING_RATE, EPS)
        tables = {f"t{t}": spec for t, spec in enumerate(specs)}
        self.module = BatchedTTEmbeddingBags(tables, optimizer=fused, device=device, dtype=dtype)
        self.module.materialise_rows(materialised_bytes, "materialised")

    @property
    def cores(self) -> list[list[Tensor]]:
        """The cores of each table; views of the weights."""
        return list(self.module.split_weights().values())

    @property
    def num_parameters(self) -> int:
        return self.module.layout.num_parameters

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(*self.module.parameters(), *self.module.buffers())

    def forward(self, batch: Batch) -> Tensor:
        with ablation(flow=self.flow):
            return self.module(batch.indices, batch.offsets)

    def update(self) -> None:
        self.module.zero_grad()

    def plan(self, batch: Batch) -> ops.FlowPlan:
        """The batch, grouped."""
        with ablation(flow=self.flow):
            return ops.flow_plan(self.module.layout, batch.indices, batch.offsets)

    def action(self, operation: str, batches: Sequence[Batch]) -> Action:
        if operation == "plan":
            return Action(self.plan, lambda call: batches[call % len(batches)])
        if operation == "forward_planned":
            return Action(self._planned(), self._with_plans(batches))
        return super().action(operation, batches)

    def _with_plans(self, batches: Sequence[Batch]) -> Callable[[int], Any]:
        planned = [(batch, self.plan(batch)) for batch in batches]
        return lambda call: planned[call % len(planned)]

    def _planned(self) -> Callable[[Any], Tensor]:
        layout, weights = self.module.layout, self.module.weights

        @torch.no_grad()
        def run(argument: tuple[Batch, ops.FlowPlan]) -> Tensor:
            batch, plan = argument
            return native.pooled_forward(weights, layout, batch.offsets, plan)  # a plan made here

        return run


class FlowTTCallATable(Contender):
    """This project's ops, one call a table: what many tables cost without the grouped call."""

    name = "flowtt_call_a_table"

    def __init__(self, specs: Sequence[TTSpec], optimizer: str | None = "rowwise_adagrad") -> None:
        self.optimizer = optimizer
        self.tables = [FlowTT([spec], optimizer) for spec in specs]

    @torch.no_grad()
    def copy_cores(self, cores: Sequence[Sequence[Tensor]]) -> None:
        """Takes the weights of others."""
        for table, those in zip(self.tables, cores, strict=True):
            for own, that in zip(table.cores[0], those, strict=True):
                own.copy_(that)

    @property
    def num_parameters(self) -> int:
        return sum(table.num_parameters for table in self.tables)

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self.tables)

    def forward(self, batch: Batch) -> Tensor:
        parts = split_batch(batch, len(self.tables))
        return torch.cat([table.forward(part) for table, part in zip(self.tables, parts, strict=True)], dim=1)

    def update(self) -> None:
        for table in self.tables:
            table.update()


@functools.lru_cache(maxsize=16)
def split_batch(batch: Batch, tables: int) -> list[Batch]:
    """The batch of each table, without gradients: backward of the whole brings them.

    Cached, so that contenders that know one table at a time are not charged for it.
    """
    bags = (batch.offsets.numel() - 1) // tables
    no_gradient = batch.grad_output.new_empty(bags, 0)
    parts = []
    for t in range(tables):
        offsets = batch.offsets[t * bags : (t + 1) * bags + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        parts.append(Batch(batch.indices[first:last], offsets - first, no_gradient))
    return parts


def tensor_bytes(*tensors: Tensor) -> int:
    """Bytes that tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def counted_flops(spec: TTSpec, rows: int, prefixes: int) -> tuple[int, int]:
    """Floating-point operations of forward and of backward, prefix products once each, equal rows once.

    Backward makes the prefix products anew, and takes two products for each one of forward. Additions for pooling,
    for sums over equal rows and for the optimizer are not counted.
    """
    prefix, row = prefixes * spec.flops_per_prefix, rows * spec.flops_per_row
    return prefix + row, 3 * prefix + 2 * row
