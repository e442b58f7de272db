#!/usr/bin/env bash
# Makes the virtual environment and installs the tested set for this host, once; called by the Makefile.
#   scripts/setup.sh VENV cpu|cuda
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 device=$2

case $device in cpu | cuda) ;; *)
  echo "FLOWTT_DEVICE=$device is not known; use cpu or cuda" >&2
  exit 2
  ;;
esac
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "Python 3.10 or newer is needed; $python is $("$python" --version 2>&1). Choose another with PYTHON=..." >&2
  exit 2
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "a C++17 compiler is needed (Debian and Ubuntu: apt-get install g++)" >&2
  exit 2
fi

if [ ! -x "$venv/bin/python" ]; then
  echo "== making a virtual environment in $venv"
  "$python" -m venv "$venv"
fi
echo "== installing requirements/$device.txt (torch, torchrec, fbgemm-gpu, torchx)"
"$venv/bin/python" -m pip install --quiet -r "requirements/$device.txt"
