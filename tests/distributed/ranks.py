"""Runs functions on the ranks of a gloo process group: real processes, started once for many tests."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=60)


class RankError(AssertionError):
    """A function failed on some rank; the message has the traceback of every rank that failed."""


class Ranks:
    """``world_size`` processes, each a rank of one gloo group.

    Args:
        world_size: number of ranks.
        folder: a fresh folder for the group's rendezvous.
        hosts: how many hosts the ranks take themselves to be on.
    """

    def __init__(self, world_size: int, folder: Path, hosts: int = 1) -> None:
        self.world_size = world_size
        self._local_size = world_size // hosts
        self._folder = folder
        self._groups = 0
        self._workers: list[tuple[mp.Process, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(rank, world_size, *args)`` on every rank and returns the results in rank order.

        Raises:
            RankError: if it raises on any rank. The processes are then started anew for the next call.
        """
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            connection.send((function, args))
        replies = []
        for process, connection in self._workers:
            try:
                replies.append(connection.recv())
            except EOFError:
                process.join()
                replies.append((False, f"the process ended with exit code {process.exitcode}"))
        failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(replies) if not ok]
        if failed:
            self.close()
            raise RankError("\n".join(failed))
        return [value for _, value in replies]

    def _start(self) -> None:
        context = mp.get_context("forkserver")  # has imported torchrec: see tests/conftest.py
        rendezvous = self._folder / f"rendezvous{self._groups}"
        self._groups += 1
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            args = (rank, self.world_size, str(rendezvous), self._local_size, theirs)
            process = context.Process(target=_serve, args=args)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self._workers:
            connection.close()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []


def join_group(rank: int, world_size: int, rendezvous: str, local_size: int | None = None) -> None:
    """Makes this process a rank of a gloo group that meets at a file."""
    local_size = local_size or world_size
    os.environ.update(LOCAL_RANK=str(rank % local_size), LOCAL_WORLD_SIZE=str(local_size), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=TIMEOUT
    )


def _serve(rank: int, world_size: int, rendezvous: str, local_size: int, connection: Connection) -> None:
    join_group(rank, world_size, rendezvous, local_size)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, function(rank, world_size, *args)))
        except BaseException:  # torch.distributed.checkpoint raises a BaseException
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()
