#!/usr/bin/env bash
# Builds everything with the CUDA kernels (no GPU needed). Uses the CUDA toolkit on this machine, and fetches the headers
# of cuDNN's frontend; without these, or without cuDNN's own, softmax attention is FlashGLA's own kernels alone.
#   build_cuda.sh [PRESET [CMAKE_ARGUMENT...]]   PRESET: cuda (default; every supported GPU) or cuda-native (this machine's)
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "error: there is no flag $1; see $0 --help" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
preset=${1:-cuda}
[ $# -eq 0 ] || shift
scripts/install_dependencies.sh
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -z "$nvcc" ]; then
  echo "error: no nvcc found; install the CUDA toolkit 12.8 or later, or put its bin folder on PATH" >&2
  exit 1
fi
arguments=(-DCMAKE_CUDA_COMPILER="$nvcc")
if frontend=$(scripts/cudnn_frontend.sh); then
  arguments+=(-DCUDNN_FRONTEND_INCLUDE="$frontend")
else
  echo "notice: there are no headers of cuDNN's frontend; softmax attention will be FlashGLA's own kernels alone"
fi
scripts/build.sh "$preset" -- "${arguments[@]}" "$@"
