"""The ops of a compiled library: calling them, and their fake kernels and gradients.

A library holds the ops' schemas and kernels and knows nothing of Python; the rest is here. The methods of `CompiledOps`
take the same arguments and return the same values as the functions of `flowtt_torchrec.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowtt_torchrec import ablations
from flowtt_torchrec.first_order import first_order, refuse_forward_mode
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import KINDS, OptimizerSpec
from flowtt_torchrec.plan import BoundsCheckMode, Flow, FlowPlan, PoolingMode
from flowtt_torchrec.precision import TO_NEAREST, compute_dtype
from flowtt_torchrec.reference import check_rows

_UPDATE_FOR_GRAPHS = "pooled_backward_update_for_graphs"


class CompiledOps:
    """The ops that a loaded library defines.

    Args:
        namespace: where in ``torch.ops`` they are.
        emulated: whether CPU tensors stand for those of a GPU, as in tests.
    """

    def __init__(self, namespace: str, emulated: bool = False) -> None:
        self._namespace = namespace
        self._ops = getattr(torch.ops, namespace)
        self._emulated = emulated

    def register(self) -> None:
        """Registers fake kernels and gradients; once, after the library has been loaded."""
        for name, fake in (
            ("flow_plan", _fake_flow_plan),
            ("check_plan", _fake_check_plan),
            ("pooled_forward", _fake_pooled_forward),
            ("pooled_backward", _fake_pooled_backward),
            ("pooled_backward_update", _fake_pooled_backward_update),
        ):
            torch.library.register_fake(f"{self._namespace}::{name}", fake)
        self._register_update_for_graphs()
        torch.library.register_autograd(
            f"{self._namespace}::pooled_forward",
            first_order(self.pooled_forward_gradient),
            setup_context=_save_for_backward,
        )

    def _register_update_for_graphs(self) -> None:
        """``pooled_backward_update`` with a tensor for the learning rate, which the schema's float makes a constant.

        A compiled graph would otherwise be made anew for every learning rate of a schedule.
        """
        update = self._ops.pooled_backward_update.default
        place = [argument.name for argument in update._schema.arguments].index("learning_rate")
        signature = str(update._schema).partition("(")[2].replace("float learning_rate", "Tensor learning_rate")

        def with_float(*args: Any) -> Tensor:
            return update(*args[:place], args[place].item(), *args[place + 1 :])

        self._library = torch.library.Library(self._namespace, "FRAGMENT")
        self._library.define(f"{_UPDATE_FOR_GRAPHS}({signature}")
        self._library.impl(_UPDATE_FOR_GRAPHS, with_float, "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"{self._namespace}::{_UPDATE_FOR_GRAPHS}", _fake_pooled_backward_update, lib=self._library
        )

    def flow_plan(
        self,
        layout: TTLayout,
        indices: Tensor,
        offsets: Tensor,
        flow: Flow = Flow.PREFIX,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> FlowPlan:
        plan = FlowPlan(
            *self._ops.flow_plan(
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

    def check_plan(self, layout: TTLayout, offsets: Tensor, plan: FlowPlan) -> FlowPlan:
        counts = self._ops.check_plan(layout.tables, layout.features, offsets.contiguous(), *plan)
        return FlowPlan(*plan[:-1], counts)  # so that a compiled graph does not drop the check

    def pooled_forward(
        self,
        weights: Tensor,
        layout: TTLayout,
        offsets: Tensor,
        plan: FlowPlan,
        per_sample_weights: Tensor | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
    ) -> Tensor:
        self._mirror_settings(weights)
        refuse_forward_mode(weights, per_sample_weights)
        args = (
            weights,
            layout.tables,
            layout.features,
            offsets.contiguous(),
            *plan,
            _contiguous(per_sample_weights),
            layout.total_dim,
            int(pooling_mode),
        )
        # Functions that torch.library registers do not work with torch.func.
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return _ForTransforms.apply(self, *args)
        return self._ops.pooled_forward(*args)

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
    ) -> tuple[Tensor, Tensor]:
        self._mirror_settings(weights)
        return self._ops.pooled_backward(
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
        learning_rate: Tensor | None = None,  # for a compiled graph, in the place of the optimizer's
    ) -> Tensor:
        self._mirror_settings(weights)
        in_graph = learning_rate is not None
        update = getattr(self._ops, _UPDATE_FOR_GRAPHS) if in_graph else self._ops.pooled_backward_update
        return update(
            grad_output.contiguous(),
            weights,
            momentum1,
            momentum2,
            layout.tables,
            layout.features,
            offsets.contiguous(),
            *plan,
            _contiguous(per_sample_weights),
            int(pooling_mode),
            per_sample_weights_grad,
            KINDS.index(optimizer.kind),
            learning_rate if in_graph else optimizer.learning_rate,
            optimizer.eps,
            optimizer.weight_decay,
            optimizer.beta1,
            optimizer.beta2,
            steps,
            rounding_seed,
        )

    def release_memory(self) -> None:
        if not self._emulated:
            self._ops.release_memory()

    def synchronize(self, device: torch.device | None = None) -> None:
        if self._emulated:
            self._ops.raise_cuda_fault()
        elif torch.cuda.is_initialized() and self._ops.cuda_architectures():
            with torch.cuda.device(device):
                torch.cuda.synchronize()
                self._ops.raise_cuda_fault()

    def _mirror_settings(self, weights: Tensor) -> None:
        # The stable ABI has no way to ask torch. On the CPU everything is deterministic and exact.
        if weights.is_cuda or self._emulated:
            self._ops.use_deterministic_cuda(torch.are_deterministic_algorithms_enabled())
            self._ops.use_cuda_tf32(torch.backends.cuda.matmul.fp32_precision == "tf32")
            mapping = ablations.current()
            self._ops.use_cuda_mapping(mapping.by_work, mapping.steal, mapping.handover)

    def pooled_forward_gradient(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The backward of the op ``pooled_forward``, from what `_save_for_backward` has saved."""
        *args, per_sample_weights = ctx.saved_tensors
        wants_weights, *_, wants_per_sample_weights, _, _ = ctx.needs_input_grad[-13:]
        self._mirror_settings(args[0])
        grad_weights, grad_per_sample_weights = self._ops.pooled_backward(
            grad_output.contiguous(), *args, per_sample_weights, ctx.pooling_mode, wants_per_sample_weights
        )
        return (
            grad_weights.to(args[0].dtype) if wants_weights else None,
            *(None,) * 9,
            grad_per_sample_weights if wants_per_sample_weights else None,
            None,
            None,
        )


