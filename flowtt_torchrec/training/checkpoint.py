"""Checkpoints that survive a kill at any moment.

All ranks write with ``torch.distributed.checkpoint`` into a hidden directory beside the others. Only when every file is
on disk does one rename give it its final name, ``step-000000001200``. A directory with such a name is therefore whole;
what a killed job left half-written is ignored, and removed by the next run. ``state.json`` keeps a checksum of every
file, itself included, so that bits that change later are noticed.
"""

from __future__ import annotations

import errno
import hashlib
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
_BEST_FILE = "best.json"
_NAME = re.compile(r"step-(\d+)")
_WRITTEN_BY = re.compile(r"__(\d+)_\d+\.distcp")  # rank, by torch.distributed.checkpoint
_FILES, _CHECKSUM = "files", "checksum"
_UNFINISHED = (".writing-", ".removing-")


_CHUNK_BYTES = 1 << 22
_ADVICE = "Remove it to continue from the one before, or start without --resume"


class Checkpoints:
    """The checkpoints of one run, in one directory that all ranks see.

    Args:
        directory: where they are; made when the first is written.
        keep: how many to keep, the latest ones; one that `save` is told to spare does not count.
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

    def best(self) -> int | None:
        """Step of the checkpoint that `mark_best` was last told; None if there is none, or it is gone."""
        try:
            step = json.loads((self.directory / _BEST_FILE).read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if step in self.steps() else None

    def mark_best(self, step: int) -> None:
        """Notes that the checkpoint of ``step`` is the best, if there is one. For one rank.

        Raises:
            CheckpointError: it cannot be written.
        """
        if step not in self.steps():
            return
        try:
            write_atomically(self.directory / _BEST_FILE, json.dumps({"step": step}) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.directory / _BEST_FILE}: {_reason(error, self.directory)}"
            ) from None

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}"

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any], spare: int | None = None) -> Path:
        """Writes a checkpoint. All ranks call it together.

        Args:
            step: names the checkpoint.
            tensors: nested dictionary of this rank's tensors, as `torch.distributed.checkpoint.save` takes it.
            state: what else is to be known, the same on all ranks; must go into JSON.
            spare: step of a checkpoint that is kept, however old.

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
            files = _digests(unfinished)
            if dist.get_rank() == 0:
                whole = {**state, _FILES: files}
                text = json.dumps({**whole, _CHECKSUM: _checksum(whole)}, indent=1, allow_nan=False)
                write_atomically(unfinished / _STATE_FILE, text)
                if final.exists():
                    _remove(final)
                os.rename(unfinished, final)
                sync_directory(self.directory)
                for old in [other for other in self.steps() if other != spare][: -self.keep]:
                    _remove(self.path(old))
            dist.barrier()
        except (OSError, CheckpointException) as error:
            reason = _reason(error, self.directory)
            if dist.get_rank() == 0:  # what it takes may be what others need
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {reason}. Those before it are as they were"
            ) from None
        return final

    def read_state(self, step: int) -> dict[str, Any]:
        """What `save` was given as ``state``."""
        state = self._read_state(step)
        return {name: value for name, value in state.items() if name not in (_FILES, _CHECKSUM)}

    def _read_state(self, step: int) -> dict[str, Any]:
        try:
            state = json.loads((self.path(step) / _STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(step, str(error)) from None
        if not isinstance(state, dict):
            raise self.damaged(step, "it is no mapping")
        checksum = state.pop(_CHECKSUM, None)  # there is none in those of older versions
        if checksum is not None and checksum != _checksum(state):
            raise self.damaged(step, "its checksum is another")
        return state

    def damaged(self, step: int, what: str, file: str = _STATE_FILE) -> CheckpointError:
        """The error of a file that is not as it was written."""
        return CheckpointError(f"the checkpoint {self.path(step)} is damaged: {file}: {what}. {_ADVICE}")

    def load(self, step: int, tensors: dict[str, Any]) -> None:
        """Reads a checkpoint into ``tensors``, in place. All ranks call it together.

        Raises:
            CheckpointError: a tensor is missing or has another shape, or a file is damaged.
        """
        self._verify(step)
        try:
            checkpoint.load(tensors, self.path(step))
        except (OSError, ValueError, RuntimeError, CheckpointException) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {self.path(step)}: {_reason(error)}. {_ADVICE}"
            ) from None

    def _verify(self, step: int) -> None:
        """Compares all files with their checksums; each rank takes a part of them, and all raise the same error."""
        files = self._read_state(step).get(_FILES, {})
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = {name: _difference(self.path(step) / name, files[name]) for name in sorted(files)[rank::world_size]}
        found: list[dict[str, str | None]] = [{}] * world_size
        dist.all_gather_object(found, mine)
        for name, difference in (item for of_rank in found for item in of_rank.items()):
            if difference is not None:
                raise self.damaged(step, difference, name)

    def remove_all(self) -> int:
        """Removes all checkpoints; returns how many there were. For one rank."""
        steps = self.steps()
        for step in steps:
            _remove(self.path(step))
        (self.directory / _BEST_FILE).unlink(missing_ok=True)
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


def _digests(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file, which the rank that wrote it reads once more. All ranks call it together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = {}
    for path in sorted(directory.iterdir()):
        match = _WRITTEN_BY.fullmatch(path.name)
        if (int(match[1]) if match else 0) == rank:
            mine[path.name] = _digest(path)
    found: list[dict[str, Any]] = [{}] * world_size
    dist.all_gather_object(found, mine)
    return {name: digest for of_rank in found for name, digest in of_rank.items()}


def _digest(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _difference(path: Path, expected: dict[str, Any]) -> str | None:
    """What is wrong with a file; None if it is as it was written."""
    try:
        if (size := path.stat().st_size) != expected["bytes"]:
            return f"it has {size:,} bytes, but was written with {expected['bytes']:,}"
        return None if _digest(path) == expected else "its checksum is another: bits have changed since it was written"
    except OSError as error:
        return error.strerror


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException, directory: Path | None = None) -> str:
    """The error in one line, without the stack that `CheckpointException` carries for each rank.

    Args:
        error: it.
        directory: what was being written to.
    """
    if isinstance(error, CheckpointException):
        reasons = (f"rank {rank}: {_reason(cause[0], directory)}" for rank, cause in sorted(error.failures.items()))
        return "; ".join(reasons)
    if directory is not None and (short := _stopped_short(error)) is not None:
        free = shutil.disk_usage(directory).free
        return f"{short} in {directory}, where {free / 1e6:,.0f} MB are free"
    return " ".join(f"{error}".split()).rstrip(".") or type(error).__name__


def _stopped_short(error: BaseException) -> str | None:
    """In words, if a file could not be written to its end."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    # torch's writer hides why; other ranks' errors come without their causes.
    return "no space left, or a limit on the size of files," if "inline_container" in str(error) else None
