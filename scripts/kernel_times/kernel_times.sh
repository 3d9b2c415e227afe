#!/usr/bin/env bash
# Runs a program and says which CUDA kernels its time went to (CUPTI; graphs are looked into).
#   scripts/kernel_times/kernel_times.sh OUT.txt PROGRAM ARGUMENT...
#   scripts/kernel_times/kernel_times.sh --where      prints the folder of CUPTI that it finds, or why there is none
# For any program; `flashgla bench --kernels` says of its own steps which operators' kernels they are. A line for each
# kernel of each graph ("graph G of N": N of its nodes; 0 of 0: launched alone). Names are as the compiler mangles them;
# c++filt reads them. Needs cupti.h and libcupti of the CUDA toolkit, found by CUPTI (a folder with include and lib or
# lib64; default: where the toolkit has them).
set -euo pipefail
cupti='' library=''
for folder in ${CUPTI:+"$CUPTI"} /usr/local/cuda/extras/CUPTI /usr/local/cuda/targets/*-linux /usr/local/cuda; do
  [ -e "$folder/include/cupti.h" ] || continue
  library=$(find "$folder"/lib64 "$folder"/lib -maxdepth 1 -name 'libcupti.so*' 2>/dev/null | sort | head -n 1) || true
  [ -z "$library" ] || { cupti=$folder; break; }
done
if [ -z "$cupti" ]; then
  echo "error: no folder with CUPTI's include/cupti.h and lib/libcupti.so; set CUPTI to one" >&2
  exit 1
fi
[ "${1-}" != --where ] || { echo "$cupti"; exit 0; }
out=${1:?usage: kernel_times.sh OUT.txt PROGRAM ARGUMENT...}
shift
here=$(cd "$(dirname "$0")" && pwd)
lib=$(dirname "$library")
injected=$(mktemp --suffix .so)
trap 'rm -f "$injected"' EXIT
g++ -std=c++17 -O1 -shared -fPIC -I"$cupti/include" -I/usr/local/cuda/include "$here/kernel_times.cpp" \
  -o "$injected" -L"$lib" -l:"$(basename "$library")" -Wl,-rpath,"$lib"
KERNEL_TIMES=$out CUDA_INJECTION64_PATH=$injected LD_LIBRARY_PATH=$lib:${LD_LIBRARY_PATH:-} "$@"
