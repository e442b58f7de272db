"""Whole numbers as callers have them: Python's, NumPy's, or any type with ``__index__``."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def whole_number(name: str, value: SupportsIndex, least: int | None = None) -> int:
    """The ``int`` that a value stands for.

    Args:
        name: what it is called in messages.
        value: an int, a NumPy integer, an integer tensor of one element, or anything else with ``__index__``.
        least: the smallest number allowed.

    Raises:
        ValueError: naming the argument and its value, for a float, even a whole one, and for a number below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number
