"""TorchRec's planner with TT tables among its choices."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GridSearchProposer, UniformProposer
from torchrec.distributed.planner.stats import EmbeddingStats
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
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder

from flowtt_torchrec.distributed.auto_compression import AutoCompression, DenseFirstPerfModel, DenseFirstProposer
from flowtt_torchrec.distributed.embeddingbag import TTEmbeddingBagCollectionSharder
from flowtt_torchrec.distributed.estimators import CUSTOMIZED_KERNEL, TTPerfEstimator, TTStorageEstimator, is_tt
from flowtt_torchrec.distributed.sharding import COLUMN_TYPES, ROW_TYPES, SUPPORTED_SHARDING_TYPES
from flowtt_torchrec.distributed.stats import CompressionRow, CompressionStats
from flowtt_torchrec.spec import TTSpec

_DEVICE_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)


class TTEmbeddingEnumerator(EmbeddingEnumerator):
    """Enumerates TT options for the tables with a spec, and TorchRec's own options for all others.

    Column-wise options are those whose shards a tensor train can be cut into (``ParameterConstraints.min_partition`` is
    the least width that TorchRec tries, 128 by default). On the CPU row-wise options come only for tables whose
    constraints name them: gloo's exchange of their gradients needs batches of one size on all ranks.

    Args:
        topology: the devices.
        batch_size: samples a rank and step.
        compression: spec of each table that is to be a tensor train. The tables of an `AutoCompression` get TorchRec's
            own options too, but for those outside of device memory (UVM, SSD), whose place tensor trains take;
            constraints can name them.
        constraints: per table; they may narrow a TT table's sharding types, and its kernel with an `AutoCompression`.
        flops_per_ms: see `TTPerfEstimator`.
        use_exact_enumerate_order: as in TorchRec.

    Raises:
        ValueError: if a TT table's constraints leave it no option.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        compression: Mapping[str, TTSpec],
        constraints: dict[str, ParameterConstraints] | None = None,
        flops_per_ms: float | None = None,
        use_exact_enumerate_order: bool = False,
    ) -> None:
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            estimator=[
                TTPerfEstimator(topology, compression, constraints, flops_per_ms),
                TTStorageEstimator(topology, compression, constraints),
            ],
            use_exact_enumerate_order=use_exact_enumerate_order,
        )
        self._compression = dict(compression)
        self._dense_too = isinstance(compression, AutoCompression)
        for name in self._compression:
            _check_constraints(name, (constraints or {}).get(name), self._dense_too)

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Options of all tables of ``module``, in an order that does not depend on the process.

        Raises:
            ValueError: if a spec names a table that the module hasn't or is of another size, or if no
                `TTEmbeddingBagCollectionSharder` with the same compression is among the sharders.
        """
        self._check_tables(module, sharders)
        options = super().enumerate(module, sharders)
        offered = {o.name for o in options if is_tt(o, self._compression)}
        missing = {o.fqn for o in options if o.name in self._compression.keys() - offered and self._may_be_tt(o)}
        if missing:
            raise ValueError(
                f"no sharder offers the TT kernel for {sorted(missing)}; put a TTEmbeddingBagCollectionSharder with "
                "the planner's compression first among the sharders"
            )
        kept = [o for o in options if self._is_sensible(o)]
        left = {o.fqn for o in kept}
        for option in options:
            if option.fqn not in left:
                raise ValueError(self._why_none(option.name))
        # TorchRec takes the types and kernels of a table from a set, whose order differs from process to process
        place = {fqn: i for i, fqn in enumerate(dict.fromkeys(o.fqn for o in kept))}
        kept.sort(key=lambda o: (place[o.fqn], o.sharding_type, o.compute_kernel))
        self._last_stored_search_space = copy.deepcopy(kept)
        return kept

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """As in TorchRec, but for options that can be estimated: a TT table cannot be cut into any columns."""
        super().populate_estimates([o for o in sharding_options if self._can_be_cut(o)])

    def _can_be_cut(self, option: ShardingOption) -> bool:
        if not is_tt(option, self._compression) or option.sharding_type not in COLUMN_TYPES:
            return True
        step = self._compression[option.name].column_step
        return all(shard.offset[1] % step == 0 and shard.size[1] % step == 0 for shard in option.shards)

    def _is_sensible(self, option: ShardingOption) -> bool:
        """Whether an option of a table is to be offered: what its constraints name if possible, else what is of use."""
        constraints = (self._constraints or {}).get(option.name) or ParameterConstraints()
        if not is_tt(option, self._compression):
            if option.compute_kernel == CUSTOMIZED_KERNEL:
                return False
            if option.name not in self._compression:
                return True
            return self._dense_too and (bool(constraints.compute_kernels) or option.compute_kernel in _DEVICE_KERNELS)
        if not self._can_be_cut(option):
            return False
        if constraints.sharding_types:
            return True
        if option.sharding_type in COLUMN_TYPES:
            return len(option.shards) > 1
        return option.sharding_type not in ROW_TYPES or self._compute_device != "cpu"

    def _why_none(self, name: str) -> str:
        if name not in self._compression:
            return (
                f"table {name!r} is dense and its constraints leave it no sharding type that TorchRec has on "
                f"{self._compute_device}; allow others"
            )
        step = self._compression[name].column_step
        return (
            f"table {name!r}: its constraints leave column-wise shards only that its TTSpec, with q "
            f"{self._compression[name].q}, cannot be cut into; set min_partition to a multiple of {step}, or allow "
            "other sharding types"
        )

    def _may_be_tt(self, option: ShardingOption) -> bool:
        kernels = ((self._constraints or {}).get(option.name) or ParameterConstraints()).compute_kernels
        return not kernels or CUSTOMIZED_KERNEL in kernels

    def _check_tables(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> None:
        found: dict[str, None] = {}
        for sharder, name, parameter in _tables(module, sharders):
            found[name] = None
            spec = self._compression.get(name)
            if spec is None:
                continue
            spec.check_table(name, *parameter.shape)
            if not isinstance(sharder, TTEmbeddingBagCollectionSharder):
                continue
            if sharder.plan_chooses != self._dense_too:
                raise ValueError("the planner or the sharder has an AutoCompression, but not both; pass both the same")
            if sharder.compression.get(name) != spec:
                raise ValueError(
                    f"the planner's compression gives table {name!r} {spec}, the sharder's "
                    f"{sharder.compression.get(name)}; pass both the same mapping"
                )
        for name in self._compression:
            if name not in found:
                near = difflib.get_close_matches(name, found, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"the compression names table {name!r}, which the model hasn't; it has {_some(found)}{hint}"
                )


class TTEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """``EmbeddingShardingPlanner`` that places TT tables beside dense ones, with their true storage and cost.

    Args:
        topology: the devices; taken from the process group if not given.
        batch_size: samples a rank and step.
        enumerator: a `TTEmbeddingEnumerator`; made from the other arguments if not given.
        storage_reservation, proposer, partitioner, performance_model, constraints, debug, callbacks, timeout_seconds,
            plan_loader: as in TorchRec.
        stats: what to report of a plan. TorchRec's ``EmbeddingStats`` and `CompressionStats` if not given.
        compression: spec of each table that is to be a tensor train. With an `AutoCompression` the planner chooses: the
            default ``performance_model`` is then a `DenseFirstPerfModel`, and a `DenseFirstProposer` is among the
            default proposers.
        flops_per_ms: see `TTPerfEstimator`.

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
        flops_per_ms: float | None = None,
    ) -> None:
        if enumerator is not None and not isinstance(enumerator, TTEmbeddingEnumerator):
            raise ValueError(
                f"{type(enumerator).__name__} enumerates no TT tables; pass a TTEmbeddingEnumerator, or no enumerator"
            )
        auto = isinstance(compression, AutoCompression)
        if auto and proposer is None:
            dense_first = [DenseFirstProposer(), DenseFirstProposer(use_depth=False)]
            proposer = [GridSearchProposer(), *dense_first, UniformProposer()]
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=[EmbeddingStats(), CompressionStats(compression)] if stats is None else stats,
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
                self._topology, self._batch_size, compression, constraints, flops_per_ms
            )

    @property
    def compression_rows(self) -> list[CompressionRow]:
        """The compression table of the last plan, on the rank that made it; empty without a `CompressionStats`."""
        return [row for stats in self._stats if isinstance(stats, CompressionStats) for row in stats.rows]


