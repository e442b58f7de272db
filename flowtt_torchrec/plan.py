"""What a batch is grouped into, and how lookups are made: the types that all backends share (csrc: `flowtt/plan.h`)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


class BoundsCheckMode(IntEnum):
    """What happens to a row number that its table does not have; numbered as FBGEMM's modes."""

    FATAL = 0  # IndexError
    WARNING = 1  # looked up as row 0, with a warning
    IGNORE = 2  # looked up as row 0


class Flow(IntEnum):
    """How lookups are grouped."""

    PREFIX = 0  # equal rows once, rows of one prefix share its product
    UNIQUE = 1  # equal rows once, every row by itself
    DIRECT = 2  # every lookup by itself, in the order given


class PoolingMode(IntEnum):
    """How the rows of a bag become one; an empty bag gives zeros."""

    SUM = 0
    MEAN = 1  # divided by the number of lookups in the bag, also when they are weighted


class FlowPlan(NamedTuple):
    """A batch of ``N`` lookups, grouped. Of ``U`` distinct rows in ``P`` flows; entries past those are unspecified.

    Attributes:
        lookups: int32 ``[N]``, positions of the lookups in key order; equal keys keep their order.
        bags: int32 ``[N]``, bag ``feature * batch_size + sample`` of each lookup, in the order given.
        row_keys: int64 ``[N]``, the ``U`` distinct keys in key order.
        row_starts: int32 ``[N + 1]``, first place in ``lookups`` of each distinct row, then ``N``.
        flow_starts: int32 ``[N + 1]``, first distinct row of each flow, then ``U``.
        counts: int64 ``[4]``: ``U``, ``P``, row numbers that were out of range, the layout's ``fingerprint``.
    """

    lookups: Tensor
    bags: Tensor
    row_keys: Tensor
    row_starts: Tensor
    flow_starts: Tensor
    counts: Tensor
