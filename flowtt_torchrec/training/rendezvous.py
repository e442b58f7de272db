"""Joining the other ranks of a job, within a bounded time: one that never starts ends the others with a message."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from flowtt_torchrec.training.errors import UserError, say_error

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GRACE_SECONDS = 2.0  # for what ends by itself, with a better message


def join(backend: str, timeout: float) -> None:
    """Makes the default process group of the ranks that the launcher's environment variables describe.

    Collectives in it have torch's own time-outs.

    Args:
        backend: as `torch.distributed.init_process_group`.
        timeout: seconds to wait for the others.

    Raises:
        UserError: a variable is missing, the port is in use, or not all ranks came. Where nothing but waiting can be
            done, the process ends with the message.
    """
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"the environment has WORLD_SIZE, but not {', '.join(missing)}; start the job by torchrun or torchx, which "
            "set them, or set all of them"
        )
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    world_size = int(os.environ["WORLD_SIZE"])
    within = f"within {timeout:g} s (training.start_timeout)"
    causes = "see whether a rank was killed or waits for something, and whether the hosts reach each other"
    late = f"not all of the {world_size} ranks met at {address} {within}; {causes}"
    with _deadline(timeout + _GRACE_SECONDS, f"{late}; or another program may use this port"):
        try:
            store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
            _wait_for_all(store, rank, world_size, timeout)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" in str(error):
                raise UserError(
                    f"port {os.environ['MASTER_PORT']} (MASTER_PORT), where the ranks are to meet, is in use; choose "
                    "another, or start with torchrun --standalone, which finds a free one"
                ) from None
            raise UserError(f"{late} ({str(error).splitlines()[0]})") from None
        except dist.DistStoreError:
            raise UserError(late) from None
        store.set_timeout(default_pg_timeout)
        dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size)


def _wait_for_all(store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
    """Raises `UserError` with the ranks that did not come."""
    names = [f"started/{other}" for other in range(world_size)]
    store.set(names[rank], "")
    try:
        store.wait(names, timedelta(seconds=timeout))
    except dist.DistStoreError:
        absent = [str(other) for other, name in enumerate(names) if not store.check([name])]
        raise UserError(
            f"rank {', '.join(absent[:8])}{' and others' if len(absent) > 8 else ''} of {world_size} did not start "
            f"within {timeout:g} s (training.start_timeout); see its own message, or whether it was killed"
        ) from None


@contextmanager
def _deadline(seconds: float, message: str) -> Iterator[None]:
    """Ends the process with a message if the block takes longer: torch waits for a wrong server's answer for ever."""

    def end() -> None:
        say_error(message)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