def _check_constraints(name: str, constraints: ParameterConstraints | None, dense_too: bool) -> None:
    if constraints is None or dense_too:
        return
    kernels, types = constraints.compute_kernels, constraints.sharding_types
    if kernels and CUSTOMIZED_KERNEL not in kernels:
        raise ValueError(
            f"table {name!r} has a TTSpec, but its constraints allow the compute kernels {kernels} only; leave "
            f"compute_kernels out or add {CUSTOMIZED_KERNEL!r}, or take the table out of the compression"
        )
    if types and not set(types) & set(SUPPORTED_SHARDING_TYPES):
        raise ValueError(
            f"table {name!r} has a TTSpec, but its constraints allow the sharding types {types} only; TT tables "
            f"support {', '.join(SUPPORTED_SHARDING_TYPES)}"
        )


def _tables(
    module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
) -> Iterator[tuple[ModuleSharder[nn.Module], str, nn.Parameter]]:
    """Sharder, name and parameter of each table, found as TorchRec's enumerator finds them."""
    by_type = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    queue = [module]
    while queue:
        child = queue.pop()
        sharder = by_type.get(sharder_name(type(child)))
        if sharder is None:
            queue.extend(child.children())
            continue
        for name, parameter in sharder.shardable_parameters(child).items():
            yield sharder, name, parameter


def _some(names: Mapping[str, Any], most: int = 10) -> str:
    listed = ", ".join(list(names)[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
