"""Sharding types that TT tables support, as subclasses of TorchRec's that make a TT lookup."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torchrec.distributed.embedding_lookup import BaseEmbeddingLookup
from torchrec.distributed.embedding_types import BaseGroupedFeatureProcessor
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingType

from flowtt_torchrec.distributed.fused_params import TT_TABLES, output_dtype
from flowtt_torchrec.distributed.lookup import (
    TTDpGroupedPooledEmbeddingsLookup,
    TTGroupedPooledEmbeddingsLookup,
    TTSharedGroupedPooledEmbeddingsLookup,
)
from flowtt_torchrec.distributed.tables import TTTables


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


class TTRwPooledEmbeddingSharding(_TTLookups, RwPooledEmbeddingSharding):
    """Row-wise: every rank has all cores and serves its rows for the lookups of all ranks."""

    _sharding_type = ShardingType.ROW_WISE


class TTTwRwPooledEmbeddingSharding(_TTLookups, TwRwPooledEmbeddingSharding):
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
SUPPORTED_SHARDING_TYPES = tuple(SHARDINGS)
ROW_TYPES = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
COLUMN_TYPES = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
HOST_TYPES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
