"""Bugs planted in the kernels, one at a time: the checked build must notice every one."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from cuda_emulation import build, checked_run, emulated

pytestmark = [
    pytest.mark.skipif(build.toolkit() is None, reason="the headers of the CUDA toolkit are not here"),
    pytest.mark.slow,
]

HEADERS = build.ROOT / "csrc" / "include" / "flowtt"
CHECKER = "RACE|UNINITIALISED|OUT OF BOUNDS|DEADLOCK|LIVELOCK|divergent|exited|never waited for"
WRONG = "AssertionError: error"


class Mutation(NamedTuple):
    name: str
    header: str  # where
    old: str  # must be there once
    new: str
    sources: str  # compiled anew
    report: str  # what must be said


MUTATIONS = [
    Mutation(
        "tile read before it is decoded",
        "schedule.cuh",
        "__syncthreads();  // the tile can be read",
        "",
        "rows",
        CHECKER,
    ),
    Mutation(
        "missing wait for the middle slice",
        "forward.cuh",
        "__pipeline_wait_prior(1);",
        "__pipeline_wait_prior(2);",
        "rows",
        "UNINITIALISED",
    ),
    Mutation(
        "missing wait for the last slices",
        "forward.cuh",
        "__pipeline_wait_prior(0);",
        "__pipeline_wait_prior(1);",
        "rows",
        "UNINITIALISED",
    ),
    Mutation(
        "slab overwritten while it is read",
        "forward.cuh",
        "if (flow > 0) __syncthreads();",
        "",
        "rows",
        CHECKER,
    ),
    Mutation(
        "stale product of another flow",
        "checkpoints.cuh",
        "comes && borders.held == tile.flow_key[0]",
        "comes",
        "rows",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "kept product is taken from the wrong place",
        "forward.cuh",
        "borders.keeps && borders.held_at > 0",
        "false",
        "rows",
        WRONG,
    ),
    Mutation(
        "checkpoint published without a fence",
        "checkpoints.cuh",
        "  __threadfence();\n  atomicAdd",
        "  atomicAdd",
        "rows",
        "RACE",
    ),
    Mutation(
        "checkpoint published before all of it is stored",
        "checkpoints.cuh",
        "__syncthreads();  // all has been stored",
        "",
        "rows",
        "RACE",
    ),
    Mutation(
        "checkpoint read without a fence",
        "checkpoints.cuh",
        "__nanosleep(64);\n  __threadfence();",
        "__nanosleep(64);",
        "rows",
        "RACE",
    ),
    Mutation(
        "stale checkpoint: nobody waits for it",
        "checkpoints.cuh",
        "states + slot) < 2)",
        "states + slot) < 1)",
        "rows",
        "RACE|UNINITIALISED",
    ),
    Mutation(
        "checkpoint of the tile before",
        "checkpoints.cuh",
        "+ first / schedule.tile_rows;",
        "+ first / schedule.tile_rows - 1;",
        "rows",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "dC over C while C is read",
        "backward.cuh",
        "__syncthreads();  // C has been read: dC takes its place",
        "",
        "backward",
        "RACE",
    ),
    Mutation(
        "last slice's gradient is dropped",
        "backward.cuh",
        "if (!Sum::kDeterministic && loaded.slice >= 0) {",
        "if (false) {",
        "backward",
        WRONG,
    ),
    Mutation(
        "gradient of a slice goes to the next one",
        "backward.cuh",
        "if (!is_loaded && loaded.slice >= 0) {",
        "if (false) {",
        "backward",
        WRONG,
    ),
    Mutation(
        "plain addition in place of an atomic",
        "gradient_sum.cuh",
        "atomicAdd(data + i, value);",
        "data[i] += value;",
        "backward",
        "RACE",
    ),
    Mutation(
        "flow ends one row early",
        "tile.cuh",
        "tile.flow_first[num_flows] = count;",
        "tile.flow_first[num_flows] = count - 1;",
        "rows",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "flows of different middle slices together",
        "tile.cuh",
        "end < limit && tile.flow_owner[end] == tile.flow_owner[flow]",
        "end < limit",
        "rows",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "pieces of C lie too close",
        "products.cuh",
        "c + row * table.slab_pitch + piece * table.rank_pitch + column",
        "c + row * table.slab_pitch + piece * table.rank4 + column",
        "rows",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "stolen range is stored without an atomic",
        "schedule.cuh",
        "atomicExch(schedule.ranges + blockIdx.x, tile_range(from + 1, end));",
        "schedule.ranges[blockIdx.x] = tile_range(from + 1, end);",
        "rows",
        "RACE",
    ),
    Mutation(
        "thief does the stolen tile twice",
        "schedule.cuh",
        "tile_range(from + 1, end)",
        "tile_range(from, end)",
        "backward",
        f"RACE|{WRONG}",
    ),
    Mutation(
        "victim keeps what was stolen",
        "schedule.cuh",
        "tile_range(next, from))",
        "tile_range(next, end))",
        "backward",
        f"RACE|LIVELOCK|{WRONG}",
    ),
    Mutation(
        "carry goes to the wrong span",
        "row_gradients.cuh",
        "to_carry ? p.carries + int64_t{span}",
        "to_carry ? p.carries + int64_t{span + 1}",
        "backward",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "two spans write one row",
        "row_gradients.cuh",
        "bool to_carry = carried;",
        "bool to_carry = carried && false;",
        "backward",
        "RACE",
    ),
    Mutation(
        "flows are cut one bit too high",
        "flow_plan.cuh",
        ">> table.digit_shift[0] != 0",
        ">> (table.digit_shift[0] + 1) != 0",
        "flow_plan",
        WRONG,
    ),
    Mutation(
        "lookup counted to the row before",
        "number_lookups.cuh",
        "0xffffffffu >> (31 - lane)",
        "0x7fffffffu >> (31 - lane)",
        "setting",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "momentum written while it is read",
        "update.cuh",
        "__syncthreads();  // everybody has read the momentum",
        "",
        "backward",
        "RACE",
    ),
    Mutation(
        "fixed-point sums overflow",
        "fixed_point.cuh",
        "62 - most",
        "90 - most",
        "backward",
        WRONG,
    ),
    Mutation(
        "pairs of lanes swap the wrong rows",
        "tensor_cores.cuh",
        "lane / 4 + (lower ? 8 : 0)",
        "lane / 4 + (lower ? 0 : 8)",
        "backward",
        WRONG,
    ),
    Mutation(
        "operands are not split although TF32 is not allowed",
        "tensor_cores.cuh",
        "(SPLIT_A || SPLIT_B) && !tf32",
        "(SPLIT_A || SPLIT_B) && tf32",
        "rows",
        WRONG,
    ),
    Mutation(
        "16-bit left factors in the wrong fragments",
        "products.cuh",
        "pair(lower, 0), pair(upper, 8)",
        "pair(upper, 8), pair(lower, 0)",
        "rows",
        WRONG,
    ),
    Mutation(
        "gradient of a slab goes to the first",
        "backward.cuh",
        "column = slab.first_q * table.rank + (strip.column + i) * 8",
        "column = (strip.column + i) * 8",
        "backward",
        WRONG,
    ),
    Mutation(
        "dC goes on behind the flow's rows",
        "tensor_gradients.cuh",
        "return k < depth ? (half",
        "return true ? (half",
        "backward",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "shares of later slabs begin with the first",
        "share_tiles.cuh",
        "static_cast<int>(slab) * tiles +",
        "0 * tiles +",
        "setting",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "random bits are the same for all elements",
        "element.cuh",
        "static_cast<uint64_t>(seed), static_cast<uint64_t>(i)",
        "static_cast<uint64_t>(seed), 0",
        "backward",
        WRONG,
    ),
]


def attempt(mutation: Mutation, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the checked build with one bug."""
    text = (HEADERS / mutation.header).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.header} has changed: adapt this mutation"
    mutated = folder / "flowtt" / mutation.header
    mutated.parent.mkdir(parents=True)
    mutated.write_text(text.replace(mutation.old, mutation.new))
    source = build.ROOT / "csrc" / "cuda" / f"{mutation.sources}.cu"
    return checked_run.start(emulated.build_ops("checked", {source: [f"-I{folder}"]}))


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """All of them, a few at a time."""
    emulated.build_ops("checked")  # what they share
    folder = tmp_path_factory.mktemp("mutations")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {m.name: pool.submit(attempt, m, folder / str(i)) for i, m in enumerate(MUTATIONS)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_planted_bugs_are_caught(attempts, mutation):
    result = attempts[mutation.name].result()
    assert result.returncode != 0, "nothing was reported"
    assert re.search(mutation.report, result.stdout), result.stdout[-3000:]
