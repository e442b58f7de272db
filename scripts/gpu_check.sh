#!/usr/bin/env bash
# Checks the CUDA ops on a GPU: needs torch >= 2.11 with CUDA, nvcc, pytest and hypothesis; torchrec need not be there.
# Writes to gpu_check/ (or the first argument) what it printed, and times as JSON.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check}
mkdir -p "$out"
python - <<'PYTHON'
import torch
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} sees no GPU here")
print(torch.__version__, torch.cuda.get_device_name(), f"compute capability {torch.cuda.get_device_capability()}")
PYTHON
FLOWTT_BUILD_CUDA=1 python setup.py build_ext --inplace 2>&1 | tee "$out/build.txt"
PYTHONPATH=. python -m benchmarks.cuda_kernels | tee "$out/kernels.txt"
PYTHONPATH=. python -m pytest tests/test_ops.py tests/test_cuda_library.py tests/test_cuda_graph.py -m "cuda or not slow" -k "cuda and not emulated" -q \
  2>&1 | tee "$out/tests.txt"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck initcheck; do
    PYTHONPATH=. compute-sanitizer --tool "$tool" --error-exitcode 9 python -m pytest -q tests/test_ops.py \
      -m cuda -k "many_tables and weighted-mean-prefix or rows_per_prefix" 2>&1 | tee "$out/$tool.txt"
  done
fi
PYTHONPATH=. python -m benchmarks.cuda_times --json "$out/times.json" | tee "$out/times.txt"
