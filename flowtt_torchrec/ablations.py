"""Other ways to make the same lookups, to measure what each part of the design is worth; no argument of an op."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowtt_torchrec.plan import Flow

_FLOWS = {flow.name.lower(): flow for flow in Flow}


@dataclasses.dataclass(frozen=True)
class Mapping:
    """How lookups are made now; the arguments of `ablation`."""

    flow: Flow = Flow.PREFIX
    by_work: bool = True
    steal: bool = True
    handover: bool = True


_current = Mapping()


def current() -> Mapping:
    """What holds where this is called: everything on, outside of `ablation`."""
    return _current


@contextmanager
def ablation(
    *, flow: str | None = None, by_work: bool | None = None, steal: bool | None = None, handover: bool | None = None
) -> Iterator[None]:
    """Within the block, all ops of this process take other ways to the same numbers, but for rounding.

    For measurements and tests; none of these ways is faster in general. What is not given stays as it is, so that
    blocks can be nested. Not for several threads at once.

    Args:
        flow: how a plan that is made in the block groups lookups: ``"prefix"``, the default; ``"unique"`` takes only
            equal rows together; ``"direct"`` nothing, and does not sort.
        by_work: thread blocks of the CUDA kernels begin with shares of equal work, else of equal numbers of rows. On
            the CPU this and the following do nothing.
        steal: thread blocks without work take some of others'.
        handover: products of long flows are handed from thread block to thread block, else made again.

    Raises:
        ValueError: for an unknown flow.

    Example:
        >>> with flowtt_torchrec.ablation(flow="unique"):
        ...     output = bags(indices, offsets)
    """
    global _current
    if flow is not None and flow not in _FLOWS:
        raise ValueError(f"unknown flow {flow!r}; known: {', '.join(_FLOWS)}")
    given: dict[str, Any] = {
        "flow": None if flow is None else _FLOWS[flow],
        "by_work": by_work,
        "steal": steal,
        "handover": handover,
    }
    before = _current
    _current = dataclasses.replace(before, **{name: value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        _current = before
