from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from flowtt_torchrec.training.errors import UserError
from flowtt_torchrec.training.rendezvous import join

_ALONE = """\
from flowtt_torchrec.training.rendezvous import join
join("gloo", 1.0)
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where something listens that is no store."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


def _environment(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch, taken: int) -> pytest.MonkeyPatch:
    """The environment of rank 0 of two."""
    for name, value in _environment(0, taken).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_missing_variable_is_named(of_two: pytest.MonkeyPatch) -> None:
    of_two.delenv("MASTER_PORT")
    with pytest.raises(UserError, match=r"has WORLD_SIZE, but not MASTER_PORT; start the job by torchrun"):
        join("gloo", 1.0)


def test_a_port_in_use_is_named(of_two: pytest.MonkeyPatch, taken: int) -> None:
    with pytest.raises(UserError, match=rf"port {taken} \(MASTER_PORT\), .* is in use; choose another"):
        join("gloo", 1.0)


def test_a_rank_that_does_not_start_is_waited_for_so_long(of_two: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    of_two.setenv("MASTER_PORT", str(port))
    with pytest.raises(
        UserError, match=r"not all of the 2 ranks met at localhost:\d+ within 1 s \(training.start_timeout"
    ):
        join("gloo", 1.0)


def test_under_torchrun_the_missing_rank_is_named(of_two: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    of_two.setenv("MASTER_PORT", str(store.port))
    of_two.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    of_two.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(UserError, match=r"rank 1 of 2 did not start within 1 s"):
        join("gloo", 1.0)


def test_waiting_for_a_wrong_server_ends(taken: int) -> None:
    """torch itself would wait for ever."""
    ended = subprocess.run(
        [sys.executable, "-c", _ALONE],
        env={**os.environ, **_environment(1, taken)},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "train_dlrm.py: error on rank 1: not all of the 2 ranks met" in ended.stderr
    assert "another program may use this port" in ended.stderr
