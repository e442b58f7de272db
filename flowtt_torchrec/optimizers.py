"""Fused optimizers on cores: which there are, their hyper-parameters, and their state.

All core gradients are taken at the weights before the step. Then, with ``g = gradient + weight_decay * w`` and only on
slices ``G_k[i_k]`` that the batch looked up:

* ``"sgd"``: ``w -= learning_rate * g``
* ``"adagrad"``: ``m += g**2``, ``w -= learning_rate * g / (sqrt(m) + eps)``, one ``m`` an element
* ``"rowwise_adagrad"``: ``m += mean(g**2)`` over the slice, the same update, one ``m`` a slice

They are torch.optim's SGD and Adagrad and FBGEMM's row-wise Adagrad, a slice taking the place of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowtt_torchrec.layout import NUM_CORES, SLICE_OFFSETS, TTLayout
from flowtt_torchrec.spec import MAX_CORES

SGD, ADAGRAD, ROWWISE_ADAGRAD = "sgd", "adagrad", "rowwise_adagrad"
KINDS = (SGD, ADAGRAD, ROWWISE_ADAGRAD)  # an optimizer's place here is its number in the compiled ops


@dataclass(frozen=True)
class OptimizerSpec:
    """A fused optimizer and its hyper-parameters.

    Args:
        kind: ``"sgd"``, ``"adagrad"`` or ``"rowwise_adagrad"``.
        learning_rate: step size.
        eps: added to the root of the accumulator; not used by SGD.
        weight_decay: L2 penalty, added to the gradient of slices that the batch looked up.

    Raises:
        ValueError: for an unknown kind or a negative number.
    """

    kind: str
    learning_rate: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown fused optimizer {self.kind!r}; known: {', '.join(KINDS)}")
        for field in ("learning_rate", "eps", "weight_decay"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{self.kind} needs {field} of at least 0, not {getattr(self, field)}")


def state_names(kind: str) -> tuple[str, ...]:
    """Names of the state tensors that an optimizer keeps, as FBGEMM calls them."""
    return () if kind == SGD else ("momentum1",)


def init_state(
    layout: TTLayout, kind: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """State of an optimizer before its first step: zeros, one an element, or one a slice for row-wise Adagrad."""
    size = layout.num_slices if kind == ROWWISE_ADAGRAD else layout.num_parameters
    return {name: torch.zeros(size, dtype=dtype, device=device) for name in state_names(kind)}


def split_state(layout: TTLayout, kind: str, state: Mapping[str, Tensor]) -> dict[str, list[dict[str, Tensor]]]:
    """Views of the state by table and core: shaped as the core, or ``[p_k]`` for row-wise Adagrad."""
    split: dict[str, list[dict[str, Tensor]]] = {
        name: [{} for _ in spec.p] for name, spec in zip(layout.names, layout.specs)
    }
    views_of = layout.slice_views if kind == ROWWISE_ADAGRAD else layout.core_views
    for state_name, flat in state.items():
        for name, views in zip(layout.names, views_of(flat)):
            for core_state, view in zip(split[name], views):
                core_state[state_name] = view
    return split


@torch.no_grad()
def apply_gradient(
    layout: TTLayout,
    optimizer: OptimizerSpec,
    weights: Tensor,
    state: Mapping[str, Tensor],
    grad: Tensor,
    touched: Tensor | None = None,
) -> None:
    """One step from a gradient that is already summed, for cores that several ranks hold. In place.

    The same step as that of a fused lookup. Equal arguments give equal bits, so replicas stay equal.

    Args:
        layout: the tables.
        optimizer: the optimizer, with the learning rate of this step.
        weights: the cores of all tables, ``[layout.num_parameters]``.
        state: as `init_state` makes it.
        grad: gradient of ``weights``, zero on slices that no batch looked up.
        touched: bool ``[layout.num_slices]``, slices that some batch looked up; read where there is weight decay.

    Raises:
        ValueError: for weight decay without ``touched``.
    """
    if optimizer.weight_decay:
        if touched is None:
            raise ValueError("weight decay falls on touched slices only, so it must be known which those are")
        grad = grad + optimizer.weight_decay * (weights * _spread(layout, touched))
    if optimizer.kind == SGD:
        weights.sub_(grad, alpha=optimizer.learning_rate)
        return
    momentum1 = state["momentum1"]
    if optimizer.kind == ADAGRAD:
        momentum1.addcmul_(grad, grad)
        root = momentum1.sqrt()
    else:
        for core_grads, moments in zip(layout.core_views(grad), layout.slice_views(momentum1)):
            for core_grad, moment in zip(core_grads, moments):
                moment.add_(core_grad.square().mean(dim=(1, 2, 3)))
        root = _spread(layout, momentum1.sqrt())
    root.add_(optimizer.eps)
    root.masked_fill_(root == 0, 1)  # no step yet and eps = 0: the gradient is 0 too
    weights.addcdiv_(grad, root, value=-optimizer.learning_rate)


def touched_slices(layout: TTLayout, row_keys: Tensor) -> Tensor:
    """Which slices some rows are made of.

    Args:
        layout: the tables.
        row_keys: int64 ``[N]``, keys of rows, as a flow plan has them.

    Returns:
        bool ``[layout.num_slices]``.
    """
    first = layout.tables[:, SLICE_OFFSETS : SLICE_OFFSETS + MAX_CORES].to(row_keys.device)
    real = torch.arange(MAX_CORES, device=row_keys.device) < layout.tables[:, NUM_CORES, None].to(row_keys.device)
    tables, digits = layout.split_keys(row_keys)
    touched = torch.zeros(layout.num_slices, dtype=torch.bool, device=row_keys.device)
    touched[(first[tables] + digits)[real[tables]]] = True
    return touched


def _spread(layout: TTLayout, slices: Tensor) -> Tensor:
    """A value a slice ``[num_slices]``, on every element of the slice, ``[num_parameters]``."""
    sizes = [size // p for spec in layout.specs for size, p in zip(spec.core_sizes, spec.p)]
    counts = [p for spec in layout.specs for p in spec.p]
    repeats = torch.tensor(sizes).repeat_interleave(torch.tensor(counts)).to(slices.device)
    return slices.repeat_interleave(repeats, output_size=layout.num_parameters)
