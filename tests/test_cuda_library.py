"""The compiled library beside this torch: what it has for GPUs, and what it says where that is not enough."""

from __future__ import annotations

import pytest
import torch
from tt_samples import layout_of

from flowtt_torchrec import native

pytestmark = pytest.mark.skipif(native.load_error is not None, reason="there is no compiled library")


def call_as_on_a_gpu():
    """The CUDA kernel of an op, called with CPU tensors."""
    layout = layout_of("three_cores")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return torch.ops.flowtt.flow_plan.default.redispatch(
        keys, layout.tables, layout.table_names, layout.features, torch.tensor([1]), torch.tensor([0, 1]), 0, 0
    )


def test_loads_beside_this_torch_and_says_what_is_missing():
    assert torch.ops.flowtt.cpu_isa()
    if torch.ops.flowtt.cuda_architectures():
        with pytest.raises(RuntimeError, match="indices must be on the GPU"):
            call_as_on_a_gpu()
    else:
        with pytest.raises(RuntimeError, match="no CUDA kernels: build it where nvcc is, with FLOWTT_BUILD_CUDA=1"):
            call_as_on_a_gpu()


def test_needs_no_library_of_cuda():
    """cudart is linked statically: the library loads on hosts without CUDA."""
    needed = native.library_path.read_bytes()
    assert b"libcudart.so" not in needed
    assert b"libtorch_cuda.so\0" in needed or not torch.ops.flowtt.cuda_architectures()  # looked up by name only
