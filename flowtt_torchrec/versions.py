"""Versions of everything that has to fit together, for reports and bug reports."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

_DISTRIBUTIONS = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchx", "torchmetrics", "numpy")


def versions() -> dict[str, str]:
    """Installed versions by distribution name, this package's and Python's first; "not installed" where missing."""
    found = {"flowtt-torchrec": _version("flowtt-torchrec"), "python": platform.python_version()}
    found.update({name: _version(name) for name in _DISTRIBUTIONS})
    found["cuda"] = torch.version.cuda or "none (CPU build of torch)"
    return found


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
