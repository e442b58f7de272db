"""The compression table: what each TT table saves, and where it was placed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.planner.types import ShardingOption, Stats
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from flowtt_torchrec.distributed.planner.shard_estimators import is_tt, optimizer_class
from flowtt_torchrec.distributed.planner.storage import table_bytes
from flowtt_torchrec.distributed.sharding_types import CUSTOMIZED_KERNEL, DATA_PARALLEL
from flowtt_torchrec.distributed.tables import table_parameters
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.table_text import print_table

COLUMNS = ("table", "rows x dim", "p", "q", "ranks", "dense MB", "TT MB", "ratio", "optimizer MB", "placement")
_TEXT_COLUMNS = ("table", "p", "q", "ranks", "placement")


@dataclass(frozen=True)
class CompressionRow:
    """One TT table of a plan. Bytes are those of one copy; every rank of its placement has one."""

    table: str
    num_embeddings: int
    embedding_dim: int
    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]
    dense_bytes: int
    tt_bytes: int
    optimizer_bytes: int
    placement: str

    @property
    def ratio(self) -> float:
        """Dense bytes over TT bytes."""
        return self.dense_bytes / self.tt_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON report."""
        return {**asdict(self), "ratio": self.ratio}

    def cells(self) -> tuple[str, ...]:
        """Text of `COLUMNS`."""
        return (
            self.table,
            f"{self.num_embeddings:,} x {self.embedding_dim}",
            _factors(self.p),
            _factors(self.q),
            _factors(self.ranks),
            _megabytes(self.dense_bytes),
            _megabytes(self.tt_bytes),
            f"{self.ratio:,.1f}x",
            _megabytes(self.optimizer_bytes),
            self.placement,
        )


def compression_rows(best_plan: list[ShardingOption], compression: Mapping[str, TTSpec]) -> list[CompressionRow]:
    """One row for each TT table of a plan, in the plan's order."""
    return [
        _row(
            option.name,
            compression[option.name],
            option.sharding_type,
            {shard.rank for shard in option.shards if shard.rank is not None},
            option.tensor,
        )
        for option in best_plan
        if is_tt(option, compression)
    ]


def _row(name: str, spec: TTSpec, sharding_type: str, ranks: Iterable[int], tensor: Tensor) -> CompressionRow:
    element_size = tensor.element_size()
    counted = table_bytes(spec, sharding_type, optimizer_class(tensor), element_size)
    return CompressionRow(
        name,
        spec.num_embeddings,
        spec.embedding_dim,
        spec.p,
        spec.q,
        spec.ranks,
        dense_bytes=spec.num_embeddings * spec.embedding_dim * element_size,
        tt_bytes=counted.cores,
        optimizer_bytes=counted.optimizer,
        placement=_placement(sharding_type, sorted(set(ranks))),
    )


class CompressionStats(Stats):
    """Keeps the compression table of the last plan, on the rank that planned, and prints it there.

    Args:
        compression: spec of each TT table.
        max_rows: tables listed one by one, the largest first; the others are counted in one line.
        announce: print each plan's table when it is made; else only `show` prints.

    Attributes:
        rows: the table of the last plan.
    """

    def __init__(self, compression: Mapping[str, TTSpec], max_rows: int = 40, *, announce: bool = True) -> None:
        self._compression = compression
        self._max_rows = max_rows
        self._announce = announce
        self._summary = ""
        self.rows: list[CompressionRow] = []

    def log(self, sharding_plan: ShardingPlan, *, best_plan: list[ShardingOption], **kwargs: Any) -> None:
        """Called by the planner with its plan; ``sharding_plan`` is empty if it found none."""
        self.rows = compression_rows(best_plan, self._compression) if sharding_plan.plan else []
        dense = [o for o in best_plan if not is_tt(o, self._compression)]
        dense_bytes = sum(o.tensor.numel() * o.tensor.element_size() for o in dense)
        self._summary = _summary(self.rows, len(dense), dense_bytes)
        costs = getattr(kwargs.get("enumerator"), "costs", None)
        if costs is not None:
            self._summary += f". Times of tensor trains: {costs.source}"
        if self._announce and (not dist.is_initialized() or dist.get_rank() == 0):
            self.show()

    def take(self, plan: ShardingPlan, module: nn.Module) -> None:
        """Keeps the table of a plan that no planner made, on this rank.

        Args:
            plan: for ``module``.
            module: the model before it is sharded.
        """
        self.rows, dense_tables, dense_bytes = [], 0, 0
        for path, entries in plan.plan.items():
            parameters = table_parameters(module.get_submodule(path))
            for name, entry in cast(EmbeddingModuleShardingPlan, entries).items():
                tensor = parameters[name]
                if entry.compute_kernel == CUSTOMIZED_KERNEL and name in self._compression:
                    spec = self._compression[name]
                    self.rows.append(_row(name, spec, entry.sharding_type, entry.ranks or [], tensor))
                else:
                    dense_tables += 1
                    dense_bytes += tensor.numel() * tensor.element_size()
        self._summary = _summary(self.rows, dense_tables, dense_bytes)

    def show(self) -> None:
        """Prints the table of the last plan, if it has TT tables: drawn where it fits a terminal, else in lines."""
        if self.rows:
            print_table(
                "Tensor-train tables",
                COLUMNS,
                self._table(),
                text_columns=_TEXT_COLUMNS,
                caption=self._summary,
                sum_row=True,
            )

    def _table(self) -> list[tuple[str, ...]]:
        largest = sorted(self.rows, key=lambda row: row.dense_bytes, reverse=True)
        table = [row.cells() for row in largest[: self._max_rows]]
        rest = largest[self._max_rows :]
        if rest:
            table.append(_sum_cells(f"{len(rest)} smaller tables", rest))
        table.append(_sum_cells("total", self.rows))
        return table


def _sum_cells(label: str, rows: list[CompressionRow]) -> tuple[str, ...]:
    dense = sum(row.dense_bytes for row in rows)
    cores = sum(row.tt_bytes for row in rows)
    return (
        label,
        f"{sum(row.num_embeddings for row in rows):,}",
        *("", "", ""),
        _megabytes(dense),
        _megabytes(cores),
        f"{dense / cores:,.1f}x",
        _megabytes(sum(row.optimizer_bytes for row in rows)),
        "",
    )


def _summary(rows: list[CompressionRow], dense_tables: int, dense_bytes: int) -> str:
    before, after = sum(row.dense_bytes for row in rows), sum(row.tt_bytes for row in rows)
    return (
        f"{len(rows)} of {len(rows) + dense_tables} tables are tensor trains: {_megabytes(before)} MB become "
        f"{_megabytes(after)} MB; the other {dense_tables} keep {_megabytes(dense_bytes)} MB. 1 MB = 1,000,000 bytes"
    )


def _placement(sharding_type: str, ranks: list[int]) -> str:
    if sharding_type == DATA_PARALLEL or len(ranks) > 4:
        return f"{sharding_type} on {len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    return f"{sharding_type} on rank {', '.join(map(str, ranks))}"


def _factors(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f}"
