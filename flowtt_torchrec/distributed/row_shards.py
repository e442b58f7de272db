"""Shards of some rows of a table: the row numbers that the user gave, from those that TorchRec sends to a shard.

TorchRec cuts a table into blocks of ``ceil(rows / shards)`` rows and sends an id to shard ``id // block``, as
``id % block``. An id past the blocks goes to shard ``id % shards``, as ``id // shards``, and so does a negative one, as
the unsigned number of the same bits (FBGEMM's ``block_bucketize_sparse_features``). Such a quotient is never smaller
than a block, so that both can be told apart and undone. What a lookup checks, and names in its errors, is thus the id
that the user gave, and an id that the table does not have is not taken for one of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import ShardedEmbeddingTable


class _Blocks(NamedTuple):
    """How a table is cut into rows, and which of the shards is here."""

    shards: int
    shard: int
    rows: int


class RowShards:
    """The row shards that one rank computes, all cut into as many parts.

    Args:
        tables: a table for each shard, as TorchRec's lookup has them.
        device: of the row numbers.
    """

    def __init__(self, tables: Sequence[ShardedEmbeddingTable], device: torch.device | None) -> None:
        blocks = [blocks for table in tables for blocks in [_blocks(table)] * len(table.feature_names)]
        [(self._shards, self._shard)] = {(of_feature.shards, of_feature.shard) for of_feature in blocks}
        self._rows = torch.tensor([of_feature.rows for of_feature in blocks], device=device)

    def row_numbers(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """The ids that the user gave.

        Args:
            indices: int32 or int64 ``[N]``, as TorchRec sent them, feature by feature.
            offsets: ``[num_features * batch_size + 1]``, first lookup of each bag, then ``N``.

        Returns:
            int64 ``[N]``.
        """
        if self._shards == 1 or not indices.numel():
            return indices
        lookups = offsets[:: (offsets.numel() - 1) // self._rows.numel()].diff()
        rows = self._rows.repeat_interleave(lookups, output_size=indices.numel())
        # The product wraps around in the ids' own type, as the unsigned number of a negative id did.
        return torch.where(indices < rows, indices + self._shard * rows, indices * self._shards + self._shard)


def _blocks(table: ShardedEmbeddingTable) -> _Blocks:
    assert table.global_metadata is not None
    assert table.local_metadata is not None
    shards = table.global_metadata.shards_metadata
    rows = -(-table.num_embeddings // len(shards))
    return _Blocks(len(shards), shards.index(table.local_metadata), rows)
