"""The CUDA ops on the emulator, beyond what tests/test_ops.py holds every backend to."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_samples import SPECS, groups, layout_of, mixed_layout, random_batch, random_weights

from cuda_emulation import build, checked_run, emulated
from cuda_emulation.checked_run import compare, compare_plans, long_flow, run
from flowtt_torchrec import ablation, ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import KINDS, OptimizerSpec
from flowtt_torchrec.spec import TTSpec

pytestmark = pytest.mark.skipif(build.toolkit() is None, reason="the headers of the CUDA toolkit are not here")


@pytest.fixture(scope="module")
def emulator():
    return emulated.load()


@settings(max_examples=60, deadline=None)
@given(groups(), st.data())
def test_equals_the_reference_for_any_shapes_and_batch(emulator, layout, data):
    emulator.cuda_emulation_seed(ctypes.c_uint64(data.draw(st.integers(1, 1000))))
    batch = random_batch(
        layout, data.draw(st.integers(0, 20)), data.draw(st.integers(0, 12)), data.draw(st.integers(0, 99))
    )
    torch.use_deterministic_algorithms(data.draw(st.booleans()))
    try:
        compare(
            layout,
            *batch,
            tolerance=3e-3,
            weighted=data.draw(st.booleans()),
            pooling=data.draw(st.sampled_from(["sum", "mean"])),
            flow=data.draw(st.sampled_from(["prefix", "unique", "direct"])),
            optimizer=OptimizerSpec(
                data.draw(st.sampled_from(KINDS)), 0.1, 1e-3, data.draw(st.sampled_from([0.0, 0.1]))
            ),
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "spec",
    [
        TTSpec(500, 64, (4, 4, 32), (4, 4, 4), (16, 128)),
        TTSpec(2000, 64, (32, 2, 32), (4, 4, 4), (128, 128)),  # the middle slice is four slabs
        TTSpec(500, 128, (16, 3, 12), (4, 4, 8), (64, 64)),
        TTSpec(16, 256, (2, 2, 2, 2), (4, 4, 4, 4), (8, 64, 8)),
        TTSpec(30, 256, (5, 6), (16, 16), (64,)),
        TTSpec(64, 300, (4, 4, 4), (5, 6, 10), (20, 21)),
        TTSpec(64, 256, (4, 8, 2), (1, 1, 256), (4, 8)),
        TTSpec(64, 256, (2, 8, 4), (256, 1, 1), (8, 4)),
    ],
    ids=lambda spec: f"q{spec.q}-r{spec.ranks}".replace(" ", ""),
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_large_shapes(emulator, spec, deterministic):
    layout = TTLayout([spec, SPECS["three_cores"]], ["large", "small"], [0, 1])
    torch.use_deterministic_algorithms(deterministic)
    try:
        compare(layout, *random_batch(layout, 12, 3))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("count", [31, 32, 33, 255, 257])
def test_one_flow_over_many_tiles(emulator, count):
    compare(*long_flow(count))


@pytest.mark.parametrize(("multiprocessors", "resident"), [(1, 1), (40, 16)], ids=["few blocks", "many blocks"])
def test_more_tiles_than_blocks_and_the_reverse(emulator, multiprocessors, resident):
    layout = layout_of("powers_of_two", "three_cores")
    emulator.cuda_emulation_set_multiprocessors(multiprocessors)
    emulator.cuda_emulation_set_resident_blocks(resident)
    try:
        compare(layout, *random_batch(layout, 200, 3))
        compare(layout, *random_batch(layout, 1, 1))
    finally:
        emulator.cuda_emulation_set_multiprocessors(3)
        emulator.cuda_emulation_set_resident_blocks(0)


@pytest.mark.parametrize("by_work", [False, True], ids=["shares of rows", "shares of work"])
@pytest.mark.parametrize("steal", [False, True], ids=["static", "stealing"])
@pytest.mark.parametrize("handover", [False, True], ids=["products made again", "products handed over"])
def test_mappings_for_ablations(emulator, by_work, steal, handover):
    layout = layout_of("powers_of_two", "three_cores")
    with ablation(by_work=by_work, steal=steal, handover=handover):
        compare(layout, *random_batch(layout, 100, 3))
        compare(*long_flow(100))


@pytest.fixture
def prefix_products(emulator):
    """Counts the prefix products of a forward pass, for several schedules."""

    def count(layout, indices, offsets, steal, handover):
        weights = random_weights(layout, torch.float32)
        counts = set()
        with ops.use_backend(emulated.BACKEND), ablation(steal=steal, handover=handover):
            plan = ops.flow_plan(layout, indices, offsets)
            for seed in range(1, 5):
                emulator.cuda_emulation_seed(ctypes.c_uint64(seed))
                ops.pooled_lookup(weights, layout, offsets, plan)
                counts.add(emulator.cuda_emulation_take_count(b"prefix products"))
        return int(plan.counts[1]), counts

    emulator.cuda_emulation_take_count(b"prefix products")
    return count


LONG_FLOWS = {
    "one flow": long_flow(400),
    "many flows": (
        TTLayout([TTSpec(16_000, 32, (20, 4, 200), (2, 4, 4), (32, 32)), SPECS["four_cores"]], ["a", "b"], [0, 1]),
        torch.arange(2400) * 7 % 2400 % torch.tensor([2400, 60]).repeat_interleave(1200),
        torch.arange(0, 2401, 2),
    ),
    "several slabs": (
        TTLayout([TTSpec(6400, 64, (32, 2, 100), (4, 4, 4), (128, 128))], ["t"]),
        torch.arange(250),
        torch.arange(0, 251, 2),
    ),
}


@pytest.mark.parametrize("batch", LONG_FLOWS.values(), ids=LONG_FLOWS)
@pytest.mark.parametrize("steal", [False, True], ids=["static", "stealing"])
def test_prefix_products_are_made_once(prefix_products, batch, steal):
    flows, counts = prefix_products(*batch, steal, handover=True)
    assert counts == {flows}


def test_without_handover_a_flow_is_made_again_where_shares_meet(prefix_products):
    blocks = 6
    flows, counts = prefix_products(*LONG_FLOWS["one flow"], steal=False, handover=False)
    assert (flows, counts) == (1, {blocks})
    flows, counts = prefix_products(*LONG_FLOWS["many flows"], steal=False, handover=False)
    assert flows < min(counts) <= max(counts) < flows + blocks


@pytest.mark.parametrize(
    ("p", "tables", "key_bytes", "passes"),
    [
        ((1024, 1024, 1024), 1, 4, 4),
        ((1024, 1024, 4096), 1, 4, 4),  # 32 bits, all of them digits
        ((1024, 1024, 4096), 2, 8, 5),
        ((1024, 1024, 2048), 2, 4, 4),
        ((10, 10, 10), 3, 4, 2),
    ],
)
@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
def test_keys_are_as_short_as_they_can_be(emulator, p, tables, key_bytes, passes, flow):
    layout = TTLayout([TTSpec(math.prod(p), 8, p, (2, 2, 2), (1, 1))] * tables, [f"t{i}" for i in range(tables)])
    indices, offsets = random_batch(layout, 20, 3)
    indices[-3:] = math.prod(p) - 1
    emulator.cuda_emulation_take_count(b"bytes of the sort")
    compare_plans(layout, indices, offsets, flow)
    each = 0 if flow == "direct" else key_bytes + passes * 2 * (key_bytes + 4)
    assert emulator.cuda_emulation_take_count(b"bytes of the sort") == indices.numel() * each


@pytest.fixture
def small_waves(emulator):
    torch.ops.flowtt_emulated.use_cuda_row_bytes(1)
    yield
    torch.ops.flowtt_emulated.use_cuda_row_bytes(64 << 20)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
def test_waves_of_rows(small_waves, deterministic, flow):
    layout = layout_of("powers_of_two", "odd", "four_cores")
    torch.use_deterministic_algorithms(deterministic)
    try:
        compare(layout, *random_batch(layout, 100, 4), pooling="mean", flow=flow)
        compare(*long_flow(300), flow=flow)
    finally:
        torch.use_deterministic_algorithms(False)


def test_rows_take_a_sixteenth_of_what_all_would(emulator, small_waves):
    layout = layout_of("powers_of_two", "three_cores")
    indices, offsets = random_batch(layout, 400, 6)
    for name in (b"rows", b"row gradients"):
        emulator.cuda_emulation_take_count(name)
    run(emulated.BACKEND, layout, indices, offsets)
    widest, tile = 64, 32
    most = (indices.numel() / 16 + tile) * widest * 4
    assert 0 < emulator.cuda_emulation_take_count(b"rows") <= most
    assert 0 < emulator.cuda_emulation_take_count(b"row gradients") <= most


@pytest.mark.parametrize("count", [1023, 1025, 3000, 70_000])
def test_a_hot_row_is_summed_in_levels(emulator, count):
    layout = TTLayout([SPECS["three_cores"]], ["t"])
    indices = torch.cat([torch.arange(20), torch.full((count,), 20), torch.arange(21, 40)])
    emulator.cuda_emulation_take_count(b"carries added one by one")
    compare(layout, indices, torch.linspace(0, count + 39, 41).long(), weighted=False)
    assert emulator.cuda_emulation_take_count(b"carries added one by one") <= 2 * 32 + 2 * (count > 32**2) * 32


def test_many_tables(emulator):
    """More descriptors than one launch can carry."""
    count = 250
    layout = TTLayout([SPECS["three_cores"]] * count, [f"t{i}" for i in range(count)])
    compare(layout, *random_batch(layout, 2, 2), weighted=False)


def test_same_bits_whatever_the_schedule(emulator):
    layout = mixed_layout()
    batch = random_batch(layout, 40, 6)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for seed in range(1, 5):
            emulator.cuda_emulation_seed(ctypes.c_uint64(seed))
            emulator.cuda_emulation_set_multiprocessors(seed)
            results.append(run(emulated.BACKEND, layout, *batch, optimizer=OptimizerSpec("rowwise_adagrad", 0.1)))
    finally:
        torch.use_deterministic_algorithms(False)
        emulator.cuda_emulation_set_multiprocessors(3)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))


def test_a_gradient_that_is_not_finite_stays_visible(emulator):
    layout = layout_of("three_cores")
    weights = random_weights(layout, torch.float32).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with ops.use_backend(emulated.BACKEND):
            output = ops.lookup(weights, layout, torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
            grad_output = torch.ones_like(output)
            grad_output[1, 3] = float("inf")
            assert torch.autograd.grad(output, weights, grad_output)[0].isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_not_supported_is_said(emulator):
    batch = torch.tensor([0, 1]), torch.tensor([0, 2])
    with ops.use_backend(emulated.BACKEND):
        layout = layout_of("three_cores")
        shifted = torch.zeros(layout.num_parameters + 1)[1:]
        with pytest.raises(RuntimeError, match="weights must start at a multiple of 16 bytes"):
            ops.lookup(shifted, layout, *batch)
        with pytest.raises(RuntimeError, match="weights must be float32, bfloat16 or float16 on the GPU, not float64"):
            ops.lookup(random_weights(layout), layout, *batch)
        layout = TTLayout([TTSpec(64, 64, (4, 4, 4), (4, 4, 4), (16, 16))], ["t"])
        emulator.cuda_emulation_set_shared_bytes(4_000)
        try:
            with pytest.raises(
                RuntimeError, match="bytes of shared memory a block, and this device has 4000; choose sma"
            ):
                ops.lookup(random_weights(layout, torch.float32), layout, *batch)
        finally:
            emulator.cuda_emulation_set_shared_bytes(227 * 1024)
        layout = TTLayout([TTSpec(10**6, 4096, (100, 100, 100), (16, 16, 16), (256, 256))], ["t"])
        with pytest.raises(RuntimeError, match=r"table number 0 has ranks 256 and 256 .*16384, as of 128 and 128"):
            ops.lookup(torch.zeros(layout.num_parameters), layout, *batch)


@pytest.mark.slow
def test_checked_build_has_nothing_to_report():
    result = checked_run.start(emulated.build_ops("checked"))
    assert result.returncode == 0, result.stdout[-3000:]
