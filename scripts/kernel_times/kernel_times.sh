#!/usr/bin/env bash
# Runs a program and says which CUDA kernels its time went to (CUPTI; graphs are looked into).
#   scripts/kernel_times/kernel_times.sh OUT.txt PROGRAM ARGUMENT...
# Names are as the compiler mangles them; c++filt reads them. Needs cupti.h and libcupti of the CUDA toolkit, found by
# CUPTI (a folder with include and lib or lib64; default: the toolkit's extras/CUPTI).
set -euo pipefail
out=$1
shift
cupti=${CUPTI:-/usr/local/cuda/extras/CUPTI}
here=$(cd "$(dirname "$0")" && pwd)
library=$(mktemp --suffix .so)
lib=$cupti/lib64
[ -d "$lib" ] || lib=$cupti/lib
name=$(basename "$(find "$lib" -maxdepth 1 -name "libcupti.so*" | sort | head -n 1)")
g++ -std=c++17 -O1 -shared -fPIC -I"$cupti/include" -I/usr/local/cuda/include "$here/kernel_times.cpp" \
  -o "$library" -L"$lib" -l:"$name" -Wl,-rpath,"$lib"
KERNEL_TIMES=$out CUDA_INJECTION64_PATH=$library LD_LIBRARY_PATH=$lib:${LD_LIBRARY_PATH:-} "$@"
rm -f "$library"
