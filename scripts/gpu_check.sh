#!/usr/bin/env bash
# Checks the CUDA ops on a GPU and measures them, within five minutes once they are built.
#
#   scripts/gpu_check.sh [FOLDER]      results go there; default: gpu_check/
#
# Needs torch >= 2.11 with CUDA, nvcc, and pip install numpy pytest hypothesis rich; torchrec need not be there.
# Every step runs, whatever the others say; summary.json has their exit statuses and times, and lookup.json the
# measurements. FLOWTT_DEVICE=cpu tries the script where there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check}
device=${FLOWTT_DEVICE:-cuda}
mkdir -p "$out"
export PYTHONPATH=.
summary=()
failed=0

# step NAME COMMAND...: runs it, keeps what it prints in NAME.txt.
step() {
  local name=$1 begin=$SECONDS status=0
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$out/$name.txt" || status=$?
  summary+=("\"$name\": {\"status\": $status, \"seconds\": $((SECONDS - begin))}")
  [ "$status" = 0 ] || failed=1
}

python - "$device" <<'PYTHON' || exit 1
import sys
import torch
if sys.argv[1] == "cuda":
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU here")
    print(torch.__version__, torch.cuda.get_device_name(), f"compute capability {torch.cuda.get_device_capability()}")
PYTHON

if [ "$device" = cuda ]; then
  export FLOWTT_BUILD_CUDA=1
  tests=(-m "cuda or not slow" -k "cuda and not emulated")
  preset=quick
else
  tests=(-k "cuda-emulated and rows_per_prefix")
  preset=smoke
fi
step build python setup.py build_ext --inplace
[ "$device" = cpu ] || step kernels python -m benchmarks.cuda_kernels
step tests python -m pytest -q tests/test_ops.py tests/test_batch_errors.py tests/test_optimizers.py tests/test_cuda_library.py \
  tests/test_cuda_graph.py "${tests[@]}"
if [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck initcheck; do
    step "$tool" timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 9 python -m pytest -q tests/test_ops.py \
      -m cuda -k "many_tables and weighted-mean-prefix or rows_per_prefix"
  done
fi
step lookup python -m benchmarks.lookup --device "$device" --only device --preset "$preset" \
  --json "$out/lookup.json" --csv "$out/lookup.csv"
(IFS=,; printf '{%s}\n' "${summary[*]}") >"$out/summary.json"
cat "$out/summary.json"
exit "$failed"
