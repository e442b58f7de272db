"""Budgets for what the CUDA kernels do to memory, counted on the emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from cuda_emulation import build

pytestmark = [
    pytest.mark.skipif(build.toolkit() is None, reason="the headers of the CUDA toolkit are not here"),
    pytest.mark.slow,
]

BLOCKS, SLICES, TILE = 6, 4, 32  # of the emulated device; middle slices of the table; rows
SECTORS = {"last slice": 16, "left slice": 8, "middle slice": 512, "row": 4}


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """In a process of its own: the checked library defines the same ops as the fast one."""
    path = tmp_path_factory.mktemp("counts") / "counts.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_counts", "--json", str(path)],
        cwd=build.ROOT,
        env={**os.environ, "PYTHONPATH": str(build.ROOT)},
        check=True,
    )
    return json.loads(path.read_text())


def total(counts, direction, kind, *sources):
    return sum(
        numbers["transactions"]
        for key, numbers in counts[direction].items()
        if key.endswith(kind) and (not sources or key.split()[0] in sources)
    )


def tiles(counts):
    return -(-counts["rows"] // TILE)


def test_forward_has_no_atomics_but_those_of_the_schedule(counts):
    ours = {source: total(counts, "forward", "global atomic", source) for source in ("schedule.cuh", "checkpoints.cuh")}
    assert total(counts, "forward", "global atomic") == sum(ours.values())
    assert ours["schedule.cuh"] <= 4 * (tiles(counts) + BLOCKS)
    assert ours["checkpoints.cuh"] <= 4 * tiles(counts)  # claims and publishes the first flow's product and the last's


def test_every_distinct_row_is_written_once(counts):
    assert total(counts, "forward", "global store", "products.cuh") == SECTORS["row"] * counts["rows"]


def test_slices_are_loaded_once_a_row_a_flow_or_a_stretch_of_tiles(counts):
    least = (
        SECTORS["last slice"] * counts["rows"]
        + SECTORS["left slice"] * (counts["flows"] + tiles(counts))
        + SECTORS["middle slice"] * (SLICES + 2 * BLOCKS)  # once a slice, and where a share begins or is stolen
    )
    descriptors = 8 * 32 * (tiles(counts) + SLICES + BLOCKS)  # a few broadcast words of every warp
    assert total(counts, "forward", "global load", "tile.cuh", "element.cuh") <= least + descriptors


def test_gradients_are_added_once_a_row_a_flow_or_a_stretch_of_tiles(counts):
    most = (
        SECTORS["last slice"] * counts["rows"]
        + SECTORS["left slice"] * (counts["flows"] + tiles(counts))
        + SECTORS["middle slice"] * (SLICES + 2 * BLOCKS)
    )
    assert total(counts, "backward", "global atomic", "gradient_sum.cuh") <= most


@pytest.mark.parametrize(("direction", "budget"), [("forward", 90), ("backward", 210)])
def test_wavefronts_of_shared_memory_for_each_row(counts, direction, budget):
    kinds = sum(total(counts, direction, kind) for kind in ("shared load", "shared store"))
    assert kinds / counts["rows"] <= budget
