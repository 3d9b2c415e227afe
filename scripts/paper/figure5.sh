#!/usr/bin/env bash
# Figure 5 of the paper: perplexity by position, beyond the length that models were trained with.
#   figure5.sh OUT [small|full] [TEXT]
# Trains GLA at length T and at 4 T, evaluates both on sequences of 14 T tokens, and draws OUT/figure5.png. `small` (the default)
# is for a CPU, minutes: T = 128, models of a few hundred thousand parameters, stories made here unless a TEXT is given;
# `full` has T = 2048, the paper's, and needs a GPU and a TEXT of books. What is trained already is not trained again.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
flashgla=$root/build/bin/flashgla
[ $# -ge 1 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
out=$1
size=${2:-small}
text=${3:-}
case $size in
  small) length=128 batch=8 steps=300 preset=gla-tiny bucket=128 sequences=16 ;;
  full) length=2048 batch=64 steps=10000 preset=gla-340m bucket=2048 sequences=0 ;;
  *) echo "error: the size is $size; expected small or full" >&2; exit 2 ;;
esac
[ "$size" = small ] || [ -n "$text" ] || { echo "error: full needs a TEXT" >&2; exit 2; }
mkdir -p "$out"

if [ ! -f "$out/tokens/data.json" ]; then
  if [ -z "$text" ]; then
    # Stories of 14 T tokens and more in a row: the tokens of one after another are what positions are of.
    "$flashgla" data stories --megabytes 2 --seed 1 --out "$out/stories.jsonl" --quiet
    text=$out/stories.jsonl
  fi
  "$flashgla" data prepare "$text" --out "$out/tokens" --tokenizer byte --quiet
fi

models=()
train() {  # NAME LENGTH SEQUENCES [FLAG...]
  local name=$1 run=$out/$1
  shift
  if [ ! -f "$run/checkpoints/latest" ]; then
    echo "training $name"
    "$flashgla" train --data "$out/tokens" --preset "$preset" --out "$run" --steps "$steps" --length "$1" --batch "$2" \
      "${@:3}" >"$out/$name.log" 2>&1 || { tail -n 5 "$out/$name.log" >&2; rm -rf "$run"; return 1; }
  fi
  models+=("$run")
}
train "gla-$length" "$length" "$batch"
train "gla-$((4 * length))" "$((4 * length))" "$((batch / 4 > 0 ? batch / 4 : 1))"

"$flashgla" evaluate "${models[@]}" --data "$out/tokens" --part validation --extrapolate $((14 * length)) --bucket "$bucket" \
  --window "$length" --sequences "$sequences" --png "$out/figure5.png" | tee "$out/figure5.txt"
echo "$out/figure5.png"
