#!/usr/bin/env bash
# Configures and builds a preset of CMakePresets.json into its folder, quietly:
#   build.sh [PRESET [TARGET...]] [-- CMAKE_ARGUMENT...]
# Presets: release (build; the default), debug (build-debug), sanitize (build-sanitize), cuda (build-cuda), cuda-native.
# As many compilers at once as there are processors, where CMAKE_BUILD_PARALLEL_LEVEL does not say how many: more take
# each other's memory.
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
esac
cd "$(dirname "$0")/.."
preset=release
if [ $# -gt 0 ] && [ "$1" != -- ]; then preset=$1; shift; fi
targets=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do targets+=("$1"); shift; done
[ $# -gt 0 ] && shift

folder=build-$preset
[ "$preset" != release ] || folder=build
mkdir -p "$folder"
log=$folder/build.log
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
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
