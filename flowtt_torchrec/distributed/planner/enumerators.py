"""TorchRec's enumerator with TT options, and without those that no plan gains from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ModuleSharder, PipelineType, ShardingType

from flowtt_torchrec.distributed.auto_compression import AutoCompression
from flowtt_torchrec.distributed.compat import estimators_sharders
from flowtt_torchrec.distributed.fp_embeddingbag import TT_SHARDERS
from flowtt_torchrec.distributed.planner.shard_estimators import TTPerfEstimator, TTStorageEstimator, is_tt
from flowtt_torchrec.distributed.sharding_types import (
    COLUMN_TYPES,
    CUSTOMIZED_KERNEL,
    DATA_PARALLEL,
    HOST_TYPES,
    ROW_TYPES,
    SUPPORTED_SHARDING_TYPES,
)
from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.planner_costs import CostConstants
from flowtt_torchrec.spec import TTSpec

TABLE_WISE = ShardingType.TABLE_WISE.value
_DEVICE_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
_SEVERAL_RANKS = (DATA_PARALLEL, ShardingType.TABLE_ROW_WISE.value)
_UNCONSTRAINED = ParameterConstraints()


class TTEmbeddingEnumerator(EmbeddingEnumerator):
    """Enumerates TT options for the tables with a spec, and TorchRec's own options for all others.

    Column-wise options are those whose shards a tensor train can be cut into (``ParameterConstraints.min_partition`` is
    the least width that TorchRec tries, 128 by default). A TT table whose constraints name no sharding types gets what
    a plan may gain from, so that hundreds of tables on hundreds of devices can be planned:

    * not row-wise: a data-parallel table holds the same cores and does the same lookups on every rank, and exchanges
      no rows. On the CPU not table-row-wise either: gloo's exchange of its gradients needs batches of one size on all
      ranks;
    * on one host not table-row-wise and table-column-wise, which are row-wise and column-wise there;
    * of table-wise, table-row-wise and data-parallel those that take the ranks together the least time, up to the first
      that takes no rank more than the ranks spend on everything on average; table-wise always.

    Where the sharder offers none of these, as a subclass may, the table gets what it offers.

    No tensor train is data-parallel where the sharder has ``keep_forward_weights``, which DDP does not go with.

    Args:
        topology: the devices.
        batch_size: samples a rank and step.
        compression: spec of each table that is to be a tensor train. The tables of an `AutoCompression` get TorchRec's
            own options too, but for those outside of device memory (UVM, SSD), whose place tensor trains take;
            constraints can name them.
        constraints: per table; they may narrow a TT table's sharding types, and its kernel with an `AutoCompression`.
        costs: what lookups cost; see `TTPerfEstimator`.
        use_exact_enumerate_order: as in TorchRec.
        pipeline_type: the training pipeline, for the batches that it holds.

    Raises:
        ValueError: if a TT table's constraints leave it no option.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        compression: Mapping[str, TTSpec],
        constraints: dict[str, ParameterConstraints] | None = None,
        costs: CostConstants | None = None,
        use_exact_enumerate_order: bool = False,
        pipeline_type: PipelineType = PipelineType.NONE,
    ) -> None:
        self._tt_perf = TTPerfEstimator(topology, compression, constraints, costs)
        self._tt_storage = TTStorageEstimator(topology, compression, constraints, pipeline_type)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            estimator=[self._tt_perf, self._tt_storage],
            use_exact_enumerate_order=use_exact_enumerate_order,
        )
        self._compression = dict(compression)
        self._dense_too = isinstance(compression, AutoCompression)
        self._no_gain: set[tuple[str, str]] = set()  # table and sharding type
        self._offered: dict[str, list[str]] = {}  # sharding types that the sharder has for a table
        for name in self._compression:
            _check_constraints(name, (constraints or {}).get(name), self._dense_too)

    @property
    def costs(self) -> CostConstants:
        """The constants that TT options are rated with."""
        return self._tt_perf.costs

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Options of all tables of ``module``, in an order that does not depend on the process.

        Raises:
            ValueError: if a spec names a table that the module hasn't or is of another size, or if no
                `TTEmbeddingBagCollectionSharder` with the same compression is among the sharders.
        """
        self._check_tables(module, sharders)
        self._tt_storage.kept_forward_weights = {
            name
            for sharder, _, name, _ in _tables(module, sharders)
            if isinstance(sharder, TT_SHARDERS) and sharder.keep_forward_weights
        }
        self._offered = {
            name: sharder.sharding_types(self._compute_device) for sharder, _, name, _ in _tables(module, sharders)
        }
        self._no_gain = self._types_without_gain(module, sharders)
        options = super().enumerate(module, sharders)
        offered = {o.name for o in options if is_tt(o, self._compression)}
        missing = {o.fqn for o in options if o.name in self._compression.keys() - offered and self._may_be_tt(o)}
        if missing:
            raise ValueError(
                f"no sharder offers the TT kernel for {sorted(missing)}; put a TTEmbeddingBagCollectionSharder "
                "(TTFeatureProcessedEmbeddingBagCollectionSharder for a collection with feature processors) with the "
                "planner's compression last among the sharders"
            )
        usable = [o for o in options if self._is_usable(o)]
        worthwhile = {o.fqn for o in usable if self._is_worthwhile(o)}
        kept = [o for o in usable if self._is_worthwhile(o) or o.fqn not in worthwhile]
        left = {o.fqn for o in kept}
        for option in options:
            if option.fqn not in left:
                raise ValueError(self._why_none(option.name, [o for o in options if o.fqn == option.fqn]))
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

    def _filter_compute_kernels(self, name: str, allowed_compute_kernels: list[str], sharding_type: str) -> list[str]:
        """As in TorchRec, but for options that are of no use to a TT table: they are not even made."""
        kernels = super()._filter_compute_kernels(name, [str(k) for k in allowed_compute_kernels], sharding_type)
        if name not in self._compression:
            return [k for k in kernels if k != CUSTOMIZED_KERNEL] or kernels
        if CUSTOMIZED_KERNEL not in allowed_compute_kernels:
            return kernels
        constraints = self._constraints_of(name)
        stock = constraints.compute_kernels or _DEVICE_KERNELS if self._dense_too else ()
        tt = constraints.sharding_types or self._may_gain(name, sharding_type) or self._has_no_better(name)
        return [k for k in kernels if (tt if k == CUSTOMIZED_KERNEL else k in stock)]

    def _may_gain(self, name: str, sharding_type: str) -> bool:
        """Whether a plan may gain from a table's TT option; see the class."""
        if sharding_type == ShardingType.ROW_WISE.value or not self._ddp_averages(name, sharding_type):
            return False
        if sharding_type in HOST_TYPES and (
            self._world_size <= self._local_world_size or (sharding_type in ROW_TYPES and self._compute_device == "cpu")
        ):
            return False
        return (name, sharding_type) not in self._no_gain

    def _has_no_better(self, name: str) -> bool:
        """Whether the sharder offers a table no type that a plan may gain from."""
        return not any(self._may_gain(name, sharding_type) for sharding_type in self._offered.get(name, ()))

    def _ddp_averages(self, name: str, sharding_type: str) -> bool:
        return sharding_type != DATA_PARALLEL or name not in self._tt_storage.kept_forward_weights

    def _is_usable(self, option: ShardingOption) -> bool:
        if not is_tt(option, self._compression):
            dense = self._dense_too or option.name not in self._compression  # else of grid sharding, say
            return dense and option.compute_kernel != CUSTOMIZED_KERNEL
        return self._can_be_cut(option) and self._ddp_averages(option.name, option.sharding_type)

    def _is_worthwhile(self, option: ShardingOption) -> bool:
        """Whether a tensor train's column-wise option that is not asked for has several shards."""
        if not is_tt(option, self._compression):
            return True
        asked_for = bool(self._constraints_of(option.name).sharding_types)
        return asked_for or option.sharding_type not in COLUMN_TYPES or len(option.shards) > 1

    def _types_without_gain(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> set[tuple[str, str]]:
        """Tables and types: those that cost all ranks together more than one that is not too much for any of them."""
        self._no_gain = set()
        sketches = [
            self._sketch(child, name, parameter, kind)
            for sharder, child, name, parameter in _tables(module, sharders)
            if name in self._compression and isinstance(sharder, TT_SHARDERS)
            for kind in (TABLE_WISE, *_SEVERAL_RANKS)
            if self._may_gain(name, kind)
        ]
        by_type = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        self._tt_perf.estimate(sketches, estimators_sharders(by_type))
        times: dict[str, list[tuple[float, float, str]]] = {}  # by table: of all ranks, of the slowest, type
        for sketch in sketches:
            parts = [shard.perf.total for shard in sketch.shards if shard.perf is not None]
            ranks = self._world_size if sketch.sharding_type == DATA_PARALLEL else 1
            times.setdefault(sketch.name, []).append((ranks * sum(parts), max(parts), sketch.sharding_type))
        fair = sum(min(of_table)[0] for of_table in times.values()) / self._world_size
        without = set()
        for name, of_table in times.items():
            enough = False
            for _, slowest, kind in sorted(of_table):
                if enough and kind != TABLE_WISE:
                    without.add((name, kind))
                enough = enough or slowest <= fair
        return without

    def _sketch(self, module: nn.Module, name: str, parameter: nn.Parameter, sharding_type: str) -> ShardingOption:
        """An option to estimate times with; a data-parallel one has the shard of one rank."""
        sizes, offsets = calculate_shard_sizes_and_offsets(
            parameter,
            1 if sharding_type == DATA_PARALLEL else self._world_size,
            self._local_world_size,
            sharding_type,
        )
        constraints = self._constraints_of(name)
        return ShardingOption(
            name,
            parameter,
            ("", module),
            constraints.pooling_factors,
            self._batch_size,
            sharding_type,
            get_partition_by_type(sharding_type),
            CUSTOMIZED_KERNEL,
            [Shard(size, offset) for size, offset in zip(sizes, offsets)],
            is_pooled=True,
            output_dtype=constraints.output_dtype,
        )

    def _constraints_of(self, name: str) -> ParameterConstraints:
        return (self._constraints or {}).get(name) or _UNCONSTRAINED

    def _why_none(self, name: str, options: list[ShardingOption]) -> str:
        if name not in self._compression:
            return (
                f"table {name!r} is dense and its constraints leave it no sharding type that TorchRec has on "
                f"{self._compute_device}; allow others"
            )
        if name in self._tt_storage.kept_forward_weights and self._constraints_of(name).sharding_types == [
            DATA_PARALLEL
        ]:
            return (
                f"table {name!r}: its constraints leave it data_parallel only, and the sharder has "
                "keep_forward_weights=True, with which DDP does not average gradients; allow other sharding types, or "
                "leave keep_forward_weights out"
            )
        step = self._compression[name].column_step
        widths = sorted({shard.size[1] for o in options if o.sharding_type in COLUMN_TYPES for shard in o.shards})
        return (
            f"table {name!r}: its constraints leave column-wise shards only, which TorchRec cuts {widths} columns "
            f"wide, and its TTSpec, with q {self._compression[name].q}, can be cut every {step} columns; set "
            f"min_partition so that widths are multiples of {step}, or allow other sharding types"
        )

    def _may_be_tt(self, option: ShardingOption) -> bool:
        kernels = self._constraints_of(option.name).compute_kernels
        return not kernels or CUSTOMIZED_KERNEL in kernels

    def _check_tables(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> None:
        found: dict[str, None] = {}
        for sharder, _, name, parameter in _tables(module, sharders):
            found[name] = None
            spec = self._compression.get(name)
            if spec is None:
                continue
            spec.check_table(name, *parameter.shape)
            if not isinstance(sharder, TT_SHARDERS):
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
                raise ValueError(
                    f"the compression names table {name!r}, which the model hasn't; it has {_some(found)}"
                    f"{did_you_mean(name, found)}"
                )


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
) -> Iterator[tuple[ModuleSharder[nn.Module], nn.Module, str, nn.Parameter]]:
    """Sharder, module, name and parameter of each table, found as TorchRec's enumerator finds them."""
    by_type = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    queue = [module]
    while queue:
        child = queue.pop()
        sharder = by_type.get(sharder_name(type(child)))
        if sharder is None:
            queue.extend(child.children())
            continue
        for name, parameter in sharder.shardable_parameters(child).items():
            yield sharder, child, name, parameter


def _some(names: Mapping[str, Any], most: int = 10) -> str:
    listed = ", ".join(list(names)[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
