"""Memory of this process, as Linux counts it."""

from __future__ import annotations

import resource
from pathlib import Path

# With these in the environment glibc returns memory when it is freed, so that a peak counts what is alive: not what
# malloc keeps for later, and not less because memory that was freed before is used again.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def reset_peak() -> bool:
    """Sets the kernel's peak to the present use; false where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def in_use() -> int:
    return _status("VmRSS")


def peak(resettable: bool) -> int:
    return _status("VmHWM") if resettable else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
