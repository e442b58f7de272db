"""What a backend of the ops is: the functions that `flowtt_torchrec.ops` calls.

`flowtt_torchrec.reference` defines what they compute; mypy holds all backends to these signatures.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import OptimizerSpec
from flowtt_torchrec.plan import BoundsCheckMode, Flow, FlowPlan, PoolingMode
from flowtt_torchrec.precision import TO_NEAREST


class Backend(Protocol):
    """A module or an object that runs the ops."""

    def flow_plan(
        self,
        layout: TTLayout,
        indices: Tensor,
        offsets: Tensor,
        flow: Flow = Flow.PREFIX,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> FlowPlan: ...

    def check_plan(self, layout: TTLayout, offsets: Tensor, plan: FlowPlan) -> FlowPlan: ...

    def pooled_forward(
        self,
        weights: Tensor,
        layout: TTLayout,
        offsets: Tensor,
        plan: FlowPlan,
        per_sample_weights: Tensor | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
    ) -> Tensor: ...

    def pooled_backward(
        self,
        grad_output: Tensor,
        weights: Tensor,
        layout: TTLayout,
        offsets: Tensor,
        plan: FlowPlan,
        per_sample_weights: Tensor | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        per_sample_weights_grad: bool = False,
    ) -> tuple[Tensor, Tensor]: ...

    def pooled_backward_update(
        self,
        grad_output: Tensor,
        weights: Tensor,
        momentum1: Tensor | None,
        momentum2: Tensor | None,
        layout: TTLayout,
        offsets: Tensor,
        plan: FlowPlan,
        optimizer: OptimizerSpec,
        per_sample_weights: Tensor | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        per_sample_weights_grad: bool = False,
        steps: Tensor | None = None,
        rounding_seed: int = TO_NEAREST,
        learning_rate: Tensor | None = None,
    ) -> Tensor: ...

    def synchronize(self, device: torch.device | None = None) -> None: ...

    def release_memory(self) -> None: ...