class _ForTransforms(torch.autograd.Function):
    """The op ``pooled_forward`` as `torch.func.grad` takes it."""

    @staticmethod
    def forward(compiled: CompiledOps, *args: Any) -> Tensor:
        return compiled._ops.pooled_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.compiled = inputs[0]
        _save_for_backward(ctx, inputs[1:], output)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.compiled.pooled_forward_gradient(ctx, grad_output)


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


def _fake_check_plan(
    tables: Tensor,
    features: Tensor,
    offsets: Tensor,
    lookups: Tensor,
    bags: Tensor,
    row_keys: Tensor,
    row_starts: Tensor,
    flow_starts: Tensor,
    counts: Tensor,
) -> Tensor:
    return torch.empty_like(counts)


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
    rows = (offsets.numel() - 1) // features.shape[0]
    return weights.new_empty(rows, total_dim, dtype=compute_dtype(weights.dtype))


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
    return torch.empty_like(weights, dtype=grad_output.dtype), _fake_factors(
        grad_output, lookups, per_sample_weights_grad
    )


def _fake_pooled_backward_update(
    grad_output: Tensor,
    weights: Tensor,
    momentum1: Tensor | None,
    momentum2: Tensor | None,
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
    beta1: float,
    beta2: float,
    steps: Tensor | None,
    rounding_seed: int,
) -> Tensor:
    return _fake_factors(grad_output, lookups, per_sample_weights_grad)


def _fake_factors(grad_output: Tensor, lookups: Tensor, wanted: bool) -> Tensor:
    return grad_output.new_empty(lookups.numel() if wanted else 0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, *plan, per_sample_weights, _, ctx.pooling_mode = inputs
    if any(ctx.needs_input_grad):
        ctx.save_for_backward(weights, *plan, per_sample_weights)
