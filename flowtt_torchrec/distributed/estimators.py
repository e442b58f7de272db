"""What a TT table costs: bytes and milliseconds of each shard, for TorchRec's planner.

TorchRec's estimators know dense tables only, so both estimators here keep them for all other tables and for the parts
that do not depend on the table's inside: inputs, outputs and their exchange. These they take from a *shadow*, the same
sharding option with a dense table of as many numbers as the cores have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torchrec.optim
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
from torchrec.distributed.types import ShardingType

from flowtt_torchrec.distributed.sharding import COLUMN_TYPES, ROW_TYPES
from flowtt_torchrec.spec import TTSpec

CUSTOMIZED_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
HOST_TYPES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)

# A flow plan keeps two int32, one int64 and two int32 numbers a lookup; sorting takes keys and positions twice more.
PLAN_BYTES_PER_LOOKUP = 24
SORT_BYTES_PER_LOOKUP = 24

# Sustained floating-point operations a millisecond of small matrix products, of the right order for one rank.
DEFAULT_FLOPS_PER_MS = {"cuda": 20e9, "mtia": 20e9, "cpu": 50e6}

# Backward computes the prefix products again and two products for each one of forward.
BACKWARD_FLOPS, BACKWARD_BYTES = 3.0, 2.0


@dataclass(frozen=True)
class TTTableBytes:
    """Bytes of one TT table on one rank that holds it."""

    cores: int
    optimizer: int
    gradient: int
    workspace: int

    @property
    def total(self) -> int:
        return self.cores + self.optimizer + self.gradient + self.workspace


def table_bytes(
    spec: TTSpec,
    sharding_type: str,
    optimizer: type[torch.optim.Optimizer] | None,
    lookups: float,
    element_size: int = 4,
    columns: int | None = None,
) -> TTTableBytes:
    """Counts what a table takes on one rank.

    Args:
        spec: the table's shape.
        sharding_type: TorchRec's name. Data-parallel cores have a dense gradient and DDP's bucket beside them, and the
            dense optimizer's state; the other types fused state and a gradient buffer. Row-wise and column-wise tables
            have a second such buffer, for the sum over the ranks, and column-wise ones a copy of their part.
        optimizer: the class given to ``apply_optimizer_in_backward``, if any; a data-parallel table is taken to get a
            dense optimizer of the same class.
        lookups: lookups of one step on the rank.
        element_size: bytes a number of the cores. Gradients and fused state are float32 for narrower ones; those of a
            data-parallel table have the cores' type, but for the one that comes from the op.
        columns: width of a column-wise shard, all columns if not given.
    """
    cores, wide = spec.num_bytes(element_size), spec.num_bytes(max(element_size, 4))
    data_parallel = sharding_type == DATA_PARALLEL
    gradient = wide if sharding_type == ShardingType.TABLE_WISE.value else 2 * wide
    if data_parallel:
        gradient = 2 * cores if wide == cores else 2 * cores + wide
    if sharding_type in COLUMN_TYPES:
        gradient += spec.narrow(columns or spec.embedding_dim).num_bytes(element_size)
    return TTTableBytes(
        cores=cores,
        optimizer=_optimizer_bytes(
            spec, optimizer, element_size if data_parallel else max(element_size, 4), data_parallel
        ),
        gradient=gradient,
        workspace=math.ceil(lookups * (PLAN_BYTES_PER_LOOKUP + SORT_BYTES_PER_LOOKUP)),
    )


def _optimizer_bytes(
    spec: TTSpec, optimizer: type[torch.optim.Optimizer] | None, element_size: int, data_parallel: bool
) -> int:
    if optimizer is None or optimizer in (torch.optim.SGD, torchrec.optim.SGD):
        return 0
    if optimizer is torchrec.optim.RowWiseAdagrad and not data_parallel:
        return spec.num_slices * element_size
    if optimizer in (torch.optim.Adam, torchrec.optim.Adam):
        return 2 * spec.num_bytes(element_size)
    return spec.num_bytes(element_size)


def optimizer_class(option: ShardingOption) -> type[torch.optim.Optimizer] | None:
    """The optimizer that ``apply_optimizer_in_backward`` set on the option's table."""
    classes = getattr(option.tensor, "_optimizer_classes", None)
    return classes[0] if classes else None


