#!/usr/bin/env python3
"""Builds the wheel, and uses it in new environments as those who install it do.

    make wheel                              dist/: the source distribution, and the wheel that is built from it
    make test-wheel                         two environments in build/wheel/: torch alone, and torch with torchrec
    make test-wheel ARGS="--python python3.13 --torch 2.12.1"

Examples and tests are the repository's own, run away from it, so that nothing but the installed package is found.
pip's own settings hold: PIP_INDEX_URL and the like choose where torch comes from and whether it is a build for the CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TOOLS = ("pytest", "pytest-timeout", "hypothesis")


@dataclass(frozen=True)
class Environment:
    """What is installed beside the wheel, and what has to work then."""

    extras: str
    requirements: tuple[str, ...]  # of the tested set, by name or path
    example: tuple[str, ...]
    tests: tuple[str, ...]


ENVIRONMENTS = {
    "torch": Environment(
        extras="",
        requirements=("torch",),
        example=("python", "examples/plain_pytorch.py"),
        tests=("tests/test_ops.py", "tests/test_embedding_bag.py", "tests/test_cuda_library.py", "-k", "not emulated"),
    ),
    "torchrec": Environment(
        extras="[torchrec]",
        requirements=("torch", "torchrec", "./requirements/fbgemm-gpu-shim"),
        example=("torchrun", "--nproc_per_node", "2", "examples/torchrec_tensor_trains.py"),
        tests=("tests/distributed/test_twin_training.py", "tests/distributed/test_plan_file.py"),
    ),
}
CHECK = """
import flowtt_torchrec, importlib.util, sys, torch
from flowtt_torchrec import ops
assert "site-packages" in flowtt_torchrec.__file__, flowtt_torchrec.__file__
assert ops.backend_info().error is None, ops.backend_info()
assert (importlib.util.find_spec("torchrec") is not None) == (sys.argv[1] == "torchrec")
print(f"== flowtt-torchrec {flowtt_torchrec.__version__} with {sys.argv[1]}: Python {sys.version.split()[0]}, "
      f"torch {torch.__version__}", flush=True)
"""


def run(*command: str | Path, folder: Path = ROOT, path: str = os.environ["PATH"]) -> None:
    # The package must be the installed one.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "PATH": path}
    subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)


def build() -> Path:
    """Makes the source distribution and, from it, the wheel; returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    return wheel()


def wheel() -> Path:
    found = sorted(DIST.glob("flowtt_torchrec-*-py3-none-*.whl"))
    if len(found) != 1:
        raise SystemExit(f"there must be one wheel for any Python in {DIST}, not {[path.name for path in found]}")
    return found[0]


def pinned(package: str) -> str:
    """The version of a package in the tested set."""
    lines = (ROOT / "requirements" / "base.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def test(name: str, python: str, torch: str, keep: bool) -> None:
    """Installs the wheel in a new environment, and uses it."""
    start = time.monotonic()
    environment = ENVIRONMENTS[name]
    folder = ROOT / "build" / "wheel" / name
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder / "venv")
    scripts = folder / "venv" / "bin"
    versions = {"torch": torch, "torchrec": pinned("torchrec")}
    packages = [f"{one}=={versions[one]}" if one in versions else one for one in environment.requirements]
    run(scripts / "python", "-m", "pip", "install", "--quiet", f"{wheel()}{environment.extras}", *packages, *TOOLS)
    run(scripts / "python", "-m", "pip", "check")
    for part in ("tests", "examples"):
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "pyproject.toml", folder)  # pytest's settings
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    run(scripts / "python", "-c", CHECK, name, folder=folder)
    run(scripts / environment.example[0], *environment.example[1:], folder=folder, path=path)
    run(scripts / "python", "-m", "pytest", "-q", "-m", "not slow", *environment.tests, folder=folder, path=path)
    if not keep:
        shutil.rmtree(folder)
    print(f"== the wheel works with {name}; {time.monotonic() - start:.0f} seconds", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["build", "test"])
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--torch", default=pinned("torch"), help="the version beside which the wheel is used")
    parser.add_argument("--only", choices=list(ENVIRONMENTS), help="one of the environments")
    parser.add_argument("--keep", action="store_true", help="leave the environments in build/wheel/")
    arguments = parser.parse_args()
    if arguments.action == "build":
        print(build())
        return
    for name in [arguments.only] if arguments.only else ENVIRONMENTS:
        test(name, arguments.python, arguments.torch, arguments.keep)


if __name__ == "__main__":
    main()
