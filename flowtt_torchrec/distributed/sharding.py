"""Sharding types that TT tables support, as subclasses of TorchRec's that make a TT lookup."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torchrec.distributed.embedding_lookup import BaseEmbeddingLookup
from torchrec.distributed.embedding_types import BaseGroupedFeatureProcessor
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingType

from flowtt_torchrec.distributed.fused_params import TT_TABLES
from flowtt_torchrec.distributed.lookup import TTDpGroupedPooledEmbeddingsLookup, TTGroupedPooledEmbeddingsLookup
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


class TTTwPooledEmbeddingSharding(TwPooledEmbeddingSharding):
    """Table-wise: a table's cores live on one rank, which serves the lookups of all ranks."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        return TTGroupedPooledEmbeddingsLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            env=self._env,
        )


class TTDpPooledEmbeddingSharding(DpPooledEmbeddingSharding):
    """Data-parallel: every rank has all cores and serves its own lookups; only core gradients travel."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        return TTDpGroupedPooledEmbeddingsLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            scale_weight_gradients=False,  # only all-to-all divides gradients by the number of ranks
            env=self._env,
        )


SHARDINGS: dict[str, type[TTTwPooledEmbeddingSharding] | type[TTDpPooledEmbeddingSharding]] = {
    ShardingType.TABLE_WISE.value: TTTwPooledEmbeddingSharding,
    ShardingType.DATA_PARALLEL.value: TTDpPooledEmbeddingSharding,
}
SUPPORTED_SHARDING_TYPES = tuple(SHARDINGS)
