"""Gradients of which no gradient can be taken: an error where someone does, never a zero."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_REMEDY = "take it through FLOWTT_BACKEND=reference without a fused optimizer, which plain autograd differentiates"


def first_order(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Decorates the backward of an autograd function: a second backward raises ``NotImplementedError``."""

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        found = [result for result in results if result is not None]
        if not found:
            return results
        marked = iter(_NotTwice.apply(len(grads), *grads, *found))
        return tuple(None if result is None else next(marked) for result in results)

    return once


def refuse_forward_mode(*inputs: Tensor | None) -> None:
    """Raises ``NotImplementedError`` for inputs with tangents, which an op without a rule for them would drop."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in inputs):
        raise NotImplementedError(f"tensor-train lookups have no forward-mode derivative; {_REMEDY}")


class _NotTwice(torch.autograd.Function):
    """Gives back all but the first tensors, and lets nobody differentiate them."""

    @staticmethod
    def forward(inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[inputs:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(f"tensor-train lookups have no second derivative (create_graph=True); {_REMEDY}")
