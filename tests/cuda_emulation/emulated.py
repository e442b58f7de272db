"""The CUDA ops on the CPU, as a backend named "cuda-emulated"."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from cuda_emulation import build
from flowtt_torchrec import ops
from flowtt_torchrec.compiled import CompiledOps

BACKEND = "cuda-emulated"


SOURCES = sorted((build.ROOT / "csrc" / "cuda").glob("*.cu"))


def build_ops(
    mode: str, sources: Sequence[Path] = SOURCES, special: Mapping[Path, Sequence[str]] | None = None
) -> Path:
    """Builds the library of the ops; its namespace in ``torch.ops`` is ``flowtt_emulated``."""
    root, lib = build.ROOT, Path(torch.__file__).parent
    return build.build(
        "ops",
        mode,
        sources,
        [root / "csrc" / "bindings_cuda.cpp"],
        ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY", "-isystem", str(lib / "include")],
        [f"-L{lib / 'lib'}", "-ltorch_cpu"],
        special,
    )


@cache
def load(library: Path | None = None) -> ctypes.CDLL:
    """Loads the ops, once a process, and makes them a backend; returns the emulator's controls."""
    library = library or build_ops("fast")
    torch.ops.load_library(str(library))
    compiled = CompiledOps("flowtt_emulated", emulated=True)
    compiled.register()
    ops.BACKENDS[BACKEND] = compiled
    controls = ctypes.CDLL(str(library))
    controls.cuda_emulation_take_profile.restype = ctypes.c_char_p
    controls.cuda_emulation_take_count.restype = ctypes.c_uint64
    return controls
