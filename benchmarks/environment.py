"""What the numbers were measured on, and whether other processes disturbed them."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowtt_torchrec import ops
from flowtt_torchrec.machine import cpu_flags, cpu_model
from flowtt_torchrec.versions import versions

# Instruction sets that one of the kernels measured here may choose by.
_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
)
# Other processes' share of the CPU, in cores, above which a run counts as disturbed.
BUSY_CORES = 0.2


def describe(command: Sequence[str]) -> dict[str, Any]:
    """Device, threads, load, versions, command and revision, as plain values for JSON."""
    flags = cpu_flags()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "revision": _revision(),
        "device": cpu_model(),
        "cpu_flags": [flag for flag in _FLAGS if flag in flags],
        "cpu_caches": _caches(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "platform": platform.platform(),
        "versions": {name: version for name, version in versions("tensorly-torch").items() if version is not None},
    }


def describe_backend() -> dict[str, Any]:
    """Which backend runs the ops, the library by its name only."""
    info = ops.backend_info()
    return {**info._asdict(), "library": info.library and Path(info.library).name}


def command_line() -> list[str]:
    """The command as a user would type it, ``python -m benchmarks.…`` included."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    start = ["python", "-m", spec.name.removesuffix(".__main__")] if spec is not None else ["python", sys.argv[0]]
    return [*start, *sys.argv[1:]]


class CpuWatch:
    """Measures the CPU time that other processes take on the CPUs this process may use.

    Counts come from ``/proc/stat`` in ticks of 10 ms, so intervals shorter than about 0.1 s say little.
    """

    def __init__(self) -> None:
        self._start = self._read()

    def own_seconds(self) -> float:
        """CPU time of this process since the watch was made."""
        return self._read()[2] - self._start[2]

    def other_cores(self, siblings: float = 0.0) -> float:
        """Cores that others kept busy, on average since the watch was made (stolen time of a virtual machine too).

        Args:
            siblings: CPU time since then of other processes that belong to the run.
        """
        wall, busy, own = (now - before for now, before in zip(self._read(), self._start, strict=True))
        own += siblings
        cpus = len(os.sched_getaffinity(0))
        return min(cpus, max(0.0, busy - own) / wall) if wall > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds: of the clock, of our CPUs at work, and of this process and its finished children."""
        tick = os.sysconf("SC_CLK_TCK")
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                busy += user + nice + system + irq + softirq + steal
        own = os.times()
        return time.perf_counter(), busy / tick, own.user + own.system + own.children_user + own.children_system


def _caches() -> dict[str, str]:
    """Sizes of the first CPU's caches, for example ``{"L1d": "48K"}``."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
        suffix = {"Data": "d", "Instruction": "i"}.get(kind, "")
        found[f"L{level}{suffix}"] = (index / "size").read_text().strip()
    return found


def _revision() -> str:
    """Commit of the working tree, with ``-dirty`` where files differ; empty outside a checkout or without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
