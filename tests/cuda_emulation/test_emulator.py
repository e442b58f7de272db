"""The emulator itself: right kernels pass under any schedule, and each wrong one is reported, at its line."""

from __future__ import annotations

import ctypes
import re

import pytest

from cuda_emulation import build

pytestmark = pytest.mark.skipif(build.toolkit() is None, reason="the headers of the CUDA toolkit are not here")

SOURCE = build.FOLDER / "kernels.cu"
KERNELS = ("reverse", "reduce", "rotate", "touch", "ring", "last_block", "chain", "halves", "multiply")
DEFECTS = {
    name: number
    for number, name in enumerate(re.findall(r"^  k(\w+)", SOURCE.read_text().split("};")[0], re.MULTILINE))
}
EXPECTED = {
    "reverse": [255 - i for i in range(256)],
    "reduce": [1023 * 512],
    "rotate": [i // 32 * 32 + (i + 1) % 32 for i in range(256)],
    "touch": [i ^ 1 for i in range(256)],
    "ring": [tile * 128 + 127 - i for tile in range(8) for i in range(128)],
    "last_block": [32] * 16,
    "chain": list(range(1, 33)),
    "halves": list(range(1, 129)),
    "multiply": [
        sum((16 * m + k) % 7 * ((8 * k + n) % 5) for k in range(16))
        for _ in range(6)
        for m in range(16)
        for n in range(8)
    ],
}
# Kernel, defect, what the checked build says, and what the fast build says: None if it cannot know.
REPORTS = [
    ("reverse", "MissingBarrier", "UNINITIALISED read of shared|RACE read after write on shared", None),
    ("reverse", "DivergentBarrier", "thread exited while|divergent __syncthreads", "thread exited while|divergent"),
    ("reverse", "BarrierAfterExit", "after 1 threads of the block exited|exited while", "exited"),
    ("reverse", "ExitWhileOthersWait", "exited while .* wait|threads of the block exited", "exited"),
    ("rotate", "MissingWarpSync", "UNINITIALISED read of shared|RACE .* on shared", None),
    ("rotate", "ShuffleOutsideMask", "reads lane 30, which is not in mask 00ffffff", "lane 30"),
    ("rotate", "MaskOfExitedLane", "names lane 3, which has exited|lane exited while", "exited"),
    ("rotate", "DivergentWarpOperations", "divergent warp operation", "divergent warp operation"),
    ("reverse", "UninitialisedShared", r"UNINITIALISED read of shared memory \+ 36 bytes", None),
    ("reverse", "SharedOverflow", r"OUT OF BOUNDS: shared memory \+ 1024 bytes, write of 4", None),
    ("touch", "GlobalOverflow", "OUT OF BOUNDS: read of 4 bytes", None),
    ("touch", "UnregisteredMemory", "OUT OF BOUNDS: read of 4 bytes at .*, in no buffer", None),
    ("touch", "UninitialisedGlobal", r"UNINITIALISED read of a cudaMalloc buffer \+ 20 bytes", None),
    ("touch", "Misaligned", "MISALIGNED read of 16 bytes", None),
    ("reduce", "MisalignedAtomic", "MISALIGNED atomic of 8 bytes", "MISALIGNED atomic of 8 bytes"),
    ("reduce", "PlainAdd", "RACE .* on a cudaMalloc buffer", None),
    ("reduce", "PlainSharedAdd", "RACE .* on shared memory", None),
    ("ring", "MissingWait", "UNINITIALISED read of shared", None),
    ("ring", "UnwaitedCopy", "async copies never waited for", "async copies never waited for"),
    ("last_block", "MissingFence", "RACE read after write on a cudaMalloc buffer", None),
    ("last_block", "MissingAcquire", "RACE read after write on a cudaMalloc buffer", None),
    # A fence does not publish what other threads of the block stored without a barrier before it.
    ("last_block", "MissingBarrierBeforeFence", "RACE read after write on a cudaMalloc buffer", None),
    ("last_block", "WriteAfterFence", "RACE", None),
    ("chain", "WaitsForLaterBlock", "LIVELOCK", "LIVELOCK"),
    ("chain", "Deadlock", "DEADLOCK", "DEADLOCK"),
]


@pytest.fixture(scope="module", params=["fast", "checked"])
def library(request):
    library = ctypes.CDLL(str(build.build("kernels", request.param, [SOURCE])))
    library.run_kernel.restype = ctypes.c_char_p
    library.cuda_emulation_take_profile.restype = ctypes.c_char_p
    library.mode = request.param
    return library


def run(library, kernel, defect="None", seed=1):
    out = (ctypes.c_float * 1024)()
    library.cuda_emulation_seed(ctypes.c_uint64(seed))
    library.cuda_emulation_set_max_steps(ctypes.c_uint64(100_000))
    error = library.run_kernel(kernel.encode(), DEFECTS[defect], out).decode()
    return error, list(out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernels_pass_under_any_schedule(library, kernel):
    for seed in range(1, 11):
        error, out = run(library, kernel, seed=seed)
        assert error == ""
        assert out[: len(EXPECTED[kernel])] == EXPECTED[kernel]


@pytest.mark.parametrize(("kernel", "defect", "checked", "fast"), REPORTS, ids=[report[1] for report in REPORTS])
def test_wrong_kernels_are_reported(library, kernel, defect, checked, fast):
    expected = checked if library.mode == "checked" else fast
    if expected is None:
        pytest.skip("only the checked build can know")
    for seed in range(1, 6):
        error, _ = run(library, kernel, defect, seed)
        assert re.search(expected, error), f"seed {seed}: {error or 'no error'}"
        assert "kernels.cu:" in error


def test_every_defect_has_a_report():
    assert {report[1] for report in REPORTS} == set(DEFECTS) - {"None"}


def test_a_seed_repeats_its_schedule(library):
    assert run(library, "chain", "WaitsForLaterBlock", 5) == run(library, "chain", "WaitsForLaterBlock", 5)


def test_profile_counts_transactions(library):
    if library.mode == "fast":
        pytest.skip("the fast build does not count")
    library.cuda_emulation_profile(True)
    run(library, "reverse")
    library.cuda_emulation_profile(False)
    lines = [line.split(maxsplit=7) for line in library.cuda_emulation_take_profile().decode().splitlines()]
    counts = {(space, kind, buffer): tuple(map(int, numbers)) for space, kind, _, *numbers, buffer in lines}
    # 8 warps; a warp's 32 consecutive floats are 4 sectors, or one wavefront.
    assert counts["global", "load", "a cudaMalloc buffer"] == (8, 32, 32, 1024)
    assert counts["global", "store", "a cudaMalloc buffer"] == (8, 32, 32, 1024)
    assert counts["shared", "store", "-"] == (8, 8, 8, 1024)
    assert library.cuda_emulation_take_profile() == b""
