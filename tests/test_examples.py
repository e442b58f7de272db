"""The scripts of examples/ run, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs a script in this process, as the only rank where it asks; returns what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run_script(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss|->) ([0-9.]+)", output)]


def test_a_table_in_a_plain_model(run: Callable[[str], str]) -> None:
    output = run("plain_pytorch.py")
    first, *_, last = losses(output)
    assert last < 0.6 * first
    assert "table 3.8 MB in place of 2,560 MB" in output


def test_the_two_lines_in_a_torchrec_script(run: Callable[[str], str]) -> None:
    pytest.importorskip("torchrec")
    outputs = [run(name) for name in ("torchrec_dense.py", "torchrec_tensor_trains.py")]
    for output in outputs:
        first, last = losses(output)
        assert last < first - 0.1
    assert "tt_core" not in outputs[0]
    assert "t_user.tt_core0" in outputs[1]
    assert "t_shop.weight" in outputs[1]


@pytest.mark.slow
def test_the_two_lines_on_two_ranks() -> None:
    pytest.importorskip("torchrec")
    script = EXAMPLES / "torchrec_tensor_trains.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr
    first, last = losses(done.stdout)
    assert last < first - 0.1


def test_a_checkpoint_there_and_back(run: Callable[[str], str]) -> None:
    pytest.importorskip("torchrec")
    dense, compressed, tuned, exported = losses(run("compress_checkpoint.py"))
    assert compressed < dense + 0.05
    assert tuned < compressed
    assert exported == tuned  # to three digits: the rows are rounded to the dense type


def test_the_readme_names_every_script() -> None:
    named = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert named == {path.name for path in EXAMPLES.glob("*.py")} - {"clicks.py"}
