"""Reads the tables of numbers that come with the package."""

from __future__ import annotations

import csv
from importlib import resources


def read_columns(name: str) -> dict[str, list[float]]:
    """Columns of a CSV file in ``flowtt_torchrec/datasets/data`` by name; lines that start with ``#`` are comments."""
    text = (resources.files("flowtt_torchrec.datasets") / "data" / name).read_text(encoding="utf-8")
    header, *rows = csv.reader(line for line in text.splitlines() if not line.startswith("#"))
    return {column: [float(row[i]) for row in rows] for i, column in enumerate(header)}
