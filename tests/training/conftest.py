from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from training_jobs import TINY

# Imported once, for all processes that tests start with the method "forkserver".
multiprocessing.set_forkserver_preload(["flowtt_torchrec.training.metrics", "flowtt_torchrec.training.checkpoint"])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The configuration file of a job that trains in seconds."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path
