"""Batches that the ops cannot take. Of a GPU, and of the emulator, the errors come from a later op."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tt_samples import (
    CUDA,
    CUDA_EMULATED,
    dtype_of,
    every_backend,
    layout_of,
    mixed_layout,
    offsets_of,
    random_batch,
    random_weights,
)

from flowtt_torchrec import ops
from flowtt_torchrec.ops import BoundsCheckMode
from flowtt_torchrec.optimizers import KINDS, MOMENTUM1, MOMENTUM2, OptimizerSpec, init_state
from flowtt_torchrec.plan import PoolingMode

every_device = pytest.mark.parametrize(
    "backend", [CUDA_EMULATED, pytest.param(CUDA, marks=pytest.mark.cuda)], indirect=True
)


@contextmanager
def raised(error: type[Exception] | tuple[type[Exception], ...], message: str) -> Iterator[None]:
    """Expects an error from the block, of a GPU at its end at the latest."""
    with pytest.raises(error, match=message):  # noqa: PT012
        yield
        ops.synchronize()


@every_backend
def test_indices_out_of_range(backend):
    layout = mixed_layout()
    lengths = torch.tensor([2, 1, 1, 1, 0, 0, 0, 0, 0])  # of features that look up tables 5, 0, 1 and 2
    good, offsets = torch.tensor([342, 0, 22, 0, 0]), offsets_of(lengths)
    weights = random_weights(layout, dtype_of(backend))
    with ops.use_backend(backend):
        for position, bad, message in (
            (1, 343, r"index 343 at position 1 \(feature 0, table 'odd'\) .*0 to 342"),
            (2, 23, r"index 23 .*feature 1, table 'two_cores'\) .*0 to 22"),
            (3, -1, r"index -1 .*feature 2, table 'three_cores'\) .*0 to 99"),
            (4, 2**40, r"index 1099511627776 .*feature 3, table 'four_cores'\) .*0 to 59"),
        ):
            indices = good.clone()
            indices[position] = bad
            with raised(IndexError, message):
                ops.lookup(weights, layout, indices, offsets)
            ops.synchronize()
            zeroed = indices.clone()
            zeroed[position] = 0
            expected = ops.lookup(weights, layout, zeroed, offsets)
            mode = BoundsCheckMode.IGNORE
            assert ops.flow_plan(layout, indices, offsets, bounds_check_mode=mode).counts[2] == 1
            assert torch.equal(ops.lookup(weights, layout, indices, offsets, bounds_check_mode=mode), expected)


@every_backend
def test_warning_names_the_first_bad_index_and_counts_them(backend):
    layout = mixed_layout()
    lengths = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0])
    indices, offsets = torch.tensor([342, 23, 100, -1]), offsets_of(lengths)
    weights = random_weights(layout, dtype_of(backend))
    mode = BoundsCheckMode.WARNING
    with ops.use_backend(backend):
        message = r"index 23 at position 1 .*feature 1, table 'two_cores'.*0 to 22.* 3 such"
        with pytest.warns(UserWarning, match=message) as caught:
            output = ops.lookup(weights, layout, indices, offsets, bounds_check_mode=mode)
        assert len(caught) == 1
        zeroed = torch.tensor([342, 0, 0, 0])
        assert torch.equal(output, ops.lookup(weights, layout, zeroed, offsets))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ops.lookup(weights, layout, zeroed, offsets, bounds_check_mode=mode)


@every_backend
@pytest.mark.parametrize("mode", list(BoundsCheckMode))
def test_bad_offsets_are_an_error_in_every_mode(backend, mode):
    layout = layout_of("two_cores", "three_cores")
    weights = random_weights(layout, dtype_of(backend))
    for count, offsets, message in (
        (5, [0, 2, 1, 4, 5], r"decrease, but offsets\[1\] = 2 and offsets\[2\] = 1"),
        (5, [1, 2, 3, 4, 5], "start at 0 and .*, 5, but go from 1 to 5"),
        (5, [0, 2, 3, 4, 6], "number of indices, 5, but go from 0 to 6"),
        (5, [0, 2, 3, 4, 4], "number of indices, 5, but go from 0 to 4"),
        (5, [0, 2**40, -(2**40), 4, 5], "decrease"),
        (0, [0, 0, 0, 0, 2**31], "number of indices, 0"),
        (5, [0, 2, 5, 5], "batch_size"),
        (5, [], "batch_size"),
        (5, [0], "offsets"),
    ):
        with ops.use_backend(backend), raised(RuntimeError, message):
            offsets = torch.tensor(offsets, dtype=torch.int64)
            ops.lookup(weights, layout, torch.arange(count), offsets, bounds_check_mode=mode)


def failed_plan(layout, indices, offsets):
    """A failed batch's plan, after its error has been raised."""
    plan = ops.flow_plan(layout, indices, offsets)
    with raised((IndexError, RuntimeError), "out of range|must not decrease"):
        pass
    return plan


