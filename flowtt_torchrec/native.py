"""The compiled library beside this file: loading it.

The functions are those of `flowtt_torchrec.compiled.CompiledOps`, and as in `flowtt_torchrec.reference`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flowtt_torchrec.compiled import CompiledOps

_compiled = CompiledOps("flowtt")
flow_plan = _compiled.flow_plan
check_plan = _compiled.check_plan
pooled_forward = _compiled.pooled_forward
pooled_backward = _compiled.pooled_backward
pooled_backward_update = _compiled.pooled_backward_update
synchronize = _compiled.synchronize
release_memory = _compiled.release_memory


def _load() -> tuple[Path | None, str | None]:
    """Loads the library beside this file. Returns its path, and why it cannot be used, if it cannot."""
    folder = Path(__file__).parent
    libraries = sorted(folder.glob("_C*.so"))
    if not libraries:
        return None, f"there is no compiled library (_C*.so) in {folder}"
    if len(libraries) > 1:
        return None, f"there are several compiled libraries in {folder}: {', '.join(p.name for p in libraries)}"
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        return libraries[0], f"{libraries[0]} does not load: {error}"
    _compiled.register()
    return libraries[0], None


library_path, load_error = _load()
