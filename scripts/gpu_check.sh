#!/usr/bin/env bash
# Everything that a machine with a CUDA GPU can show of the kernels: tests, compute-sanitizer on small cases, the bench.
#   scripts/gpu_check.sh [BIN [OUT]] [-- BENCH_ARGUMENT...]
# BIN: folder of the built programs (default build-cuda/bin; built by scripts/build_cuda.sh where it is not there).
# OUT: folder for logs, bench.txt, bench.json, sweep.txt and sweep.json (default build-cuda/gpu_check).
# GPU_CHECK_SANITIZER_SECONDS (900): how long each run of compute-sanitizer may take. GPU_CHECK_SWEEP (1): 0 leaves out the
# bench's grid of shapes; GPU_CHECK_SWEEP_OF (cuda_sm90): the implementation that it times.
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
  printf '%-6s %-44s %s\n' "$([ "$1" -eq 0 ] && echo passed || echo FAILED)" "$2" "$3"
}

"$bin/flashgla" doctor | tee "$out/doctor.txt"
report "${PIPESTATUS[0]}" doctor "$out/doctor.txt"

# Tests in as many processes as there are pairs of cores, and beside them compute-sanitizer on each kernel path once, one
# process a path for racecheck, which slows shared memory down a hundredfold and more. What fills the device's memory
# runs afterwards, alone.
large='Cuda.MoreThan*:Cuda.OffsetsBeyond*:Cuda.AMillion*'
paths=(CudaPaths.EveryElementIsFinite/key_blocks_bf16_272_trained
       CudaPaths.EveryElementIsFinite/narrow_two_chunks_{key_trained,key_extreme,scalar_trained,none_trained}
       CudaPaths.EveryElementIsFinite/narrow_packed_{constant_extreme,none_trained}
       CudaPaths.EveryElementIsFinite/wide_{96_200_constant_trained,128_256_key_extreme,128_256_none_trained}
       CudaPaths.EveryElementIsFinite/brief_128_256_{key_trained,key_extreme,scalar_trained}
       CudaPaths.EveryElementIsFinite/{f32_tiles_f16_96_extreme,f32_tiles_f32_64_trained,tokens_f32,segments_key_trained}
       CudaPaths.EveryElementIsFinite/{values_packed_extreme,values_unaligned_trained,values_f32_packed_extreme,normalized_packed_strided_elu_plus_one_bf16})
filter=$(printf '*%s:' "${paths[@]}")
if [ "$("$test" --gtest_list_tests --gtest_filter="$filter" | grep -c '^  ')" -ne ${#paths[@]} ]; then
  echo "error: not every path named in $0 is a test" >&2
  exit 1
fi
declare -A jobs
start() {  # WHAT LOG COMMAND...
  local what=$1 log=$2
  shift 2
  "$@" >"$log" 2>&1 &
  jobs[$!]="$what|$log"
}
shards=$(( ($(nproc) + 1) / 2 ))
echo "Tests on CUDA, $shards processes, and compute-sanitizer"
for ((i = 0; i < shards; ++i)); do
  start "tests $i of $shards" "$out/test_$i.txt" env GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i \
    FLASHGLA_RANDOM_PROBLEMS=0:800 \
    "$test" --gtest_brief=1 --gtest_filter="-$large"
done
sanitizer_seconds=${GPU_CHECK_SANITIZER_SECONDS:-900}
if command -v compute-sanitizer >/dev/null; then
  start memcheck "$out/memcheck.txt" timeout "$sanitizer_seconds" \
    compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 20 "$test" --gtest_filter="$filter"
  for path in "${paths[@]}"; do
    start "racecheck ${path##*/}" "$out/racecheck_${path##*/}.txt" timeout "$sanitizer_seconds" \
      compute-sanitizer --tool racecheck --error-exitcode 9 --print-limit 20 "$test" --gtest_filter="*$path"
  done
else
  echo "skipped: no compute-sanitizer on PATH"
fi
for pid in "${!jobs[@]}"; do
  wait "$pid"
  report $? "${jobs[$pid]%%|*}" "${jobs[$pid]##*|}"
done
"$test" --gtest_brief=1 --gtest_filter="$large" >"$out/test_large.txt" 2>&1
report $? "tests of large problems" "$out/test_large.txt"
for folder in base step_outcome adamw cross_entropy elementwise embedding global_norm log_sigmoid_gate matmul rms_norm \
              rms_norm_swish_gate short_convolution swiglu train; do
  [ -x "$bin/flashgla_${folder}_test" ] || continue
  "$bin/flashgla_${folder}_test" --gtest_brief=1 >"$out/test_$folder.txt" 2>&1
  report $? "tests of $folder" "$out/test_$folder.txt"
done
grep -h '^\[  FAILED  \].*(' "$out"/test_*.txt | sort -u
grep -h '^\[  SKIPPED \]' "$out"/test_*.txt | sort -u

unset FLASHGLA_TEST_DEVICE
"$bin/flashgla" bench gated_linear_attention --device cuda --seconds 0.05 --save "$out/bench.json" "$@" | tee "$out/bench.txt"
report "${PIPESTATUS[0]}" bench "$out/bench.txt"
"$bin/flashgla" bench model_training_step model_prefill --device cuda --seconds 2 | tee "$out/model.txt"
report "${PIPESTATUS[0]}" "bench of the model" "$out/model.txt"
if [ "${GPU_CHECK_SWEEP:-1}" = 1 ]; then
  "$bin/flashgla" bench gated_linear_attention --device cuda --seconds 0.005 --sweep --save "$out/sweep.json" \
    --implementation "${GPU_CHECK_SWEEP_OF:-cuda_sm90}" | tee "$out/sweep.txt"
  report "${PIPESTATUS[0]}" sweep "$out/sweep.txt"
fi
echo "GPU check: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
