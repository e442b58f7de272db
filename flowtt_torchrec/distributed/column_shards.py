"""Shards of some columns of a table: the same cores, but of the first only the slice that makes those columns.

A column number is read in the mixed radix ``q``, so columns ``[start, start + width)`` with both numbers multiples of
``q_2 ... q_d`` are the values ``[start, start + width) / (q_2 ... q_d)`` of the first core's digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.spec import TTSpec


class ColumnShard(NamedTuple):
    """Columns ``[start, start + width)`` of a table, by its number in the layout of whole tables."""

    table: int
    start: int
    width: int


class ColumnShards:
    """The shards that one rank computes, in a layout of their own.

    Args:
        whole: layout of the whole tables.
        shards: the shards; a table may have several.
        feature_shards: the shard that each feature looks up.

    Attributes:
        layout: of the shards, one table each.
    """

    def __init__(self, whole: TTLayout, shards: Sequence[ColumnShard], feature_shards: Sequence[int]) -> None:
        self._whole = whole
        self._shards = list(shards)
        self.layout = TTLayout(
            [whole.specs[shard.table].narrow(shard.width) for shard in shards],
            [whole.names[shard.table] for shard in shards],
            feature_shards,
            parts=True,
        )

    @torch.no_grad()
    def gather(self, weights: Tensor) -> Tensor:
        """The shards' cores ``[layout.num_parameters]``, copied from those of the whole tables."""
        flat = weights.new_empty(self.layout.num_parameters)
        for part, whole in self._pairs(flat, weights):
            part.copy_(whole)
        return flat

    @torch.no_grad()
    def scatter_add(self, grad: Tensor, into: Tensor) -> None:
        """Adds the gradient of the shards' cores to that of the whole tables', ``[whole.num_parameters]``."""
        for part, whole in self._pairs(grad, into):
            whole.add_(part)

    @torch.no_grad()
    def scatter_touched(self, touched: Tensor, into: Tensor) -> None:
        """Marks the slices of whole tables, bool ``[whole.num_slices]``, that the shards' are parts of."""
        whole = self._whole.slice_views(into)
        for shard, parts in zip(self._shards, self.layout.slice_views(touched)):
            for part, of_core in zip(parts, whole[shard.table]):
                of_core.logical_or_(part)

    def _pairs(self, shard_flat: Tensor, whole_flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        whole = self._whole.core_views(whole_flat)
        pairs: list[tuple[Tensor, Tensor]] = []
        for shard, parts in zip(self._shards, self.layout.core_views(shard_flat)):
            cores = whole[shard.table]
            step = self._whole.specs[shard.table].column_step
            first = cores[0].narrow(2, shard.start // step, shard.width // step)
            pairs += zip(parts, [first, *cores[1:]])
        return pairs


def check_columns(name: str, spec: TTSpec, starts_and_widths: Sequence[tuple[int, int]]) -> None:
    """Raises ``ValueError`` naming the table unless its shards are cut where a tensor train can be."""
    step = spec.column_step
    if any(start % step or width % step for start, width in starts_and_widths):
        raise ValueError(
            f"table {name!r} is cut into columns of widths {[width for _, width in starts_and_widths]}; its TTSpec has "
            f"q {spec.q}, which can be cut every {step} columns: use shards of {_widths(spec)} columns, or another q"
        )


def _widths(spec: TTSpec, most: int = 8) -> str:
    widths = [str(k * spec.column_step) for k in range(1, spec.q[0] + 1)]
    return ", ".join(widths[:most]) + (", ..." if len(widths) > most else "")
