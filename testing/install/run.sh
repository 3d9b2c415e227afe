#!/usr/bin/env bash
# run.sh CMAKE BUILD_FOLDER WORK_FOLDER
set -euo pipefail
cmake=$1 build=$2 work=$3
rm -rf "$work"
"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
"$cmake" -G Ninja -S "$(dirname "$0")/consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
"$cmake" --build "$work/build" >/dev/null
"$work/build/consumer"
"$work/prefix/bin/flashgla" --version
