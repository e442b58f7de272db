"""Finds the files of a data set, and tells them apart."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowtt_torchrec.datasets.base import DataError

_FINGERPRINT_BYTES = 1 << 16
_NAMES_SHOWN = 5


def find_files(
    path: str | Path,
    patterns: Sequence[str],
    expected: str,
    why_not: Callable[[Path], str | None] | None = None,
) -> list[Path]:
    """``path`` itself, or what the folder ``path`` holds, in natural order (``day_2`` before ``day_10``).

    Args:
        path: a file, of any name, or a folder.
        patterns: regular expressions for whole names in a folder; the first that any name matches decides.
        expected: what these are, for the message.
        why_not: looks into a file whose name fits the last pattern only, and says why it is no data; None if it is.

    Raises:
        DataError: there is nothing to read, or a file is there both plain and gzipped.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"data path {path} does not exist")
    if not path.is_dir():
        return [path]
    reasons: dict[str, str] = {}
    names = _names(path)
    for pattern in patterns:
        found = [name for name in names if re.fullmatch(pattern, name)]
        if why_not is not None and pattern == patterns[-1]:
            reasons = {name: reason for name in found if (reason := why_not(path / name)) is not None}
            found = [name for name in found if name not in reasons]
        for name in found:
            if f"{name}.gz" in found:
                raise DataError(f"folder {path} holds both {name} and {name}.gz; remove one, or name a file")
        if found:
            return [path / name for name in found]
    shown = [f"{name} ({reasons[name]})" if name in reasons else name for name in names[:_NAMES_SHOWN]]
    raise DataError(
        f"folder {path} holds no data: expected {expected} (each also as .gz), found {', '.join(shown) or 'nothing'}"
    )


def left_out(path: Path, files: Sequence[Path]) -> str | None:
    """A note that names what lies in the folder ``path`` beside ``files``; None if there is nothing, or no folder."""
    if not path.is_dir():
        return None
    read = {file.name for file in files if file.parent == path}
    others = [name for name in _names(path) if name not in read and not name.startswith((".", "_"))]
    more = f" and {len(others) - _NAMES_SHOWN} more" if len(others) > _NAMES_SHOWN else ""
    return f"not read in {path}: {', '.join(others[:_NAMES_SHOWN])}{more}" if others else None


def fingerprint(path: Path) -> dict[str, Any]:
    """What tells a file from others without reading all of it, for JSON: name, size, a hash of both its ends.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            size = path.stat().st_size
            digest = hashlib.sha256(stream.read(_FINGERPRINT_BYTES))
            stream.seek(max(size - _FINGERPRINT_BYTES, 0))
            digest.update(stream.read(_FINGERPRINT_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return {"name": path.name, "bytes": size, "sha256_of_ends": digest.hexdigest()}


def _names(folder: Path) -> list[str]:
    try:
        return sorted((entry.name for entry in folder.iterdir() if entry.is_file()), key=_natural)
    except OSError as error:
        raise DataError(f"folder {folder} cannot be read ({error.strerror})") from None


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
