"""Registers, shared memory and occupancy of the CUDA kernels, from what ptxas said when they were built. Needs no GPU.

python -m benchmarks.cuda_kernels
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

from flowtt_torchrec import native
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.spec import TTSpec

LOGS = Path(__file__).parents[1] / "build" / "objects"
THREADS = 256
MAX_WARPS = 64  # of a multiprocessor
REGISTERS = 65_536
# Shared memory of a multiprocessor, and the most of a block.
DEVICES = {"sm_80": ("A100", 167_936, 166_912), "sm_90": ("H100, H200", 233_472, 232_448)}
ELEMENTS = {"float": 4, "Bfloat16": 2}  # bytes; Float16 is like the latter
SHAPES = {
    "rank 16, dim 64": TTSpec(1_000_000, 64, (100, 100, 100), (4, 4, 4), (16, 16)),
    "rank 32, dim 64": TTSpec(1_000_000, 64, (100, 100, 100), (4, 4, 4), (32, 32)),
    "rank 64, dim 128": TTSpec(1_000_000, 128, (100, 100, 100), (4, 4, 8), (64, 64)),
    "rank 128, dim 64": TTSpec(1_000_000, 64, (100, 100, 100), (4, 4, 4), (128, 128)),
}


class Kernel(NamedTuple):
    name: str
    architecture: str
    registers: int
    stack: int  # bytes
    spills: int  # bytes


def kernels() -> list[Kernel]:
    """The kernels of the last build.

    Raises:
        FileNotFoundError: if there was none with CUDA here.
    """
    logs = sorted(LOGS.glob("cuda_*.log"))
    if not logs:
        raise FileNotFoundError(f"no logs of nvcc in {LOGS}; build with FLOWTT_BUILD_CUDA=1 pip install -e .")
    pattern = (
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?\n.*?\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores"
        r".*?\n.*?Used (\d+) registers"
    )
    found = []
    for log in logs:
        for mangled, architecture, stack, spills, registers in re.findall(pattern, log.read_text()):
            found.append(Kernel(_name(mangled), architecture, int(registers), int(stack), int(spills)))
    return found


def _name(mangled: str) -> str:
    own = re.match(r"_ZN6flowtt(\d+)", mangled)
    if own is None:
        return "cub::" + (re.search(r"Device\w+?Kernel|EmptyKernel", mangled) or [mangled])[0]
    name = mangled[own.end() : own.end() + int(own[1])]
    template = re.match(r"I(.*?E)Ev", mangled[own.end() + int(own[1]) :])
    kinds = re.findall(r"^f|(Bfloat16|Float16|(?:Float|Fixed)Sum)|Li(\d+)", template[1]) if template else []
    return f"{name}<{', '.join(first or second or 'float' for first, second in kinds)}>" if kinds else name


def blocks_per_multiprocessor(registers: int, shared_bytes: int, architecture: str) -> int:
    """Blocks of 256 threads that are resident at once, by NVIDIA's rules for these two architectures."""
    warps = THREADS // 32
    warp_registers = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // warp_registers // 4 * 4 // warps
    by_shared = DEVICES[architecture][1] // (-(-(shared_bytes + 1024) // 128) * 128)
    return min(by_registers, by_shared, MAX_WARPS // warps)


def occupancies() -> list[tuple[str, str, str, int, int, int, float]]:
    """For each shape, architecture and direction: registers, shared bytes, blocks a multiprocessor, occupancy."""
    of = {(kernel.name, kernel.architecture): kernel for kernel in kernels()}
    rows = []
    for shape, spec in SHAPES.items():
        tables = TTLayout([spec], ["t"]).tables
        for architecture, (_, _, limit) in DEVICES.items():
            for backward in (False, True):
                for element, size in ELEMENTS.items():
                    _, shared, slab = torch.ops.flowtt.cuda_setting(tables, backward, limit, size)
                    name = f"backward_cores<{element}, FloatSum, {slab}>" if backward else f"forward_rows<{element}>"
                    registers = of[name, architecture].registers
                    blocks = blocks_per_multiprocessor(registers, shared, architecture)
                    occupancy = blocks * THREADS / 32 / MAX_WARPS
                    rows.append((shape, architecture, name, registers, shared, blocks, occupancy))
    return rows


def main() -> None:
    if native.load_error is not None:
        raise SystemExit(native.load_error)
    print(f"{'kernel':44} {'arch':6} {'registers':>9} {'stack':>6} {'spills':>6}")
    for kernel in kernels():
        print(f"{kernel.name:44.44} {kernel.architecture:6} {kernel.registers:9} {kernel.stack:6} {kernel.spills:6}")
    print(f"\n{'shape':18} {'device':18} {'kernel':40} {'registers':>9} {'shared':>8} {'blocks':>6} {'occupancy':>9}")
    for shape, architecture, name, registers, shared, blocks, occupancy in occupancies():
        device = f"{DEVICES[architecture][0]} {architecture}"
        print(f"{shape:18} {device:18} {name:40} {registers:9} {shared:8} {blocks:6} {occupancy:9.0%}")


if __name__ == "__main__":
    main()
