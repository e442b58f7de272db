"""Checkpoints that survive a kill at any moment.

All ranks write with ``torch.distributed.checkpoint`` into a hidden directory beside the others. Only when every file is
on disk does one rename give it its final name, ``step-000000001200``. A directory with such a name is therefore whole;
what a killed job left half-written is ignored, and removed by the next run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.files import sync_directory, write_atomically
from flowtt_torchrec.training.errors import CheckpointError

_STATE_FILE = "state.json"
_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = (".writing-", ".removing-")


class Checkpoints:
    """The checkpoints of one run, in one directory that all ranks see.

    Args:
        directory: where they are; made when the first is written.
        keep: how many to keep, the latest ones.
    """

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        self.directory = Path(directory)
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if (path / _STATE_FILE).is_file())
        return sorted(int(match[1]) for match in names if match)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}"

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> Path:
        """Writes a checkpoint. All ranks call it together.

        Args:
            step: names the checkpoint.
            tensors: nested dictionary of this rank's tensors, as `torch.distributed.checkpoint.save` takes it.
            state: what else is to be known, the same on all ranks; must go into JSON.

        Raises:
            CheckpointError: a rank could not write. The checkpoints before it are untouched.
        """
        final = self.path(step)
        unfinished = self.directory / f".writing-{final.name}"
        try:
            if dist.get_rank() == 0:
                self._clean()
                unfinished.mkdir(parents=True)
            dist.barrier()
            dcp.save(tensors, checkpoint_id=unfinished)  # its files are synced to disk when it returns
            if dist.get_rank() == 0:
                write_atomically(unfinished / _STATE_FILE, json.dumps(state, indent=1))
                if final.exists():
                    _remove(final)
                os.rename(unfinished, final)
                sync_directory(self.directory)
                for old in self.steps()[: -self.keep]:
                    _remove(self.path(old))
            dist.barrier()
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"cannot write the checkpoint {final}: {_reason(error)}") from None
        return final

    def read_state(self, step: int) -> dict[str, Any]:
        """What `save` was given as ``state``."""
        try:
            state = json.loads((self.path(step) / _STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(step, str(error)) from None
        if not isinstance(state, dict):
            raise self.damaged(step, "it is no mapping")
        return state

    def damaged(self, step: int, what: str, file: str = _STATE_FILE) -> CheckpointError:
        """The error of a file that is not as it was written."""
        return CheckpointError(
            f"the checkpoint {self.path(step)} is damaged: {file}: {what}. Remove it to continue from the one before, "
            "or start without --resume"
        )

    def load(self, step: int, tensors: dict[str, Any]) -> None:
        """Reads a checkpoint into ``tensors``, in place. All ranks call it together.

        Raises:
            CheckpointError: a tensor is missing or has another shape, or a file is damaged.
        """
        try:
            checkpoint.load(tensors, self.path(step))
        except (OSError, ValueError, RuntimeError, CheckpointException) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {self.path(step)}: {_reason(error)}. Remove it to continue from the one "
                "before, or start without --resume"
            ) from None

    def remove_all(self) -> int:
        """Removes all checkpoints; returns how many there were. For one rank."""
        steps = self.steps()
        for step in steps:
            _remove(self.path(step))
        self._clean()
        return len(steps)

    def _clean(self) -> None:
        """Removes what killed runs left unfinished."""
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                if path.name.startswith(_UNFINISHED):
                    shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Takes the name away first, so that a kill does not leave half a checkpoint under a good name."""
    doomed = path.with_name(f".removing-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _reason(error: BaseException) -> str:
    """The error in one line, without the stack that `CheckpointException` carries for each rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_reason(cause[0])}" for rank, cause in sorted(error.failures.items()))
    return " ".join(f"{error}".split()).rstrip(".") or type(error).__name__
