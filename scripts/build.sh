#!/usr/bin/env bash
# Configures and builds into FOLDER, quietly: build.sh FOLDER [TARGET...] [-- CMAKE_ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
targets=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do targets+=("$1"); shift; done
[ $# -gt 0 ] && shift

mkdir -p "$folder"
log=$folder/build.log
started=$SECONDS
echo "Building into $folder (log: $log)"
if ! cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  echo "error: configuring failed" >&2
  exit 1
fi
if ! cmake --build "$folder" ${targets[@]+--target "${targets[@]}"} >>"$log" 2>&1; then
  grep -E -A5 'error|FAILED' "$log" | tail -n 60 >&2
  echo "error: the build failed" >&2
  exit 1
fi
echo "Built in $((SECONDS - started)) s"
