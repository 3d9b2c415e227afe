#!/usr/bin/env bash
# Everything that a machine with a CUDA GPU can show: tests, compute-sanitizer on small cases, the bench of the operators
# and of the whole model. Ends by itself after GPU_CHECK_SECONDS at the latest.
#   scripts/gpu_check.sh [--help] [BIN [OUT]] [-- BENCH_ARGUMENT...]
# BIN: folder of the built programs (default build-cuda/bin; built by scripts/build_cuda.sh where it is not there).
# OUT: folder for logs, and what was timed as text and JSON (default build-cuda/gpu_check): bench, operators, model,
# sweep.
# GPU_CHECK_SECONDS (1800): what has not ended by then is stopped, and failed. GPU_CHECK_SANITIZER_SECONDS (600): how
# long each run of compute-sanitizer may take. GPU_CHECK_SWEEP (1): 0 leaves out the bench's grid of shapes;
# GPU_CHECK_SWEEP_OF (cuda_sm90): the implementation that it times.
# Ends with a line "GPU check: N passed, N failed"; exit code 0 only when nothing failed.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin='' out=$root/build-cuda/gpu_check
refuse() { echo "error: $*; see $0 --help" >&2; exit 2; }
case ${1-} in --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
named=0
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    -*) refuse "there is no argument '$1' (the bench's come behind --)" ;;
    '') refuse "a folder without a name" ;;
  esac
  named=$((named + 1))
  case $named in
    1) bin=$1 ;;
    2) out=$1 ;;
    *) refuse "'$1' is one argument too many" ;;
  esac
  shift
done
[ $# -eq 0 ] || shift
has_programs() { [ -x "$1/flashgla" ] && [ -x "$1/flashgla_gated_linear_attention_test" ]; }
if [ -n "$bin" ]; then
  has_programs "$bin" || refuse "BIN '$bin' has no flashgla and flashgla_gated_linear_attention_test"
else
  bin=$root/build-cuda/bin
  has_programs "$bin" || "$root/scripts/build_cuda.sh" || exit 1
fi
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd) bin=$(cd "$bin" && pwd)
test=$bin/flashgla_gated_linear_attention_test
export OMP_WAIT_POLICY=passive FLASHGLA_TEST_DEVICE=cuda
SECONDS=0

