#!/usr/bin/env bash
# Checks that the library built here loads beside a CUDA build of torch, on a machine without a GPU: the CPU ops equal the
# reference, and a CUDA call says what is missing. Downloads gigabytes: torch 2.11.0 from PyPI, with CUDA 13.
#
#   scripts/check_cuda_torch.sh [FOLDER]      an environment there is made, or used; default: build/cuda-torch
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/cuda-torch}
[ -x "$folder/bin/python" ] || { python3 -m venv "$folder" && "$folder/bin/pip" install -q torch==2.11.0 numpy; }
PYTHONPATH=. "$folder/bin/python" - <<'PYTHON'
import torch

from flowtt_torchrec import native, ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.spec import TTSpec

assert torch.version.cuda, f"torch {torch.__version__} has no CUDA"
assert native.load_error is None, native.load_error
print(f"torch {torch.__version__}, library for {torch.ops.flowtt.cuda_architectures() or 'the CPU only'}")
specs = [TTSpec(1000, 64, (10, 10, 10), (4, 4, 4), (32, 32)), TTSpec(100, 12, (5, 4, 6), (2, 3, 2), (3, 5))]
layout = TTLayout(specs, ["a", "b"])
indices, offsets = torch.arange(160) * 7 % 100, torch.arange(0, 161, 4)
results = []
for backend in ("reference", "native"):
    with ops.use_backend(backend):
        weights = torch.rand(layout.num_parameters, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = ops.lookup(weights, layout, indices, offsets)
        results.append((output.detach(), torch.autograd.grad(output.sum(), weights)[0]))
for expected, actual in zip(*results):
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
try:
    ops.lookup(weights, layout, torch.tensor([0, 100]), torch.tensor([0, 1, 2]))
except IndexError as error:
    print("An index out of range says:", error)
ops.synchronize()  # there is nothing to wait for
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
arguments = layout.tables, layout.table_names, layout.features, indices, offsets, 0, 0
try:
    torch.ops.flowtt.flow_plan.default.redispatch(keys, *arguments)
except RuntimeError as error:
    print("CPU ops equal the reference; a CUDA call with CPU tensors says:", str(error).splitlines()[0])
else:
    raise SystemExit("a CUDA call with CPU tensors went through")
PYTHON
