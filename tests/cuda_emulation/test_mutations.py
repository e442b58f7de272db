"""Bugs planted in the kernels, one at a time: the checked build must notice every one."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from cuda_emulation import build, checked_run, emulated
from cuda_emulation.mutants import Before, Change, instead, left_out, plant, swap

ANY_CHECK = "RACE|UNINITIALISED|OUT OF BOUNDS|DEADLOCK|LIVELOCK|divergent|exited|never waited for"
WRONG = "AssertionError: error"


class Mutant(NamedTuple):
    bug: str
    change: Change | Before  # of the line that is marked with the mutant's name
    report: str  # what must be said


MUTANTS = {
    "tile-read-early": Mutant("tile read before it is decoded", left_out(), ANY_CHECK),
    "unwaited-middle-slice": Mutant("missing wait for the middle slice", swap("1", "2"), "UNINITIALISED"),
    "unwaited-last-slices": Mutant("missing wait for the last slices", swap("0", "1"), "UNINITIALISED"),
    "overwritten-slab": Mutant("slab overwritten while it is read", left_out(), ANY_CHECK),
    "stale-product": Mutant(
        "stale product of another flow", swap("borders.held == tile.flow_key[0]", "true"), f"{ANY_CHECK}|{WRONG}"
    ),
    "misplaced-product": Mutant("kept product is taken from the wrong place", swap("borders.keeps", "false"), WRONG),
    "unfenced-publication": Mutant("product published without a fence", left_out(), "RACE"),
    "early-publication": Mutant("product published before all of it is stored", left_out(), "RACE"),
    "unfenced-read": Mutant("product read without a fence", left_out(), "RACE"),
    "unwaited-handover": Mutant("stale product: nobody waits for it", swap("2", "1"), "RACE|UNINITIALISED"),
    "earlier-handover": Mutant(
        "product of the tile before", swap("taken.number", "taken.number - 1"), f"{ANY_CHECK}|{WRONG}"
    ),
    "overwritten-product": Mutant("dC over C while C is read", left_out(), "RACE"),
    "dropped-gradient": Mutant("last slice's gradient is dropped", swap("loaded.slice >= 0", "false"), WRONG),
    "misdirected-gradient": Mutant("gradient of a slice goes to the next one", swap("!is_loaded", "false"), WRONG),
    "plain-addition": Mutant(
        "plain addition in place of an atomic", swap("atomicAdd(data + i, value)", "data[i] += value"), "RACE"
    ),
    "short-flow": Mutant("flow ends one row early", swap("count", "count - 1"), f"{ANY_CHECK}|{WRONG}"),
    "mixed-flow": Mutant("flows of different middle slices together", swap("mine", "false"), f"{ANY_CHECK}|{WRONG}"),
    "overlapping-pieces": Mutant(
        "pieces of C lie too close", swap("piece * rank_pitch", "piece * (rank_pitch - 4)"), f"{ANY_CHECK}|{WRONG}"
    ),
    "plain-store": Mutant(
        "stolen range is stored without an atomic",
        instead("schedule.ranges[blockIdx.x] = tile_range(from + 1, end);"),
        "RACE",
    ),
    "doubled-tile": Mutant("thief does the stolen tile twice", swap("from + 1", "from"), f"RACE|{WRONG}"),
    "kept-range": Mutant(
        "victim keeps what was stolen",
        swap("tile_range(next, from)", "tile_range(next, end)"),
        f"RACE|LIVELOCK|{WRONG}",
    ),
    "misdirected-carry": Mutant(
        "carry goes to the wrong span", swap("int64_t{span}", "int64_t{span + 1}"), f"{ANY_CHECK}|{WRONG}"
    ),
    "uncarried-row": Mutant("two spans write one row", swap("carried", "false"), "RACE"),
    "dropped-carry": Mutant("carry of the last span is dropped", swap("s <= last_span", "s < last_span"), WRONG),
    "carries-past-row": Mutant(
        "carries are summed beyond the end of the row", swap("last * 32", "first * 32"), f"UNINITIALISED|{WRONG}"
    ),
    "missing-level": Mutant("last level of carries is not summed", swap("32 * stride", "32 * 32 * stride"), WRONG),
    "late-levels": Mutant(
        "carries are read before they are summed",
        Before('check(FLOWTT_LAUNCH(add_carries, grid, kThreads, 0, context_.stream, arguments), "add_carries");'),
        WRONG,
    ),
    "short-waves": Mutant(
        "waves end one row early", swap("begin + wave_rows", "begin + wave_rows - 1"), f"{ANY_CHECK}|{WRONG}"
    ),
    "first-wave-again": Mutant("all waves work on the first one's rows", left_out(), WRONG),
    "wave-past-end": Mutant(
        "first row of the next wave is taken for one of this",
        swap("row - begin_ < count_", "row - begin_ <= count_"),
        f"{ANY_CHECK}|{WRONG}",
    ),
    "overwritten-bags": Mutant(
        "bags of a later wave overwrite those before", swap("plan.begin_row > 0", "false"), WRONG
    ),
    "earlier-wave": Mutant(
        "products of the wave before are taken",
        swap("handover.states != nullptr", "handover.states != nullptr && wave.begin_row == 0"),
        WRONG,
    ),
    "failed-lookup": Mutant("failed batch is looked up", swap("faults->failed", "false"), WRONG),
    "row-out-of-range": Mutant("row out of range goes into the key", left_out(), "OUT OF BOUNDS"),
    "unwritten-gradients": Mutant("gradients of a failed batch's weights are not written", left_out(), WRONG),
    "untold-fault": Mutant("fault is found and not told", left_out(), WRONG),
    "repeated-fault": Mutant("fault is told again and again", left_out(), "IndexError"),
    "high-prefix": Mutant(
        "flows are cut one bit too high", swap("table.digit_shift[0]", "table.digit_shift[0] + 1"), WRONG
    ),
    "lookup-too-early": Mutant(
        "lookup counted to the row before", swap("0xffffffffu", "0x7fffffffu"), f"{ANY_CHECK}|{WRONG}"
    ),
    "early-momentum": Mutant("momentum written while it is read", left_out(), "RACE"),
    "overflow": Mutant("fixed-point sums overflow", swap("62", "90"), WRONG),
    "swapped-rows": Mutant("pairs of lanes swap the wrong rows", swap("lower ? 8 : 0", "lower ? 0 : 8"), WRONG),
    "unsplit-operands": Mutant("operands are not split although TF32 is not allowed", swap("!tf32", "tf32"), WRONG),
    "swapped-fragments": Mutant(
        "16-bit left factors in the wrong fragments", swap("pair(lower, 0)", "pair(upper, 8)"), WRONG
    ),
    "unkept-product": Mutant(
        "product of a flow that goes on is not kept",
        swap("!(keeps && tile.num_flows == 1)", "keeps"),
        f"UNINITIALISED|{WRONG}",
    ),
    "first-slab": Mutant("gradient of a slab goes to the first", swap("slab.first_q * shape.rank", "0"), WRONG),
    "gradient-past-flow": Mutant(
        "dC goes on behind the flow's rows", swap("k < depth", "true"), f"{ANY_CHECK}|{WRONG}"
    ),
    "first-share": Mutant(
        "shares of later slabs begin with the first",
        swap("static_cast<int>(slab) * tiles", "0"),
        f"{ANY_CHECK}|{WRONG}",
    ),
    "constant-bits": Mutant(
        "random bits are the same for all elements", swap("static_cast<uint64_t>(i)", "uint64_t{0}"), WRONG
    ),
}


def test_every_mutant_fits_the_line_that_is_marked_for_it(tmp_path):
    plant({name: mutant.change for name, mutant in MUTANTS.items()}, tmp_path)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the checked build says of each bug."""
    folder, output = (
        build.OBJECTS / "mutants",
        tmp_path_factory.mktemp("reports"),
    )  # one place: objects know their paths
    sources = plant({name: mutant.change for name, mutant in MUTANTS.items()}, folder)
    library = emulated.build_ops("checked", sources, {source: [f"-I{folder / 'include'}"] for source in sources})
    result = checked_run.start(library, len(MUTANTS), output)
    assert result.returncode == 0, result.stdout
    return {name: (output / str(number)).read_text() for number, name in enumerate(MUTANTS, start=1)}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first one builds the library, and runs all
@pytest.mark.skipif(build.toolkit() is None, reason="the headers of the CUDA toolkit are not here")
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_caught(reports, name):
    said = reports[name]
    assert not said.endswith("passed\n"), f"nothing was reported: {MUTANTS[name].bug}"
    assert re.search(MUTANTS[name].report, said), said[-3000:]
