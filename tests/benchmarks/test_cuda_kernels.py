"""What can be held of the CUDA kernels without a GPU: no stack, no spills, room on a multiprocessor."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cuda_kernels
from flowtt_torchrec import native

pytestmark = pytest.mark.skipif(
    native.load_error is not None
    or not torch.ops.flowtt.cuda_architectures()
    or not list(cuda_kernels.LOGS.glob("cuda_*.log")),
    reason="the library here was built without CUDA kernels, or elsewhere",
)


def test_no_kernel_of_ours_has_a_stack_or_spills():
    own = [kernel for kernel in cuda_kernels.kernels() if not kernel.name.startswith("cub::")]
    names = {kernel.name for kernel in own}
    assert {"forward_rows<float>", "pool_rows", "make_keys", "backward_cores<Bfloat16, FloatSum, 4096>"} <= names
    for kernel in own:
        assert (kernel.stack, kernel.spills) == (0, 0), kernel


def test_blocks_per_multiprocessor():
    assert cuda_kernels.blocks_per_multiprocessor(64, 56_848, "sm_80") == 2  # by shared memory
    assert cuda_kernels.blocks_per_multiprocessor(64, 56_848, "sm_90") == 4  # by both
    assert cuda_kernels.blocks_per_multiprocessor(128, 1_000, "sm_90") == 2  # by registers
    assert cuda_kernels.blocks_per_multiprocessor(20, 0, "sm_90") == 8  # by threads


def test_room_for_the_usual_shapes():
    for shape, architecture, name, registers, shared, blocks, _ in cuda_kernels.occupancies():
        least = 1 if "128" in shape or "64, dim 128" in shape else 2
        assert blocks >= least, (shape, architecture, name, registers, shared)
