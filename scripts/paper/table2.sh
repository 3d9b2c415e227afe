#!/usr/bin/env bash
# Table 2 of the paper and its first version's ablation: the gate, and the number of heads, by training loss.
#   table2.sh OUT [small|full] [TEXT] [SEEDS] [TOKENS]
# Trains GLA's layer without a gate, with a constant one, with one of a head, of the keys' channels (GLA), of the values'
# channels and of both, and GLA with 1 and 8 heads. `small` (the default) is for a CPU: configs/char-level.json's size on a
# text of about 1 MB (stories made here unless a TEXT is given); `full` is a model of 25M parameters for a GPU, on TEXT
# (a folder made by `flashgla data prepare`). SEEDS: how many, 1 if not given; TOKENS: of each run. What was interrupted
# goes on when called again, what is done stays. OUT/table2.txt has the result beside the paper's.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
flashgla=${FLASHGLA:-$root/build/bin/flashgla}
[ $# -ge 1 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
out=$1
size=${2:-small}
text=${3:-}
seeds=${4:-1}
tokens=${5:-}
shape='"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 320, "initializer_range": 0.05'
flags=(--config "$root/configs/char-level.json")
case $size in
  small) ;;
  full)
    shape='"hidden_size": 384, "num_hidden_layers": 12'
    flags=(--batch-tokens 65536 --sequence-length 1024 --learning-rate 1e-3 --initial-learning-rate 1e-4
           --final-learning-rate 1e-4 --weight-decay 0.1 --train-tokens 100M --evaluate-every 0 --checkpoint-every 0) ;;
  *) echo "error: the size is $size; expected small or full" >&2; exit 2 ;;
esac
[ "$size" = small ] || [ -n "$text" ] || { echo "error: full needs a TEXT" >&2; exit 2; }
[ -z "$tokens" ] || flags+=(--train-tokens "$tokens")
mkdir -p "$out"
if [ -z "$text" ]; then
  text=$out/tokens
  if [ ! -f "$text/data.json" ]; then
    "$flashgla" data stories --megabytes 1 --seed 1 --out "$out/stories.jsonl" --quiet
    "$flashgla" data prepare "$out/stories.jsonl" --out "$text" --tokenizer byte --validation 0.1 --quiet
  fi
fi

# name gate heads, the paper's perplexity at 340M (Table 2), its first version's
rows="none:none:4:23.21:23.21 constant:constant:4:16.55: scalar:scalar:4:15.56: value:value:4::15.15
      key:key:4:14.77:14.73 key_value:key_value:4::14.86 key_1_head:key:1:14.61: key_8_heads:key:8:15.29:"
for ((seed = 1; seed <= seeds; ++seed)); do
  for row in $rows; do
    IFS=: read -r name gate heads _ _ <<<"$row"
    run=$out/$name-$seed
    [ ! -f "$run/done" ] || continue
    echo "training $name, seed $seed"
    model="{\"model_type\": \"gla_variant\", \"gate\": \"$gate\", \"num_heads\": $heads, $shape,
            \"tie_word_embeddings\": true}"
    "$flashgla" train "${flags[@]}" --data "$text" --out "$run" --seed "$seed" --log-every 1 --resume --model "$model" \
      >"$out/$name-$seed.log" 2>&1 || { tail -n 5 "$out/$name-$seed.log" >&2; exit 1; }
    touch "$run/done"
  done
done

python3 - "$out" "$seeds" $rows <<'PYTHON' | tee "$out/table2.txt"
"""Mean training loss of the last 200 steps (the paper's measure), over the seeds, and its spread."""
import json
import math
import statistics
import sys

out, seeds = sys.argv[1], int(sys.argv[2])
print(f"{'gate':12} {'perplexity':>10} {'spread':>8} {'validation':>10}   paper  first version")
for row in sys.argv[3:]:
    name, _, _, paper, first = row.split(":")
    losses, validation = [], []
    for seed in range(1, seeds + 1):
        with open(f"{out}/{name}-{seed}/metrics.jsonl", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        losses.append(statistics.fmean(r["loss"] for r in rows[-201:] if r["kind"] == "train"))
        validation += [r["loss"] for r in rows if r["kind"] == "eval"][-1:]
    spread = statistics.stdev(losses) if seeds > 1 else math.nan
    after = math.exp(statistics.fmean(validation)) if validation else math.nan
    print(f"{name:12} {math.exp(statistics.fmean(losses)):10.4f} {spread:8.4f} {after:10.4f}   {paper:>5}  {first:>5}")
PYTHON
