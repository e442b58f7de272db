"""Versions of everything that has to fit together, for reports and bug reports."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from flowtt_torchrec._version import __version__

_DISTRIBUTIONS = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchx", "torchmetrics", "numpy")


def versions(*others: str) -> dict[str, str | None]:
    """Versions by distribution name, this package's and Python's first; None for what is not installed.

    Args:
        others: distributions to add to those that the package has to do with.
    """
    found: dict[str, str | None] = {"flowtt-torchrec": __version__, "python": platform.python_version()}
    found.update({name: _version(name) for name in (*_DISTRIBUTIONS, *others)})
    found["cuda"] = torch.version.cuda
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
