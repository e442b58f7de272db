"""The folders that a job writes to: tried before it starts, and held by one job at a time."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from flowtt_torchrec.files import write_atomically
from flowtt_torchrec.training.errors import ConfigError, UserError

_LOCK = ".lock"
_OWNER = ".lock-owner.json"


def try_folder(setting: str, folder: Path) -> None:
    """Writes a file into a folder, which is made for it, and leaves everything as it was.

    Args:
        setting: where the folder is from, for the message.
        folder: it need not be there.

    Raises:
        ConfigError: nothing can be written there.
    """
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.is_dir():
                path.mkdir()
                made.append(path)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 12))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot write into {folder}: {error.strerror}; set it to another folder"
        ) from None
    finally:
        for path in reversed(made):
            with suppress(OSError):  # somebody else has begun to use it
                path.rmdir()


@contextmanager
def held(folder: Path) -> Iterator[str | None]:
    """Holds a folder, which is made, against other jobs. The system ends the hold with the process, whatever ends that.

    Yields:
        What to say of a job that held it and did not come to its end; None if there was none.

    Raises:
        UserError: another job holds it; the message says which.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder} is in use by another job{_owner(folder)}. Wait for its end, or end it (the processes of a "
            "killed torchrun go on), or choose another checkpoint.directory"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise UserError(f"{folder} cannot be locked against other jobs: {error}; choose another folder") from None
    try:
        owner = _owner(folder)
        described = {"process": os.getpid(), "host": socket.gethostname(), "command": " ".join(sys.argv)}
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        write_atomically(folder / _OWNER, json.dumps({**described, "started": started}, indent=1) + "\n")
        yield f"{folder} was left by a job that was killed{owner}" if owner else None
    finally:
        (folder / _OWNER).unlink(missing_ok=True)
        lock.release()


def _owner(folder: Path) -> str:
    """Who holds, or held, the folder."""
    try:
        owner = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
        return f": process {owner['process']} on host {owner['host']}, since {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
