from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flowtt_torchrec import ops


@pytest.fixture(autouse=True)
def _one_thread_and_a_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and the compiled ops where they are built; processes that a test starts do the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    name = "native" if ops.backend_info().error is None else "reference"
    monkeypatch.setenv(ops.BACKEND_VARIABLE, name)
    with ops.use_backend(name):
        yield
    torch.set_num_threads(threads)
