"""Sharding types that TT tables support, and their lookups: TorchRec's, with a TT kernel for groups of TT tables."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import BaseEmbeddingLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist
from torchrec.distributed.embedding_types import (
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flowtt_torchrec.distributed.fused_params import TT_TABLES, output_dtype
from flowtt_torchrec.distributed.kernel import TTDenseEmbeddingBag, TTFusedEmbeddingBag, TTKernel
from flowtt_torchrec.distributed.shared_kernel import TTSharedEmbeddingBag
from flowtt_torchrec.distributed.tables import TTTables, name_tables
from flowtt_torchrec.distributed.variable_batch import merge_groups


@dataclass
class TTParameterSharding(ParameterSharding):
    """An entry of a plan that carries the collection's TT tables to the kernel."""

    tt_tables: TTTables | None = None

    @classmethod
    def wrap(cls, sharding: ParameterSharding, tables: TTTables) -> TTParameterSharding:
        """A copy of a plan's entry, which other ranks and runs may share, with the tables."""
        values = {field.name: getattr(sharding, field.name) for field in fields(ParameterSharding)}
        return cls(**values, tt_tables=tables)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Called by TorchRec for tables of the customised kernel only; dense tables never see these."""
        return {TT_TABLES: self.tt_tables}


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


class _TTLookups:
    """Makes the TT lookup of a sharding type; a mix-in in front of TorchRec's class of the type."""

    _lookup_class: type[TTGroupedPooledEmbeddingsLookup] = TTSharedGroupedPooledEmbeddingsLookup
    _sharding_type: ShardingType | None = None  # given for row-wise types: means become sums, which TorchRec divides
    _scale_weight_gradients = True

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        of_ranks = self._grouped_embedding_configs_per_rank  # type: ignore[attr-defined]
        lookup = self._lookup_class(
            grouped_configs=of_ranks[self._env.rank],  # type: ignore[attr-defined]
            pg=self._env.process_group,  # type: ignore[attr-defined]
            device=device if device is not None else self._device,  # type: ignore[attr-defined]
            feature_processor=feature_processor,
            scale_weight_gradients=self._scale_weight_gradients,
            sharding_type=self._sharding_type,
            env=self._env,  # type: ignore[attr-defined]
        )
        placed = [config for of_rank in of_ranks for config in of_rank]
        if placed and not of_ranks[self._env.rank]:  # type: ignore[attr-defined]
            # TorchRec's stand-in for the output is float32, which the exchange would mix with what other ranks send.
            stand_in = lookup._dummy_embs_tensor
            lookup._dummy_embs_tensor = torch.empty(
                0, dtype=output_dtype(placed[0].fused_params, "tables"), device=stand_in.device, requires_grad=True
            )
        return lookup


class TTTwPooledEmbeddingSharding(_TTLookups, TwPooledEmbeddingSharding):
    """Table-wise: a table's cores live on one rank, which serves the lookups of all ranks."""

    _lookup_class = TTGroupedPooledEmbeddingsLookup


class TTDpPooledEmbeddingSharding(_TTLookups, DpPooledEmbeddingSharding):
    """Data-parallel: every rank has all cores and serves its own lookups; only core gradients travel."""

    _lookup_class = TTDpGroupedPooledEmbeddingsLookup
    _scale_weight_gradients = False  # only all-to-all divides gradients by the number of ranks


class TTCwPooledEmbeddingSharding(_TTLookups, CwPooledEmbeddingSharding):
    """Column-wise: a rank has all cores and serves its columns for the lookups of all ranks."""


class TTTwCwPooledEmbeddingSharding(_TTLookups, TwCwPooledEmbeddingSharding):
    """Column-wise within a host."""


class _EvenBatches:
    """Tells of batches that gloo's exchange of row-wise gradients cannot take; a mix-in of row-wise types."""

    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[Any, Any, Any]:
        made = super().create_output_dist(device)  # type: ignore[misc]
        if dist.get_backend(self._env.process_group) == "gloo":  # type: ignore[attr-defined]
            made.register_forward_pre_hook(self._check_batches)
        return made

    def _check_batches(self, module: BaseEmbeddingDist[Any, Any, Any], args: tuple[Any, ...]) -> None:
        rows, context = args[0], args[1] if len(args) > 1 else None
        if context is None or not rows.requires_grad:
            return
        sizes = context.batch_size_per_rank
        if context.variable_batch_per_feature:
            dims = self.embedding_dims()  # type: ignore[attr-defined]
            sizes = [sum(map(operator.mul, of_rank, dims)) for of_rank in context.batch_size_per_rank_per_feature]
        if len(set(sizes)) > 1:
            of_ranks = self._grouped_embedding_configs_per_rank  # type: ignore[attr-defined]
            groups = (group for of_rank in of_ranks for group in of_rank)
            names = dict.fromkeys(table.name for group in groups for table in group.embedding_tables)
            raise ValueError(
                f"{name_tables(names)}: with gloo row-wise tables train on batches of one size on all ranks, not on "
                f"{sizes}; leave an uneven last batch out (drop_last), or constrain the tables to other sharding types"
            )


class TTRwPooledEmbeddingSharding(_EvenBatches, _TTLookups, RwPooledEmbeddingSharding):
    """Row-wise: every rank has all cores and serves its rows for the lookups of all ranks."""

    _sharding_type = ShardingType.ROW_WISE


class TTTwRwPooledEmbeddingSharding(_EvenBatches, _TTLookups, TwRwPooledEmbeddingSharding):
    """Row-wise within a host."""

    _sharding_type = ShardingType.TABLE_ROW_WISE


SHARDINGS: dict[str, Any] = {
    ShardingType.TABLE_WISE.value: TTTwPooledEmbeddingSharding,
    ShardingType.DATA_PARALLEL.value: TTDpPooledEmbeddingSharding,
    ShardingType.ROW_WISE.value: TTRwPooledEmbeddingSharding,
    ShardingType.TABLE_ROW_WISE.value: TTTwRwPooledEmbeddingSharding,
    ShardingType.COLUMN_WISE.value: TTCwPooledEmbeddingSharding,
    ShardingType.TABLE_COLUMN_WISE.value: TTTwCwPooledEmbeddingSharding,
}