passed=0 failed=0
report() {  # STATUS WHAT LOG
  if [ "$1" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
  printf '%-6s %-44s %s\n' "$([ "$1" -eq 0 ] && echo passed || echo FAILED)" "$2" "$3"
}
bounded() {  # COMMAND..., stopped when the check's time is over
  local left=$(( ${GPU_CHECK_SECONDS:-1800} - SECONDS ))
  [ "$left" -gt 0 ] || { echo "error: no time left of GPU_CHECK_SECONDS"; return 124; }
  timeout -k 10 "$left" "$@"
}
declare -A jobs
start() {  # WHAT LOG COMMAND...
  local what=$1 log=$2
  shift 2
  bounded "$@" >"$log" 2>&1 &
  jobs[$!]="$what|$log"
}
finish() {  # waits for all that were started
  for pid in "${!jobs[@]}"; do
    wait "$pid"
    report $? "${jobs[$pid]%%|*}" "${jobs[$pid]##*|}"
  done
  jobs=()
}

bounded "$bin/flashgla" doctor | tee "$out/doctor.txt"
report "${PIPESTATUS[0]}" doctor "$out/doctor.txt"

# Tests in as many processes as there are pairs of cores, and beside them compute-sanitizer on each kernel path once, one
# process a path for racecheck, which slows shared memory down a hundredfold and more; and on a few steps of a small
# model. What fills the device's memory runs afterwards, alone.
large='Cuda.MoreThan*:Cuda.OffsetsBeyond*:Cuda.AMillion*'
paths=(CudaPaths.EveryElementIsFinite/key_blocks_bf16_272_trained
       CudaPaths.EveryElementIsFinite/narrow_two_chunks_{key_trained,key_extreme,scalar_trained,none_trained}
       CudaPaths.EveryElementIsFinite/narrow_packed_{constant_extreme,none_trained}
       CudaPaths.EveryElementIsFinite/wide_{96_200_constant_trained,128_256_key_extreme,128_256_none_trained}
       CudaPaths.EveryElementIsFinite/brief_128_256_{key_trained,key_extreme,scalar_trained}
       CudaPaths.EveryElementIsFinite/{f32_tiles_f16_96_extreme,f32_tiles_f32_64_trained,tokens_f32,segments_key_trained}
       CudaPaths.EveryElementIsFinite/parallel_packed_key_trained
       CudaPaths.EveryElementIsFinite/{values_packed_extreme,values_unaligned_trained,values_f32_packed_extreme,normalized_packed_strided_elu_plus_one_bf16})
filter=$(printf '*%s:' "${paths[@]}")
if [ "$("$test" --gtest_list_tests --gtest_filter="$filter" | grep -c '^  ')" -ne ${#paths[@]} ]; then
  echo "error: not every path named in $0 is a test" >&2
  exit 1
fi
shards=$(( ($(nproc) + 1) / 2 ))
echo "Tests on CUDA, $shards processes, and compute-sanitizer"
for ((i = 0; i < shards; ++i)); do
  start "tests $i of $shards" "$out/test_$i.txt" env GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i \
    FLASHGLA_RANDOM_PROBLEMS=0:800 \
    "$test" --gtest_brief=1 --gtest_filter="-$large"
done
sanitize() {  # TOOL WHAT COMMAND...
  local tool=$1 what=$2
  shift 2
  start "$tool $what" "$out/${tool}_$what.txt" timeout "${GPU_CHECK_SANITIZER_SECONDS:-600}" \
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "$@"
}
# Steps of a model whose vocabulary and rows are no multiple of 8; the arguments tell the runs apart.
sanitize_steps() {  # TOOL NAME TRAIN_ARGUMENT...
  local tool=$1 run=$out/steps_$1_$2
  rm -rf "$run"
  sanitize "$tool" "steps_$2" "$bin/flashgla" train --quiet --model "$out/small.json" --data "$out/small.txt" \
    --out "$run" --device cuda --threads 1 --batch-tokens 390 --sequence-length 130 --evaluation-tokens 400 \
    --checkpoint-every 0 "${@:3}"
}
if command -v compute-sanitizer >/dev/null; then
  sanitize memcheck paths "$test" --gtest_filter="$filter"
  for path in "${paths[@]}"; do sanitize racecheck "${path##*/}" "$test" --gtest_filter="*$path"; done
  echo '{"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 96, "vocab_size": 259,
         "use_short_conv": true}' >"$out/small.json"
  for ((i = 0; i < 2000; ++i)); do echo "line $((i * 7919 % 1000))"; done >"$out/small.txt"
  sanitize_steps memcheck bf16 --dtype bf16 --order windows --graphs off --steps 4 --evaluate-every 2
  sanitize_steps memcheck f32 --dtype f32 --order segments --segments 2 --steps 4 --evaluate-every 2
  sanitize_steps racecheck bf16 --dtype bf16 --order windows --graphs off --steps 1 --evaluate-every 0
  # Generation by 16 sequences, whose state waits in a ring.
  sanitize memcheck ring "$bin/flashgla_generate_test" --gtest_filter='GenerationWithARing.WritesTheSameText'
  sanitize racecheck long_convolution "$bin/flashgla_long_convolution_test" --gtest_filter='*NumbersBeyond*'
  # Of operators alone: initcheck does not see what cuBLASLt's kernels store by TMA, so that in a model each
  # kernel behind a product is named. What a model reads before it is written is found by the tests of models and
  # training that fill the arenas with NaN.
  for operator in short_convolution rms_norm swiglu embedding; do
    sanitize initcheck "$operator" "$bin/flashgla_${operator}_test" --gtest_filter='*EveryImplementation*'
  done
else
  echo "skipped: no compute-sanitizer on PATH"
fi
finish
bounded "$test" --gtest_brief=1 --gtest_filter="$large" >"$out/test_large.txt" 2>&1
report $? "tests of large problems" "$out/test_large.txt"
for program in "$bin"/flashgla_*_test; do
  [ "$program" != "$test" ] || continue
  name=${program##*/flashgla_}
  start "tests of ${name%_test}" "$out/test_${name%_test}.txt" "$program" --gtest_brief=1
done
finish
grep -h '^\[  FAILED  \].*(' "$out"/test_*.txt | sort -u
grep -h '^\[  SKIPPED \]' "$out"/test_*.txt | sort -u

unset FLASHGLA_TEST_DEVICE
time_rows() {  # NAME BENCH_ARGUMENT...
  bounded "$bin/flashgla" bench "${@:2}" --device cuda --save "$out/$1.json" | tee "$out/$1.txt"
  report "${PIPESTATUS[0]}" "$1" "$out/$1.txt"
}
time_rows bench gated_linear_attention --seconds 0.05 "$@"
time_rows operators matmul adamw cross_entropy dropout elementwise embedding feature_map forget_gate global_norm \
  hyena_filter layer_norm linear_step log_sigmoid_gate long_convolution rms_norm rms_norm_swish_gate rotary sampling \
  selective_scan short_convolution softmax softmax_attention state_space swiglu token_shift wkv --seconds 0.05
kernels=()
if "$bin/flashgla" bench model_decoding --device cuda --only 'gla-340m batch 1 bf16' --seconds 0.01 --kernels \
  >"$out/kernels.txt" 2>&1; then
  kernels=(--kernels)
else
  echo "skipped: where steps' time goes: $(tail -n 1 "$out/kernels.txt")"
fi
time_rows model model_training_step model_prefill model_decoding --seconds 2 "${kernels[@]}"
if [ "${GPU_CHECK_SWEEP:-1}" = 1 ]; then
  time_rows sweep gated_linear_attention --seconds 0.005 --sweep --implementation "${GPU_CHECK_SWEEP_OF:-cuda_sm90}"
fi
echo "GPU check: $passed passed, $failed failed, $SECONDS s"
[ "$failed" -eq 0 ]
