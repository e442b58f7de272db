"""``python -m flowtt_torchrec env`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import flowtt_torchrec


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowtt_torchrec", *args]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_env_prints_versions_and_the_backend(backend: str) -> None:
    result = run("env", FLOWTT_BACKEND=backend)
    assert result.returncode == 0, result.stderr
    values = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert values["torch"] == torch.__version__
    assert values["flowtt-torchrec"] == flowtt_torchrec.__version__
    assert values["backend"] == f"{backend} (FLOWTT_BACKEND={backend})"
    assert values["torchrec"] != "not installed"


def test_an_unknown_backend_is_refused() -> None:
    result = run("env", FLOWTT_BACKEND="gpu")
    assert result.returncode != 0
    assert "unknown backend 'gpu' (FLOWTT_BACKEND=gpu); known: native, reference" in result.stderr
