"""A lookup that hands the gradient of its cores to a function, which makes the step in its own way and time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowtt_torchrec import ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.plan import BoundsCheckMode, FlowPlan


def deferred_lookup(
    trained: Tensor,
    layout: TTLayout,
    indices: Tensor,
    offsets: Tensor,
    *,
    read: Callable[[], Tensor],
    leave: Callable[[Tensor, Tensor | None], None],
    with_row_keys: bool,
    per_sample_weights: Tensor | None = None,
    pooling: str = "sum",
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
) -> Tensor:
    """Pooled rows as `ops.lookup` has them.

    Args:
        trained: requires a gradient, and gets none: it only brings backward here.
        layout: of the tables that are looked up.
        read: gives their cores ``[layout.num_parameters]``, at which the gradient is taken too.
        leave: is given that gradient in backward, not rounded to the weights' type, and the keys of the rows that were
            looked up.
        with_row_keys: whether ``leave`` needs the keys; on a GPU they wait for the device.
    """

    def collect(grad: Tensor, plan: FlowPlan) -> None:
        leave(grad, plan.row_keys[: int(plan.counts[0])] if with_row_keys else None)

    return ops.collected_lookup(
        trained,
        read(),
        layout,
        indices,
        offsets,
        collect=collect,
        per_sample_weights=per_sample_weights,
        pooling=pooling,
        bounds_check_mode=bounds_check_mode,
    )


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
