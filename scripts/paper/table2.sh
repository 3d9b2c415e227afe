#!/usr/bin/env bash
# Table 2 of the paper and its first version's ablation: the gate, and the number of heads, by training loss.
#   table2.sh OUT [--size small|medium] [--text FILE_OR_FOLDER] [--seeds N] [--steps N] [--device D] [--jobs N]
#     [--normalizer N] [--only NAMES]
# Trains GLA's layer without a gate, with a constant one, with one of a head, of the keys' channels (GLA), of the
# values' channels and of both, and GLA with 1 and 8 heads. What is trained already, with the same settings, is not
# trained again. OUT/table2.txt has the result beside the paper's, OUT/table2.json its numbers; table2.py writes these
# into docs/PAPER.md.
#   small   configs/char-level.json's size, bytes of one text of about 1 MB: minutes a run on two cores
#   medium  25M parameters, bytes, for a GPU: 6,000 steps of 16,384 tokens a run (--steps for fewer)
# Of NAMES alone, with commas (none, constant, scalar, value, key, key_value, key_1_head, key_8_heads), where there is
# no time for all: the table has what is trained. N jobs train side by side (1). Gates' logarithms are divided by the
# normalizer (16, the paper's). Without a text small makes stories of 1 MB, and medium takes the sources of this
# machine's Python (python_sources.py).
set -euo pipefail
. "$(dirname "$0")/program.sh"
if [ $# -lt 1 ] || [[ $1 == -* ]]; then usage; fi
out=$1 size=small text='' seeds=1 steps='' device=auto jobs=1 normalizer=16 only=''
shift
take_options 'size text seeds steps device jobs normalizer only' "$@"
case $size in
  small)
    validation=0.1
    shape='"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 320, "initializer_range": 0.05'
    flags=(--config "$root/configs/char-level.json") ;;
  medium)
    validation=0.01
    shape='"hidden_size": 512, "num_hidden_layers": 8'
    flags=(--batch-tokens 16384 --sequence-length 1024 --learning-rate 1e-3 --initial-learning-rate 1e-4
           --final-learning-rate 1e-4 --weight-decay 0.1 --evaluate-every 0 --checkpoint-every 0)
    steps=${steps:-6000} ;;
  *) echo "error: the size is $size; expected small or medium" >&2; exit 2 ;;
esac
[ -z "$steps" ] || flags+=(--steps "$steps")
about="$size, normalizer $normalizer, ${flags[*]}"  # of a run that is done
need_program
mkdir -p "$out"
if [ -z "$text" ] && [ "$size" = medium ]; then
  text=$out/python-sources.jsonl
  [ -f "$text" ] || python3 "$root/scripts/paper/python_sources.py" "$text"
elif [ -z "$text" ]; then
  text=$out/stories.jsonl
  [ -f "$text" ] || "$flashgla" data stories --megabytes 1 --seed 1 --out "$text" --quiet
fi
if [ ! -f "$out/tokens/data.json" ] && [ ! -f "$text/data.json" ]; then
  "$flashgla" data prepare "$text" --out "$out/tokens" --tokenizer byte --validation "$validation" --quiet
fi
tokens=$text
[ ! -f "$out/tokens/data.json" ] || tokens=$out/tokens

# NAME:GATE:HEADS:the paper's perplexity at 340M (Table 2):its first version's
rows="none:none:4:23.21:23.21 constant:constant:4:16.55: scalar:scalar:4:15.56: value:value:4::15.15
      key:key:4:14.77:14.73 key_value:key_value:4::14.86 key_1_head:key:1:14.61: key_8_heads:key:8:15.29:"
train() {  # NAME GATE HEADS SEED
  local run=$out/$1-$4
  [ "$(cat "$run/done" 2>/dev/null)" != "$about" ] || return 0
  local model="{\"model_type\": \"gla_variant\", \"gate\": \"$2\", \"num_heads\": $3, $shape, \"gate_logit_normalizer\": $normalizer,
                \"tie_word_embeddings\": true}"
  mkdir -p "$out/models"
  echo "$model" >"$out/models/$1.json"
  rm -rf "$run"
  "$flashgla" train "${flags[@]}" --data "$tokens" --out "$run" --seed "$4" --log-every 1 --device "$device" \
    --keep-checkpoints 1 --quiet --model "$out/models/$1.json" >"$out/$1-$4.log" 2>&1 ||
    { echo "error: $1, seed $4: $(tail -n 1 "$out/$1-$4.log")" >&2; return 1; }
  echo "$about" >"$run/done"
}
for ((seed = 1; seed <= seeds; ++seed)); do
  for row in $rows; do
    IFS=: read -r name gate heads _ _ <<<"$row"
    [[ -z $only || ,$only, == *,$name,* ]] || continue
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || exit 1; done
    train "$name" "$gate" "$heads" "$seed" &
  done
done
while [ -n "$(jobs -rp)" ]; do wait -n || exit 1; done

cat >"$out/settings.json" <<END
{"size": "$size", "text": "$(basename "$text")", "device": "$device", "normalizer": $normalizer, "date": "$(date -u +%F)"}
END
# shellcheck disable=SC2086
python3 "$root/scripts/paper/table2.py" gather "$out" "$seeds" $rows | tee "$out/table2.txt"
