"""Lookups: TorchRec's grouped lookup, with a TT kernel for the groups of TT tables."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flowtt_torchrec.distributed.kernel import TTDenseEmbeddingBag, TTFusedEmbeddingBag, TTKernel
from flowtt_torchrec.distributed.shared_kernel import TTSharedEmbeddingBag
from flowtt_torchrec.distributed.tables import name_tables
from flowtt_torchrec.distributed.variable_batch import merge_groups


class TTGroupedPooledEmbeddingsLookup(GroupedPooledEmbeddingsLookup):
    """Lookup of table-wise tables; dense groups keep TorchRec's kernels."""

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

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """As in TorchRec, but with a batch size per feature (VBE) the outputs of several groups are concatenated.

        TorchRec hands one output buffer from kernel to kernel, which FBGEMM's CPU kernels don't support.
        """
        tt = any(isinstance(kernel, TTKernel) for kernel in self._emb_modules)
        if not tt or len(self._emb_modules) == 1 or not sparse_features.variable_stride_per_key():
            return super().forward(sparse_features)
        groups = sparse_features.split(self._feature_splits)
        outputs = self._forward(groups)
        for config, output in zip(self.grouped_configs, outputs):
            if output.dim() != 1:
                names = name_tables(table.name for table in config.embedding_tables)
                raise NotImplementedError(
                    f"{names}: TorchRec's {config.compute_kernel.value} kernel has no batch size per feature (VBE) on "
                    f"{output.device.type}; place dense tables table_wise, or give the features one batch size"
                )
        dims = [config.embedding_dims() for config in self.grouped_configs]
        return merge_groups(outputs, dims, [group.stride_per_key_per_rank() for group in groups])


class TTSharedGroupedPooledEmbeddingsLookup(TTGroupedPooledEmbeddingsLookup):
    """Lookup of row-wise and column-wise tables."""

    tt_kernel = TTSharedEmbeddingBag


class TTDpGroupedPooledEmbeddingsLookup(TTGroupedPooledEmbeddingsLookup):
    """Lookup of data-parallel tables."""

    tt_kernel = TTDenseEmbeddingBag
