"""``python -m flowtt_torchrec env``: what is installed, and which backend runs the ops and why."""

from __future__ import annotations

import argparse
import platform

import torch

from flowtt_torchrec.ops import backend_info
from flowtt_torchrec.versions import versions


def environment() -> dict[str, str]:
    """What a bug report needs, by name."""
    backend = backend_info()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        **versions(),
        "platform": platform.platform(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "cuda devices": ", ".join(devices) or "none",
        "backend": f"{backend.name} ({backend.reason})",
        "compiled library": backend.error or str(backend.library),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flowtt_torchrec", description=__doc__)
    parser.add_argument("command", choices=["env"], help="print the environment")
    parser.parse_args()
    values = environment()
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
