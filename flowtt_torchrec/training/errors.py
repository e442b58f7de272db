"""The error that a user can cause and mend: one clear message, no traceback."""

from __future__ import annotations

import os
import sys


class UserError(Exception):
    """Something the user gave is wrong. The message names it, says what is allowed, and needs no traceback."""


class ConfigError(UserError):
    """A setting is wrong; the message starts with where it was made, like ``configs/a.yaml:12`` or ``--epochs``."""


class DivergenceError(UserError):
    """The model's numbers are not finite any more; the message says since when, and what to do."""


class CheckpointError(UserError):
    """A checkpoint cannot be used: missing parts, or made by a run that this one does not continue."""


def say_error(message: str) -> None:
    """Prints the one message that a process ends with."""
    on_rank = f" on rank {os.environ.get('RANK', 0)}" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    print(f"train_dlrm.py: error{on_rank}: {message}", file=sys.stderr, flush=True)
