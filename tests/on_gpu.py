"""The compiled CUDA ops on a GPU, for tests that hold CPU tensors: arguments go there, results come back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowtt_torchrec.compiled import CompiledOps
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.plan import FlowPlan


class OpsOnDevice:
    """A backend like ``ops`` for tensors of another device.

    Args:
        ops: what runs on ``device``.
        device: where to.
    """

    def __init__(self, ops: CompiledOps, device: str) -> None:
        self._ops = ops
        self._device = device

    def _there(self, value: Any) -> Any:
        if isinstance(value, FlowPlan):
            return FlowPlan(*(tensor.to(self._device) for tensor in value))
        return value.to(self._device) if isinstance(value, Tensor) else value

    def flow_plan(self, layout: TTLayout, *args: Any) -> FlowPlan:
        return FlowPlan(*(tensor.cpu() for tensor in self._ops.flow_plan(layout, *map(self._there, args))))

    def synchronize(self, device: torch.device | None = None) -> None:
        self._ops.synchronize(device)

    def pooled_forward(self, *args: Any) -> Tensor:
        return self._ops.pooled_forward(*map(self._there, args)).cpu()

    def pooled_backward(self, *args: Any) -> tuple[Tensor, Tensor]:
        first, second = self._ops.pooled_backward(*map(self._there, args))
        return first.cpu(), second.cpu()

    def pooled_backward_update(
        self, grad_output: Tensor, weights: Tensor, momentum1: Tensor | None, momentum2: Tensor | None, *args: Any
    ) -> Tensor:
        moved = [self._there(value) for value in (grad_output, weights, momentum1, momentum2)]
        gradient = self._ops.pooled_backward_update(*moved, *map(self._there, args))
        with torch.no_grad():
            for to, value in zip((weights, momentum1, momentum2), moved[1:]):
                if to is not None:
                    to.copy_(value)
        return gradient.cpu()
