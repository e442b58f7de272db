"""The compiled library: loading it, and its fake kernels and gradients.

The library holds the ops' schemas and kernels and knows nothing of Python; the rest is registered here when it loads.
The functions below take the same arguments and return the same values as those of `flowtt_torchrec.reference`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import KINDS, OptimizerSpec
from flowtt_torchrec.reference import BoundsCheckMode, Flow, FlowPlan, PoolingMode, check_rows

_ops = torch.ops.flowtt


def flow_plan(
    layout: TTLayout,
    indices: Tensor,
    offsets: Tensor,
    flow: Flow = Flow.PREFIX,
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
) -> FlowPlan:
    plan = FlowPlan(
        *_ops.flow_plan(
            layout.tables,
            layout.table_names,
            layout.features,
            indices.contiguous(),
            offsets.contiguous(),
            int(flow),
            int(bounds_check_mode),
        )
    )
    # Only this mode waits for the plan: the library has no way to warn.
    if bounds_check_mode == BoundsCheckMode.WARNING and int(plan.counts[2]):
        batch_size = (offsets.numel() - 1) // layout.num_features
        check_rows(layout, indices, plan.bags.long(), batch_size, bounds_check_mode)
    return plan


def pooled_forward(
    weights: Tensor,
    layout: TTLayout,
    offsets: Tensor,
    plan: FlowPlan,
    per_sample_weights: Tensor | None = None,
    pooling_mode: PoolingMode = PoolingMode.SUM,
) -> Tensor:
    return _ops.pooled_forward(
        weights,
        layout.tables,
        layout.features,
        offsets.contiguous(),
        *plan,
        _contiguous(per_sample_weights),
        layout.total_dim,
        int(pooling_mode),
    )


def pooled_backward(
    grad_output: Tensor,
    weights: Tensor,
    layout: TTLayout,
    offsets: Tensor,
    plan: FlowPlan,
    per_sample_weights: Tensor | None = None,
    pooling_mode: PoolingMode = PoolingMode.SUM,
    per_sample_weights_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    return _ops.pooled_backward(
        grad_output.contiguous(),  # a sum's gradient comes expanded, with strides of 0
        weights,
        layout.tables,
        layout.features,
        offsets.contiguous(),
        *plan,
        _contiguous(per_sample_weights),
        int(pooling_mode),
        per_sample_weights_grad,
    )


def pooled_backward_update(
    grad_output: Tensor,
    weights: Tensor,
    momentum1: Tensor | None,
    layout: TTLayout,
    offsets: Tensor,
    plan: FlowPlan,
    optimizer: OptimizerSpec,
    per_sample_weights: Tensor | None = None,
    pooling_mode: PoolingMode = PoolingMode.SUM,
    per_sample_weights_grad: bool = False,
) -> Tensor:
    return _ops.pooled_backward_update(
        grad_output.contiguous(),
        weights,
        momentum1,
        layout.tables,
        layout.features,
        offsets.contiguous(),
        *plan,
        _contiguous(per_sample_weights),
        int(pooling_mode),
        per_sample_weights_grad,
        KINDS.index(optimizer.kind),
        optimizer.learning_rate,
        optimizer.eps,
        optimizer.weight_decay,
    )


def _contiguous(per_sample_weights: Tensor | None) -> Tensor | None:
    return None if per_sample_weights is None else per_sample_weights.contiguous()


def _fake_flow_plan(
    tables: Tensor,
    table_names: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    flow: int,
    bounds_check_mode: int,
) -> tuple[Tensor, ...]:
    count = indices.numel()
    return (
        indices.new_empty(count, dtype=torch.int32),
        indices.new_empty(count, dtype=torch.int32),
        indices.new_empty(count, dtype=torch.int64),
        indices.new_empty(count + 1, dtype=torch.int32),
        indices.new_empty(count + 1, dtype=torch.int32),
        indices.new_empty(4, dtype=torch.int64),
    )


def _fake_pooled_forward(
    weights: Tensor,
    tables: Tensor,
    features: Tensor,
    offsets: Tensor,
    lookups: Tensor,
    bags: Tensor,
    row_keys: Tensor,
    row_starts: Tensor,
    flow_starts: Tensor,
    counts: Tensor,
    per_sample_weights: Tensor | None,
    total_dim: int,
    pooling_mode: int,
) -> Tensor:
    return weights.new_empty((offsets.numel() - 1) // features.shape[0], total_dim)


def _fake_pooled_backward(
    grad_output: Tensor,
    weights: Tensor,
    tables: Tensor,
    features: Tensor,
    offsets: Tensor,
    lookups: Tensor,
    bags: Tensor,
    row_keys: Tensor,
    row_starts: Tensor,
    flow_starts: Tensor,
    counts: Tensor,
    per_sample_weights: Tensor | None,
    pooling_mode: int,
    per_sample_weights_grad: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights), weights.new_empty(lookups.numel() if per_sample_weights_grad else 0)


def _fake_pooled_backward_update(
    grad_output: Tensor,
    weights: Tensor,
    momentum1: Tensor | None,
    tables: Tensor,
    features: Tensor,
    offsets: Tensor,
    lookups: Tensor,
    bags: Tensor,
    row_keys: Tensor,
    row_starts: Tensor,
    flow_starts: Tensor,
    counts: Tensor,
    per_sample_weights: Tensor | None,
    pooling_mode: int,
    per_sample_weights_grad: bool,
    optimizer: int,
    learning_rate: float,
    eps: float,
    weight_decay: float,
) -> Tensor:
    return weights.new_empty(lookups.numel() if per_sample_weights_grad else 0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, *plan, per_sample_weights, _, ctx.pooling_mode = inputs
    if any(ctx.needs_input_grad):
        ctx.save_for_backward(weights, *plan, per_sample_weights)


def _pooled_forward_gradient(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    *args, per_sample_weights = ctx.saved_tensors
    wants_weights, wants_per_sample_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[10]
    grad_weights, grad_per_sample_weights = _ops.pooled_backward(
        grad_output.contiguous(), *args, per_sample_weights, ctx.pooling_mode, wants_per_sample_weights
    )
    return (
        grad_weights if wants_weights else None,
        *(None,) * 9,
        grad_per_sample_weights if wants_per_sample_weights else None,
        None,
        None,
    )


def _load() -> tuple[Path | None, str | None]:
    """Loads the library beside this file. Returns its path, and why it cannot be used, if it cannot."""
    folder = Path(__file__).parent
    libraries = sorted(folder.glob("_C*.so"))
    if not libraries:
        return None, f"there is no compiled library (_C*.so) in {folder}"
    if len(libraries) > 1:
        return None, f"there are several compiled libraries in {folder}: {', '.join(p.name for p in libraries)}"
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        return libraries[0], f"{libraries[0]} does not load: {error}"
    torch.library.register_fake("flowtt::flow_plan", _fake_flow_plan)
    torch.library.register_fake("flowtt::pooled_forward", _fake_pooled_forward)
    torch.library.register_fake("flowtt::pooled_backward", _fake_pooled_backward)
    torch.library.register_fake("flowtt::pooled_backward_update", _fake_pooled_backward_update)
    torch.library.register_autograd(
        "flowtt::pooled_forward", _pooled_forward_gradient, setup_context=_save_for_backward
    )
    return libraries[0], None


library_path, load_error = _load()
