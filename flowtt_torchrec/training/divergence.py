"""Notices a run whose numbers are not finite any more, at no wait for the device in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor

_NEVER = torch.iinfo(torch.int64).max


class FirstNonFiniteLoss:
    """The first step whose loss was not a finite number on some rank.

    Args:
        device: of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), _NEVER, dtype=torch.int64, device=device)

    def update(self, step: int, loss: Tensor) -> None:
        """Adds the loss of a step on this rank, a scalar; waits for nothing."""
        found = torch.where(torch.isfinite(loss.detach()), _NEVER, step)
        self._first = torch.minimum(self._first, found)

    def step(self) -> int | None:
        """The step, if there is one; the same on all ranks, which call it together."""
        first = self._first.clone()
        dist.all_reduce(first, dist.ReduceOp.MIN)
        return None if int(first) == _NEVER else int(first)


def non_finite_tensor(tensors: Mapping[str, Any]) -> str | None:
    """Name of a tensor that holds NaN or an infinity on some rank, the same on all ranks, which call it together.

    Args:
        tensors: nested state dict.
    """
    mine = next((name for name, tensor in _leaves(tensors) if not _is_finite(tensor)), None)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return next((name for name in found if name is not None), None)


def _is_finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(torch.stack(torch.aminmax(part.detach()))).all())  # makes no copy; NaN is both of the two
        for part in _local_parts(value)
        if part.is_floating_point() and part.numel()
    )


def _local_parts(value: Any) -> Iterable[Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, DTensor):
        return [value.to_local()]
    return [value] if isinstance(value, Tensor) else []


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
