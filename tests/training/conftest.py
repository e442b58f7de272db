from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import TINY


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The configuration file of a job that trains in seconds."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path
