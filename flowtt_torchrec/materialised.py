"""Rows made once and kept, for lookups without gradients of cores that do not change: the fast path of inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowtt_torchrec import ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.lookup_costs import MEASURED, Constants, estimate, table_counts
from flowtt_torchrec.plan import BoundsCheckMode
from flowtt_torchrec.precision import compute_dtype
from flowtt_torchrec.reference import check_offsets, check_rows
from flowtt_torchrec.whole_numbers import whole_number

_ROWS_AT_ONCE = 131_072
CHOICES = ("auto", "prefix", "materialised")


class MaterialisedRows:
    """Looks up rows of small or much used tables in memory, those of all others by their flows.

    With ``"auto"`` a table's rows are made as soon as its lookups so far would have saved more time than making them
    takes, by `flowtt_torchrec.lookup_costs`, the best use of the memory first: in total never more than twice the time
    of the better choice. Rows are dropped at the first lookup that finds the weights changed, by torch's version
    counter: what writes through ``weights.data`` or from another process must call `clear`.

    Not for several threads at once, nor for weights made in ``torch.inference_mode``, which have no version.

    Args:
        max_bytes: the most that kept rows may take.
        strategy: ``"auto"``; ``"materialised"``: rows of as many tables as fit, smallest first, at the first lookup;
            ``"prefix"``: of none.
        constants: of the cost model.

    Raises:
        ValueError: for an unknown strategy or negative ``max_bytes``.
    """

    def __init__(self, max_bytes: int, strategy: str = "auto", constants: Constants = MEASURED) -> None:
        if strategy not in CHOICES:
            raise ValueError(f"unknown strategy {strategy!r}; known: {', '.join(CHOICES)}")
        max_bytes = whole_number("max_bytes", max_bytes, least=0)
        self.max_bytes, self.strategy, self.constants = max_bytes, strategy, constants
        self.clear()

    def __reduce__(self) -> tuple[Callable[..., MaterialisedRows], tuple[Any, ...]]:
        return MaterialisedRows, (self.max_bytes, self.strategy, self.constants)  # copies keep no rows

    def clear(self) -> None:
        """Drops all rows, and what is known of the lookups so far."""
        self._rows: dict[int, Tensor] = {}  # by table
        self._saved: dict[int, float] = {}  # ns that rows of a table would have saved so far
        self._weights: Tensor | None = None
        self._version = -1

    @property
    def num_bytes(self) -> int:
        """What the kept rows take."""
        return sum(rows.nbytes for rows in self._rows.values())

    def strategies(self, layout: TTLayout) -> dict[str, str]:
        """``"prefix"`` or ``"materialised"`` for each table, as the next lookup will have it if no weight changes."""
        return {name: "materialised" if t in self._rows else "prefix" for t, name in enumerate(layout.names)}

    @torch.no_grad()
    def lookup(
        self,
        weights: Tensor,
        layout: TTLayout,
        indices: Tensor,
        offsets: Tensor,
        *,
        per_sample_weights: Tensor | None = None,
        pooling: str = "sum",
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> Tensor:
        """As `flowtt_torchrec.ops.lookup`, without gradients."""
        if weights is not self._weights or weights._version != self._version:
            self.clear()
            self._weights, self._version = weights, weights._version
            if self.strategy == "materialised":
                for table in sorted(range(layout.num_tables), key=lambda t: _row_bytes(t, weights, layout)):
                    self._keep(table, weights, layout)
        options = {"pooling": pooling, "bounds_check_mode": bounds_check_mode}
        if not self._rows:
            return self._by_flows(weights, layout, indices, offsets, per_sample_weights, options)
        batch_size = check_offsets(layout, indices.numel(), offsets)
        starts = layout.feature_starts(offsets)
        if not _in_range(layout, indices, starts):
            bags = torch.arange(offsets.numel() - 1, device=offsets.device).repeat_interleave(offsets.diff())
            indices = check_rows(layout, indices, bags, batch_size, bounds_check_mode)[1].to(indices.dtype)
        kept = [f for f, table in enumerate(layout.feature_tables) if table in self._rows]
        others = [f for f, table in enumerate(layout.feature_tables) if table not in self._rows]
        outputs: dict[int, Tensor] = {}
        for f in kept:
            own = slice(starts[f], starts[f + 1])
            bags = offsets[f * batch_size : (f + 1) * batch_size + 1] - starts[f]
            factors = None if per_sample_weights is None else per_sample_weights[own]
            outputs[f] = _gather(self._rows[layout.feature_tables[f]], indices[own], bags, factors, pooling)
        if others:
            part = TTLayout(layout.specs, layout.names, [layout.feature_tables[f] for f in others])
            own_indices = torch.cat([indices[starts[f] : starts[f + 1]] for f in others])
            lengths = offsets.diff().view(layout.num_features, batch_size)[others].flatten()
            own_offsets = F.pad(lengths.cumsum(0), (1, 0))
            factors = None
            if per_sample_weights is not None:
                factors = torch.cat([per_sample_weights[starts[f] : starts[f + 1]] for f in others])
            output = self._by_flows(weights, part, own_indices, own_offsets, factors, options)
            outputs.update(zip(others, output.split(part.feature_dims, dim=1)))
        return outputs[0] if len(outputs) == 1 else torch.cat([outputs[f] for f in range(layout.num_features)], dim=1)

    def _by_flows(
        self,
        weights: Tensor,
        layout: TTLayout,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        plan = ops.flow_plan(layout, indices, offsets, bounds_check_mode=options["bounds_check_mode"])
        output = ops.pooled_lookup(
            weights, layout, offsets, plan, per_sample_weights=per_sample_weights, pooling=options["pooling"]
        )
        if self.strategy == "auto":
            self._account(weights, layout, offsets, plan)
        return output

    def _account(self, weights: Tensor, layout: TTLayout, offsets: Tensor, plan: ops.FlowPlan) -> None:
        """Adds up what rows would have saved, and makes those that have paid for themselves."""
        if not any(self._fits(table, weights, layout) for table in set(layout.feature_tables)):
            return
        due = []
        for table, counts in enumerate(table_counts(layout, offsets, plan)):
            if counts.lookups == 0 or not self._fits(table, weights, layout):
                continue
            cost = estimate(layout.names[table], layout.specs[table], counts, self.constants)
            saved = cost.nanoseconds["prefix"] - cost.nanoseconds["materialised"]
            self._saved[table] = self._saved.get(table, 0.0) + saved
            if self._saved[table] >= cost.make_rows:
                due.append((self._saved[table] / cost.row_bytes, table))
        for _, table in sorted(due, reverse=True):
            self._keep(table, weights, layout)

    def _fits(self, table: int, weights: Tensor, layout: TTLayout) -> bool:
        return self.num_bytes + _row_bytes(table, weights, layout) <= self.max_bytes

    def _keep(self, table: int, weights: Tensor, layout: TTLayout) -> None:
        if not self._fits(table, weights, layout):
            return
        alone = TTLayout(layout.specs, layout.names, [table])
        every = torch.arange(layout.specs[table].num_embeddings, device=weights.device)
        rows = weights.new_empty(every.numel(), alone.total_dim, dtype=compute_dtype(weights.dtype))
        for ids, piece in zip(every.split(_ROWS_AT_ONCE), rows.split(_ROWS_AT_ONCE)):
            piece.copy_(ops.lookup(weights, alone, ids, _one_each(ids)))
        self._rows[table] = rows


def _one_each(ids: Tensor) -> Tensor:
    """Offsets of bags of one lookup each."""
    return torch.arange(ids.numel() + 1, device=ids.device)


def _row_bytes(table: int, weights: Tensor, layout: TTLayout) -> int:
    spec = layout.specs[table]
    return spec.num_embeddings * spec.embedding_dim * max(4, weights.element_size())


def _in_range(layout: TTLayout, indices: Tensor, starts: list[int]) -> bool:
    for f, table in enumerate(layout.feature_tables):
        if starts[f] == starts[f + 1]:
            continue
        low, high = indices[starts[f] : starts[f + 1]].aminmax()
        if int(low) < 0 or int(high) >= layout.specs[table].num_embeddings:
            return False
    return True


def _gather(rows: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None, pooling: str) -> Tensor:
    offsets = offsets.to(indices.dtype)
    if factors is None:
        return F.embedding_bag(indices, rows, offsets, mode=pooling, include_last_offset=True)
    output = F.embedding_bag(
        indices, rows, offsets, mode="sum", include_last_offset=True, per_sample_weights=factors.to(rows.dtype)
    )
    return output if pooling == "sum" else output / offsets.diff().clamp(min=1)[:, None]
