#!/usr/bin/env bash
# Table 1 of the paper: perplexity and common sense reasoning, by lm-evaluation-harness with flashgla's models.
#   table1.sh MODEL OUT [cpu|cuda] [LIMIT]
# MODEL: a model folder. Needs a network for the tasks' data, and a python3 with lm_eval and this package; OUT gets the
# harness's results. The paper gives accuracy for all tasks but HellaSwag, ARC-c and OpenBookQA, which are by length (acc_norm).
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
python3 -c 'import flashgla.lm_eval' || { echo "error: python3 needs lm_eval and flashgla" >&2; exit 1; }
arguments=(--model flashgla --model_args "pretrained=$1,device=${3:-cpu}" --output_path "$2")
[ -z "${4:-}" ] || arguments+=(--limit "$4")
run() { python3 -m flashgla.lm_eval "${arguments[@]}" "$@"; }
tasks=lambada_openai,wikitext,piqa,hellaswag,winogrande,arc_easy,arc_challenge,openbookqa,sciq,boolq,copa
run --tasks "$tasks" --num_fewshot 0
run --tasks hellaswag,piqa,winogrande,arc_easy,arc_challenge,openbookqa,sciq,boolq,copa --num_fewshot 5
