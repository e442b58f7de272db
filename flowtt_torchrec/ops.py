"""The tensor-train embedding ops, and which backend runs them.

``native`` is the compiled library and the default. ``reference`` is the plain PyTorch definition: slow, but it needs no
compiler. A library that is missing or does not load is an error at the first op call; there is no silent fallback.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowtt_torchrec import ablations, native, reference
from flowtt_torchrec.backend import Backend
from flowtt_torchrec.first_order import first_order
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import MOMENTUM1, MOMENTUM2, STEP, OptimizerSpec, state_names
from flowtt_torchrec.plan import BoundsCheckMode, FlowPlan, PoolingMode
from flowtt_torchrec.precision import WEIGHT_DTYPES, compute_dtype

BACKENDS: dict[str, Backend] = {"native": native, "reference": reference}
BACKEND_VARIABLE = "FLOWTT_BACKEND"
_POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}


class BackendInfo(NamedTuple):
    """Which backend runs and why.

    Attributes:
        name: ``"native"`` or ``"reference"``.
        reason: what chose it.
        library: path of the compiled library, if there is one.
        error: why the compiled library cannot be used, if it cannot.
    """

    name: str
    reason: str
    library: str | None
    error: str | None


def _choose(name: str, reason: str) -> tuple[str, str]:
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r} ({reason}); known: {', '.join(BACKENDS)}")
    return name, reason


_chosen = (
    _choose(os.environ[BACKEND_VARIABLE], f"{BACKEND_VARIABLE}={os.environ[BACKEND_VARIABLE]}")
    if os.environ.get(BACKEND_VARIABLE)
    else _choose("native", "the default")
)


def set_backend(name: str) -> None:
    """Makes ``"native"`` or ``"reference"`` run all following ops of this process."""
    global _chosen
    _chosen = _choose(name, f"set_backend({name!r})")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, ``"native"`` or ``"reference"`` runs the ops."""
    global _chosen
    before = _chosen
    _chosen = _choose(name, f"use_backend({name!r})")
    try:
        yield
    finally:
        _chosen = before


def backend_info() -> BackendInfo:
    """Which backend runs and why, and what is known about the compiled library."""
    library = None if native.library_path is None else str(native.library_path)
    return BackendInfo(*_chosen, library, native.load_error)


def _backend() -> Backend:
    name = _chosen[0]
    if name == "native" and native.load_error is not None:
        raise RuntimeError(
            f"the compiled FlowTT ops cannot be used: {native.load_error}. Build them with `make setup` or "
            f"`pip install --no-build-isolation -e .`, or set {BACKEND_VARIABLE}=reference to run the slow, plain "
            "PyTorch definition instead"
        )
    return BACKENDS[name]


def flow_plan(
    layout: TTLayout,
    indices: Tensor,
    offsets: Tensor,
    *,
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
) -> FlowPlan:
    """Groups a batch's lookups by shared prefix, equal rows together.

    A GPU tells late what is wrong with a batch: the error comes from a later op, or from `synchronize`. Until then
    such a batch has a plan without rows: outputs and gradients are zeros, and a fused optimizer changes nothing.

    Args:
        layout: the tables and features.
        indices: int32 or int64 ``[N]``, row numbers, feature by feature, as TorchRec's ``KeyedJaggedTensor`` has them.
        offsets: int32 or int64 ``[num_features * batch_size + 1]``, first lookup of each bag, then ``N``.
        bounds_check_mode: what happens to a row number that its table does not have.

    Returns:
        The plan, for `pooled_lookup`.

    Raises:
        IndexError: for a row number out of range under ``FATAL``.
        RuntimeError: for offsets that do not describe the indices, or a compiled library that cannot be used.
        ValueError: for arguments of the wrong type or shape.
    """
    _check_devices(indices.device, offsets=offsets)
    _check_integers(indices=indices, offsets=offsets)
    return _backend().flow_plan(layout, indices, offsets, ablations.current().flow, bounds_check_mode)


def release_memory() -> None:
    """Gives memory that ops keep from call to call back to the system; the next calls ask for theirs anew.

    On the CPU, ops keep at most twice the scratch memory that some hundred calls before needed at once, and by
    themselves give back what these did not use. What torch keeps on a GPU is released by ``torch.cuda.empty_cache()``.
    """
    _backend().release_memory()


