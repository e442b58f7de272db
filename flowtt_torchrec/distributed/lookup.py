"""Lookups: TorchRec's grouped lookup, with a TT kernel for the groups of TT tables."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType

from flowtt_torchrec.distributed.kernel import TTDenseEmbeddingBag, TTFusedEmbeddingBag, TTKernel


class TTGroupedPooledEmbeddingsLookup(GroupedPooledEmbeddingsLookup):
    """Lookup of a model-parallel sharding type; dense groups keep TorchRec's kernels."""

    tt_kernel: type[TTKernel] = TTFusedEmbeddingBag

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        if config.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return super()._create_embedding_kernel(config, device, pg, sharding_type, env)
        return self.tt_kernel(config=config, pg=pg, device=device, sharding_type=sharding_type)


class TTDpGroupedPooledEmbeddingsLookup(TTGroupedPooledEmbeddingsLookup):
    """Lookup of data-parallel tables."""

    tt_kernel = TTDenseEmbeddingBag
