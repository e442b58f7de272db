"""What a TT table costs: bytes and milliseconds of each shard, for TorchRec's planner.

TorchRec's estimators know dense tables only, so both estimators here keep them for all other tables and for the parts
that do not depend on the table's inside: inputs, outputs and their exchange. These they take from a *shadow*, the same
sharding option with a dense table of as many numbers as the cores have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    get_num_poolings,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import PipelineType

from flowtt_torchrec.distributed.planner.storage import TTTableBytes, Work, table_bytes
from flowtt_torchrec.distributed.sharding_types import (
    COLUMN_TYPES,
    CUSTOMIZED_KERNEL,
    DATA_PARALLEL,
    HOST_TYPES,
    ROW_TYPES,
)
from flowtt_torchrec.planner_costs import CostConstants, default_costs
from flowtt_torchrec.spec import TTSpec


def optimizer_class(table: torch.Tensor) -> type[torch.optim.Optimizer] | None:
    """The optimizer that ``apply_optimizer_in_backward`` set on a table."""
    classes = getattr(table, "_optimizer_classes", None)
    return classes[0] if classes else None


def work_per_rank(
    option: ShardingOption, world_size: int, constraints: Mapping[str, ParameterConstraints] | None
) -> Work:
    """What a step does on a rank that holds a shard: with the local batch if data-parallel, else with all batches.

    The lookups of a row-wise table are taken to spread evenly over its shards.
    """
    constraint = constraints.get(option.name) if constraints else None
    batch_sizes = (constraint and constraint.batch_sizes) or [option.batch_size] * option.num_inputs
    poolings = get_num_poolings(constraints, option)
    lookups = sum(length * n * b for length, n, b in zip(option.input_lengths, poolings, batch_sizes))
    bags = sum(n * b for n, b in zip(poolings, batch_sizes))
    if option.sharding_type != DATA_PARALLEL:
        lookups *= world_size / (len(option.shards) if option.sharding_type in ROW_TYPES else 1)
        bags *= world_size
    return Work(lookups, bags, len(option.shards), world_size, bool(option.is_weighted))


def is_tt(option: ShardingOption, compression: Mapping[str, TTSpec]) -> bool:
    return option.compute_kernel == CUSTOMIZED_KERNEL and option.name in compression


def _distinct_sizes(option: ShardingOption) -> list[tuple[int, int]]:
    """Sizes of the shards, each once: shards of one size cost the same, and there may be a thousand."""
    return list(dict.fromkeys((shard.size[0], shard.size[1]) for shard in option.shards))


def _shadow(option: ShardingOption, spec: TTSpec) -> ShardingOption:
    """The option with a dense table of as many numbers as the cores have, and a shard of each width."""
    rows = -(-spec.num_parameters // spec.embedding_dim)
    shadow = copy.copy(option)
    shadow._tensor = torch.empty(rows, spec.embedding_dim, dtype=option.tensor.dtype, device="meta")
    dense = option.sharding_type == DATA_PARALLEL
    shadow.compute_kernel = (EmbeddingComputeKernel.DENSE if dense else EmbeddingComputeKernel.FUSED).value
    shadow.shards = [Shard([rows, columns], [0, 0]) for _, columns in _distinct_sizes(option)]
    return shadow


class TTStorageEstimator(ShardEstimator):
    """Bytes of each shard: `table_bytes` for TT tables, TorchRec's own count for all others.

    Args:
        topology: the devices.
        compression: spec of each TT table.
        constraints: the planner's constraints.
        pipeline_type: the training pipeline, for the batches that it holds.
        **stock: passed on to ``EmbeddingStorageEstimator`` (``run_embedding_at_peak_memory``).

    Attributes:
        kept_forward_weights: tables whose sharder has ``keep_forward_weights``; the enumerator tells.
    """

    def __init__(
        self,
        topology: Topology,
        compression: Mapping[str, TTSpec],
        constraints: dict[str, ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        **stock: Any,
    ) -> None:
        self._topology = topology
        self._compression = compression
        self._constraints = constraints
        self._pipeline_type = pipeline_type
        self.kept_forward_weights: Collection[str] = ()
        self._stock = EmbeddingStorageEstimator(
            topology=topology, constraints=constraints, pipeline_type=pipeline_type, **stock
        )

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Sets ``shard.storage`` of all options; options of the customised kernel without a spec are left alone."""
        self._stock.estimate([o for o in sharding_options if o.compute_kernel != CUSTOMIZED_KERNEL], *args, **kwargs)
        on_device = self._topology.compute_device in {"cuda", "mtia"}
        for option in sharding_options:
            if not is_tt(option, self._compression):
                continue
            storages = {}
            for size in _distinct_sizes(option):
                total = self.count(option, size[1]).total
                storages[size] = Storage(hbm=total, ddr=0) if on_device else Storage(hbm=0, ddr=total)
            for shard in option.shards:
                shard.storage = storages[shard.size[0], shard.size[1]]

    def count(self, option: ShardingOption, columns: int) -> TTTableBytes:
        """Bytes of a shard of so many columns of a TT option."""
        return table_bytes(
            self._compression[option.name],
            option.sharding_type,
            optimizer_class(option.tensor),
            option.tensor.element_size(),
            work=work_per_rank(option, self._topology.world_size, self._constraints),
            columns=columns,
            device=self._topology.compute_device,
            pipeline_type=self._pipeline_type,
            keep_forward_weights=option.name in self.kept_forward_weights,
        )


