"""Memory that the CPU ops keep from call to call: bounded, given back, and released on demand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tt_samples import layout_of, random_weights

import flowtt_torchrec
from flowtt_torchrec import ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import OptimizerSpec, init_state
from flowtt_torchrec.spec import TTSpec

MIB = 1 << 20
reads_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
PATIENCE = 256  # calls after which unused memory is given back


@pytest.fixture(autouse=True)
def native_with_nothing_kept():
    with ops.use_backend("native"):
        flowtt_torchrec.release_memory()
        yield
        flowtt_torchrec.release_memory()


def kept() -> int:
    return torch.ops.flowtt.kept_bytes()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_step(spec: TTSpec, kind: str = "rowwise_adagrad"):
    """A training step with a number of lookups, of which several are in a bag."""
    layout = TTLayout([spec], ["a"])
    weights = random_weights(layout, torch.float32).requires_grad_()
    optimizer, state = OptimizerSpec(kind, 1e-3), init_state(layout, kind)
    generator = torch.Generator().manual_seed(0)

    def step(lookups: int) -> None:
        indices = torch.randint(spec.num_embeddings, (lookups,), generator=generator)
        offsets = torch.arange(0, lookups + 1, 2)
        ops.fused_lookup(weights, layout, indices, offsets, optimizer=optimizer, state=state).sum().backward()

    return step


def test_memory_of_a_large_batch_is_kept_for_the_next_and_given_back_over_small_ones():
    step = make_step(TTSpec.suggest(1_000_000, 64, 16))
    step(200_000)
    large = kept()
    assert large > 8 * MIB
    for _ in range(3):
        step(200_000)
    assert kept() <= 1.5 * large
    for _ in range(PATIENCE):  # too small to want any of it: a step makes three calls
        step(100)
    assert kept() == 0


def test_memory_is_released_on_demand():
    step = make_step(TTSpec.suggest(1_000_000, 64, 16))
    step(200_000)
    assert kept() > 0
    flowtt_torchrec.release_memory()
    assert kept() == 0
    step(200_000)  # and taken again
    assert kept() > 0
    with ops.use_backend("reference"):
        flowtt_torchrec.release_memory()  # which keeps nothing
    assert kept() > 0


def test_blocks_of_nearly_the_same_size_are_shared():
    step = make_step(TTSpec(4_000_000, 64, (2000, 2000), (8, 8), (16,)))  # two cores: the largest buffers
    step(60_000)
    first = kept()
    for lookups in (59_000, 52_000, 60_000, 48_000, 57_000, 44_000, 60_000):
        step(lookups)
        assert kept() <= 1.25 * first


def check_that_memory_stays_flat(steps: int, spec: TTSpec) -> None:
    step, generator = make_step(spec), torch.Generator().manual_seed(1)
    sizes = [2 * int(n) for n in torch.randint(500, 15_000, (steps,), generator=generator)]
    warm_up = min(100, steps // 3)
    for lookups in (30_000, *sizes[:warm_up]):
        step(lookups)
    before, most = resident(), 0
    for number, lookups in enumerate(sizes[warm_up:]):
        step(lookups)
        if number % 20 == 0:
            most = max(most, resident())
    assert most - before < 48 * MIB


@reads_proc
def test_resident_memory_stays_flat_over_batches_of_different_sizes():
    check_that_memory_stays_flat(150, TTSpec(1_000_000, 32, (1000, 1000), (4, 8), (16,)))


@pytest.mark.slow
@reads_proc
def test_resident_memory_stays_flat_over_20_000_steps():
    check_that_memory_stays_flat(20_000, TTSpec(1_000_000, 64, (1000, 1000), (8, 8), (2,)))


@reads_proc
def test_memory_of_large_outputs_is_used_again_when_nobody_has_it():
    layout, batch_size = layout_of("rank_32"), 40_000
    ids = torch.arange(batch_size) % layout.specs[0].num_embeddings
    weights, offsets = random_weights(layout, torch.float32), torch.arange(batch_size + 1)
    held = [ops.lookup(weights + k, layout, ids, offsets) for k in range(12)]
    size, view = held[0].nbytes, held[0][5]
    assert size > 8 * MIB
    rows = [output[5].clone() for output in held]
    flowtt_torchrec.release_memory()
    before = resident()
    del held
    assert 0 < kept() <= 2 * (size + 2 * MIB)  # two are kept, whatever a caller held
    assert before - resident() > 8 * size  # not of the one with a view
    again = [ops.lookup(weights + k, layout, ids, offsets) for k in range(12)]
    assert torch.equal(view, rows[0])
    assert all(torch.equal(output[5], row) for output, row in zip(again, rows, strict=True))
