"""``train_dlrm.py``'s main function: the command line, and how a process ends when something is wrong.

What a user can mend ends in one message, on one rank; anything else is a bug and shows its traceback. Either way a
process that fails ends at once, without waiting for the others, so that torchrun can end those.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from flowtt_torchrec.training.errors import UserError, say_error
from flowtt_torchrec.training.options import parse
from flowtt_torchrec.training.settings import to_yaml

_SAME_ERROR_GRACE_SECONDS = 1.0
_LOST_PEER_GRACE_SECONDS = 10.0
_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Application timeout")
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)
_ASKED_FOR = re.compile(r"allocate ([\d.]+ ?\w+)", re.IGNORECASE)
_WRONG_INDEX = re.compile(r"index .* is out of range; allowed: .*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``train_dlrm.py``; returns the exit status."""
    try:
        invocation = parse(sys.argv[1:] if arguments is None else arguments)
        if invocation.print_config:
            if _rank() == 0:
                print(to_yaml(invocation.config), end="", flush=True)
            return 0
        # Not at the top: it takes seconds to import TorchRec, and a typo should be told at once.
        from flowtt_torchrec.training.job import run

        run(invocation)
    except Exception as error:
        return _end(error)
    return 0


def _end(error: Exception) -> int:
    """Says what went wrong. Returns the exit status, but does not return in a process that has a process group."""
    message = _message_for_user(error)
    if message is None:
        traceback.print_exception(error)
    else:
        lost_peer = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
        if lost_peer or _rank() > 0:
            # Mostly rank 0 says the same, or another rank says why, and torchrun ends this one while it waits.
            time.sleep(_LOST_PEER_GRACE_SECONDS if lost_peer else _SAME_ERROR_GRACE_SECONDS)
        say_error(message)
    if dist.is_initialized():  # tidying up would wait for the others, who may wait for this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return 1


def _message_for_user(error: Exception) -> str | None:
    """What to tell the user, or None for a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))):
        asked = match[1] if (match := _ASKED_FOR.search(str(error))) else None
        return (
            f"out of memory{'' if asked is None else f', when {asked} more were asked for'}. Use a smaller "
            "training.batch_size or training.test_batch_size, compress more tables (compression.*), or use more ranks; "
            "--dry-run shows what the tables take"
        )
    if isinstance(error, IndexError | RuntimeError):  # from the operators, and from gloo and nccl
        if match := _WRONG_INDEX.search(str(error)):
            return match[0]
        if _LOST_PEER.search(str(error)):
            return "lost the connection to another rank, whose own message says why"
        return None
    from flowtt_torchrec.datasets import DataError  # imports TorchRec

    return str(error) if isinstance(error, DataError) else None


def _rank() -> int:
    return int(os.environ.get("RANK", 0))
