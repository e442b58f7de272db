from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowtt_torchrec.training.errors import ConfigError, UserError
from flowtt_torchrec.training.folders import held, try_folder

_HOLD = """\
import sys, time
from pathlib import Path
from flowtt_torchrec.training.folders import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    try_folder("report.directory", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            ConfigError, match=r"report\.directory: cannot write into .*file.*: (File exists|Not a dir)"
        ):
            try_folder("report.directory", folder)
    with pytest.raises(ConfigError, match=r"x: cannot write into /proc/new: .*; set it to another folder"):
        try_folder("x", Path("/proc/new"))


def test_a_folder_is_held_by_one_job_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with held(folder) as left:
        assert left is None
        with pytest.raises(UserError, match=rf"checkpoints is in use by another job: process {os.getpid()} on host .*"):
            held(folder).__enter__()
    with held(folder) as left:
        assert left is None


def test_a_hold_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"in use by another job: process {holder.pid} on host .*, since 2"):
        held(folder).__enter__()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with held(folder) as left:
        assert left is not None
        assert f"was left by a job that was killed: process {holder.pid} on host" in left
        owner = json.loads((folder / ".lock-owner.json").read_text())
        assert owner["process"] == os.getpid()
    assert not (folder / ".lock-owner.json").exists()
