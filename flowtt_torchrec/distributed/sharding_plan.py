"""Entries of a plan made by hand, for ``torchrec.distributed.sharding_plan.construct_module_sharding_plan``."""

from __future__ import annotations

from typing import Any

from torchrec.distributed import sharding_plan
from torchrec.distributed.sharding_plan import ParameterShardingGenerator
from torchrec.distributed.types import ParameterSharding, ShardingType

from flowtt_torchrec.distributed.sharding_types import CUSTOMIZED_KERNEL


def table_wise(rank: int, device: str | None = None) -> ParameterShardingGenerator:
    """A TT table on one rank; otherwise as TorchRec's ``table_wise``."""
    kernel = CUSTOMIZED_KERNEL
    return sharding_plan.table_wise(rank=rank, device=device, compute_kernel=kernel)


def data_parallel() -> ParameterShardingGenerator:
    """A TT table on every rank; otherwise as TorchRec's ``data_parallel``."""
    return _customized(sharding_plan.data_parallel())


def row_wise(sizes_placement: tuple[list[int], str | list[str]] | None = None) -> ParameterShardingGenerator:
    """A TT table whose rows are served by all ranks; otherwise as TorchRec's ``row_wise``."""
    return _customized(sharding_plan.row_wise(sizes_placement))


def table_row_wise(host_index: int) -> ParameterShardingGenerator:
    """A TT table whose rows are served by the ranks of a host; otherwise as TorchRec's ``table_row_wise``."""
    return _customized(sharding_plan.table_row_wise(host_index=host_index))


def column_wise(ranks: list[int] | None = None, size_per_rank: list[int] | None = None) -> ParameterShardingGenerator:
    """A TT table whose columns are served by several ranks, in shards of whole ``TTSpec.column_step``.

    Otherwise as TorchRec's ``column_wise``: ``ranks`` for shards of equal width, or the width of each rank's.
    """
    return _customized(sharding_plan.column_wise(ranks=ranks, size_per_rank=size_per_rank))


def table_column_wise(ranks: list[int]) -> ParameterShardingGenerator:
    """As `column_wise`, in TorchRec's sharding type for the ranks of one host."""
    return _customized(sharding_plan.column_wise(ranks=ranks), ShardingType.TABLE_COLUMN_WISE)


def _customized(
    generate: ParameterShardingGenerator, sharding_type: ShardingType | None = None
) -> ParameterShardingGenerator:
    def generate_tt(*args: Any, **kwargs: Any) -> ParameterSharding:
        sharding = generate(*args, **kwargs)
        sharding.compute_kernel = CUSTOMIZED_KERNEL
        if sharding_type is not None:
            sharding.sharding_type = sharding_type.value
        return sharding

    return generate_tt
