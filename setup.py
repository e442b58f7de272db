"""Builds the compiled ops, `flowtt_torchrec/_C.so`, against the installed torch; everything else is in pyproject.toml.

The library uses torch's stable ABI and no Python API: one build serves every Python and every torch from 2.11 on.
CUDA kernels are in it where a GPU and nvcc are, or where FLOWTT_BUILD_CUDA=1 or CI asks for them: nvcc takes minutes.
It needs no GPU, and the library loads beside a torch without CUDA too.
Environment variables: CXX, CXXFLAGS, LDFLAGS; CUDA_HOME, NVCCFLAGS; MAX_JOBS, compilers at a time;
FLOWTT_BUILD_CUDA=auto|0|1; CI, which makes warnings errors and builds CUDA kernels where nvcc is.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).parent
OBJECTS = ROOT / "build" / "objects"  # kept from build to build, whoever asks for it
LIBRARY = "_C.so"

MIN_TORCH = (2, 11)
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY"]
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]
X86 = platform.machine().lower() in ("x86_64", "amd64")
# Kernels are compiled once for each instruction set; csrc/cpu/isa.cpp chooses at run time and tests for these flags.
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"]
ISA_FLAGS = {"kernels_avx2.cpp": AVX2, "kernels_avx512.cpp": AVX512}


# A100, H100 and H200, and whatever comes later through PTX. Only CUB's kernels may use a stack.
CUDA_ARCHITECTURES = "sm_80, sm_90, compute_90"
NVCC_FLAGS = [
    *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v"),
    *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"),
]
NO_STACK = ["-Xptxas", "-warn-spills,-warn-lmem-usage"]
MAY_HAVE_STACK = "primitives.cu"
if os.environ.get("CI"):  # a user's compiler may know warnings that ours does not
    CXX_FLAGS.append("-Werror")
    NVCC_FLAGS += ["-Werror", "all-warnings"]
    NO_STACK += ["-Xptxas", "-Werror"]
MIN_NVCC = (12, 1)  # kernel arguments of more than 4 KB


def has_gpu() -> bool:
    """Whether the driver of NVIDIA lists a GPU, or FLOWTT_DEVICE says so."""
    device = os.environ.get("FLOWTT_DEVICE")
    if device:
        return device == "cuda"
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def find_cuda() -> tuple[Path | None, str]:
    """The CUDA toolkit to build with, if any, and why."""
    wanted = os.environ.get("FLOWTT_BUILD_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SetupError(f"FLOWTT_BUILD_CUDA={wanted!r} is unknown; allowed: auto, 0, 1")
    if wanted == "0":
        return None, "FLOWTT_BUILD_CUDA=0"
    if wanted == "auto" and not os.environ.get("CI") and not has_gpu():
        return None, "no GPU here; FLOWTT_BUILD_CUDA=1 builds them all the same"
    on_path = shutil.which("nvcc")
    candidates = [
        os.environ.get("CUDA_HOME"),
        str(Path(on_path).resolve().parents[1]) if on_path else None,
        "/usr/local/cuda",
    ]
    complete = [
        Path(home)
        for home in candidates
        if home and all((Path(home) / part).exists() for part in ("bin/nvcc", "include/cuda_runtime_api.h"))
    ]
    found = complete[0] if complete else None
    why = "no nvcc in CUDA_HOME, the PATH or /usr/local/cuda"
    if found is not None:
        text = subprocess.run([str(found / "bin" / "nvcc"), "--version"], capture_output=True, text=True, check=True)
        version = tuple(map(int, re.search(r"release (\d+)\.(\d+)", text.stdout).groups()))
        if version >= MIN_NVCC:
            return found, f"nvcc {version[0]}.{version[1]} in {found}"
        why = f"nvcc in {found} is {version[0]}.{version[1]}; {MIN_NVCC[0]}.{MIN_NVCC[1]} or later is needed"
    if wanted == "1":
        raise SetupError(f"FLOWTT_BUILD_CUDA=1, but there is {why}")
    return None, why


def sources(cuda: bool) -> list[Path]:
    csrc = ROOT / "csrc"
    found = [csrc / "bindings.cpp", *sorted((csrc / "cpu").glob("*.cpp"))]
    if cuda:  # first, as they take longest
        found = [*sorted((csrc / "cuda").glob("*.cu")), csrc / "bindings_cuda.cpp", *found]
    return [path for path in found if X86 or path.name not in ISA_FLAGS]


class BuildOps(build_ext):
    """Compiles what changed, in parallel, each file with its own flags."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        try:
            import torch
        except ImportError as error:
            raise SetupError(
                "building the ops needs torch: install it first, then build with "
                "`pip install --no-build-isolation -e .`"
            ) from error
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
            raise SetupError(
                f"torch {torch.__version__} is too old; {'.'.join(map(str, MIN_TORCH))} or later is needed"
            )
        cuda, why = find_cuda()
        isas = "AVX-512, AVX2 and baseline" if X86 else f"baseline, the only ones for {platform.machine()}"
        kernels = f"with CUDA kernels for {CUDA_ARCHITECTURES}" if cuda else "without CUDA kernels"
        print(f"flowtt: building the CPU ops ({isas}) {kernels} ({why})", flush=True)

        torch_root = Path(torch.__file__).parent
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        flags = [*CXX_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")), f"-DFLOWTT_X86={int(X86)}"]
        flags += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}"]
        torch_flags = [*STABLE_ABI, "-isystem", str(torch_root / "include")]
        libraries = ["-ltorch_cpu"]
        if cuda is not None:
            torch_flags += [f'-DFLOWTT_CUDA="{CUDA_ARCHITECTURES}"', "-isystem", str(cuda / "include")]
            # Static, so that the library loads where there is no CUDA; its symbols stay its own.
            libraries += [
                f"-L{cuda / 'lib64'}",
                "-lcudart_static",
                "-lpthread",
                "-ldl",
                "-lrt",
                "-Wl,--exclude-libs,ALL",
            ]

        def compile_one(source: Path) -> Path:
            uses_torch = source.parent.name == "csrc"
            own = [*(torch_flags if uses_torch else ()), *ISA_FLAGS.get(source.name, ())]
            target = OBJECTS / f"{source.parent.name}_{source.stem}.o"
            command = [*compiler, *flags, *own, "-MMD", "-c", str(source), "-o", str(target)]
            if source.suffix == ".cu" and cuda is not None:
                stack = [] if source.name == MAY_HAVE_STACK else NO_STACK
                nvcc = [str(cuda / "bin" / "nvcc"), *NVCC_FLAGS, *stack, *shlex.split(os.environ.get("NVCCFLAGS", ""))]
                include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}"]
                dependencies = ["-MMD", "-MF", str(target.with_suffix(".d"))]
                command = [*nvcc, *include, *dependencies, "-c", str(source), "-o", str(target)]
            run_if_stale(command, source, target, torch.__version__ if uses_torch else "")
            return target

        OBJECTS.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            objects = [str(path) for path in pool.map(compile_one, sources(cuda is not None))]
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        link = shlex.split(os.environ.get("LDFLAGS", ""))
        run([*compiler, "-shared", *objects, "-o", str(library), f"-L{torch_root / 'lib'}", *libraries, *link])


