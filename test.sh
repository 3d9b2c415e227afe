#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test that this machine can run.
# Ends with a line "N passed, N failed"; exit code 0 only when none failed.
#   ./test.sh [REGEX]   only the tests whose names match
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "error: there is no flag $1; see $0 --help" >&2; exit 2 ;;
esac
cd "$(dirname "$0")"
scripts/install_dependencies.sh python
python=$(scripts/python_environment.sh build/python-environment \
  'nanobind>=2.4' numpy ml_dtypes pytest --no-deps tokenizers)
scripts/build.sh release -- -DFLASHGLA_TESTS=ON -DFLASHGLA_PYTHON=ON -DPython_EXECUTABLE="$python"

. scripts/temporary_files.sh
echo "Testing"
log=build/test.log
status=0
# One more than there are processors: some tests wait, and between two short ones ctest itself does.
ctest --test-dir build --output-on-failure -j $(($(nproc) + 1)) ${1:+-R "$1"} >"$log" 2>&1 || status=$?
grep -E '\*\*\*|SKIPPED:|^\[  FAILED  \]' "$log" | sed -E 's/ \.{3,}/ /' | sort -u | head -n 60 || true
total=$(sed -nE 's/^[0-9]+% tests passed, [0-9]+ tests failed out of ([0-9]+)$/\1/p' "$log")
failed=$(sed -nE 's/^[0-9]+% tests passed, ([0-9]+) tests failed out of [0-9]+$/\1/p' "$log")
if [ -z "${total:-}" ]; then
  tail -n 20 "$log" >&2
  echo "0 passed, 1 failed"
  exit 1
fi
[ "$failed" -eq 0 ] || echo "The whole log: $log"
skipped=$(grep -cE '\*\*\*Skipped' "$log" || true)
[ "$skipped" -eq 0 ] || echo "$skipped skipped, for want of hardware"
echo "$((total - failed - skipped)) passed, $failed failed"
exit "$status"
