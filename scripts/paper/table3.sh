#!/usr/bin/env bash
# Table 3 of the paper: recall from the context (FDA, SWDE, SQuAD), by lm-evaluation-harness with flashgla's models.
#   table3.sh MODEL OUT [cpu|cuda] [LIMIT]
# As table1.sh. The harness calls these tasks fda, swde and squad_completion.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
python3 -c 'import flashgla.lm_eval' || { echo "error: python3 needs lm_eval and flashgla" >&2; exit 1; }
arguments=(--model flashgla --model_args "pretrained=$1,device=${3:-cpu}" --output_path "$2")
[ -z "${4:-}" ] || arguments+=(--limit "$4")
python3 -m flashgla.lm_eval "${arguments[@]}" --tasks "fda,swde,squad_completion" --num_fewshot 0
