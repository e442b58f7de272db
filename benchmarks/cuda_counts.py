"""What the CUDA kernels do, counted on the emulator: 32-byte sectors of global memory by buffer, wavefronts of shared
memory, atomics, multiply-adds, for each lookup and beside the least that the same accesses could take; and how long an
H200 takes at least. Needs a CUDA toolkit, no GPU.

    python -m benchmarks.cuda_counts

Counts, not times: they rank what bounds a kernel and show a change for the worse. Widths are those of the source; an
instruction that tensor cores execute shows only its loads.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from flowtt_torchrec import ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.spec import TTSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
emulated = importlib.import_module("cuda_emulation.emulated")

SPEC = TTSpec(16_000, 32, (20, 4, 200), (2, 4, 4), (32, 32))
LOOKUPS = 600
# Eight of the middle slices of a table with p (300, 304, 350), and a large batch's share of lookups: as many rows and
# flows for each middle slice as 445,000 skewed lookups have. The batch of docs/cuda.md.
SLICES = TTSpec(840_000, 32, (300, 8, 350), (2, 4, 4), (32, 32))
SLICE_LOOKUPS = 7_500
MULTIPLY_ADDS = ("multiply-adds", "TF32 multiply-adds", "16-bit multiply-adds")
# An H200: multiply-adds, sectors and wavefronts a nanosecond. 132 multiprocessors at 1.98 GHz, a wavefront of shared
# memory a cycle; FP32 and dense TF32 as specified; L2 at 5.5 TB/s is assumed.
RATES = {"multiply-adds": 33_500, "TF32 multiply-adds": 247_000, "sectors": 5_500 / 32, "wavefronts": 132 * 1.98}


class Count(NamedTuple):
    """Accesses of one kind to one buffer by one source file.

    ``transactions`` are sectors or wavefronts, ``least`` the fewest for the same bytes; shared memory's buffer is "-".
    """

    source: str
    kind: str
    buffer: str
    requests: int
    transactions: int
    least: int
    bytes: int


class Workload(NamedTuple):
    layout: TTLayout
    indices: torch.Tensor
    offsets: torch.Tensor
    lookups: int
    rows: int
    flows: int


def _workload(spec: TTSpec, indices: torch.Tensor, offsets: torch.Tensor) -> Workload:
    rows = indices.unique()
    flows = torch.div(rows, spec.p[-1], rounding_mode="floor").unique()
    return Workload(TTLayout([spec], ["t"]), indices, offsets, indices.numel(), rows.numel(), flows.numel())


def workload(lookups: int = LOOKUPS) -> Workload:
    """Bags of two lookups of one table, ids skewed as in click logs."""
    generator = torch.Generator().manual_seed(0)
    indices = (torch.rand(lookups, generator=generator).pow(4) * SPEC.num_embeddings).long() * 7 % SPEC.num_embeddings
    return _workload(SPEC, indices, torch.arange(0, lookups + 1, 2))


def slices(seed: int = 0) -> Workload:
    """Bags of 20 lookups, skewed by Zipf's law with exponent 1.085; popularity does not follow the row number."""
    generator = torch.Generator().manual_seed(seed)
    rows = SLICES.num_embeddings
    popularity = torch.arange(1, rows + 1, dtype=torch.float64).pow(-1.085).cumsum(0)
    drawn = torch.rand(SLICE_LOOKUPS, generator=generator, dtype=torch.float64) * popularity[-1]
    indices = torch.searchsorted(popularity, drawn) * 611_953 % rows
    return _workload(SLICES, indices, torch.arange(0, SLICE_LOOKUPS + 1, 20))


WORKLOADS: dict[str, Callable[[], Workload]] = {"small": workload, "slices": slices}


class Pass(NamedTuple):
    counts: list[Count]
    multiply_adds: dict[str, int]


