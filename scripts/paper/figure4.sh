#!/usr/bin/env bash
# Figure 4 of the paper: accuracy in multi-query associative recall by model width.
#   figure4.sh OUT [--size tiny|full] [--settings T:PAIRS,...] [--widths LIST] [--models LIST] [--rates LIST]
#              [--layers N] [--epochs N] [--pilot EPOCHS] [--sequences N] [--device D] [--dtype f32|bf16]
#              [--dropout P] [--range R] [--clip-norm X] [--seed N] [--jobs N]
# Trains every model of the grid on the task and takes the best accuracy over the learning rates. What has been trained
# is not trained again, and what was cut off goes on. OUT/figure4.txt has the table, OUT/figure4.json its numbers and
# OUT/figure4-T-PAIRS.png the curves, where there is gnuplot.
#   tiny  64 tokens, 4 pairs of 128 words, width 32, on the CPU: all six models take some two minutes on two cores
#   full  8,192 words, 100,000 sequences for training and 3,000 for validation, as in Arora et al. 2023; on a GPU
# LIST, with commas, of models: attention, gla, retnet, mamba, rwkv (its time mix), hyena; also gla_conv, GLA with a
# short convolution (which tiny's gla has, too), and gla_large, retnet_small: the state of a layer of GLA is a quarter
# of RetNet's, and these two have each other's. N jobs train side by side. A run ends at 99% accuracy, or when eight
# evaluations (one an epoch) in a row were not better than the best. With --pilot every model is first trained for so
# many epochs at the first width with each of the rates (then 1e-4, 4.64e-4, 2.15e-3 and 1e-2 unless named), in
# OUT/pilot, and the grid takes the two rates of the least validation loss.
set -euo pipefail
. "$(dirname "$0")/program.sh"
if [ $# -lt 1 ] || [[ $1 == -* ]]; then usage; fi
out=$1 size=tiny settings='' widths='' models='' rates='' layers=2 epochs='' pilot=''
sequences='' device='' jobs='' dtype=f32 dropout='' range='' clip_norm=0 seed=123
shift
names='size settings widths models rates layers epochs pilot sequences device dtype dropout range clip-norm seed jobs'
take_options "$names" "$@"
# The tiny ones start from larger weights, have no dropout, and GLA a short convolution: they have little time.
case $size in
  tiny) words=128 validation=500 usual_range=0.1 most_tokens=4096
    usual_dropout=0 gla=', "num_heads": 1, "expand_k": 1.0, "use_short_conv": true'
    defaults=(64:4 32 5e-3 10 20000 cpu 2 'attention,gla,retnet,mamba,rwkv,hyena') ;;
  full) words=8192 validation=3000 usual_range=0.02 most_tokens=65536
    usual_dropout=0.1 gla=', "num_heads": 2'
    defaults=('256:16,512:64' '64,128' '4.64e-3,2.15e-3' 64 100000 auto 8 'attention,gla,retnet,mamba,rwkv,hyena') ;;
  *) echo "error: the size is $size; expected tiny or full" >&2; exit 2 ;;
esac
[ -z "$pilot" ] || rates=${rates:-1e-4,4.64e-4,2.15e-3,1e-2}
settings=${settings:-${defaults[0]}} widths=${widths:-${defaults[1]}} rates=${rates:-${defaults[2]}}
epochs=${epochs:-${defaults[3]}} sequences=${sequences:-${defaults[4]}} device=${device:-${defaults[5]}}
jobs=${jobs:-${defaults[6]}} models=${models:-${defaults[7]}} dropout=${dropout:-$usual_dropout}
range=${range:-$usual_range}
for option in layers epochs sequences jobs ${pilot:+pilot}; do
  [[ ${!option} =~ ^[1-9][0-9]*$ ]] && continue
  echo "error: --$option is '${!option}'; expected a whole number above 0" >&2
  exit 2
done
need_program
mkdir -p "$out/models"

