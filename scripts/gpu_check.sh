#!/usr/bin/env bash
# Everything that a machine with a CUDA GPU can show of the kernels: tests, compute-sanitizer on small cases, the bench.
#   scripts/gpu_check.sh [BIN [OUT]] [-- BENCH_ARGUMENT...]
# BIN: folder of the built programs (default build-cuda/bin; built by scripts/build_cuda.sh where it is not there).
# OUT: folder for logs, bench.txt and bench.json (default build-cuda/gpu_check).
# Ends with a line "GPU check: N passed, N failed"; exit code 0 only when nothing failed.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/build-cuda/bin out=$root/build-cuda/gpu_check
[ $# -gt 0 ] && [ "$1" != -- ] && { bin=$1; shift; }
[ $# -gt 0 ] && [ "$1" != -- ] && { out=$1; shift; }
[ $# -gt 0 ] && shift
test=$bin/flashgla_gated_linear_attention_test
[ -x "$test" ] && [ -x "$bin/flashgla" ] || "$root/scripts/build_cuda.sh" || exit 1
mkdir -p "$out" || exit 1
export OMP_WAIT_POLICY=passive FLASHGLA_TEST_DEVICE=cuda

passed=0 failed=0
report() {  # STATUS WHAT LOG
  if [ "$1" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
  printf '%-6s %-28s %s\n' "$([ "$1" -eq 0 ] && echo passed || echo FAILED)" "$2" "$3"
}

"$bin/flashgla" doctor | tee "$out/doctor.txt"
report "${PIPESTATUS[0]}" doctor "$out/doctor.txt"

# Tests in as many processes as there are pairs of cores; those that fill the device's memory afterwards, alone.
large='Cuda.MoreThan*:Cuda.OffsetsBeyond*:Cuda.AMillion*'
shards=$(( ($(nproc) + 1) / 2 ))
echo "Tests on CUDA, $shards processes"
declare -A jobs
for ((i = 0; i < shards; ++i)); do
  GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i "$test" --gtest_brief=1 --gtest_filter="-$large" \
    >"$out/test_$i.txt" 2>&1 &
  jobs[$!]="tests $i of $shards|$out/test_$i.txt"
done
for pid in "${!jobs[@]}"; do
  wait "$pid"
  report $? "${jobs[$pid]%%|*}" "${jobs[$pid]##*|}"
done
"$test" --gtest_brief=1 --gtest_filter="$large" >"$out/test_large.txt" 2>&1
report $? "tests of large problems" "$out/test_large.txt"
grep -h '^\[  FAILED  \].*(' "$out"/test_*.txt | sort -u
grep -h '^\[  SKIPPED \]' "$out"/test_*.txt | sort -u

# Each kernel path once; both tools slow kernels down a hundredfold.
sanitized='*CudaPaths*/narrow_key_extreme:*CudaPaths*/narrow_packed_key_trained:*CudaPaths*/narrow_strided_scalar_trained'
sanitized+=':*CudaPaths*/narrow_unaligned_constant_extreme:*CudaPaths*/narrow_none_trained'
sanitized+=':*CudaPaths*/wide_128_256_key_trained:*CudaPaths*/wide_96_200_scalar_extreme:*CudaPaths*/segments_key_trained'
sanitized+=':*CudaPaths*/tokens_f32:Cuda.GraphOfAStep*'
if command -v compute-sanitizer >/dev/null; then
  jobs=()
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "$test" --gtest_brief=1 \
      --gtest_filter="$sanitized" >"$out/$tool.txt" 2>&1 &
    jobs[$!]="compute-sanitizer $tool|$out/$tool.txt"
  done
  for pid in "${!jobs[@]}"; do
    wait "$pid"
    report $? "${jobs[$pid]%%|*}" "${jobs[$pid]##*|}"
  done
  grep -h 'ERROR SUMMARY\|RACECHECK SUMMARY' "$out/memcheck.txt" "$out/racecheck.txt"
else
  echo "skipped: no compute-sanitizer on PATH"
fi

unset FLASHGLA_TEST_DEVICE
"$bin/flashgla" bench gated_linear_attention --device cuda --seconds 0.05 --save "$out/bench.json" "$@" | tee "$out/bench.txt"
report "${PIPESTATUS[0]}" bench "$out/bench.txt"
echo "GPU check: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
