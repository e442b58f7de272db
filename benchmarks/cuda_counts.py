"""What the CUDA kernels do to memory, counted on the emulator: 32-byte sectors of global memory, wavefronts of shared
memory, atomics, for each lookup and beside the least that the same accesses could take. Needs a CUDA toolkit, no GPU.

    python -m benchmarks.cuda_counts

Counts, not times: they rank what bounds a kernel and show a change for the worse. Widths are those of the source; an
instruction that tensor cores execute shows only its loads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import defaultdict
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
# Two of the middle slices of a table with p (300, 304, 350), at 445,000 skewed lookups a batch: the batch of
# the budgets in docs/cuda.md.
SLICES = TTSpec(210_000, 32, (300, 2, 350), (2, 4, 4), (32, 32))
FIELDS = ("requests", "transactions", "least", "bytes")


class Count(NamedTuple):
    """Accesses of one kind: ``transactions`` are sectors or wavefronts, ``least`` the fewest for the same bytes."""

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


def workload(lookups: int = LOOKUPS) -> Workload:
    """Bags of two lookups of one table, ids skewed as in click logs."""
    layout = TTLayout([SPEC], ["t"])
    generator = torch.Generator().manual_seed(0)
    indices = (torch.rand(lookups, generator=generator).pow(4) * SPEC.num_embeddings).long() * 7 % SPEC.num_embeddings
    offsets = torch.arange(0, lookups + 1, 2)
    rows = indices.unique()
    return Workload(
        layout,
        indices,
        offsets,
        lookups,
        rows.numel(),
        torch.div(rows, SPEC.p[-1], rounding_mode="floor").unique().numel(),
    )


def large_table(seed: int = 0) -> Workload:
    """What a batch of 445,000 lookups, skewed and scattered over a large table, leaves to two middle slices of it."""
    first, middle, last = 300, 304, 350
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(445_000, generator=generator, dtype=torch.float64)
    ranks = ((3e7**-0.085 - 1) * uniform + 1).pow(-1 / 0.085).long()  # Zipf's law with exponent 1.085
    rows = ranks * 2_654_435_761 % (first * middle * last)
    rows = rows[rows // last % middle < 2]
    indices = (rows // last // middle * 2 + rows // last % middle) * last + rows % last
    indices = indices[: indices.numel() // 2 * 2]
    offsets = torch.arange(0, indices.numel() + 1, 2)
    distinct = indices.unique()
    flows = torch.div(distinct, last, rounding_mode="floor").unique().numel()
    return Workload(TTLayout([SLICES], ["t"]), indices, offsets, indices.numel(), distinct.numel(), flows)


WORKLOADS = {"small": workload, "large-table": large_table}


def count(work: Workload, direction: str) -> dict[tuple[str, str], Count]:
    """Counts of one forward or backward pass, by (source file, kind of access); the plan is not counted.

    Args:
        work: what is looked up.
        direction: ``"forward"`` or ``"backward"``.
    """
    emulator = emulated.load(emulated.build_ops("checked"))
    emulator.cuda_emulation_seed(1)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(work.layout.num_parameters, generator=generator).requires_grad_()
    with ops.use_backend(emulated.BACKEND):
        plan = ops.flow_plan(work.layout, work.indices, work.offsets)
        if direction == "backward":
            output = ops.pooled_lookup(weights, work.layout, work.offsets, plan)
        emulator.cuda_emulation_profile(True)
        if direction == "forward":
            ops.pooled_lookup(weights, work.layout, work.offsets, plan)
        else:
            output.sum().backward()
        emulator.cuda_emulation_profile(False)
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(FIELDS))
    for line in emulator.cuda_emulation_take_profile().decode().splitlines():
        space, operation, source, *numbers = line.split()
        entry = totals[source.partition(":")[0], f"{space} {operation}"]
        for i, number in enumerate(numbers):
            entry[i] += int(number)
    return {key: Count(*numbers) for key, numbers in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts what the CUDA kernels do to memory, on the emulator.")
    parser.add_argument("--json", type=Path, help="also write the counts here")
    parser.add_argument("--workload", choices=WORKLOADS, default="small", help="default: small")
    parser.add_argument("--multiprocessors", type=int, default=3, help="of the emulated device; 2 blocks each")
    options = parser.parse_args()
    json_path = options.json
    work = WORKLOADS[options.workload]()
    emulated.load(emulated.build_ops("checked")).cuda_emulation_set_multiprocessors(options.multiprocessors)
    sizes = {"lookups": work.lookups, "rows": work.rows, "flows": work.flows}
    print(f"{work.lookups} lookups, {work.rows} distinct rows, {work.flows} flows; {work.layout.specs[0]}")
    found: dict[str, dict[str, dict[str, int]]] = {}
    for direction in ("forward", "backward"):
        found[direction] = {}
        print(f"\n{direction:30} {'':16} {'a lookup':>10} {'least':>10} {'ratio':>6}")
        for (source, kind), numbers in sorted(count(work, direction).items()):
            found[direction][f"{source} {kind}"] = numbers._asdict()
            each, least = numbers.transactions / work.lookups, numbers.least / work.lookups
            print(f"{source:30} {kind:16} {each:10.2f} {least:10.2f} {each / least:6.2f}")
    if json_path is not None:
        json_path.write_text(json.dumps({**sizes, **found}, indent=1))


if __name__ == "__main__":
    main()
