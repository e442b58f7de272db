"""Entries of a plan made by hand, for ``torchrec.distributed.sharding_plan.construct_module_sharding_plan``."""

from __future__ import annotations

from typing import Any

from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import ParameterShardingGenerator
from torchrec.distributed.types import ParameterSharding


def table_wise(rank: int, device: str | None = None) -> ParameterShardingGenerator:
    """A TT table on one rank; otherwise as TorchRec's ``table_wise``."""
    kernel = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
    return sharding_plan.table_wise(rank=rank, device=device, compute_kernel=kernel)


def data_parallel() -> ParameterShardingGenerator:
    """A TT table on every rank; otherwise as TorchRec's ``data_parallel``."""
    generate = sharding_plan.data_parallel()

    def generate_tt(*args: Any, **kwargs: Any) -> ParameterSharding:
        sharding = generate(*args, **kwargs)
        sharding.compute_kernel = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
        return sharding

    return generate_tt