def count(work: Workload, direction: str) -> Pass:
    """Counts one forward or backward pass, as training makes it; its plan, and checks of a caller's, are not counted.

    Args:
        work: what is looked up.
        direction: ``"forward"`` or ``"backward"``.
    """
    emulator = emulated.load(emulated.build_ops("checked"))
    emulator.cuda_emulation_seed(1)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(work.layout.num_parameters, generator=generator)
    cores = [4 * int(core.storage_offset()) for core in work.layout.core_views(weights)[0]]
    emulator.cuda_emulation_profile_parts(
        ctypes.c_uint64(weights.nbytes), (ctypes.c_uint64 * len(cores))(*cores), len(cores)
    )
    weights.requires_grad_()
    forward = ops.BACKENDS[emulated.BACKEND].pooled_forward
    with ops.use_backend(emulated.BACKEND):
        plan = ops.flow_plan(work.layout, work.indices, work.offsets)
        if direction == "backward":
            output = forward(weights, work.layout, work.offsets, plan)
        for name in MULTIPLY_ADDS:
            emulator.cuda_emulation_take_count(name.encode())
        emulator.cuda_emulation_profile(True)
        if direction == "forward":
            forward(weights, work.layout, work.offsets, plan)
        else:
            output.sum().backward()
        emulator.cuda_emulation_profile(False)
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for line in emulator.cuda_emulation_take_profile().decode().splitlines():
        space, operation, source, *numbers, buffer = line.split(maxsplit=7)
        entry = totals[source.partition(":")[0], f"{space} {operation}", buffer]
        for i, number in enumerate(numbers):
            entry[i] += int(number)
    return Pass(
        [Count(*key, *numbers) for key, numbers in sorted(totals.items())],
        {name: emulator.cuda_emulation_take_count(name.encode()) for name in MULTIPLY_ADDS},
    )


def least_time(result: Pass) -> dict[str, float]:
    """Nanoseconds that an H200 takes at least, by what bounds it: a roofline, of counts and peaks alone."""
    spaces = {"sectors": "global", "wavefronts": "shared"}
    amounts: dict[str, int] = dict(result.multiply_adds)
    for name, space in spaces.items():
        amounts[name] = sum(c.transactions for c in result.counts if c.kind.startswith(space))
    return {name: amounts[name] / rate for name, rate in RATES.items()}


def _print(title: str, key: Callable[[Count], tuple[str, str]], counts: Iterable[Count], lookups: int) -> None:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for one in counts:
        sums[key(one)][0] += one.transactions
        sums[key(one)][1] += one.least
    print(f"\n{title:44} {'a lookup':>10} {'least':>10} {'ratio':>6}")
    for (what, kind), (transactions, least) in sorted(sums.items()):
        print(f"{what:28} {kind:15} {transactions / lookups:10.2f} {least / lookups:10.2f} {transactions / least:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts what the CUDA kernels do, on the emulator.")
    parser.add_argument("--json", type=Path, help="also write the counts here")
    parser.add_argument("--workload", choices=WORKLOADS, default="small", help="default: small")
    parser.add_argument("--multiprocessors", type=int, default=3, choices=range(1, 9), help="2 blocks each")
    options = parser.parse_args()
    json_path = options.json
    work = WORKLOADS[options.workload]()
    emulator = emulated.load(emulated.build_ops("checked"))
    emulator.cuda_emulation_set_multiprocessors(options.multiprocessors)
    emulator.cuda_emulation_set_resident_blocks(2 * options.multiprocessors)  # as on a GPU: fewer steals
    found: dict[str, object] = {"lookups": work.lookups, "rows": work.rows, "flows": work.flows}
    print(f"{work.lookups} lookups, {work.rows} distinct rows, {work.flows} flows; {work.layout.specs[0]}")
    for direction in ("forward", "backward"):
        result = count(work, direction)
        found[direction] = [one._asdict() for one in result.counts]
        found[f"{direction} operations"] = result.multiply_adds
        in_global = [one for one in result.counts if one.kind.startswith("global")]
        in_shared = [one for one in result.counts if one.kind.startswith("shared")]
        _print(f"{direction}: sectors", lambda one: (one.buffer, one.kind), in_global, work.lookups)
        _print(f"{direction}: wavefronts", lambda one: (one.source, one.kind), in_shared, work.lookups)
        print()
        for name, number in result.multiply_adds.items():
            print(f"{name:44} {number / work.lookups:10.2f}")
        bounds = ", ".join(f"{ns / work.lookups:.3f} for {name}" for name, ns in least_time(result).items())
        print(f"an H200 takes at least, ns a lookup: {bounds}")
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
