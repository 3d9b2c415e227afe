#!/usr/bin/env bash
# Figure 6 of the paper: training speed and memory of 1.3B models on one GPU, by the length of sequences and by their
# number.
#   figure6.sh OUT [--seconds S] [--models LIST]
# Times a training step (forward, backward, clipping, AdamW; bf16): of 16,384 tokens as 8 x 2K, 1 x 16K, 4 x 4K and
# 2 x 8K, then of 1, 4, 2 and 16 sequences of 2K: GLA with everything kept and with activations recomputed,
# Transformer++, Mamba, RetNet, Mamba-2. OUT/length-MODEL.json and OUT/batch-MODEL.json have the rows of `flashgla bench
# model_training_step --sweep`; figure6.py writes them into docs/PAPER.md and draws them, those of a run that was cut
# off too (.partial). LIST, of these presets, with commas: gla-1.3b, transformer-1.3b, mamba-1.3b, retnet-1.3b,
# mamba2-1.3b. What is measured already is not measured again. S seconds for each figure: at least ten steps are made.
set -euo pipefail
. "$(dirname "$0")/program.sh"
if [ $# -lt 1 ] || [[ $1 == -* ]]; then usage; fi
out=$1 seconds=1 models=gla-1.3b,transformer-1.3b,mamba-1.3b,retnet-1.3b,mamba2-1.3b
shift
take_options 'seconds models' "$@"
need_program
mkdir -p "$out"
for by in length batch; do
  for model in ${models//,/ }; do
    run=$out/$by-$model
    [ ! -f "$run.json" ] || continue
    "$flashgla" bench model_training_step --sweep --only "by $by: $model" --device cuda --seconds "$seconds" \
      --save "$run.partial"
    mv "$run.partial" "$run.json"
  done
done
