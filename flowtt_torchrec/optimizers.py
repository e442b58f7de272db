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

from flowtt_torchrec.layout import TTLayout

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
