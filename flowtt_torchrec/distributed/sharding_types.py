"""Names of sharding types and of the compute kernel, as a plan spells them."""

from __future__ import annotations

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

CUSTOMIZED_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value


class _KernelOfOurPlanner(str):
    """A kernel's name; in a planner's message that it does not know it, it says which planner does."""

    def __format__(self, spec: str) -> str:
        return f"{super().__format__(spec)} (of a tensor-train table: plan with TTEmbeddingShardingPlanner)"


TT_KERNEL = _KernelOfOurPlanner(CUSTOMIZED_KERNEL)  # what sharders offer

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
