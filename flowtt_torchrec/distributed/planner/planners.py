"""TorchRec's planner with TT tables among its choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import PipelineType

from flowtt_torchrec.distributed.auto_compression import AutoCompression
from flowtt_torchrec.distributed.planner.compression_stats import CompressionRow, CompressionStats
from flowtt_torchrec.distributed.planner.enumerators import TTEmbeddingEnumerator
from flowtt_torchrec.distributed.planner.perf_models import DenseFirstPerfModel
from flowtt_torchrec.distributed.planner.proposers import BisectingGreedyProposer, DenseFirstProposer
from flowtt_torchrec.distributed.planner.stats import TTEmbeddingStats
from flowtt_torchrec.planner_costs import CostConstants
from flowtt_torchrec.spec import TTSpec


class TTEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """``EmbeddingShardingPlanner`` that places TT tables beside dense ones, with their true storage and cost.

    Args:
        topology: the devices; taken from the process group if not given.
        batch_size: samples a rank and step.
        enumerator: a `TTEmbeddingEnumerator`; made from the other arguments if not given.
        storage_reservation: as in TorchRec; so are ``partitioner``, ``performance_model``, ``constraints``, ``debug``,
            ``callbacks``, ``timeout_seconds`` and ``plan_loader``.
        proposer: TorchRec's, with `BisectingGreedyProposer` for its greedy ones, if not given.
        stats: what to report of a plan. `TTEmbeddingStats` and `CompressionStats` if not given.
        compression: spec of each table that is to be a tensor train. With an `AutoCompression` the planner chooses: the
            default ``performance_model`` is then a `DenseFirstPerfModel`, and a `DenseFirstProposer` is among the
            default proposers.
        costs: what lookups cost; see `TTPerfEstimator`.
        pipeline_type: the training pipeline, for the batches that it holds.

    Raises:
        ValueError: for an enumerator that knows no TT tables, or constraints that leave a TT table no option.

    Example:
        >>> planner = TTEmbeddingShardingPlanner(topology, batch_size=2048, compression=compression)
        >>> plan = planner.collective_plan(model, [TTEmbeddingBagCollectionSharder(compression)], pg)
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        compression: Mapping[str, TTSpec],
        costs: CostConstants | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
    ) -> None:
        if enumerator is not None and not isinstance(enumerator, TTEmbeddingEnumerator):
            raise ValueError(
                f"{type(enumerator).__name__} enumerates no TT tables; pass a TTEmbeddingEnumerator, or no enumerator"
            )
        auto = isinstance(compression, AutoCompression)
        if proposer is None:
            greedy = DenseFirstProposer if auto else BisectingGreedyProposer
            proposer = [GridSearchProposer(), greedy(), greedy(use_depth=False), UniformProposer()]
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=[TTEmbeddingStats(compression), CompressionStats(compression)] if stats is None else stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        if auto and performance_model is None:
            self._perf_model = DenseFirstPerfModel(self._topology)
        if enumerator is None:  # made here because the default topology is made by the base class
            self._enumerator = TTEmbeddingEnumerator(
                self._topology,
                self._batch_size,
                compression,
                constraints,
                costs,
                pipeline_type=pipeline_type,
            )

    @property
    def compression_rows(self) -> list[CompressionRow]:
        """The compression table of the last plan, on the rank that made it; empty without a `CompressionStats`."""
        return [row for stats in self._stats if isinstance(stats, CompressionStats) for row in stats.rows]
