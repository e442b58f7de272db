"""Runs the ops of a checked library against the reference, in a process of its own.

The process ends with 1 and a message if the checker reports anything, or a number is wrong.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tt_samples import SPECS, assert_near, layout_of, mixed_layout, random_batch, random_weights

from cuda_emulation import build, emulated
from flowtt_torchrec import ablation, ops, reference
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import KINDS, MOMENTUM1, MOMENTUM2, OptimizerSpec, init_state
from flowtt_torchrec.spec import TTSpec

SEEDS = (1, 2, 3)


def run(backend, layout, indices, offsets, *, weighted=True, pooling="sum", flow="prefix", optimizer=None):
    """Output, updated weights, optimizer state and gradient of the per-sample weights, in float32."""
    optimizer = optimizer or OptimizerSpec("sgd", 0.1)
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(layout, torch.float32).requires_grad_()
    factors = torch.rand(indices.numel(), generator=generator).requires_grad_() if weighted else None
    state = init_state(layout, optimizer.kind)
    with ops.use_backend(backend), ablation(flow=flow):
        output = ops.fused_lookup(
            weights, layout, indices, offsets,
            optimizer=optimizer, state=state, per_sample_weights=factors, pooling=pooling,
        )  # fmt: skip
        output.backward(torch.randn(output.shape, generator=generator))
    return [output.detach(), weights.detach(), *state.values(), *([factors.grad] if weighted else [])]


def compare_plans(layout, indices, offsets, flow="prefix"):
    """Holds the emulated plan to the reference."""
    plans = []
    for backend in ("reference", emulated.BACKEND):
        with ops.use_backend(backend), ablation(flow=flow):
            plans.append(ops.flow_plan(layout, indices, offsets))
    num_rows, num_flows = plans[0].counts.tolist()[:2]
    valid = {"row_keys": num_rows, "row_starts": num_rows + 1, "flow_starts": num_flows + 1}
    for name, expected, actual in zip(plans[0]._fields, *plans):
        assert torch.equal(actual[: valid.get(name)], expected[: valid.get(name)]), f"error in {name}"


def compare(layout, indices, offsets, tolerance=1e-4, **options):
    """Holds the emulated ops to the reference: the plan, and all that `run` gives."""
    compare_plans(layout, indices, offsets, options.get("flow", "prefix"))
    for expected, actual in zip(
        run("reference", layout, indices, offsets, **options),
        run(emulated.BACKEND, layout, indices, offsets, **options),
    ):
        assert_near(actual, expected, tolerance)


def compare_16_bit(layout, indices, offsets, dtype, tolerance=1e-5):
    """Holds output and gradients from 16-bit cores to the reference on the same numbers, widened."""
    compiled = ops.BACKENDS[emulated.BACKEND]
    weights, plan = random_weights(layout, dtype), reference.flow_plan(layout, indices, offsets)
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(indices.numel(), generator=generator)
    batch_size = (offsets.numel() - 1) // layout.num_features
    grad_output = torch.randn(batch_size, layout.total_dim, generator=generator)
    output = compiled.pooled_forward(weights, layout, offsets, plan, factors)
    grads = compiled.pooled_backward(grad_output, weights, layout, offsets, plan, factors, per_sample_weights_grad=True)
    wide = weights.double(), layout, offsets, plan, factors.double()
    expected_grads = reference.pooled_backward(grad_output.double(), *wide, per_sample_weights_grad=True)
    for actual, expected in zip((output, *grads), (reference.pooled_forward(*wide), *expected_grads)):
        assert actual.dtype == torch.float32
        assert_near(actual, expected, tolerance)


def compare_rounding(layout, indices, offsets, dtype, kind, seed):
    """Holds 16-bit cores after a step to the reference, bit by bit.

    Gradients differ in their last bits, which moves a few in a thousand across a threshold; another ``seed`` would move
    half of those that are touched.
    """
    plan, results = reference.flow_plan(layout, indices, offsets), []
    batch_size = (offsets.numel() - 1) // layout.num_features
    grad_output = torch.randn(batch_size, layout.total_dim, generator=torch.Generator().manual_seed(0))
    for backend in ("reference", emulated.BACKEND):
        weights, state = random_weights(layout, dtype), init_state(layout, kind, dtype=dtype)
        ops.BACKENDS[backend].pooled_backward_update(
            grad_output, weights, state.get(MOMENTUM1), state.get(MOMENTUM2), layout, offsets, plan,
            OptimizerSpec(kind, 0.1, 1e-3), steps=torch.arange(layout.num_tables) + 1, rounding_seed=seed,
        )  # fmt: skip
        results.append(weights)
    assert not torch.equal(results[0], random_weights(layout, dtype))
    different = int((results[0] != results[1]).sum())
    assert different <= 0.01 * layout.num_parameters, f"error in {different} of {layout.num_parameters} weights"
    assert_near(results[1].float(), results[0].float(), 2.0**-6)


def compare_failed(layout, indices, offsets):
    """Holds the emulated ops to telling of an index out of range, and to looking nothing up in its batch."""
    indices, at, bad = indices.clone(), indices.numel() // 2, -(2**40)
    indices[at] = bad
    weights, factors = random_weights(layout, torch.float32).requires_grad_(), torch.rand(indices.numel())
    with ops.use_backend(emulated.BACKEND):
        plan, told = ops.flow_plan(layout, indices, offsets), ""
        try:
            ops.synchronize()
        except IndexError as error:
            told = str(error)
        assert f"index {bad} at position {at} " in told, f"error not told, but {told!r}"
        forward = ops.BACKENDS[emulated.BACKEND].pooled_forward  # without the check of the plan, which would see it too
        output = forward(weights, layout, offsets, plan, factors.requires_grad_())
        for result in (output, *torch.autograd.grad(output.sum(), (weights, factors))):
            assert not result.any(), "error: a failed batch is looked up"


def long_flow(count):
    """Rows of one prefix, each twice, in one table whose last factor is large."""
    layout = TTLayout([TTSpec(4 * count, 16, (2, 2, count), (2, 2, 4), (4, 8))], ["flow"])
    return layout, torch.arange(count).repeat(2), torch.arange(0, 2 * count + 1, 2)


def batches(seed: int) -> Iterator[tuple[TTLayout, tuple[Tensor, Tensor], dict[str, Any]]]:
    """Batches that together reach every kernel and every branch."""
    large = TTSpec(600, 64, (10, 2, 32), (4, 4, 4), (32, 128))
    kinds = [*KINDS[seed % 3 :], *KINDS[: seed % 3]]
    repeated = torch.full((100,), 17), torch.tensor([0, 40, 100])
    yield layout_of("three_cores"), repeated, {"optimizer": OptimizerSpec("rowwise_adagrad", 0.1, 1e-3)}
    for layout, size, options in (
        (mixed_layout(), 6, {"pooling": "mean", "optimizer": OptimizerSpec(kinds[0], 0.1, 1e-3, 0.1)}),
        (mixed_layout(), 5, {"flow": "unique", "optimizer": OptimizerSpec(kinds[1], 0.1, 1e-3), "deterministic": True}),
        (layout_of("rank_32", "four_cores"), 40, {"flow": "direct", "weighted": False}),
        (TTLayout([large, SPECS["odd"]], ["large", "odd"]), 8, {"optimizer": OptimizerSpec(kinds[2], 0.1, 1e-3)}),
    ):
        yield layout, random_batch(layout, size, 4, seed), options
    layout, indices, offsets = long_flow(150)
    yield layout, (indices, offsets), {}
    slabs = TTSpec(2560, 64, (16, 2, 80), (4, 4, 4), (64, 128))  # flows over several tiles, and C in two slabs
    yield TTLayout([slabs], ["slabs"]), (torch.arange(70), torch.tensor([0, 70])), {}
    yield layout_of("three_cores"), random_batch(layout_of("three_cores"), 40, 4, seed), {"row_bytes": 1}  # waves
    for name in ("powers_of_two", "odd"):  # many tiles, some of them stolen
        yield layout_of(name), random_batch(layout_of(name), 100, 4, seed), {}
    if seed > SEEDS[0]:
        return  # what follows is large
    # Waves of several tiles, with products handed over; flows of 200 rows.
    yield long_flow(200)[0], (torch.arange(600).repeat(2), torch.arange(0, 1201, 2)), {"row_bytes": 1}
    # Two hot rows, one with carries in two levels.
    hot = torch.arange(7).repeat_interleave(torch.tensor([1, 1, 1, 66_000, 1500, 1, 1]))
    bags = torch.linspace(0, hot.numel(), 41).long()
    yield layout_of("tiny"), (hot, bags), {"weighted": False, "tolerance": 1e-3}  # the reference adds one by one


def start(library: Path, bugs: int = 0, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the batches in a new process, or with each of ``bugs`` in turn: see `with_every_bug`."""
    path = f"{build.ROOT}:{build.ROOT / 'tests'}"
    more = [str(bugs), str(folder)] if bugs else []
    return subprocess.run(
        [sys.executable, "-m", "cuda_emulation.checked_run", str(library), *more],
        env={**os.environ, "PYTHONPATH": path, "FLOWTT_BACKEND": "reference"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run_batches(emulator: ctypes.CDLL) -> None:
    emulator.cuda_emulation_set_max_steps(ctypes.c_uint64(20_000_000))
    for seed in SEEDS:
        emulator.cuda_emulation_seed(ctypes.c_uint64(seed))
        compare_failed(mixed_layout(), *random_batch(mixed_layout(), 20, 4, seed))
        for layout, batch, options in batches(seed):
            torch.use_deterministic_algorithms(options.pop("deterministic", False))
            torch.ops.flowtt_emulated.use_cuda_row_bytes(options.pop("row_bytes", 64 << 20))
            compare(layout, *batch, **options)
        mixed = layout_of("rank_32", "odd", "four_cores")
        for dtype in (torch.bfloat16, torch.float16):
            batch = random_batch(mixed, 12, 4, seed)
            compare_16_bit(mixed, *batch, dtype)
            compare_rounding(mixed, *batch, dtype, KINDS[seed % 3], seed)


def with_every_bug(emulator: ctypes.CDLL, bugs: int, folder: Path) -> None:
    """Runs the batches once with each bug, in forks of this process, as many at a time as there are CPUs.

    What bug number N makes them say goes to the file ``N`` of ``folder``, with "passed" as the last line if nothing is
    wrong. Forks need no time to import torch and to load the library.
    """
    running = 0
    for bug in range(1, bugs + 1):
        if os.fork() == 0:
            output = os.open(folder / str(bug), os.O_WRONLY | os.O_CREAT)
            os.dup2(output, sys.stdout.fileno())
            os.dup2(output, sys.stderr.fileno())
            emulator.cuda_emulation_wake_bug(bug)
            try:
                run_batches(emulator)
                print("passed", flush=True)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        running += 1
        if running == (os.cpu_count() or 1):
            os.wait()
            running -= 1
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    loaded = emulated.load(Path(sys.argv[1]))
    if sys.argv[2:]:
        with_every_bug(loaded, int(sys.argv[2]), Path(sys.argv[3]))
    else:
        run_batches(loaded)
