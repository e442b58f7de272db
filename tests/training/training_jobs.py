"""A tiny job, and ways to run it under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "train_dlrm.py"

TINY = """\
data:
  generate: {train_rows: 3000, val_rows: 500, scale: 0.01}
model:
  embedding_dim: 8
  dense_arch_layer_sizes: [16, 8]
  over_arch_layer_sizes: [16, 1]
compression: {min_rows: 1000, rank: 4}
optimizer: {kind: adagrad, learning_rate: 0.05}
training: {batch_size: 25, log_every: 7, profile_steps: 3}
"""


def environment() -> dict[str, str]:
    """For a job in processes of its own, without what this process may have from a launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "FLOWTT_DEVICE": "cpu"}


def torchrun(arguments: Sequence[str | Path], processes: int = 2) -> list[str]:
    """The command of a job with several processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [*launcher, str(SCRIPT), *map(str, arguments)]


def run_job(arguments: Sequence[str | Path], directory: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end, in ``directory``."""
    return subprocess.run(
        torchrun(arguments, processes),
        cwd=directory,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