def lookups_per_rank(
    option: ShardingOption, world_size: int, constraints: Mapping[str, ParameterConstraints] | None
) -> float:
    """Lookups of one step on a rank that holds a shard: of the local batch if data-parallel, else of all batches.

    A row-wise table's are taken to spread evenly over its shards.
    """
    constraint = constraints.get(option.name) if constraints else None
    batch_sizes = (constraint and constraint.batch_sizes) or [option.batch_size] * option.num_inputs
    poolings = get_num_poolings(constraints, option)
    local = sum(length * n * b for length, n, b in zip(option.input_lengths, poolings, batch_sizes))
    if option.sharding_type == DATA_PARALLEL:
        return local
    return local * world_size / (len(option.shards) if option.sharding_type in ROW_TYPES else 1)


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
    """Bytes of each shard: `table_bytes`, and TorchRec's own count for inputs and outputs.

    Args:
        topology: the devices.
        compression: spec of each TT table.
        constraints: the planner's constraints.
        **stock: passed on to ``EmbeddingStorageEstimator`` (``pipeline_type``, ``run_embedding_at_peak_memory``).
    """

    def __init__(
        self,
        topology: Topology,
        compression: Mapping[str, TTSpec],
        constraints: dict[str, ParameterConstraints] | None = None,
        **stock: Any,
    ) -> None:
        self._topology = topology
        self._compression = compression
        self._constraints = constraints
        self._stock = EmbeddingStorageEstimator(topology=topology, constraints=constraints, **stock)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Sets ``shard.storage`` of all options; options of the customised kernel without a spec are left alone."""
        self._stock.estimate([o for o in sharding_options if o.compute_kernel != CUSTOMIZED_KERNEL], *args, **kwargs)
        options = [o for o in sharding_options if is_tt(o, self._compression)]
        shadows = [_shadow(o, self._compression[o.name]) for o in options]
        self._stock.estimate(shadows, *args, **kwargs)
        on_device = self._topology.compute_device in {"cuda", "mtia"}
        for option, shadow in zip(options, shadows):
            element_size = option.tensor.element_size()
            lookups = lookups_per_rank(option, self._topology.world_size, self._constraints)
            storages = {}
            for size, other in zip(_distinct_sizes(option), shadow.shards):
                own = table_bytes(
                    self._compression[option.name],
                    option.sharding_type,
                    optimizer_class(option),
                    lookups,
                    element_size,
                    columns=size[1],
                ).total
                # what is left of the shadow without its weights: inputs, outputs and the pipeline's copies of them
                exchange = other.storage.hbm + other.storage.ddr - math.prod(other.size) * element_size
                total = own + exchange
                storages[size] = Storage(hbm=total, ddr=0) if on_device else Storage(hbm=0, ddr=total)
            for shard in option.shards:
                shard.storage = storages[shard.size[0], shard.size[1]]


class TTPerfEstimator(ShardEstimator):
    """Milliseconds of each shard: a roofline for the products, and TorchRec's own model for the communication.

    The all-reduce of a data-parallel, row-wise or column-wise table is priced with the bytes of its cores.

    Args:
        topology: the devices, with their memory and communication bandwidths.
        compression: spec of each TT table.
        constraints: the planner's constraints.
        flops_per_ms: sustained floating-point operations a millisecond of one device; `DEFAULT_FLOPS_PER_MS` if not
            given.
    """

    def __init__(
        self,
        topology: Topology,
        compression: Mapping[str, TTSpec],
        constraints: dict[str, ParameterConstraints] | None = None,
        flops_per_ms: float | None = None,
    ) -> None:
        device = topology.compute_device
        self._topology = topology
        self._compression = compression
        self._constraints = constraints
        self._flops_per_ms = DEFAULT_FLOPS_PER_MS[device] if flops_per_ms is None else flops_per_ms
        self._bytes_per_ms = topology.ddr_mem_bw if device == "cpu" else topology.hbm_mem_bw
        self._stock = EmbeddingPerfEstimator(topology=topology, constraints=constraints)

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
        lookups = lookups_per_rank(option, self._topology.world_size, self._constraints)
        rows = occupied(num_embeddings, lookups)
        prefixes = occupied(min(spec.num_prefixes, -(-num_embeddings // spec.p[-1])), rows)
        flops = prefixes * spec.flops_per_prefix + rows * spec.flops_per_row
        slices = [size // p for size, p in zip(spec.core_sizes, spec.p)]
        moved = element_size * (prefixes * sum(slices[:-1]) + rows * slices[-1] + lookups * spec.embedding_dim)
        moved += lookups * (PLAN_BYTES_PER_LOOKUP + SORT_BYTES_PER_LOOKUP)
        copied = 2 * spec.num_bytes(element_size) if column_wise else 0
        update = 3 * whole.num_bytes(element_size)  # read the gradient, read and write the cores
        if _is_shared(option):
            update += 6 * whole.num_bytes(element_size)  # gather the gradient, and into and out of what is summed
        forward = max(flops / self._flops_per_ms, (moved + copied) / self._bytes_per_ms)
        backward = max(
            BACKWARD_FLOPS * flops / self._flops_per_ms, (BACKWARD_BYTES * moved + update) / self._bytes_per_ms
        )
        return forward, backward

    def _sum_over_ranks(self, option: ShardingOption) -> float:
        """Milliseconds of the all-reduce over the ranks of a row-wise or column-wise table, as a ring."""
        ranks, topology = len(option.shards), self._topology
        if not _is_shared(option) or ranks == 1:
            return 0.0
        one_host = option.sharding_type in HOST_TYPES or topology.world_size <= topology.local_world_size
        bandwidth = topology.intra_host_bw if one_host else topology.inter_host_bw
        sent = self._compression[option.name].num_bytes(option.tensor.element_size()) * 2 * (ranks - 1) / ranks
        return sent / bandwidth


def _is_shared(option: ShardingOption) -> bool:
    return option.sharding_type in (*ROW_TYPES, *COLUMN_TYPES)


def occupied(bins: float, balls: float) -> float:
    """Expected number of ``bins`` that are hit when ``balls`` fall evenly: ``bins (1 - exp(-balls / bins))``."""
    return -bins * math.expm1(-balls / bins)
