"""Bugs planted in the CUDA sources at marked lines, all in one library, each of them asleep until it is asked for.

A comment ``[mutant: name, other-name]`` marks the code on its line, or on the next one where it stands alone. The mark
goes where the code goes; what it does there is said in `test_mutations`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cuda_emulation import build, emulated

CSRC = build.ROOT / "csrc"
SOURCES = [*sorted((CSRC / "include" / "flowtt").glob("*.*h")), *emulated.SOURCES]
MARK = re.compile(r"\[mutant: ([\w, -]+)\]")


class Change(NamedTuple):
    """What becomes of a marked line: ``old``, an expression in it, or the whole of it, becomes ``new``."""

    new: str
    old: str | None = None

    def apply(self, code: str, asked: str) -> str:
        """The line with both versions, the new one where ``asked``."""
        if self.old is None:
            if not code.rstrip().endswith(";"):
                raise ValueError(f"not one statement: {code}")
            return f"if ({asked}) {{ {self.new} }} else {{ {code.strip()} }}"
        if code.count(self.old) != 1:
            raise ValueError(f"{self.old!r} is there {code.count(self.old)} times: {code}")
        return code.replace(self.old, f"({asked} ? ({self.new}) : ({self.old}))")


def left_out() -> Change:
    """The statement is not there."""
    return Change("")


def instead(statement: str) -> Change:
    """Another statement is there."""
    return Change(statement)


def swap(old: str, new: str) -> Change:
    """Another expression is there."""
    return Change(new, old)


class Before(NamedTuple):
    """A statement comes before the line."""

    statement: str

    def apply(self, code: str, asked: str) -> str:
        return f"if ({asked}) {{ {self.statement} }} {code.strip()}"


def plant(changes: Mapping[str, Change | Before], folder: Path) -> list[Path]:
    """Writes the sources with all bugs to ``folder``, headers to ``folder / "include" / "flowtt"``.

    Returns:
        The sources to compile, in place of those in csrc/cuda.

    Raises:
        ValueError: for a mark without a change, a change without a mark, and a line that a change does not fit.
    """
    numbers = {name: number for number, name in enumerate(changes, start=1)}
    places: dict[str, str] = {}
    for path in SOURCES:
        lines = path.read_text().split("\n")
        for at, names in _marked(lines).items():
            place = f"{path.relative_to(CSRC)}:{at + 1}"
            for name in names:
                if name not in changes or name in places:
                    raise ValueError(
                        f"{place}: mutant {name!r} " + ("is marked twice" if name in places else "is unknown")
                    )
                places[name] = place
            code = lines[at].partition("//")[0]
            for name in sorted(names, key=lambda name: getattr(changes[name], "old", None) is None):  # whole lines last
                try:
                    code = changes[name].apply(code, f"cuda_emulation::has_bug({numbers[name]})")
                except ValueError as error:
                    raise ValueError(f"{place}: mutant {name!r} does not fit: {error}") from None
            lines[at] = code
        target = folder / ("include/flowtt" if path.suffix != ".cu" else "cuda") / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(lines))
    lost = sorted(changes.keys() - places.keys())
    if lost:
        raise ValueError(f"nothing in {CSRC} is marked with " + ", ".join(f"[mutant: {name}]" for name in lost))
    return [folder / "cuda" / path.name for path in emulated.SOURCES]


def _marked(lines: list[str]) -> dict[int, list[str]]:
    """Line numbers, from 0, of marked code, and the names of its marks."""
    found: dict[int, list[str]] = defaultdict(list)
    for number, line in enumerate(lines):
        for mark in MARK.finditer(line):
            at = number
            while lines[at].lstrip().startswith("//"):
                at += 1
            found[at] += mark[1].split(", ")
    return found
