"""The processes of a job: device, process group, threads, and how a process ends."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flowtt_torchrec.training.config import TrainingConfig
from flowtt_torchrec.training.errors import ConfigError
from flowtt_torchrec.training.rendezvous import join

T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """This process among the processes of the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def choose_device(wanted: str | None, must_exist: bool = True) -> str:
    """``"cpu"`` or ``"cuda"``: what is asked for, else FLOWTT_DEVICE, else cuda if there is a GPU.

    Raises:
        ConfigError: FLOWTT_DEVICE is something else, or cuda is asked for, has to exist, and there is no GPU.
    """
    source = "training.device" if wanted is not None else "FLOWTT_DEVICE"
    kind = wanted or os.environ.get("FLOWTT_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"{source}={kind} is unknown; allowed: cpu, cuda")
    if must_exist and kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{source}=cuda, but torch {torch.__version__} finds no GPU; use {source}=cpu")
    return kind


@contextmanager
def process_group(
    device_kind: str, threads: int | None, start_timeout: float = TrainingConfig.start_timeout
) -> Iterator[Runtime]:
    """Joins the process group that torchrun or torchx describe in the environment, or makes one of one process.

    Args:
        device_kind: ``"cpu"`` (gloo) or ``"cuda"`` (nccl, with gloo for what is on the host).
        threads: CPU threads of this process; by default the cores divided by the processes of the host.
        start_timeout: seconds to wait for the other ranks.
    """
    launched = "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // local_world_size))
    device = torch.device("cpu")
    if device_kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device_kind == "cpu" else "cpu:gloo,cuda:nccl"
    if launched:
        join(backend, start_timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield Runtime(dist.get_rank(), dist.get_world_size(), local_rank, local_world_size, device)
    dist.destroy_process_group()  # not after an error: the other ranks may wait in a collective, and this one would too


def decide_on_main(runtime: Runtime, decide: Callable[[], T]) -> T:
    """The result of ``decide`` on rank 0, on every rank. All ranks call it together."""
    box: list[Any] = [decide() if runtime.is_main else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def host_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest use so far, in bytes: resident memory of this process, and what torch allocated on its GPU."""
    peak = {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}  # Linux counts KiB
    if device.type == "cuda":
        peak["cuda"] = torch.cuda.max_memory_allocated(device)
    return peak