def synchronize(device: torch.device | None = None) -> None:
    """Waits for a GPU, and raises what it has found wrong with a batch, unless an op has done so; else does nothing.

    Args:
        device: by default the current GPU.

    Raises:
        IndexError, RuntimeError: as `flow_plan`.
    """
    _backend().synchronize(device)


def pooled_lookup(
    weights: Tensor,
    layout: TTLayout,
    offsets: Tensor,
    plan: FlowPlan,
    *,
    per_sample_weights: Tensor | None = None,
    pooling: str = "sum",
) -> Tensor:
    """Pooled rows of a batch whose plan is known; otherwise as `lookup`.

    The plan is checked first: it must be one of this layout and these offsets, and as `flow_plan` made it. On a GPU an
    error comes late, as those of `flow_plan`.

    Raises:
        RuntimeError: for a plan of another layout or other offsets, or that has been changed.
        ValueError: for arguments of the wrong type, shape or device.
    """
    _check_integers(offsets=offsets)
    _check_devices(weights.device, **plan._asdict())
    _check(weights, layout, offsets, plan.lookups, per_sample_weights)
    plan = _backend().check_plan(layout, offsets, plan)
    return _pooled_lookup(weights, layout, offsets, plan, per_sample_weights, pooling)


def lookup(
    weights: Tensor,
    layout: TTLayout,
    indices: Tensor,
    offsets: Tensor,
    *,
    per_sample_weights: Tensor | None = None,
    pooling: str = "sum",
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
) -> Tensor:
    """Pooled rows of all features of a batch; differentiable in ``weights`` and ``per_sample_weights``.

    Args:
        weights: the cores of all tables, ``[layout.num_parameters]``, float32, float64, bfloat16 or float16.
        layout: the tables and features.
        indices: as for `flow_plan`.
        offsets: as for `flow_plan`.
        per_sample_weights: factor of each lookup, ``[N]``, float64 if the weights are, else float32.
        pooling: ``"sum"``, or ``"mean"``: divided by the number of lookups in the bag, also when they are weighted.
        bounds_check_mode: as for `flow_plan`.

    Returns:
        ``[batch_size, layout.total_dim]``, the features' columns side by side; zeros for an empty bag. Float64 if the
        weights are, else float32: what is narrower than float32 is widened when it is read.

    Raises:
        IndexError, RuntimeError: as `flow_plan`.
        ValueError: for arguments of the wrong type, shape or device.
    """
    _check(weights, layout, offsets, indices, per_sample_weights)
    plan = flow_plan(layout, indices, offsets, bounds_check_mode=bounds_check_mode)
    return _pooled_lookup(weights, layout, offsets, plan, per_sample_weights, pooling)


def fused_lookup(
    weights: Tensor,
    layout: TTLayout,
    indices: Tensor,
    offsets: Tensor,
    *,
    optimizer: OptimizerSpec,
    state: Mapping[str, Tensor],
    per_sample_weights: Tensor | None = None,
    pooling: str = "sum",
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    seed: int = 0,
    learning_rate: Tensor | None = None,
    trained: Tensor | None = None,
) -> Tensor:
    """As `lookup`, but backward steps the optimizer on ``weights`` and ``state`` in place.

    ``weights.grad`` stays ``None``. ``weights`` that do not require a gradient are not changed. Every lookup's backward
    is a step, as with FBGEMM's tables, also where a loss has several lookups of one table.

    Args:
        optimizer: the optimizer, with the learning rate of this step.
        state: its state, as `flowtt_torchrec.optimizers.init_state` makes it.
        seed: of stochastic rounding, together with the number of the step.
        learning_rate: that of ``optimizer`` once more, float64 ``[]`` on the CPU. Under ``torch.compile`` this is what
            is read, so that a schedule does not make the graph anew for every learning rate.
        trained: requires a gradient in the place of ``weights``, and gets none: any tensor, for weights that are the
            memory of parameters.

    Raises:
        IndexError: as `flow_plan`.
        RuntimeError: as `flow_plan`; from backward, if the weights have changed since this forward.
        ValueError: for arguments of the wrong type, shape or device.
    """
    _check(weights, layout, offsets, indices, per_sample_weights)
    plan = flow_plan(layout, indices, offsets, bounds_check_mode=bounds_check_mode)
    trained = weights if trained is None else trained
    if not trained.requires_grad:
        return _pooled_lookup(weights, layout, offsets, plan, per_sample_weights, pooling)
    names = state_names(optimizer.kind, weights.dtype)
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(
            f"{optimizer.kind} on {weights.dtype} needs the state {missing[0]!r}; make it with optimizers.init_state"
        )
    _check_devices(weights.device, **{name: state[name] for name in names if name != STEP})
    kept = [state[name] if name in names else None for name in (MOMENTUM1, MOMENTUM2, STEP)]
    mode = _option("pooling", pooling, _POOLING)
    args = weights, *kept, learning_rate, offsets, *plan, layout, optimizer, seed, mode, _backend()
    return _FusedLookup.apply(trained, per_sample_weights, *args)


