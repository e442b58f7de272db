"""Types of cores: which there are, what is computed with them, and how updated ones are rounded.

Cores in bfloat16 or float16 take half the memory. All sums, gradients and optimizer state stay float32. Rounding an
updated weight to nearest would lose every step smaller than half the distance to the next number, so a fused optimizer
rounds stochastically by default: up or down with probabilities that keep the mean. The random bits are a function of a
seed and the element's place, so that replicas stay equal and a run can be repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TO_NEAREST = -1  # in the place of a rounding seed

_REDUCED = (torch.bfloat16, torch.float16)
_SEEDS = 1 << 24  # different ones: as many as have their own elements 0 to 2^40
_MASK_32 = (1 << 32) - 1


def check_weight_dtype(dtype: torch.dtype) -> None:
    """Raises ``ValueError`` for a type that cores cannot have."""
    if dtype not in WEIGHT_DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in WEIGHT_DTYPES)
        raise ValueError(f"cores cannot be {dtype}; use one of {known}")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of outputs, gradients and optimizer state for weights of a type: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_reduced(dtype: torch.dtype) -> bool:
    """Whether cores of a type are narrower than what is computed with."""
    return dtype in _REDUCED


def rounding_seed(seed: int) -> int:
    """The seed of step 0, for `seed_of_step`; ``seed`` is the module's."""
    return seed * 0x9E3779 % _SEEDS


def seed_of_step(first: int, step: int) -> int:
    """The seed of one step of a table; those of 2^24 steps differ.

    Args:
        first: of step 0, as `rounding_seed` makes it, or `TO_NEAREST`, which stays so.
        step: number of the step.
    """
    return TO_NEAREST if first == TO_NEAREST else (first + step) % _SEEDS


def random_bits(seed: int, elements: Tensor) -> Tensor:
    """16 random bits for each element: those from ``16 * (element % 4)`` on of splitmix64(seed * 2^40 + element // 4).

    Args:
        seed: changes all bits; its lowest 24 bits count.
        elements: int64 places in the flat weights, of any shape.

    Returns:
        int64 in ``[0, 2^16)``, shaped as ``elements``.
    """
    x = elements // 4 + _signed(seed << 40) + _signed(0x9E3779B97F4A7C15)  # integers of torch wrap around
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) >> elements % 4 * 16 & 0xFFFF


def round_stochastically(values: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Rounds up or down, up the more often the nearer the number above is. What is not finite is converted as it is.

    Args:
        values: float32.
        dtype: bfloat16 or float16.
        random: as `random_bits` makes them, shaped as ``values``.
    """
    values = values.float()
    if dtype == torch.bfloat16:
        rounded = _round_off(values, random, 0xFFFF).to(dtype)
    else:
        normal = _round_off(values, random, 0x1FFF).to(dtype)
        units = values.abs() * 2.0**24  # float16 below 2^-14 is a whole number of these
        below = units.floor()
        up = random.float() * 2.0**-16 < units - below
        small = ((below + up) * 2.0**-24).copysign(values).to(dtype)
        rounded = torch.where(values.abs() < 2.0**-14, small, normal)
    return torch.where(values.isfinite(), rounded, values.to(dtype))


def round_weights(values: Tensor, dtype: torch.dtype, seed: int, elements: Tensor) -> Tensor:
    """Updated weights as they are stored.

    Args:
        values: float32 or float64.
        dtype: of the weights. Only bfloat16 and float16 have something to round.
        seed: see `random_bits`; `TO_NEAREST` rounds to nearest.
        elements: int64 places in the flat weights, shaped as ``values``.
    """
    if seed == TO_NEAREST or not is_reduced(dtype):
        return values.to(dtype)
    return round_stochastically(values, dtype, random_bits(seed, elements))


def _signed(x: int) -> int:
    """The int64 with the same low 64 bits."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 to the right as if unsigned."""
    return x >> bits & (1 << 64 - bits) - 1


def _round_off(values: Tensor, random: Tensor, low: int) -> Tensor:
    """float32 without its ``low`` bits, to which random ones were added."""
    bits = values.view(torch.int32).long() & _MASK_32
    return (bits + (random & low) & ~low).int().view(torch.float32)
