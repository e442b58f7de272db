"""Finds the files of a data set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from flowtt_torchrec.datasets.base import DataError


def find_files(path: str | Path, patterns: Sequence[str], expected: str) -> list[Path]:
    """``path`` itself, or what the folder ``path`` holds, in natural order (``day_2`` before ``day_10``).

    Args:
        path: a file, of any name, or a folder.
        patterns: regular expressions for whole names in a folder; the first that any name matches decides.
        expected: what these are, for the message.

    Raises:
        DataError: there is nothing to read, or a file is there both plain and gzipped.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"data path {path} does not exist")
    if not path.is_dir():
        return [path]
    names = sorted((entry.name for entry in path.iterdir() if entry.is_file()), key=_natural)
    for pattern in patterns:
        found = [name for name in names if re.fullmatch(pattern, name)]
        for name in found:
            if f"{name}.gz" in found:
                raise DataError(f"folder {path} holds both {name} and {name}.gz; remove one, or name a file")
        if found:
            return [path / name for name in found]
    raise DataError(
        f"folder {path} holds no data: expected {expected} (each also as .gz), "
        f"found {', '.join(names[:5]) or 'nothing'}"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