def collected_lookup(
    trained: Tensor,
    weights: Tensor,
    layout: TTLayout,
    indices: Tensor,
    offsets: Tensor,
    *,
    collect: Callable[[Tensor, FlowPlan], None],
    per_sample_weights: Tensor | None = None,
    pooling: str = "sum",
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
) -> Tensor:
    """As `lookup`, but backward hands the gradient of ``weights`` to a function, as `lookup` computes it.

    A gradient that autograd keeps has the weights' type; this one is float32 for weights narrower than that.

    Args:
        trained: what the weights are made of; it gets no gradient, but there is none to collect unless it requires one.
        weights: the cores, ``[layout.num_parameters]``.
        layout: the tables and features.
        indices: as for `flow_plan`.
        offsets: as for `flow_plan`.
        collect: called in backward with the gradient, ``[layout.num_parameters]``, and the batch's plan.
        per_sample_weights: as for `lookup`.
        pooling: as for `lookup`.
        bounds_check_mode: as for `flow_plan`.

    Raises:
        IndexError, RuntimeError, ValueError: as `lookup`.
    """
    _check(weights, layout, offsets, indices, per_sample_weights)
    plan = flow_plan(layout, indices, offsets, bounds_check_mode=bounds_check_mode)
    mode = _option("pooling", pooling, _POOLING)
    return _CollectedLookup.apply(
        trained, per_sample_weights, weights, offsets, *plan, layout, collect, mode, _backend()
    )


class _CollectedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trained: Tensor, per_sample_weights: Tensor | None, weights: Tensor, *args: Any) -> Tensor:
        offsets, *plan, layout, ctx.collect, mode, backend = args
        ctx.version = _Version(weights)
        ctx.layout, ctx.mode, ctx.backend = layout, mode, backend
        ctx.save_for_backward(weights, per_sample_weights, offsets, *plan)
        return backend.pooled_forward(weights, layout, offsets, FlowPlan(*plan), per_sample_weights, mode)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.version.check()
        weights, per_sample_weights, offsets, *plan = ctx.saved_tensors
        wants_weights, wants_per_sample_weights = ctx.needs_input_grad[:2]
        grad, grad_per_sample_weights = ctx.backend.pooled_backward(
            grad_output,
            weights,
            ctx.layout,
            offsets,
            FlowPlan(*plan),
            per_sample_weights,
            ctx.mode,
            wants_per_sample_weights,
        )
        if wants_weights:
            ctx.collect(grad, FlowPlan(*plan))
        rest = (None,) * (len(ctx.needs_input_grad) - 2)
        return None, grad_per_sample_weights if wants_per_sample_weights else None, *rest


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trained: Tensor, per_sample_weights: Tensor | None, weights: Tensor, *args: Any) -> Tensor:
        momentum1, momentum2, steps, rate, offsets, *plan = args[:-5]
        layout, optimizer, seed, mode, backend = args[-5:]
        ctx.weights, ctx.version = weights, _Version(weights)
        ctx.rate = rate if torch.compiler.is_compiling() else None
        ctx.momentum1, ctx.momentum2, ctx.steps = momentum1, momentum2, steps
        ctx.save_for_backward(per_sample_weights, offsets, *plan)
        ctx.layout, ctx.optimizer, ctx.seed, ctx.mode, ctx.backend = layout, optimizer, seed, mode, backend
        return backend.pooled_forward(weights, layout, offsets, FlowPlan(*plan), per_sample_weights, mode)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        per_sample_weights, offsets, *plan = ctx.saved_tensors
        ctx.version.check()
        weights = ctx.weights
        wants_per_sample_weights = ctx.needs_input_grad[1]
        grad_per_sample_weights = ctx.backend.pooled_backward_update(
            grad_output,
            weights,
            ctx.momentum1,
            ctx.momentum2,
            ctx.layout,
            offsets,
            FlowPlan(*plan),
            ctx.optimizer,
            per_sample_weights,
            ctx.mode,
            wants_per_sample_weights,
            None if ctx.steps is None else ctx.steps + 1,
            ctx.optimizer.rounding_seed(weights.dtype, ctx.seed),
            ctx.rate,
        )
        if ctx.steps is not None:
            ctx.steps.add_(1)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(weights)
        rest = (None,) * (len(ctx.needs_input_grad) - 2)
        return None, grad_per_sample_weights if wants_per_sample_weights else None, *rest


