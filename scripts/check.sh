#!/usr/bin/env bash
# Everything about the tree that can be checked without a GPU, beside the tests: check.sh [STEP...]
#   format      clang-format on every C++ and CUDA source
#   shell       shellcheck on every script
#   python      ruff on every Python file, mypy on the package
#   structure   the direction of includes
#   documents   links, paths, environment variables, the changelog's version
#   figures     tables in the documents say what docs/figures/ says
#   tidy        clang-tidy on every C++ source (.clang-tidy)
#   sanitize    tests of files, formats and models with the address and undefined-behaviour sanitizers
#   fuzz        ten seconds for every target of testing/fuzz
#   ptxas       registers and spills of the CUDA kernels; only where scripts/build_cuda.sh has built them
# Default: all. Each step says how to mend what it found. Ends with "check: N passed, N failed".
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
esac
steps=("$@")
[ $# -gt 0 ] || steps=(format shell python structure documents figures tidy sanitize fuzz ptxas)
scripts/install_dependencies.sh check || exit 1
environment=build-sanitize/python-environment
passed=0 failed=0
declare -A mend

sources() {  # PATTERN...: files that git knows, or would
  git ls-files -co --exclude-standard -- "$@" | while read -r file; do [ -f "$file" ] && echo "$file"; done
}

step_format() { sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -d '\n' -n 40 -P "$(nproc)" clang-format --dry-run -Werror; }
mend[format]="git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format -i"

step_shell() { sources '*.sh' .ci/run | xargs -d '\n' shellcheck -S warning -x -P SCRIPTDIR; }
mend[shell]="what shellcheck proposes; its wiki explains each number"

step_python() {
  local python
  python=$(scripts/python_environment.sh $environment ruff==0.17.6 mypy==2.4.1 numpy) || return 1
  "$python" -m ruff check . && "$python" -m mypy
}
mend[python]="$environment/bin/ruff check --fix ."

step_structure() { python3 testing/structure/check_includes.py .; }
mend[structure]="move the code to a folder that may include what it needs (docs/ARCHITECTURE.md)"

step_documents() { python3 scripts/checks/documents.py; }
mend[documents]="the documents named above; variables go into docs/environment.md"

step_figures() { python3 scripts/figures.py --check; }
mend[figures]="scripts/figures.py"

step_tidy() { cmake --preset sanitize && python3 scripts/checks/tidy.py build-sanitize; }
mend[tidy]="the sources named above; one alone: python3 scripts/checks/tidy.py build-sanitize SOURCE"

# Readers, writers and models: what meets bytes that somebody else made. The longest first.
tested=(model train text base data generate)
# Left out: what measures rounding, half of the time; test.sh runs it.
numeric='*FiniteDifferences*:*Rounding*'
step_sanitize() {
  local folder programs=() failed=0
  for folder in "${tested[@]}"; do programs+=("flashgla_${folder}_test"); done
  scripts/build.sh sanitize fuzz "${programs[@]}" || return 1
  . scripts/temporary_files.sh
  export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive GTEST_TOTAL_SHARDS=2
  rm -f build-sanitize/*.failed
  # shellcheck disable=SC2016  # the inner shell's
  printf '%s\0' "${tested[@]/%/ 0}" "${tested[@]/%/ 1}" | xargs -0 -P "$(nproc)" -I {} sh -c '
    set -- {}
    GTEST_SHARD_INDEX=$2 "build-sanitize/bin/flashgla_$1_test" --gtest_brief=1 "--gtest_filter=-$0" \
      >"build-sanitize/$1.$2.log" 2>&1 || touch "build-sanitize/$1.$2.failed"' "$numeric"
  for folder in build-sanitize/*.failed; do
    [ -e "$folder" ] || continue
    failed=1
    echo "$folder:" && tail -n 40 "${folder%.failed}.log"
  done
  [ "$failed" -eq 0 ] && echo "${#tested[@]} test programs passed"
}
mend[sanitize]="the test named above, which runs alone as build-sanitize/bin/flashgla_<folder>_test --gtest_filter=NAME"

step_fuzz() { scripts/fuzz.sh 10; }
mend[fuzz]="the reader that the target feeds; the input named above becomes a test"

step_ptxas() {
  [ -d build-cuda ] || { echo "skipped: no build-cuda; scripts/build_cuda.sh makes it"; return 0; }
  python3 scripts/checks/ptxas.py build-cuda
}
mend[ptxas]="as said above"

mkdir -p build-sanitize
for step in "${steps[@]}"; do
  if ! declare -F "step_$step" >/dev/null; then
    echo "error: there is no step '$step'; known: format shell python structure documents figures tidy sanitize fuzz ptxas" >&2
    exit 2
  fi
  log=build-sanitize/check_$step.log
  started=$SECONDS
  if "step_$step" >"$log" 2>&1; then
    passed=$((passed + 1))
    printf 'passed %-10s %4d s  %s\n' "$step" $((SECONDS - started)) "$(tail -n 1 "$log")"
  else
    failed=$((failed + 1))
    tail -n 60 "$log"
    printf 'FAILED %-10s %4d s  log: %s\n  to mend: %s\n' "$step" $((SECONDS - started)) "$log" "${mend[$step]}"
  fi
done
echo "check: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