# Runs of one folder are of the same settings: what is trained already is not trained again.
settings_text() {
  cat <<END
{"size": "$size", "layers": $layers, "epochs": $epochs, "sequences": $sequences, "words": $words, "device": "$device",
 "dtype": "$dtype", "dropout": $dropout, "range": $range, "clip_norm": $clip_norm, "seed": $seed,
 "date": "$(date -u +%F)"}
END
}
if [ -f "$out/settings.json" ] && [ "$(settings_text | head -n 2)" != "$(head -n 2 "$out/settings.json")" ]; then
  echo "error: $out has runs of other settings; take another folder" >&2
  diff <(head -n 2 "$out/settings.json") <(settings_text | head -n 2) | sed -n 's/^[<>]/&/p' >&2
  exit 1
fi
settings_text >"$out/settings.json"

# MODEL WIDTH LENGTH: zoology's model around the mixer: blocks r += mixer(norm(r)), r += norm(r), LayerNorm, tied head;
# learned positions for attention alone, no MLP and RMSNorm for Mamba.
describe() {
  local fields
  case $1 in
    attention)
      fields="\"model_type\": \"transformer\", \"num_heads\": 1, \"qkv_bias\": true, \"o_bias\": true,
              \"use_rope\": false, \"learned_positions\": true, \"max_position_embeddings\": $3" ;;
    gla) fields="\"model_type\": \"gla\"$gla" ;;
    gla_conv) fields='"model_type": "gla", "num_heads": 2, "use_short_conv": true' ;;
    gla_large) fields='"model_type": "gla", "num_heads": 2, "expand_k": 1.0, "expand_v": 2.0' ;;
    retnet) fields='"model_type": "retnet", "num_heads": 2' ;;
    retnet_small) fields='"model_type": "retnet", "num_heads": 2, "expand_k": 0.5, "expand_v": 1.0' ;;
    mamba) fields='"model_type": "mamba"' ;;
    rwkv) fields='"model_type": "rwkv", "embedding_norm": false, "zero_init": false' ;;
    hyena) fields="\"model_type\": \"hyena\", \"l_max\": $3" ;;
    *)
      echo "error: the model is $1; expected attention, gla, gla_conv, gla_large, retnet, retnet_small, mamba, rwkv" \
        "or hyena" >&2
      exit 2 ;;
  esac
  local blocks='"identity_mlp": true, "norm_type": "layer_norm"'
  [ "$1" != mamba ] || blocks='"use_mlp": false'
  echo "{$fields, $blocks, \"hidden_size\": $2, \"num_hidden_layers\": $layers, \"norm_eps\": 1e-5,
         \"tie_word_embeddings\": true, \"initializer_range\": $range, \"vocab_size\": $words}"
}

train() {  # MODEL SETTING WIDTH RATE
  local length=${2%:*} name=$1-${2/:/-}-$3-$4
  local tokens_a_step=$((length * 512 < most_tokens ? length * 512 : most_tokens))
  local run=$out/$name model=$out/models/$1-${2/:/-}-$3.json steps=$((sequences * length / tokens_a_step))
  local fallout=$dropout
  [ "$1" != mamba ] || fallout=0
  "$flashgla" train --data "$out/task-${2/:/-}" --model "$model" --out "$run" --resume --device "$device" \
    --dtype "$dtype" --length "$length" --batch-tokens "$tokens_a_step" --steps $((steps * epochs)) \
    --learning-rate "$4" \
    --initial-learning-rate 0 --final-learning-rate 0 --warmup-tokens 0 --beta2 0.999 --weight-decay 0.1 \
    --clip-norm "$clip_norm" --embedding-dropout "$fallout" --attention-dropout "$fallout" \
    --evaluate-every "$steps" --evaluation-tokens 0 \
    --checkpoint-every $((steps * 4)) --keep-checkpoints 1 --log-every "$steps" --stop-accuracy 0.99 --patience 8 \
    --seed "$seed" --quiet >"$out/$name.log" 2>&1 ||
    { echo "error: $name: $(tail -n 1 "$out/$name.log")" >&2; return 1; }
  touch "$run/done"
  report "$name" $((steps * epochs))
}

