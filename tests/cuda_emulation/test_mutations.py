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

CSRC = build.ROOT / "csrc"
CHECKER = "RACE|UNINITIALISED|OUT OF BOUNDS|DEADLOCK|LIVELOCK|divergent|exited|never waited for"
WRONG = "AssertionError: error"


class Mutation(NamedTuple):
    name: str
    file: str  # where: a header, or a source of launches
    old: str  # there once
    new: str
    source: str  # compiled anew
    report: str  # what must be said

    @property
    def original(self) -> Path:
        return CSRC / ("cuda" if self.file.endswith(".cu") else "include/flowtt") / self.file


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
        "owner != owner_before",
        "owner_before < 0",
        "rows",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "pieces of C lie too close",
        "products.cuh",
        "c + row * slab_pitch + piece * rank_pitch + column",
        "c + row * slab_pitch + piece * (rank_pitch - 4) + column",
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
        "carry of the last span is dropped",
        "row_gradients.cuh",
        "s <= last_span; s += step",
        "s < last_span; s += step",
        "backward",
        WRONG,
    ),
    Mutation(
        "carries are summed beyond the end of the row",
        "row_gradients.cuh",
        "p.plan.row_starts[row + 1] <= last * 32",
        "p.plan.row_starts[row + 1] <= first * 32",
        "backward",
        f"UNINITIALISED|{WRONG}",
    ),
    Mutation(
        "last level of carries is not summed",
        "backward.cu",
        "spans_ > 32 * stride;",
        "spans_ > 32 * 32 * stride;",
        "backward",
        WRONG,
    ),
    Mutation(
        "carries are read before they are summed",
        "backward.cu",
        """    for (int stride = 1; spans_ > 32 * stride; stride *= 32) {""",
        """    check(FLOWTT_LAUNCH(add_carries, grid, kThreads, 0, context_.stream, arguments), "add_carries");
    for (int stride = 1; spans_ > 32 * stride; stride *= 32) {""",
        "backward",
        WRONG,
    ),
    Mutation(
        "waves end one row early",
        "waves.cuh",
        "min(begin + wave_rows, num_rows)",
        "min(begin + wave_rows - 1, num_rows)",
        "setting",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "all waves work on the first one's rows",
        "setting.cu",
        "wave.row_keys += wave.begin_row;",
        "",
        "setting",
        WRONG,
    ),
    Mutation(
        "first row of the next wave is taken for one of this",
        "device_batch.cuh",
        "row - begin_ < count_",
        "row - begin_ <= count_",
        "backward",
        f"{CHECKER}|{WRONG}",
    ),
    Mutation(
        "bags of a later wave overwrite those before",
        "pooling.cuh",
        "plan.begin_row > 0 ? to + scale * sum[i] : scale * sum[i]",
        "scale * sum[i]",
        "forward",
        WRONG,
    ),
    Mutation(
        "checkpoints of the wave before are taken",
        "rows.cu",
        "if (checkpoints.states != nullptr) {",
        "if (checkpoints.states != nullptr && wave.begin_row == 0) {",
        "rows",
        WRONG,
    ),
    Mutation(
        "failed batch is looked up",
        "flow_plan.cuh",
        "counts[0] = faults->failed ? 0 : rows;",
        "counts[0] = rows;",
        "flow_plan",
        WRONG,
    ),
    Mutation(
        "row out of range goes into the key",
        "flow_plan.cuh",
        "    row = 0;\n",
        "",
        "flow_plan",
        "OUT OF BOUNDS",
    ),
    Mutation(
        "gradients of a failed batch's weights are not written",
        "row_gradients.cuh",
        "if (has_no_rows(p.plan) && lane < count) gradients[p.plan.lookups[span * 32 + lane]] = 0.f;",
        "",
        "backward",
        WRONG,
    ),
    Mutation(
        "fault is found and not told",
        "faults.cuh",
        "state = FaultRecord::kWritten;",
        "",
        "report",
        WRONG,
    ),
    Mutation(
        "fault is told again and again",
        "report.cu",
        "__atomic_store_n(&record.state, unsigned{FaultRecord::kFree}, __ATOMIC_RELEASE);",
        "",
        "report",
        "IndexError",
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
        "device_batch.cuh",
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
        "product of a flow that goes on is not kept",
        "backward.cuh",
        "goes_on && !(keeps && tile.num_flows == 1)",
        "goes_on && keeps",
        "backward",
        f"UNINITIALISED|{WRONG}",
    ),
    Mutation(
        "gradient of a slab goes to the first",
        "backward.cuh",
        "column = slab.first_q * shape.rank + (strip.column + i) * 8",
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
    source = CSRC / "cuda" / f"{mutation.source}.cu"
    mutated = folder / "flowtt" / mutation.file
    mutated.parent.mkdir(parents=True)
    mutated.write_text(mutation.original.read_text().replace(mutation.old, mutation.new))
    if mutation.original == source:
        sources = [mutated if path == source else path for path in emulated.SOURCES]
        return checked_run.start(emulated.build_ops("checked", sources))
    return checked_run.start(emulated.build_ops("checked", special={source: [f"-I{folder}"]}))


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """All of them, a few at a time."""
    emulated.build_ops("checked")  # what they share
    folder = tmp_path_factory.mktemp("mutations")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {m.name: pool.submit(attempt, m, folder / str(i)) for i, m in enumerate(MUTATIONS)}


def test_every_bug_has_its_place():
    for mutation in MUTATIONS:
        places = mutation.original.read_text().count(mutation.old)
        assert places == 1, f"{mutation.file} has changed: adapt the mutation {mutation.name!r}"


@pytest.mark.slow
@pytest.mark.skipif(build.toolkit() is None, reason="the headers of the CUDA toolkit are not here")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_planted_bugs_are_caught(attempts, mutation):
    result = attempts[mutation.name].result()
    assert result.returncode != 0, "nothing was reported"
    assert re.search(mutation.report, result.stdout), result.stdout[-3000:]
