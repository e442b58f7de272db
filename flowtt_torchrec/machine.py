"""The machine's name, for whatever says where numbers were measured."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device | str) -> str:
    """Model of the GPU, or of the processor."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """The processor's model, such as ``Intel(R) Xeon(R) Platinum 8481C``; its architecture where no more is known."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """The kernel's names of the processor's instruction sets; empty where it gives none."""
    return set((_cpu_info("flags") or _cpu_info("Features")).split())


def _cpu_info(wanted: str) -> str:
    """What Linux says of the first processor."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == wanted:
                return value.strip()
    return ""
