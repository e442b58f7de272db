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


def total(counts, direction, kind, *buffers, sources=()):
    """Sectors or wavefronts of one kind, of all buffers whose names begin so."""
    return sum(
        one["transactions"]
        for one in counts[direction]
        if one["kind"] == kind
        and (not buffers or one["buffer"].startswith(buffers))
        and (not sources or one["source"] in sources)
    )


def tiles(counts):
    return -(-counts["rows"] // TILE)


def slices_moved(counts):
    """Sectors of a core's slices where each is moved once a row, a flow, or a stretch of tiles."""
    return {
        "part 1": SECTORS["left slice"] * (counts["flows"] + tiles(counts)),
        "part 2": SECTORS["middle slice"] * (SLICES + 2 * BLOCKS),  # also where a share begins, or is stolen
        "part 3": SECTORS["last slice"] * counts["rows"],
    }


def test_forward_has_no_atomics_but_those_of_the_schedule(counts):
    ranges = total(counts, "forward", "global atomic", "tile ranges")
    states = total(counts, "forward", "global atomic", "states of handed-over products")
    assert total(counts, "forward", "global atomic") == ranges + states
    assert ranges <= 4 * (tiles(counts) + BLOCKS)
    assert states <= 4 * tiles(counts)  # claims and publishes the first flow's product and the last's


def test_every_distinct_row_is_written_once_and_read_once_a_lookup(counts):
    written = total(counts, "forward", "global store", "rows", sources=["products.cuh"])
    assert written == SECTORS["row"] * counts["rows"]
    gathered = total(counts, "forward", "global load", "rows", sources=["pooling.cuh"])
    assert gathered <= (SECTORS["row"] + 0.5) * counts["lookups"]  # and the rows' numbers, two a bag


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_slices_are_loaded_once_a_row_a_flow_or_a_stretch_of_tiles(counts, direction):
    for part, most in slices_moved(counts).items():
        assert 0 < total(counts, direction, "global load", f"weights, {part}") <= most


def test_gradients_are_added_once_a_row_a_flow_or_a_stretch_of_tiles(counts):
    added = 0
    for part, most in slices_moved(counts).items():
        sectors = total(counts, "backward", "global atomic", f"gradient of the weights, {part}")
        assert 0 < sectors <= most
        added += sectors
    ranges = total(counts, "backward", "global atomic", "tile ranges")
    assert total(counts, "backward", "global atomic") == added + ranges
    assert ranges <= 4 * (tiles(counts) + BLOCKS)


def test_row_gradients_are_read_once_and_never_added_by_atomics(counts):
    carries = -(-counts["lookups"] // 32)
    assert total(counts, "backward", "global load", "grad_output") == SECTORS["row"] * counts["lookups"]
    assert total(counts, "backward", "global store", "row gradients") <= SECTORS["row"] * (counts["rows"] + carries)


@pytest.mark.parametrize(("direction", "budget"), [("forward", 10), ("backward", 12)])
def test_descriptors_are_read_a_few_times_a_batch_of_flows(counts, direction, budget):
    sectors = total(counts, direction, "global load", "tables", "features", "counts", "row_keys")
    assert sectors / counts["lookups"] <= budget


@pytest.mark.parametrize(("direction", "budget"), [("forward", 62), ("backward", 86)])
def test_wavefronts_of_shared_memory_for_each_row(counts, direction, budget):
    kinds = sum(total(counts, direction, kind) for kind in ("shared load", "shared store"))
    assert kinds / counts["rows"] <= budget


def test_multiply_adds_are_those_of_the_products(counts):
    flow, row = 2 * 4 * 32 * 32, 2 * 4 * 4 * 32
    done = sum(counts["forward operations"].values())
    least = flow * counts["flows"] + row * counts["rows"]
    assert least <= done <= 6 * least  # tensor cores: three products, on whole tiles of 16 rows