@every_device
@pytest.mark.parametrize("fault", ["index", "offsets"])
@pytest.mark.parametrize("waves", [False, True], ids=["one wave", "waves"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_a_failed_batch_changes_nothing(backend, fault, waves, deterministic):
    layout = mixed_layout()
    indices, offsets = random_batch(layout, 20)
    if fault == "index":
        indices[17] = -5
    else:
        offsets[9] = 10**9
    factors, grad_output = torch.rand(indices.numel()), torch.randn(20, layout.total_dim)
    library = torch.ops.flowtt if backend == CUDA else torch.ops.flowtt_emulated
    library.use_cuda_row_bytes(1 if waves else 64 << 20)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with ops.use_backend(backend):
            plan = failed_plan(layout, indices, offsets)
            assert plan.counts[:2].tolist() == [0, 0]
            compiled = ops.BACKENDS[backend]
            weights = random_weights(layout, torch.float32)
            args = layout, offsets, plan
            for pooling in PoolingMode:
                output = compiled.pooled_forward(weights, *args, factors, pooling)
                assert output.shape == grad_output.shape
                assert not output.any()
                grads = compiled.pooled_backward(grad_output, weights, *args, factors, pooling, True)
                assert not grads[0].any()
                assert not grads[1].any()
            steps = torch.ones(layout.num_tables, dtype=torch.int64)
            for kind in KINDS:
                state = init_state(layout, kind)
                before = [t.clone() for t in (weights, *state.values())]
                moments = state.get(MOMENTUM1), state.get(MOMENTUM2)
                optimizer = OptimizerSpec(kind, 0.1, 1e-3, weight_decay=0.1)
                compiled.pooled_backward_update(
                    grad_output, weights, *moments, *args, optimizer, factors, PoolingMode.SUM, True, steps
                )
                assert all(torch.equal(a, b) for a, b in zip(before, (weights, *state.values())))
    finally:
        library.use_cuda_row_bytes(64 << 20)
        torch.use_deterministic_algorithms(False)


@every_device
def test_the_first_error_is_raised_by_the_next_op_and_once(backend):
    first, second = layout_of("odd", "tiny"), layout_of("two_cores", "three_cores")
    good, offsets = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
    with ops.use_backend(backend):
        expected = ops.lookup(random_weights(second, torch.float32), second, good, offsets)
        ops.flow_plan(first, torch.tensor([3, 99]), offsets)
        # Of another group of tables, which the error does not name.
        with raised(IndexError, r"index 99 at position 1 \(feature 1, table 'tiny'\).*0 to 6\. The GPU found this"):
            ops.lookup(random_weights(second, torch.float32), second, torch.tensor([50, 0]), offsets)
        ops.synchronize()
        assert torch.equal(ops.lookup(random_weights(second, torch.float32), second, good, offsets), expected)
        ops.flow_plan(second, torch.tensor([50, 0]), offsets)
        with raised(IndexError, "index 50 at position 0 .*'two_cores'"):
            pass


@every_device
def test_backward_raises_too(backend):
    layout = layout_of("two_cores", "three_cores")
    weights, offsets = random_weights(layout, torch.float32).requires_grad_(), torch.tensor([0, 1, 2])
    with ops.use_backend(backend):
        output = ops.lookup(weights, layout, torch.tensor([3, 4]), offsets)
        ops.flow_plan(layout, torch.tensor([3, 100]), offsets)
        with raised(IndexError, "index 100 .*'three_cores'"):
            output.sum().backward()
