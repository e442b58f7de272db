"""A tiny job, and ways to run it: under torchrun, or in processes that have imported everything."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "train_dlrm.py"

TINY = """\
data:
  generate: {train_rows: 3000, val_rows: 500, scale: 0.01}
model:
  embedding_dim: 8
  dense_arch_layer_sizes: [16, 8]
  over_arch_layer_sizes: [16, 1]
compression: {min_rows: 1000, rank: 4}
optimizer: {kind: adagrad, learning_rate: 0.05}
training: {batch_size: 25, log_every: 7, profile_steps: 3}
"""


def environment() -> dict[str, str]:
    """For a job in processes of its own, without what this process may have from a launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "FLOWTT_DEVICE": "cpu"}


def run_here(*arguments: str | Path) -> None:
    """Runs a job of one rank to its end in this process; its errors are exceptions."""
    from flowtt_torchrec.training.job import run
    from flowtt_torchrec.training.options import parse

    try:
        run(parse([str(argument) for argument in arguments]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def torchrun(arguments: Sequence[str | Path], processes: int = 2) -> list[str]:
    """The command of a job with several processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [*launcher, str(SCRIPT), *map(str, arguments)]


def run_job(arguments: Sequence[str | Path], directory: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end in ``directory``, as `launch_job` does but without its seconds of imports in every process.

    As under torchrun, the first process that fails ends the others.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = [str(argument) for argument in arguments]
    with tempfile.NamedTemporaryFile("r") as output:
        context = multiprocessing.get_context("forkserver")  # see tests/conftest.py
        ranks = [
            context.Process(target=_rank, args=(rank, processes, store.port, given, directory, output.name))
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + 300
        while any(rank.is_alive() for rank in ranks):
            wait([rank.sentinel for rank in ranks if rank.is_alive()], timeout=1)
            if any(rank.exitcode for rank in ranks) or time.monotonic() > deadline:
                for rank in ranks:
                    rank.terminate()
        for rank in ranks:
            rank.join()
        status = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        return subprocess.CompletedProcess(given, status, stdout=output.read())


def _rank(rank: int, world_size: int, port: int, arguments: list[str], directory: Path, output: str) -> None:
    os.chdir(directory)
    into = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(into, stream.fileno())
    of_job = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    of_store = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ |= environment() | {name: str(value) for name, value in (of_job | of_store | elastic).items()}

    from flowtt_torchrec.training.cli import main

    sys.exit(main(arguments))


def launch_job(
    arguments: Sequence[str | Path], directory: Path, processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end in ``directory``, under torchrun."""
    return subprocess.run(
        torchrun(arguments, processes),
        cwd=directory,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
