"""All contenders by name: tensor trains of this project, and what they are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.quality.tables import (
    Buckets,
    DeepHash,
    DoesNotFitError,
    HashEmbedding,
    Hashing,
    HotRows,
    MixedDimensions,
    Narrow,
    Ordered,
    QuotientRemainder,
    Robe,
    Sum,
    Table,
    Tables,
    dense,
)
from flowtt_torchrec import BatchedTTEmbeddingBags, TTSpec
from flowtt_torchrec.cores import default_std, init_cores
from flowtt_torchrec.optimizers import OptimizerSpec

Contender = Callable[[Sequence[Table], int], nn.Module]
"""Makes the tables within a number of weights: from ids ``[batch, tables]`` to rows ``[batch, tables, dim]``."""

_MOST_RANK = 512


def fit_spec(rows: int, dim: int, budget: int, num_cores: int | None = None, objective: str = "balanced") -> TTSpec:
    """The tensor train of the largest rank within a number of weights.

    The balanced shape's bonds may differ: after the largest rank for all, each is raised as far as it goes. A flow
    shape has the balanced shape's rank: the rank stays, the shape is a faster one of no more weights.

    Raises:
        DoesNotFitError: if rank 1 takes more.
    """

    def of_rank(rank: int) -> TTSpec | None:
        try:
            if objective == "memory":
                spec = TTSpec.suggest(rows, dim, rank, num_cores=num_cores, objective=objective, max_parameters=budget)
            else:
                spec = TTSpec.suggest(rows, dim, rank, num_cores=num_cores)
        except ValueError:
            return None
        return spec if spec.num_parameters <= budget else None

    low, high = 0, _MOST_RANK + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if of_rank(middle) is not None else (low, middle)
    spec = of_rank(low) if low else None
    if spec is None:
        raise DoesNotFitError("a tensor train of rank 1 needs more weights")
    if objective == "flow":
        return TTSpec.suggest(rows, dim, low, objective="flow", max_parameters=budget)
    return spec if objective == "memory" else _raise_ranks(spec, budget)


def _raise_ranks(spec: TTSpec, budget: int) -> TTSpec:
    """Raises the ranks one by one, last bond first, while the weights allow it."""
    growing = True
    while growing:
        growing = False
        for bond in reversed(range(len(spec.ranks))):
            ranks = tuple(rank + (k == bond) for k, rank in enumerate(spec.ranks))
            try:
                larger = TTSpec(spec.num_embeddings, spec.embedding_dim, spec.p, spec.q, ranks)
            except ValueError:  # more than the cores allow
                continue
            if larger.num_parameters <= budget and larger.num_parameters > spec.num_parameters:
                spec, growing = larger, True
    return spec


class TensorTrain(nn.Module):
    """A tensor train with a fused optimizer, as `BatchedTTEmbeddingBags` makes it.

    Args:
        table: the table.
        budget: weights.
        num_cores: of the shape; by default as `TTSpec.suggest`.
        objective: of the shape.
        optimizer: the fused optimizer.
        eps: of the optimizer.
        std_scale: factor on the standard deviation of the initial rows.
        orthogonal: whether slices start as random orthogonal matrices of the same size, and not from TT-Rec's Gaussian.
    """

    def __init__(
        self,
        table: Table,
        budget: int,
        *,
        num_cores: int | None = None,
        objective: str = "balanced",
        optimizer: str = "adagrad",
        eps: float = 1e-8,
        std_scale: float = 1.0,
        orthogonal: bool = False,
    ) -> None:
        super().__init__()
        self.spec = fit_spec(table.rows, table.dim, budget, num_cores, objective)
        seed = int(torch.randint(1 << 31, ()))
        fused = OptimizerSpec(optimizer, learning_rate=0.01, eps=eps)
        self.bags = BatchedTTEmbeddingBags({"table": self.spec}, optimizer=fused, seed=seed)
        cores = init_cores(self.spec, "table", std_scale * default_std(table.rows), seed=seed)
        with torch.no_grad():
            for view, core in zip(self.bags.split_weights()["table"], cores, strict=True):
                view.copy_(_orthogonal_like(core) if orthogonal else core)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bags(ids, torch.arange(len(ids) + 1))


def _orthogonal_like(core: Tensor) -> Tensor:
    """Slices ``[r, q r']`` with orthonormal rows or columns, scaled to the root mean square of ``core``."""
    slices = torch.empty(core.shape[0], core.shape[1], core.shape[2] * core.shape[3])
    for one in slices:
        nn.init.orthogonal_(one)
    return (slices * (core.pow(2).mean() / slices.pow(2).mean()).sqrt()).reshape(core.shape)


def _beside(columns: int, rest: Callable[[Table, int], nn.Module]) -> Callable[[Table, int], nn.Module]:
    """A narrow table of a few columns with a projection, added to another table that gets the rest of the weights."""

    def make(table: Table, budget: int) -> nn.Module:
        left = budget - columns * (table.rows + table.dim)
        if left <= 0:
            raise DoesNotFitError(f"{columns} numbers a row need more weights")
        return Sum(rest(table, left), Narrow(table, 0, columns))

    return make


def _hot(rest: Callable[[Table, int], nn.Module], share: float = 0.5) -> Callable[[Table, int], nn.Module]:
    return lambda table, budget: HotRows(table, budget, rest, share)


def _ordered(rest: Callable[[Table, int], nn.Module]) -> Callable[[Table, int], nn.Module]:
    return lambda table, budget: Ordered(table, lambda ordered: rest(ordered, budget))


def _by_table(make: Callable[[Table, int], nn.Module]) -> Contender:
    """Tables made one by one, all of the same ratio."""

    def build(tables: Sequence[Table], budget: int) -> nn.Module:
        total = sum(table.rows * table.dim for table in tables)
        return Tables([make(table, budget * table.rows * table.dim // total) for table in tables])

    return build


_tt = partial(partial, TensorTrain)

TABLES: dict[str, Callable[[Table, int], nn.Module]] = {
    "dense": dense,
    "hash": Hashing,
    "hash_hot": _hot(Hashing),
    "hash_embedding": HashEmbedding,
    "qr_multiply": QuotientRemainder,
    "qr_concat": partial(QuotientRemainder, concatenate=True),
    "qr_ordered": _ordered(QuotientRemainder),
    "buckets_ordered": _ordered(Buckets),
    "narrow": Narrow,
    "mixed_dimensions": MixedDimensions,
    "dhe": DeepHash,
    "tt2": _tt(num_cores=2),
    "tt3": _tt(num_cores=3),
    "tt4": _tt(num_cores=4),
    "tt_memory": _tt(objective="memory"),
    "tt_flow": _tt(objective="flow"),
    "tt2_narrow1": _beside(1, _tt(num_cores=2)),
    "tt3_narrow1": _beside(1, _tt(num_cores=3)),
    "tt3_narrow2": _beside(2, _tt(num_cores=3)),
    "tt2_hot": _hot(_tt(num_cores=2)),
    "tt3_hot": _hot(_tt(num_cores=3)),
    "tt2_ordered": _ordered(_tt(num_cores=2)),
    "tt3_ordered": _ordered(_tt(num_cores=3)),
    "tt2_rowwise": _tt(num_cores=2, optimizer="rowwise_adagrad"),
    "tt2_std3": _tt(num_cores=2, std_scale=3.0),
    "tt3_rowwise": _tt(num_cores=3, optimizer="rowwise_adagrad"),
    "tt3_adam": _tt(num_cores=3, optimizer="adam"),
    "tt3_eps": _tt(num_cores=3, eps=1e-3),
    "tt3_std3": _tt(num_cores=3, std_scale=3.0),
    "tt3_std_third": _tt(num_cores=3, std_scale=1 / 3),
    "tt3_orthogonal": _tt(num_cores=3, orthogonal=True),
}

CONTENDERS: dict[str, Contender] = {**{name: _by_table(make) for name, make in TABLES.items()}, "robe": Robe}

UNCOMPRESSED = "dense"
BASELINES = (
    *("hash", "hash_embedding", "qr_multiply", "qr_concat", "narrow", "mixed_dimensions", "robe", "dhe", "hash_hot"),
)
TENSOR_TRAINS = (
    *("tt2", "tt3", "tt4", "tt_memory", "tt_flow", "tt2_narrow1", "tt3_narrow1", "tt2_hot", "tt3_hot"),
    *("tt2_ordered", "tt3_ordered", "qr_ordered", "buckets_ordered"),
)


def num_weights(module: nn.Module) -> int:
    """Weights of a contender's module."""
    return sum(math.prod(p.shape) for p in module.parameters())
