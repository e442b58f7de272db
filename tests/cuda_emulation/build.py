"""Builds emulated CUDA code: ordinary shared objects, compiled by g++, in which every kernel runs on the CPU.

What is built stays in build/cuda_emulation from run to run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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
    """Builds ``name`` in one mode, recompiling what changed: contents count, not times.

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
    with (OBJECTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda job: _compile(*job), jobs))
        library = OBJECTS / f"{name}-{mode}-{_tag(*map(str, objects))}.so"
        link = [base[0], "-shared", *map(str, objects), "-Wl,-Bsymbolic", "-ldl", *link_flags]
        _make(link, library, lambda: objects)
    return library


def _compile(source: Path, command: list[str]) -> Path:
    target = OBJECTS / f"{source.stem}-{_tag(*command, str(source))}.o"
    dependencies = target.with_suffix(".d")

    def inputs() -> list[Path]:
        listed = dependencies.read_text() if dependencies.exists() else ""
        return [Path(name) for name in listed.replace("\\\n", " ").partition(":")[2].split()] or [source]

    _make([*command, "-MD", "-MF", str(dependencies), "-c", str(source)], target, inputs)
    return target


def _make(command: list[str], target: Path, inputs: Callable[[], list[Path]]) -> None:
    """Runs a command for ``target`` unless that was made from the same contents; what is made is whole or not there."""
    record = target.with_suffix(".sum")
    if target.exists() and record.exists() and record.read_text() == _digest(inputs()):
        return
    new = target.with_suffix(".new")
    result = subprocess.run(
        [*command, "-o", str(new)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{result.stdout}")
    record.unlink(missing_ok=True)
    new.replace(target)
    record.write_text(_digest(inputs()))


def _digest(paths: Sequence[Path]) -> str:
    """Of the contents of files; a file that is not there has none."""
    return _tag(*(_content(path) if path.exists() else "" for path in paths))


def _content(path: Path) -> str:
    status = path.stat()
    return _content_at(path, status.st_mtime_ns, status.st_size)


@cache
def _content_at(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tag(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
