"""Builds emulated CUDA code: ordinary shared objects, compiled by g++, in which every kernel runs on the CPU."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OBJECTS = ROOT / "build" / "cuda_emulation"

# -march=x86-64-v3: fused multiply-adds, as nvcc makes them.
COMMON = ["-std=c++17", "-g", "-fPIC", "-fvisibility=hidden", "-march=x86-64-v3", "-Wall", "-Wextra", "-Werror"]
# CUDA's pragmas and attributes mean nothing to g++. Kernels' parameters are not always used in every instance.
CUDA = ["-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-unused-parameter", "-DFLOWTT_CUDA_EMULATION"]
KERNELS = {
    "fast": ["-O2"],
    # -fno-tree-sra, -fno-tree-vectorize: accesses as wide as in the source.
    "checked": [
        *("-O1", "-fsanitize=thread", "-fno-tree-sra", "-fno-tree-vectorize", "-DFLOWTT_CUDA_CHECKED"),
        *("--param", "tsan-instrument-func-entry-exit=0", "--param", "tsan-distinguish-volatile=1"),
    ],
}
RUNTIME = ["scheduler.cpp", "synchronization.cpp", "counters.cpp", "source_line.cpp", "runtime_api.cpp"]


def toolkit() -> Path | None:
    """The CUDA toolkit, whose headers the emulator needs."""
    for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if folder and (Path(folder) / "include" / "cuda_runtime.h").exists():
            return Path(folder)
    return None


def build(
    name: str,
    mode: str,
    kernels: Sequence[Path],
    hosts: Sequence[Path] = (),
    host_flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    special: Mapping[Path, Sequence[str]] | None = None,
) -> Path:
    """Builds ``name`` in one mode, recompiling what changed.

    Args:
        name: of the library.
        mode: ``"fast"``, or ``"checked"``: every memory access of a kernel is checked.
        kernels: CUDA sources; those whose memory accesses are checked.
        hosts: C++ sources that launch them.
        host_flags: more flags for ``hosts``.
        link_flags: more flags for linking.
        special: flags that come first for single sources.

    Returns:
        The library.
    """
    special = special or {}
    cuda = toolkit()
    if cuda is None:
        raise FileNotFoundError("the emulator needs the headers of the CUDA toolkit; set CUDA_HOME")
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}", f"-I{FOLDER}", "-isystem", str(cuda / "include")]
    checker = "checker.cpp" if mode == "checked" else "unchecked.cpp"
    base = [os.environ.get("CXX", "g++"), *COMMON, *CUDA, *include]
    jobs = [
        *((source, [base[0], *special.get(source, ()), *base[1:], *KERNELS[mode], "-x", "c++"]) for source in kernels),
        *((source, [*base, "-O2", *host_flags]) for source in hosts),
        *((FOLDER / source, [*base, "-O2", "-fexceptions"]) for source in (*RUNTIME, checker)),
    ]
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda job: _compile(*job), jobs))
    tag = hashlib.sha256("".join(map(str, objects)).encode()).hexdigest()[:12]
    library = OBJECTS / f"{name}-{mode}-{tag}.so"
    if not library.exists() or any(o.stat().st_mtime > library.stat().st_mtime for o in objects):
        _run([base[0], "-shared", *map(str, objects), "-o", str(library), "-Wl,-Bsymbolic", "-ldl", *link_flags])
    return library


def _compile(source: Path, command: list[str]) -> Path:
    tag = hashlib.sha256(shlex.join([*command, str(source)]).encode()).hexdigest()[:12]
    target = OBJECTS / f"{source.stem}-{tag}.o"
    dependencies = target.with_suffix(".d")
    if target.exists() and dependencies.exists():
        names = dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
        made = target.stat().st_mtime
        if all(Path(name).exists() and Path(name).stat().st_mtime <= made for name in names):
            return target
    _run([*command, "-MMD", "-c", str(source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{result.stdout}")
