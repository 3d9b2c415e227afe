#!/usr/bin/env bash
# Builds everything with the CUDA kernels into build-cuda (no GPU needed). Uses the CUDA toolkit on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_dependencies.sh
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -z "$nvcc" ]; then
  echo "error: no nvcc found; install the CUDA toolkit 12.8 or later, or put its bin folder on PATH" >&2
  exit 1
fi
scripts/build.sh build-cuda -- -DFLASHGLA_CUDA=ON -DCMAKE_CUDA_COMPILER="$nvcc" "$@"