report() {  # NAME STEPS: its best accuracy, and how far the grid is (runs are subshells: files count those that ended)
  local steps accuracy ended left=''
  touch "$out/.ended-$1"
  ended=("$out"/.ended-*)
  steps=$(grep -o '"step":[0-9]*' "$out/$1/metrics.jsonl" | tail -n 1)
  accuracy=$(grep -o '"accuracy":[0-9.e-]*' "$out/$1/metrics.jsonl" | cut -d: -f2 | sort -g | tail -n 1)
  if [ ${#ended[@]} -lt "$to_train" ]; then
    left=", some $((((SECONDS - began) * (to_train - ${#ended[@]}) / ${#ended[@]} + 59) / 60)) min left"
  fi
  echo "$1: accuracy $accuracy, ended at step ${steps#*:} of $2 (${#ended[@]} of $to_train runs$left)"
}

declare -A rates_of  # by MODEL SETTING, with commas
for setting in ${settings//,/ }; do
  for model in ${models//,/ }; do rates_of["$model $setting"]=$rates; done
done
if [ -n "$pilot" ]; then
  first=${widths%%,*}
  "$0" "$out/pilot" --size "$size" --settings "$settings" --widths "$first" --models "$models" --rates "$rates" \
    --layers "$layers" --epochs "$pilot" --sequences "$sequences" --device "$device" --dtype "$dtype" \
    --dropout "$dropout" --range "$range" --clip-norm "$clip_norm" --seed "$seed" --jobs "$jobs"
  best=$(python3 "$root/scripts/paper/figure4.py" "$out/pilot" "$models" "$settings" "$first" "$rates" --best 2)
  while read -r model setting chosen; do
    echo "$model, $setting: the rates of the least loss after the pilot are $chosen"
    rates_of["$model $setting"]=$chosen
  done <<<"$best"
  for setting in ${settings//,/ }; do  # the task is the same
    [ -e "$out/task-${setting/:/-}" ] || ln -s "pilot/task-${setting/:/-}" "$out/task-${setting/:/-}"
  done
fi

runs=() trained=0  # MODEL SETTING WIDTH RATE of each: all models with their first rate, then with their second
for setting in ${settings//,/ }; do
  for width in ${widths//,/ }; do
    for ((place = 0, more = 1; more; ++place)); do
      more=0
      for model in ${models//,/ }; do
        IFS=, read -ra list <<<"${rates_of["$model $setting"]}"
        rate=${list[place]-}
        [ -n "$rate" ] || continue
        more=1
        describe "$model" "$width" "${setting%:*}" >/dev/null
        if [ -f "$out/$model-${setting/:/-}-$width-$rate/done" ]; then
          trained=$((trained + 1))
        else
          runs+=("$model $setting $width $rate")
        fi
      done
    done
  done
done
to_train=${#runs[@]}
echo "$to_train runs to train, $jobs side by side, at most $epochs epochs each; $trained trained before." \
  "Each epoch of a run is a line of $out/NAME/metrics.jsonl."
rm -f "$out"/.ended-*
began=$SECONDS

for run in "${runs[@]}"; do
  read -r model setting width rate <<<"$run"
  task=$out/task-${setting/:/-}
  if [ ! -f "$task/data.json" ]; then
    "$flashgla" data mqar --vocabulary "$words" --length "${setting%:*}" --pairs "${setting#*:}" --train "$sequences" \
      --validation "$validation" --out "$task" --quiet >/dev/null
  fi
  describe "$model" "$width" "${setting%:*}" >"$out/models/$model-${setting/:/-}-$width.json"
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || exit 1; done
  train "$model" "$setting" "$width" "$rate" &
done
while [ -n "$(jobs -rp)" ]; do wait -n || exit 1; done

every_rate=$(printf '%s\n' "${rates_of[@]}" | tr , '\n' | sort -ug | paste -sd,)
python3 "$root/scripts/paper/figure4.py" "$out" "$models" "$settings" "$widths" "$every_rate" | tee "$out/figure4.txt"
