"""The shape of a tensor-train table: `TTSpec`, its counts, and rules that choose one.

A table of ``num_embeddings x embedding_dim`` numbers is held as 2 to 4 cores. Core ``k`` is an array
``[p_k, r_{k-1}, q_k, r_k]`` with ``r_0 = r_d = 1``. A row number is read in the mixed radix ``p``, most
significant digit first, and row ``i = (i_1, ..., i_d)`` is the product ``G_1[i_1] G_2[i_2] ... G_d[i_d]``
(Yin et al., TT-Rec, MLSys 2021, eq. 3).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

from flowtt_torchrec.shapes import DEFAULT_LOOKUPS, OBJECTIVES, balanced_shape, largest_ranks, search_shape
from flowtt_torchrec.whole_numbers import whole_number

MIN_CORES, MAX_CORES = 2, 4


@dataclass(frozen=True)
class TTSpec:
    """Shape of one tensor-train table. Immutable and hashable; invalid shapes raise ``ValueError``.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        p: factors of the row number, one a core; their product is at least ``num_embeddings``.
        q: factors of the columns, one a core; their product is ``embedding_dim``.
        ranks: the inner TT ranks, one fewer than there are cores.

    Example:
        >>> TTSpec(10_000_000, 64, p=(200, 220, 250), q=(4, 4, 4), ranks=(32, 32)).num_parameters
        958720
    """

    num_embeddings: int
    embedding_dim: int
    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("p", "q", "ranks"):
            values = tuple(getattr(self, field))
            numbers = tuple(whole_number(f"TT {field} {values}", v, least=1) for v in values)
            object.__setattr__(self, field, numbers)
        for field in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, field, whole_number(field, getattr(self, field)))
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"a table needs at least one row and one column, not {self.num_embeddings} x {self.embedding_dim}"
            )
        cores = len(self.p)
        if not MIN_CORES <= cores <= MAX_CORES:
            raise ValueError(f"TT p {self.p} has {cores} factors; {MIN_CORES} to {MAX_CORES} cores are supported")
        if len(self.q) != cores or len(self.ranks) != cores - 1:
            raise ValueError(
                f"{cores} cores need {cores} factors in q and {cores - 1} ranks, not q {self.q} and ranks {self.ranks}"
            )
        if math.prod(self.p) < self.num_embeddings:
            raise ValueError(
                f"TT p {self.p} addresses {math.prod(self.p):,} rows, fewer than the table's {self.num_embeddings:,}; "
                "enlarge a factor or use TTSpec.suggest"
            )
        if math.prod(self.q) != self.embedding_dim:
            raise ValueError(
                f"TT q {self.q} multiplies to {math.prod(self.q)}, not to the embedding_dim {self.embedding_dim}"
            )
        for k, (rank, most) in enumerate(zip(self.ranks, largest_ranks(self.p, self.q, self.ranks)), start=1):
            if rank > most:
                raise ValueError(
                    f"TT rank r_{k} = {rank} exceeds {most}, the most that p {self.p}, q {self.q} and its neighbour "
                    f"ranks allow; lower it, or let TTSpec.suggest clip it"
                )

    @classmethod
    def suggest(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        rank: SupportsIndex | Sequence[int] = 32,
        *,
        num_cores: int | None = None,
        objective: str = "balanced",
        max_parameters: int | None = None,
        lookups: int = DEFAULT_LOOKUPS,
    ) -> TTSpec:
        """Chooses ``p`` and ``q`` for a table.

        ``"balanced"`` makes the factors of rows and columns as equal as they can be, the largest last, as TT-Rec and
        its successors do. ``"memory"`` takes the fewest parameters for the rank. ``"flow"`` makes a training step as
        fast as it can be (`flowtt_torchrec.step_costs`) with no more parameters than the balanced shape. What a shape
        other than the balanced one does to the quality of a model has not been studied.

        Args:
            num_embeddings: rows of the table.
            embedding_dim: columns of the table.
            rank: one number, clipped where a core is too small for it; or, for the balanced shape, one rank for each
                inner bond, taken as it is.
            num_cores: 2, 3 or 4; by default 3 for the balanced shape, and for the others the best of the three.
            objective: ``"balanced"``, ``"memory"`` or ``"flow"``.
            max_parameters: the most parameters of ``"memory"`` and ``"flow"``; by default the balanced shape's.
            lookups: lookups of the table in a batch of all ranks, which ``"flow"`` assumes.

        Raises:
            ValueError: for an unknown objective, ranks given one by one that the shape does not allow, or a budget that
                no shape fits.
        """
        if objective not in OBJECTIVES:
            raise ValueError(f"unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
        num_embeddings = whole_number("num_embeddings", num_embeddings)
        embedding_dim = whole_number("embedding_dim", embedding_dim)
        num_cores = None if num_cores is None else whole_number("num_cores", num_cores)
        max_parameters = None if max_parameters is None else whole_number("max_parameters", max_parameters, least=1)
        lookups = whole_number("lookups", lookups, least=1)
        if num_cores is not None and not MIN_CORES <= num_cores <= MAX_CORES:
            raise ValueError(f"num_cores {num_cores} is not supported; allowed: {MIN_CORES} to {MAX_CORES}")
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(f"a table needs at least one row and one column, not {num_embeddings} x {embedding_dim}")
        one_by_one: tuple[int, ...] | None = None
        if isinstance(rank, Sequence):
            one_by_one = tuple(rank)
            largest = max((whole_number(f"TT ranks {one_by_one}", r, least=1) for r in one_by_one), default=1)
        else:
            largest = whole_number("TT rank", rank, least=1)
        if objective == "balanced":
            p, q, ranks = balanced_shape(num_embeddings, embedding_dim, largest, num_cores or 3)
            ranks = ranks if one_by_one is None else one_by_one
        elif one_by_one is not None:
            raise ValueError(f"objective {objective!r} takes one rank for all bonds, not {one_by_one}")
        else:
            cores = (2, 3, 4) if num_cores is None else (num_cores,)
            p, q, ranks = search_shape(
                objective, num_embeddings, embedding_dim, largest, cores, lookups, max_parameters
            )
        return cls(num_embeddings, embedding_dim, p, q, ranks)

    @property
    def num_cores(self) -> int:
        return len(self.p)

    @property
    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        """Shapes ``[p_k, r_{k-1}, q_k, r_k]`` of the cores, first to last."""
        r = (1, *self.ranks, 1)
        return [(self.p[k], r[k], self.q[k], r[k + 1]) for k in range(self.num_cores)]

    @property
    def core_sizes(self) -> list[int]:
        """Numbers in each core."""
        return [math.prod(shape) for shape in self.core_shapes]

    @property
    def num_parameters(self) -> int:
        return sum(self.core_sizes)

    @property
    def num_slices(self) -> int:
        """Slices ``G_k[i_k]`` over all cores: what a row-wise optimizer keeps one number for."""
        return sum(self.p)

    @property
    def num_prefixes(self) -> int:
        """Distinct prefixes (all digits but the last) that the shape can address."""
        return math.prod(self.p[:-1])

    @property
    def compression_ratio(self) -> float:
        """Numbers in the dense table over numbers in the cores."""
        return self.num_embeddings * self.embedding_dim / self.num_parameters

    def num_bytes(self, element_size: int = 4) -> int:
        """Bytes of the cores at ``element_size`` bytes a number."""
        return self.num_parameters * element_size

    @property
    def flops_per_prefix(self) -> int:
        """Floating-point operations of one prefix product ``G_1[i_1] ... G_{d-1}[i_{d-1}]``, none with two cores."""
        flops, columns, r = 0, self.q[0], (1, *self.ranks, 1)
        for k in range(1, self.num_cores - 1):
            flops += 2 * columns * r[k] * self.q[k] * r[k + 1]
            columns *= self.q[k]
        return flops

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations that make one row from its prefix product."""
        return 2 * self.embedding_dim * self.ranks[-1]

    @property
    def column_step(self) -> int:
        """Columns that one value of the first core's column digit covers, ``q_2 ... q_d``: where a table can be cut."""
        return math.prod(self.q[1:])

    def narrow(self, columns: int) -> TTSpec:
        """Shape of ``columns`` neighbouring columns: the same cores, but of the first only a part of its ``q_1``.

        The ranks stay, even where they exceed what a table of so few columns can have.

        Raises:
            ValueError: if ``columns`` is no multiple of `column_step`, or more than there are.
        """
        columns = whole_number("columns", columns)
        if columns % self.column_step or not 0 < columns <= self.embedding_dim:
            raise ValueError(
                f"TT q {self.q} can be cut every {self.column_step} columns, which does not give a part of {columns}; "
                f"allowed: multiples of {self.column_step} up to {self.embedding_dim}"
            )
        narrowed = copy.copy(self)
        object.__setattr__(narrowed, "embedding_dim", columns)
        object.__setattr__(narrowed, "q", (columns // self.column_step, *self.q[1:]))
        return narrowed

    def with_rows(self, num_embeddings: int) -> TTSpec:
        """Shape of the same tensor train with rows added at its end: only the first factor of ``p`` grows, if need be.

        A checkpoint of this table loads into that one.

        Raises:
            ValueError: if that are fewer rows than there are.
        """
        num_embeddings = whole_number("num_embeddings", num_embeddings)
        if num_embeddings < self.num_embeddings:
            raise ValueError(f"a table of {self.num_embeddings:,} rows cannot be cut to {num_embeddings:,}")
        first = max(self.p[0], -(-num_embeddings // math.prod(self.p[1:])))
        return TTSpec(num_embeddings, self.embedding_dim, (first, *self.p[1:]), self.q, self.ranks)

    def check_table(self, name: str, num_embeddings: int, embedding_dim: int) -> None:
        """Raises ``ValueError`` naming the table unless the spec is for a table of that size."""
        if (self.num_embeddings, self.embedding_dim) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"table {name!r} is {num_embeddings:,} x {embedding_dim}, but its TTSpec is for "
                f"{self.num_embeddings:,} x {self.embedding_dim}; make the spec from the table's own numbers"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON; `from_dict` reads them back."""
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "p": list(self.p),
            "q": list(self.q),
            "ranks": list(self.ranks),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TTSpec:
        return cls(
            values["num_embeddings"],
            values["embedding_dim"],
            tuple(values["p"]),
            tuple(values["q"]),
            tuple(values["ranks"]),
        )


class TableConfig(Protocol):
    """What `compress_to_fit` reads of a table; TorchRec's ``EmbeddingBagConfig`` has it."""

    name: str
    num_embeddings: int
    embedding_dim: int


def compress_to_fit(
    tables: Iterable[TableConfig],
    budget: SupportsIndex | str,
    *,
    element_size: int = 4,
    core_element_size: int | None = None,
    **suggest: Any,
) -> dict[str, TTSpec]:
    """Compresses the largest tables, one after the other, until all weights fit ``budget``.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` objects, or anything with their name and size.
        budget: bytes for the weights of all tables together, as a number or like ``"8GB"``.
        element_size: bytes a number.
        core_element_size: bytes a number of the cores, ``element_size`` if not given.
        **suggest: passed on to `TTSpec.suggest`.

    Returns:
        A spec for each table to compress; the other tables stay dense.

    Raises:
        ValueError: if the tables do not fit even with every table compressed.
    """
    limit = parse_bytes(budget)
    element_size = whole_number("element_size", element_size, least=1)
    if core_element_size is not None:
        core_element_size = whole_number("core_element_size", core_element_size, least=1)
    left = sorted(tables, key=lambda t: t.num_embeddings * t.embedding_dim, reverse=True)
    total = sum(t.num_embeddings * t.embedding_dim for t in left) * element_size
    specs: dict[str, TTSpec] = {}
    for table in left:
        if total <= limit:
            return specs
        spec = TTSpec.suggest(table.num_embeddings, table.embedding_dim, **suggest)
        cores = spec.num_bytes(core_element_size or element_size)
        saved = table.num_embeddings * table.embedding_dim * element_size - cores
        if saved > 0:
            specs[table.name] = spec
            total -= saved
    if total > limit:
        raise ValueError(
            f"the tables need {total:,} bytes even with {len(specs)} of {len(left)} compressed, more than the budget "
            f"of {limit:,}; lower the rank or raise the budget"
        )
    return specs


_UNITS = {"": 1, "B": 1, **{u + s: b**e for e, u in enumerate("KMGT", 1) for s, b in (("B", 1000), ("IB", 1024))}}


def parse_bytes(size: SupportsIndex | str) -> int:
    """Bytes in ``8_000_000``, ``"8MB"`` (powers of 1000) or ``"8MiB"`` (powers of 1024)."""
    if not isinstance(size, str):
        return whole_number("a size in bytes", size)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"cannot read {size!r} as a size; write it like 8GB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])
