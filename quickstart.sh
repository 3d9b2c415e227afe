#!/usr/bin/env bash
# From a bare machine to a GLA Transformer that writes: installs what is missing, builds, makes a corpus of small
# stories, trains a small model, draws its loss curve, lets it write a paragraph. Two and a half to five minutes on two
# cores.
# On a machine with a GPU and nvcc it builds for that GPU and trains there.
#   ./quickstart.sh [RUN_FOLDER]   default: runs/quickstart (an interrupted run is continued)
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "error: there is no flag $1; see $0 --help" >&2; exit 2 ;;
esac
cd "$(dirname "$0")"
run=${1:-runs/quickstart}

scripts/install_dependencies.sh
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
gpu=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
if [ -n "$nvcc" ] && [ "${gpu%%.*}" -ge 8 ] 2>/dev/null; then  # ten minutes on two cores
  scripts/build.sh cuda-native flashgla -- -DFLASHGLA_TESTS=OFF -DCMAKE_CUDA_COMPILER="$nvcc"
  flashgla=build-cuda-native/bin/flashgla
else
  scripts/build.sh release flashgla -- -DFLASHGLA_TESTS=OFF
  flashgla=build/bin/flashgla
fi

mkdir -p "$run"
[ -f "$run/stories.jsonl" ] || "$flashgla" data stories --seed 1 --megabytes 8 --out "$run/stories.jsonl"
[ -f "$run/tokens/train.bin" ] || "$flashgla" data prepare "$run/stories.jsonl" --out "$run/tokens" --tokenizer byte
"$flashgla" train --config configs/quickstart.json --data "$run/tokens" --out "$run/model" --resume
curve=$run/loss.png
"$flashgla" plot "$run/model" --out "$curve" || curve='not drawn (see above)'
echo
echo "The model writes:"
"$flashgla" generate "$run/model" --prompt "One morning" --max-tokens 400 --temperature 0.8 --seed 1
cat <<END

Loss curve: $curve      Model: $run/model
Next:
  $flashgla generate $run/model --interactive             talk to it
  $flashgla train --help                                  train on your own text
  $flashgla bench                                         how fast the kernels are here
  $flashgla doctor                                        what this machine can run
END
