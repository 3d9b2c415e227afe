#!/usr/bin/env bash
# Configures and builds a preset of CMakePresets.json into its folder, quietly:
#   build.sh PRESET [TARGET...] [-- CMAKE_ARGUMENT...]
# Presets: release (build), debug (build-debug), sanitize (build-sanitize), cuda (build-cuda), cuda-native.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift
targets=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do targets+=("$1"); shift; done
[ $# -gt 0 ] && shift

folder=build-$preset
[ "$preset" != release ] || folder=build
mkdir -p "$folder"
log=$folder/build.log
started=$SECONDS
echo "Building into $folder (log: $log)"
if ! cmake --preset "$preset" "$@" >"$log" 2>&1; then
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
