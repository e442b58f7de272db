"""A lookup that hands the gradient of its cores to a function, which makes the step in its own way and time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowtt_torchrec import ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.reference import BoundsCheckMode


def deferred_lookup(
    weights: Tensor,
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
    """Pooled rows as `ops.lookup` has them; ``weights.grad`` stays ``None``.

    Args:
        weights: the parameter that is trained; only whether it requires a gradient matters.
        layout: of the tables that are looked up.
        read: gives their cores ``[layout.num_parameters]``, at which the gradient is taken too.
        leave: is given that gradient in backward, and the keys of the rows that were looked up.
        with_row_keys: whether ``leave`` needs the keys; on a GPU they wait for the device.
    """
    plan = ops.flow_plan(layout, indices, offsets, bounds_check_mode=bounds_check_mode)
    row_keys = plan.row_keys[: int(plan.counts[0])] if with_row_keys else None
    return ops.pooled_lookup(
        _LeaveGradient.apply(weights, read, leave, row_keys),
        layout,
        offsets,
        plan,
        per_sample_weights=per_sample_weights,
        pooling=pooling,
    )


class _LeaveGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        read: Callable[[], Tensor],
        leave: Callable[[Tensor, Tensor | None], None],
        row_keys: Tensor | None,
    ) -> Tensor:
        ctx.leave, ctx.row_keys = leave, row_keys
        return read()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.leave(grad, ctx.row_keys)
        return None, None, None, None
