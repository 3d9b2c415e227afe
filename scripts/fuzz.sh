#!/usr/bin/env bash
# Feeds every reader of files with inputs that libFuzzer makes up, under the address and undefined-behaviour sanitizers:
#   fuzz.sh SECONDS [TARGET...]   SECONDS for each target, one of testing/fuzz/*.cpp by name (default: all)
# Fails on a crash, an undefined operation, a leak, ten seconds for one input, or more memory than the input accounts for
# (testing/fuzz/fuzz.h). What was found lies in build-sanitize/fuzz; the inputs that reached new code stay there, too, and
# run.json, which scripts/figures.py takes for the documents.
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
  '' | *[!0-9]*) echo "error: the seconds are '${1:-}'; expected a whole number: fuzz.sh SECONDS [TARGET...]" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
seconds=$1
shift
scripts/install_dependencies.sh check
scripts/build.sh sanitize fuzz
build=$PWD/build-sanitize
[ $# -gt 0 ] || set -- "$build"/bin/fuzz_*
mkdir -p "$build/fuzz"

fuzz() {  # TARGET
  local name=${1##*/fuzz_}
  local found=$build/fuzz/$name
  mkdir -p "$found/inputs"
  # The fixed seed makes a run of the same length repeatable, as far as time allows.
  OMP_NUM_THREADS=1 "$build/bin/fuzz_$name" "$found/inputs" "testing/fuzz/seeds/$name" -seed=1 -timeout=10 \
    -dict=testing/fuzz/words.dict -artifact_prefix="$found/" -max_total_time="$seconds" -print_final_stats=1 \
    >"$found/log" 2>&1 || { touch "$found/failed"; return; }
  rm -f "$found/failed"
}
export -f fuzz
export build seconds
printf '%s\0' "$@" | xargs -0 -n 1 -P "$(nproc)" bash -c 'fuzz "$0"'

total=0 failed=0 rows=''
for target in "$@"; do
  name=${target##*/fuzz_}
  log=$build/fuzz/$name/log
  count=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  total=$((total + ${count:-0}))
  rows+="${rows:+, }\"$name\": ${count:-0}"
  if [ -e "$build/fuzz/$name/failed" ]; then
    failed=$((failed + 1))
    printf 'FAILED %-14s %s\n' "$name" "$log"
    grep -E -m 3 '^(error|SUMMARY)|runtime error|Test unit written' "$log" || tail -n 3 "$log"
    echo "once more: $build/bin/fuzz_$name INPUT, with the input named above"
  else
    printf 'passed %-14s %s inputs\n' "$name" "$count"
  fi
done
printf '{"commit": "%s", "date": "%s", "seconds": %s, "failed": %s, "targets": {%s}}\n' \
  "$(git describe --always --dirty --abbrev=7 --exclude='*')" "$(date -u +%F)" "$seconds" "$failed" "$rows" \
  >"$build/fuzz/run.json"
echo "Fuzzing: $total inputs, $failed targets failed"
[ "$failed" -eq 0 ]
