"""What each table of a plan is, where it lies and what it takes: for people and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from flowtt_torchrec.distributed.sharding_types import DATA_PARALLEL
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.training.compression import element_size
from flowtt_torchrec.training.console import Console, show_bytes

_MOST_ROWS = 40
_COLUMNS = ("table", "kind", "type", "kernel", "sharding", "on rank", "rows x dim", "weights")


@dataclass(frozen=True)
class PlannedTable:
    """One table of a plan.

    Args:
        name: of the table.
        num_embeddings: rows.
        embedding_dim: columns.
        spec: of a tensor train; None for a dense table.
        data_type: TorchRec's name of its numbers' type.
        kernel: TorchRec's compute kernel.
        sharding_type: TorchRec's name.
        ranks: that hold it or a part of it.
        dense_bytes: of its weights as a dense table of this type.
        weight_bytes: of one copy of its weights.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    spec: TTSpec | None
    data_type: str
    kernel: str
    sharding_type: str
    ranks: list[int]
    dense_bytes: int
    weight_bytes: int

    @property
    def weight_bytes_by_rank(self) -> dict[int, int]:
        """Of the weights that each rank holds: its share of a dense table, or all cores of a tensor train."""
        whole = self.spec is not None or self.sharding_type == DATA_PARALLEL
        return {rank: self.weight_bytes if whole else self.weight_bytes // len(self.ranks) for rank in self.ranks}

    def to_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        spec = None if self.spec is None else self.spec.to_dict()
        return {**asdict(self), "spec": spec, "compression_ratio": self.dense_bytes / self.weight_bytes}


def planned_tables(
    tables: Sequence[EmbeddingBagConfig], specs: Mapping[str, TTSpec], plan: ShardingPlan, world_size: int
) -> list[PlannedTable]:
    """One entry a table, in the order of ``tables``."""
    placed = {name: p for module in plan.plan.values() for name, p in cast(EmbeddingModuleShardingPlan, module).items()}
    result = []
    for table in tables:
        parameter, spec = placed[table.name], specs.get(table.name)
        size = element_size(table.data_type)
        numbers = table.num_embeddings * table.embedding_dim
        result.append(
            PlannedTable(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                spec=spec,
                data_type=table.data_type.value,
                kernel=parameter.compute_kernel,
                sharding_type=parameter.sharding_type,
                ranks=list(dict.fromkeys(parameter.ranks or range(world_size))),
                dense_bytes=numbers * size,
                weight_bytes=(numbers if spec is None else spec.num_parameters) * size,
            )
        )
    return result


def show_plan(console: Console, planned: Sequence[PlannedTable]) -> None:
    """Prints where the tables lie, the largest ones one by one."""
    largest = sorted(planned, key=lambda table: table.dense_bytes, reverse=True)
    rows = [
        (
            table.name,
            "dense" if table.spec is None else "tensor train",
            table.data_type,
            table.kernel,
            table.sharding_type,
            _ranks(table.ranks),
            f"{table.num_embeddings:,} x {table.embedding_dim}",
            show_bytes(table.weight_bytes),
        )
        for table in largest[:_MOST_ROWS]
    ]
    rest = largest[_MOST_ROWS:]
    if rest:
        weights = show_bytes(sum(table.weight_bytes for table in rest))
        rows.append(
            (f"{len(rest)} smaller tables", "", "", "", "", "", f"{sum(t.num_embeddings for t in rest):,}", weights)
        )
    console.table("Plan", _COLUMNS, rows, text_columns=6)


def show_summary(planned: Sequence[PlannedTable]) -> str:
    """The tables in one sentence."""
    trains = [table for table in planned if table.spec is not None]
    dense = sum(table.dense_bytes for table in planned)
    weights = sum(table.weight_bytes for table in planned)
    return (
        f"{len(planned)} tables, {len(trains)} of them tensor trains: {show_bytes(weights)} of weights, "
        f"{show_bytes(dense)} if all were dense ({dense / weights:,.1f}x)"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
