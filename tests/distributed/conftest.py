from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, join_group


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes that all tests share; they start with the first test that needs them."""
    ranks = Ranks(2, tmp_path_factory.mktemp("two_ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes on what they take for two hosts."""
    ranks = Ranks(4, tmp_path_factory.mktemp("four_ranks"), hosts=2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Calls a function as the only rank of a group, in this process."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    join_group(0, 1, str(tmp_path_factory.mktemp("one_rank") / "rendezvous"))
    yield lambda function, *args: function(0, 1, *args)
    dist.destroy_process_group()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)
