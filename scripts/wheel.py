#!/usr/bin/env python3
"""Builds the wheel, and uses it in new environments as those who install it do.

    make wheel                              dist/: the source distribution, and the wheel that is built from it
    make test-wheel                         two environments in build/wheel/: torch alone, and torch with torchrec
    make test-wheel ARGS="--python python3.13 --torch 2.12.1"

The tests run are the repository's own, away from the repository, so that nothing but the installed package is found.
pip's own settings hold: PIP_INDEX_URL and the like choose where torch comes from and whether it is a build for the CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
# What an environment has beside torch and the wheel, and which tests hold there.
ENVIRONMENTS = {
    "torch": ("", ["tests/test_ops.py", "tests/test_embedding_bag.py", "tests/test_cuda_library.py"]),
    "torchrec": ("[torchrec]", ["tests/distributed/test_twin_training.py", "tests/distributed/test_plan_file.py"]),
}
USE = """
import importlib.util, sys, torch, flowtt_torchrec
from flowtt_torchrec import TTEmbeddingBag, TTSpec, ops
assert "site-packages" in flowtt_torchrec.__file__, flowtt_torchrec.__file__
assert ops.backend_info().name == "native", ops.backend_info()
bag = TTEmbeddingBag(1000, 16, spec=TTSpec.suggest(1000, 16, rank=4))
bag(torch.tensor([1, 2, 999]), torch.tensor([0, 2])).sum().backward()
has_torchrec = importlib.util.find_spec("torchrec") is not None
assert has_torchrec == (sys.argv[1] == "torchrec")
print(f"flowtt-torchrec {flowtt_torchrec.__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}, "
      f"{'with' if has_torchrec else 'without'} torchrec: imported, and trained")
"""


def run(*command: str | Path, folder: Path = ROOT) -> None:
    # The package must be the installed one, and the tools must not find this repository's environment.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE"}
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
    extras, tests = ENVIRONMENTS[name]
    folder = ROOT / "build" / "wheel" / name
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder / "venv", folder=ROOT)
    inside = folder / "venv" / "bin" / "python"
    packages = [f"torch=={torch}", f"{wheel()}{extras}", *TOOLS]
    if name == "torchrec":
        packages += [ROOT / "requirements" / "fbgemm-gpu-shim", f"torchrec=={pinned('torchrec')}"]
    run(inside, "-m", "pip", "install", "--quiet", *packages)
    run(inside, "-m", "pip", "check")
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)  # pytest's settings
    run(inside, "-c", USE, name, folder=folder)
    run(inside, "-m", "pytest", "-q", "-m", "not slow", *tests, folder=folder)
    if not keep:
        shutil.rmtree(folder)
    print(f"== the wheel passed with {name}, in {time.monotonic() - start:.0f} seconds", flush=True)


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
