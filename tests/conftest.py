from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
import torch
from tt_samples import CUDA, CUDA_EMULATED

# Imported once, for all processes that tests start with the method "forkserver"; what is not installed is passed over.
multiprocessing.set_forkserver_preload(["flowtt_torchrec.distributed", "flowtt_torchrec.training.cli"])


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and waiting for them is slow where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend that is ready for use."""
    if request.param == CUDA_EMULATED:
        from cuda_emulation import build, emulated

        if build.toolkit() is None:
            pytest.skip("the headers of the CUDA toolkit are not here")
        emulated.load()
    if request.param == CUDA:
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU here")
        from on_gpu import OpsOnDevice

        from flowtt_torchrec import native, ops

        ops.BACKENDS[CUDA] = OpsOnDevice(native, "cuda")
    return request.param
