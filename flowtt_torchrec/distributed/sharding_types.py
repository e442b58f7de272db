"""Names of sharding types and of the compute kernel, as a plan spells them."""

from __future__ import annotations

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

CUSTOMIZED_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value

DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
ROW_TYPES = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
COLUMN_TYPES = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
HOST_TYPES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
SUPPORTED_SHARDING_TYPES = (
    ShardingType.TABLE_WISE.value,
    DATA_PARALLEL,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
)
