"""The kernel of row-wise and column-wise tables, whose cores several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType

from flowtt_torchrec.deferred import deferred_lookup
from flowtt_torchrec.distributed.column_shards import ColumnShard, ColumnShards
from flowtt_torchrec.distributed.gradient_sync import CoreGradientSync, SharedTable
from flowtt_torchrec.distributed.kernel import TTFusedEmbeddingBag
from flowtt_torchrec.optimizers import touched_slices


class TTSharedEmbeddingBag(TTFusedEmbeddingBag):
    """TT tables of which this rank computes some rows or columns, with all of their cores.

    A shard of rows gets row numbers of its own and adds its first row to them. A shard of columns is looked up with a
    part of the first core; see `ColumnShards`. A table may have several shards here. Backward leaves the gradient of
    the cores with a `CoreGradientSync`, which sums it over the ranks and has every rank make the same step.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        whole = self._emb_module.layout
        shards: list[ColumnShard] = []
        feature_shards: list[int] = []
        first_rows: list[int] = []
        for i, table in enumerate(config.embedding_tables):
            assert table.local_metadata is not None
            row, column = table.local_metadata.shard_offsets
            shards.append(ColumnShard(whole.names.index(table.name), column, table.local_cols))
            feature_shards += [i] * len(table.feature_names)
            first_rows += [row] * len(table.feature_names)
        whole_tables = all(shard.width == whole.specs[shard.table].embedding_dim for shard in shards)
        self._columns = None if whole_tables else ColumnShards(whole, shards, feature_shards)
        self._first_rows = torch.tensor(first_rows, device=device) if any(first_rows) else None
        self._sync: CoreGradientSync | None = None
        self._grad: Tensor | None = None
        self._touched: Tensor | None = None

    def share(self, sync: CoreGradientSync) -> None:
        """Tells who sums the gradients; once, before the first backward."""
        self._sync = sync

    def _lookup(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        bags = self._emb_module
        bags.set_learning_rate(self._optim.learning_rate)
        layout = bags.layout if self._columns is None else self._columns.layout
        if self._first_rows is not None and indices.numel():
            lookups = offsets[:: (offsets.numel() - 1) // layout.num_features].diff()
            indices = indices + self._first_rows.repeat_interleave(lookups, output_size=indices.numel())
        assert bags.optimizer is not None
        return deferred_lookup(
            bags.weights,
            layout,
            indices,
            offsets,
            read=self._lookup_weights,
            leave=self._leave,
            with_row_keys=bags.optimizer.needs_touched,
            per_sample_weights=weights,
            pooling=self._pooling,
            bounds_check_mode=self._bounds_check_mode,
        )

    def _lookup_weights(self) -> Tensor:
        weights = self._emb_module.weights.detach()
        if self._columns is not None:
            return self._columns.gather(weights)
        return weights.clone() if self._tables.keep_forward_weights else weights

    @torch.no_grad()
    def _leave(self, grad: Tensor, row_keys: Tensor | None) -> None:
        """Adds to the pending gradient; a model may look up several times before it goes backward."""
        whole = self._emb_module.layout
        if self._grad is None:
            self._grad = torch.zeros_like(self._emb_module.weights, dtype=grad.dtype)
        if self._columns is None:
            self._grad.add_(grad)
        else:
            self._columns.scatter_add(grad, self._grad)
        if row_keys is not None:
            if self._touched is None:
                self._touched = torch.zeros(whole.num_slices, dtype=torch.bool, device=grad.device)
            if self._columns is None:
                self._touched |= touched_slices(whole, row_keys)
            else:
                self._columns.scatter_touched(touched_slices(self._columns.layout, row_keys), self._touched)
        if self._sync is None:
            raise RuntimeError(f"{self._named}: these tables are shared by ranks, but nothing sums their gradients")
        self._sync.schedule(self)

    def pending(self) -> Sequence[SharedTable]:
        if self._grad is None:
            return []
        layout = self._emb_module.layout
        grads = self._grad.split([spec.num_parameters for spec in layout.specs])
        touched: Sequence[Tensor | None] = [None] * layout.num_tables
        if self._touched is not None:
            touched = self._touched.split([spec.num_slices for spec in layout.specs])
        return [SharedTable(*of_table) for of_table in zip(layout.names, grads, touched)]

    def step(self) -> None:
        if self._grad is not None:
            self._emb_module.apply_gradient(self._grad, self._touched)
            self._grad = self._touched = None
