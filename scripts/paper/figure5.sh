#!/usr/bin/env bash
# Figure 5 of the paper: perplexity by position, to 14 times the length that models were trained with.
#   figure5.sh OUT [--size small|medium|full] [--text FILE_OR_FOLDER] [--models LIST] [--steps N] [--batch N]
#              [--sequences N] [--device D]
# Trains models on the text at length T, evaluates them on N sequences of 14 T tokens of its validation part and draws
# OUT/figure5.png; the numbers are in OUT/figure5.json. What is trained already is not trained again, and a run that was
# interrupted goes on. figure5.py writes them into docs/PAPER.md.
#   small   T = 128, 0.8M parameters, bytes: a few minutes a model on two cores
#   medium  T = 512, 25M parameters, bytes: for a GPU
#   full    T = 2048, the paper's 340M models, 32,000 words: 10,000 steps of 131,072 tokens
# LIST, of these, with commas: gla, retnet, transformer, mamba (trained at length T), gla-4t (at 4 T directly), gla-12xt
# (12 segments of T with truncated back-propagation through time); and, only where they are named, retnet-4t and
# mamba-4t, which the paper has as well. A step has --batch sequences of T tokens (a quarter as many of 4 T). A model
# that cannot be trained here is named and left out.
# Without a text stories are made, too short to tell anything beyond a few hundred tokens.
set -euo pipefail
. "$(dirname "$0")/program.sh"
if [ $# -lt 1 ] || [[ $1 == -* ]]; then usage; fi
out=$1 size=small text='' models=gla,retnet,transformer,mamba,gla-4t,gla-12xt steps='' batch='' sequences=''
device=auto
shift
take_options 'size text models steps batch sequences device' "$@"
case $size in
  small) length=128 usual_batch=16 rate=3e-3 tokenizer=byte usual_sequences=64 width=128 layers=4
    mlp=320 narrow_mlp=192 heads=2 default_steps=500 ;;
  medium) length=512 usual_batch=64 rate=1e-3 tokenizer=byte usual_sequences=64 width=512 layers=8
    mlp=1408 narrow_mlp=768 heads=4 default_steps=1500 ;;
  full) length=2048 usual_batch=64 rate=3e-4 tokenizer=train:32000 usual_sequences=0 default_steps=10000 ;;
  *) echo "error: the size is $size; expected small, medium or full" >&2; exit 2 ;;
esac
window=$((14 * length))  # read at once
[ "$size" != full ] || window=$length
steps=${steps:-$default_steps} batch=${batch:-$usual_batch} sequences=${sequences:-$usual_sequences}
need_program
mkdir -p "$out"

if [ -z "$text" ]; then
  text=$out/stories.jsonl
  [ -f "$text" ] || "$flashgla" data stories --megabytes 2 --seed 1 --out "$text" --quiet
fi
if [ ! -f "$out/tokens/data.json" ]; then
  "$flashgla" data prepare "$text" --out "$out/tokens" --tokenizer "$tokenizer" --validation 0.1 --quiet
fi

# The paper's models at this size
describe() {  # MODEL
  local fields blocks=$layers
  case $1 in
    mamba) fields='"use_mlp": false' blocks=$((2 * layers)) ;;  # twice as many blocks without MLPs
    retnet) fields="\"num_heads\": $heads, \"intermediate_size\": $narrow_mlp" ;;  # its values are twice as wide
    *) fields="\"num_heads\": $heads, \"intermediate_size\": $mlp" ;;
  esac
  echo "{\"model_type\": \"$1\", \"hidden_size\": $width, \"num_hidden_layers\": $blocks, $fields,
    \"tie_word_embeddings\": true, \"initializer_range\": 0.05}" >"$out/$1.json"
  echo "$out/$1.json"
}
full_size() { if [ "$1" = mamba ]; then echo mamba-350m; else echo "$1-340m"; fi; }

trained=()
train() {  # NAME MODEL LENGTH SEQUENCES [FLAG...]
  local name=$1 run=$out/$1 model
  if [ "$(cat "$run/steps" 2>/dev/null)" != "$steps" ]; then
    echo "training $name"
    if [ "$size" = full ]; then model=$(full_size "$2"); else model=$(describe "$2"); fi
    if ! "$flashgla" train --data "$out/tokens" --model "$model" --out "$run" --steps "$steps" --length "$3" \
      --batch "$4" --learning-rate "$rate" --warmup-tokens $((length * batch * steps / 20)) --device "$device" \
      --evaluate-every 0 --checkpoint-every 0 --keep-checkpoints 1 --log-every 50 --resume --quiet "${@:5}" \
      >"$out/$name.log" 2>&1
    then
      echo "$name is left out: $(grep error "$out/$name.log" | tail -n 1)" >&2
      return
    fi
    echo "$steps" >"$run/steps"
  fi
  trained+=("$run")
}
for model in ${models//,/ }; do
  case $model in
    gla | retnet | transformer | mamba) train "$model-$length" "$model" "$length" "$batch" --order windows ;;
    gla-4t | retnet-4t | mamba-4t)
      train "${model%-4t}-$((4 * length))" "${model%-4t}" $((4 * length)) $((batch / 4)) --order windows ;;
    gla-12xt) train "gla-12x$length" gla "$length" "$batch" --order segments --segments 12 ;;
    *) echo "error: there is no model '$model'" >&2; usage ;;
  esac
done
[ ${#trained[@]} -gt 0 ] || { echo "error: no model could be trained" >&2; exit 1; }

png=()
if command -v gnuplot >/dev/null; then png=(--png "$out/figure5.png"); else echo "no gnuplot: no picture" >&2; fi
"$flashgla" evaluate "${trained[@]}" --data "$out/tokens" --part validation --extrapolate $((14 * length)) \
  --bucket "$length" --window "$window" --sequences "$sequences" --device "$device" "${png[@]}" --json \
  >"$out/figure5.json"
cat >"$out/settings.json" <<END
{"size": "$size", "length": $length, "steps": $steps, "tokens_of_step": $((length * batch)), "text": "$(basename "$text")",
 "tokenizer": "$tokenizer", "device": "$device", "date": "$(date -u +%F)"}
END
echo "$out/figure5.json, ${trained[*]}"