class TTPerfEstimator(ShardEstimator):
    """Milliseconds of each shard: `CostConstants` for the compute, TorchRec's own model for the communication.

    The all-reduce of a data-parallel, row-wise or column-wise table is priced with the bytes of its cores.

    Args:
        topology: the devices, with their communication bandwidths.
        compression: spec of each TT table.
        constraints: the planner's constraints.
        costs: constants of the device; `default_costs` if not given, which are not measured.

    Attributes:
        costs: the constants that are used.

    Raises:
        ValueError: for constants of another kind of device.
    """

    def __init__(
        self,
        topology: Topology,
        compression: Mapping[str, TTSpec],
        constraints: dict[str, ParameterConstraints] | None = None,
        costs: CostConstants | None = None,
    ) -> None:
        device = "cpu" if topology.compute_device == "cpu" else "cuda"
        self.costs = default_costs(device) if costs is None else costs
        if self.costs.device != device:
            raise ValueError(
                f"the cost constants ({self.costs.source}) are of {self.costs.device}, the topology is of {device}; "
                f"measure there with `python -m flowtt_torchrec calibrate --device {device}`"
            )
        self._topology = topology
        self._compression = compression
        self._constraints = constraints
        self._stock = EmbeddingPerfEstimator(topology=_no_part_of_a_host(topology), constraints=constraints)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Sets ``shard.perf`` of all options; options of the customised kernel without a spec are left alone."""
        self._stock.estimate([o for o in sharding_options if o.compute_kernel != CUSTOMIZED_KERNEL], *args, **kwargs)
        options = [o for o in sharding_options if is_tt(o, self._compression)]
        shadows = [_shadow(o, self._compression[o.name]) for o in options]
        self._stock.estimate(shadows, *args, **kwargs)
        for option, shadow in zip(options, shadows):
            perfs = {}
            for size, other in zip(_distinct_sizes(option), shadow.shards):
                forward, backward = self._compute(option, *size)
                perfs[size] = Perf(
                    fwd_compute=forward,
                    fwd_comms=other.perf.fwd_comms,
                    bwd_compute=backward,
                    bwd_comms=other.perf.bwd_comms + self._sum_over_ranks(option),
                    input_dist_comms=other.perf.input_dist_comms,
                )
            for shard in option.shards:
                shard.perf = perfs[shard.size[0], shard.size[1]]

    def _compute(self, option: ShardingOption, shard_rows: int, columns: int) -> tuple[float, float]:
        """Milliseconds of forward, and of backward with the update, if lookups are spread evenly over the rows."""
        whole = self._compression[option.name]
        column_wise = option.sharding_type in COLUMN_TYPES
        spec = whole.narrow(columns) if column_wise else whole
        num_embeddings = max(shard_rows, 1) if option.sharding_type in ROW_TYPES else spec.num_embeddings
        element_size = option.tensor.element_size()
        lookups = work_per_rank(option, self._topology.world_size, self._constraints).lookups
        rows = occupied(num_embeddings, lookups)
        prefixes = occupied(min(spec.num_prefixes, -(-num_embeddings // spec.p[-1])), rows)
        flops = prefixes * spec.flops_per_prefix + rows * spec.flops_per_row
        slices = [size // p for size, p in zip(spec.core_sizes, spec.p)]
        moved = element_size * (prefixes * sum(slices[:-1]) + rows * slices[-1] + lookups * spec.embedding_dim)
        copied = 2 * spec.num_bytes(element_size) if column_wise else 0
        update = 3 * whole.num_bytes(element_size)  # read the gradient, read and write the cores
        if _is_shared(option):
            update += 6 * whole.num_bytes(element_size)  # gather the gradient, and into and out of what is summed
        forward, backward = self.costs.forward, self.costs.backward
        return (
            forward.ms(flops, moved + copied, lookups, prefixes),
            backward.ms(flops, moved, lookups, prefixes) + update / backward.bytes_per_ms,
        )

    def _sum_over_ranks(self, option: ShardingOption) -> float:
        """Milliseconds of the all-reduce over the ranks of a row-wise or column-wise table, as a ring."""
        ranks, topology = len(option.shards), self._topology
        if not _is_shared(option) or ranks == 1:
            return 0.0
        one_host = option.sharding_type in HOST_TYPES or topology.world_size <= topology.local_world_size
        bandwidth = topology.intra_host_bw if one_host else topology.inter_host_bw
        sent = self._compression[option.name].num_bytes(option.tensor.element_size()) * 2 * (ranks - 1) / ranks
        return sent / bandwidth


def _no_part_of_a_host(topology: Topology) -> Topology:
    """The topology, hosts having no more ranks than there are; for a part of a host TorchRec counts negative time."""
    if topology.local_world_size <= topology.world_size:
        return topology
    filled = copy.copy(topology)
    filled._local_world_size = topology.world_size
    return filled


def _is_shared(option: ShardingOption) -> bool:
    return option.sharding_type in (*ROW_TYPES, *COLUMN_TYPES)


def occupied(bins: float, balls: float) -> float:
    """Expected number of ``bins`` that are hit when ``balls`` fall evenly: ``bins (1 - exp(-balls / bins))``."""
    return -bins * math.expm1(-balls / bins)
