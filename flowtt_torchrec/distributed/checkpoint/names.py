"""What tables are called in a state dict, and whether saved cores are those of a model's spec."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowtt_torchrec.spec import TTSpec

ROWS, WEIGHT = "tt_rows", "weight"
_PARAMETER = re.compile(r"((?:.*\.)?embedding_bags\.([^.]+)\.)(tt_core\d+|tt_rows|weight)")
_STATE = re.compile(r"((?:.*\.)?embedding_bags\.([^.]+)\.)(?:tt_core\d+|weight)\..+")


def split_parameter(name: str) -> tuple[str, str, str] | None:
    """``("model.ebc.embedding_bags.t.", "t", "tt_core0")`` of the whole name; None for what is no table's."""
    match = _PARAMETER.fullmatch(name)
    return None if match is None else (match[1], match[2], match[3])


def split_bag(bag: str) -> str:
    """The table's name in ``"…embedding_bags.<table>."``."""
    return bag[:-1].rpartition(".")[2]


def table_of_state(name: str) -> str | None:
    """The table whose parameter an entry of optimizer state belongs to."""
    match = _STATE.fullmatch(name)
    return None if match is None else match[2]


@dataclass
class SavedTable:
    """A tensor train as a state dict has it: the shapes of its cores, and the number of rows if that was saved too."""

    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: int | None = None

    def ordered_shapes(self) -> list[tuple[int, ...]]:
        return [shape for _, shape in sorted(self.shapes.items())]

    def agrees_with(self, other: SavedTable) -> bool:
        """Whether these can be cores of the other; some may be missing, and so may the number of rows."""
        return self.shapes.items() <= other.shapes.items() and (
            self.rows is None or other.rows is None or self.rows == other.rows
        )

    def grows_to(self, other: SavedTable) -> bool:
        """Whether the other is this table with rows added at its end: all shapes agree but the first factor of p."""
        if self.rows is None or other.rows is None or not (self._is_train() and other._is_train()):
            return False
        mine, others = self.ordered_shapes(), other.ordered_shapes()
        return (
            self.rows < other.rows
            and mine[1:] == others[1:]
            and mine[0][1:] == others[0][1:]
            and mine[0][0] <= others[0][0]
        )

    def spec(self, name: str) -> TTSpec:
        """Raises ``ValueError`` naming the table unless the cores are all there and the number of rows is known."""
        if self.rows is None:
            raise ValueError(f"table {name!r}: the checkpoint does not say how many rows it has ({ROWS} is missing)")
        if not self._is_train():
            raise ValueError(f"table {name!r} is not whole in the checkpoint: {self}")
        shapes = self.ordered_shapes()
        q = tuple(shape[2] for shape in shapes)
        return TTSpec(self.rows, math.prod(q), tuple(s[0] for s in shapes), q, tuple(s[3] for s in shapes[:-1]))

    def _is_train(self) -> bool:
        shapes = self.ordered_shapes()
        return (
            sorted(self.shapes) == list(range(len(shapes)))
            and all(len(shape) == 4 for shape in shapes)
            and [1, *(shape[3] for shape in shapes)] == [*(shape[1] for shape in shapes), 1]
        )

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", {self.rows:,} rows"
        if not self._is_train():
            return "cores of shapes " + ", ".join(f"{k}: {list(self.shapes[k])}" for k in sorted(self.shapes)) + rows
        shapes = self.ordered_shapes()
        p, q, ranks = (tuple(s[0] for s in shapes), tuple(s[2] for s in shapes), tuple(s[3] for s in shapes[:-1]))
        return f"{len(shapes)} cores with p {p}, q {q}, ranks {ranks}{rows}"


def of_spec(spec: TTSpec) -> SavedTable:
    """How a model with this spec would save the table."""
    return SavedTable(dict(enumerate(spec.core_shapes)), spec.num_embeddings)


def check_saved(name: str, saved: SavedTable, expected: SavedTable, where: str) -> None:
    """Raises ``ValueError`` unless saved cores are those that a model has.

    Args:
        name: the table.
        saved: what ``where`` has.
        expected: what the model has.
        where: like ``"the checkpoint"``.
    """
    if not saved.agrees_with(expected):
        raise ValueError(
            f"table {name!r} does not match {where}: saved are {saved}; expected are {expected}. Give the sharder the "
            "spec that was saved (flowtt_torchrec.distributed.checkpoint.saved_specs reads it), or bring the table to "
            "the new one by way of a dense table: python -m flowtt_torchrec export, then compress"
        )


def saved_tables(shapes: Mapping[str, Sequence[int]]) -> dict[str, SavedTable]:
    """The tensor trains among named tensors, by the beginning of their names, ``"…embedding_bags.<table>."``."""
    found: dict[str, SavedTable] = {}
    for name, shape in shapes.items():
        parts = split_parameter(name)
        if parts is not None and parts[2].startswith("tt_core"):
            found.setdefault(parts[0], SavedTable()).shapes[int(parts[2][len("tt_core") :])] = tuple(shape)
    return found