class _Version:
    """Of weights that backward wants as they were in forward; autograd's own check does not say what to do."""

    def __init__(self, weights: Tensor) -> None:
        # A compiled graph guards its saved tensors itself, and cannot trace versions.
        if torch.compiler.is_compiling():
            self._weights = None
        else:
            self._weights, self._version = weakref.ref(weights), weights._version

    def check(self) -> None:
        weights = None if self._weights is None else self._weights()
        if weights is not None and weights._version != self._version:
            raise RuntimeError(
                "the tensor-train weights have changed since this forward pass, so its gradient cannot be taken; "
                "with a fused optimizer run backward before the next backward of the same tables. For pipelines that "
                "look up ahead (TrainPipelineSemiSync), and losses with several lookups of one table, set "
                "keep_forward_weights=True in the sharder or in BatchedTTEmbeddingBags, or train with optimizer=None "
                "and a torch optimizer"
            )


def _option(argument: str, value: str, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise ValueError(f"unknown {argument} {value!r}; known: {', '.join(known)}")
    return known[value]


def _pooled_lookup(
    weights: Tensor, layout: TTLayout, offsets: Tensor, plan: FlowPlan, per_sample_weights: Tensor | None, pooling: str
) -> Tensor:
    """`pooled_lookup` of arguments that have been checked, and a plan that has been made of them."""
    mode = _option("pooling", pooling, _POOLING)
    return _backend().pooled_forward(weights, layout, offsets, plan, per_sample_weights, mode)


def _check_integers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be a 1-D tensor of int32 or int64, not {tensor.dim()}-D of {tensor.dtype}")


def _check(
    weights: Tensor, layout: TTLayout, offsets: Tensor, indices: Tensor, per_sample_weights: Tensor | None
) -> None:
    """Checks what the lookups ``[N]`` meet; `flow_plan` checks indices and offsets themselves."""
    _check_devices(weights.device, indices=indices, offsets=offsets, per_sample_weights=per_sample_weights)
    if weights.shape != (layout.num_parameters,) or weights.dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"weights must be float32, float64, bfloat16 or float16 [{layout.num_parameters}], the cores of "
            f"{layout.num_tables} tables, not {weights.dtype} {list(weights.shape)}"
        )
    if per_sample_weights is None:
        return
    dtype = compute_dtype(weights.dtype)
    if per_sample_weights.shape != indices.shape or per_sample_weights.dtype != dtype:
        raise ValueError(
            f"per_sample_weights must be {dtype} {list(indices.shape)}, one a lookup, "
            f"not {per_sample_weights.dtype} {list(per_sample_weights.shape)}"
        )


def _check_devices(device: torch.device, **tensors: Tensor | None) -> None:
    """Raises ``ValueError`` naming a tensor on another device; torch would give all to the kernels of one of them."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} is on device {tensor.device}, but weights, indices and offsets must be on one device, here "
                f"{device}; move it there"
            )