class AnyPythonWheel(bdist_wheel):
    """A wheel for one platform and any Python: the library uses no Python API."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def run_if_stale(command: list[str], source: Path, target: Path, version: str) -> None:
    """Compiles unless the object is newer than the source and its headers, and was made by the same command."""
    record, dependencies = target.with_suffix(".cmd"), target.with_suffix(".d")
    signature = shlex.join(command) + f"\ntorch {version}\n"
    if target.exists() and dependencies.exists() and record.exists() and record.read_text() == signature:
        names = dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
        made = target.stat().st_mtime
        if all(Path(name).exists() and Path(name).stat().st_mtime <= made for name in names):
            return
    print(f"flowtt: compiling {source.relative_to(ROOT)}", flush=True)
    record.unlink(missing_ok=True)
    target.with_suffix(".log").write_text(run(command))
    record.write_text(signature)


def run(command: list[str]) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        print(shlex.join(command), result.stdout, sep="\n", file=sys.stderr, flush=True)
        hint = "; FLOWTT_BUILD_CUDA=0 leaves the CUDA kernels out" if Path(command[0]).name == "nvcc" else ""
        raise CompileError(f"{command[0]} ended with status {result.returncode}; its messages are above{hint}")
    return result.stdout


setup(
    ext_modules=[
        Extension(
            "flowtt_torchrec._C",
            sources=[str(path.relative_to(ROOT)) for path in sources(cuda=True)],
            depends=[
                str(path.relative_to(ROOT))
                for path in sorted((ROOT / "csrc").rglob("*"))
                if path.suffix in (".h", ".inc", ".cuh")
            ],
        )
    ],
    cmdclass={"build_ext": BuildOps, "bdist_wheel": AnyPythonWheel},
)
