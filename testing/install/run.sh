#!/usr/bin/env bash
# run.sh CMAKE BUILD_FOLDER WORK_FOLDER
set -euo pipefail
cmake=$1 build=$2 work=$3
source=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$work"
"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
"$cmake" -G Ninja -S "$source/examples" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
"$cmake" --build "$work/build" >/dev/null
"$work/prefix/bin/flashgla" --version

says() {  # PATTERN COMMAND...
  local pattern=$1
  shift
  "$@" | tee "$work/said"
  grep -qaE "$pattern" "$work/said" || { echo "error: $1 does not say: $pattern" >&2; exit 1; }
}
# With all keys 0.1, queries 0.5, values 1 and gates -0.05: o_t = 0.05 sqrt(32) (1 - e^(-0.05 (t + 1))) / (1 - e^-0.05).
says 'token 0: 0.2828, token 99: 5.7604, token 100: 5.7623' "$work/build/operator"
says 'step 3: loss [0-9.]+' "$work/build/train" "$source/README.md" "$work/run" 3
says '^The ' "$work/build/generate" "$work/run" 'The '
