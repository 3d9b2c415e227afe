#!/usr/bin/env bash
# Tables 1 and 3 of the paper: perplexity, common sense reasoning and more tasks, without examples and with five, by
# lm-evaluation-harness with flashgla's models.
#   table1.sh MODEL OUT [cpu|cuda] [LIMIT]
# MODEL: a model folder. Needs a network for the tasks' data, and a python3 with lm_eval and this package; OUT gets the
# harness's results and logs. LIMIT: only so many examples of each task. The paper gives accuracy for all tasks but
# HellaSwag, ARC-c and OpenBookQA, which are by length (acc_norm).
set -euo pipefail
# shellcheck source=harness.sh
. "$(dirname "$0")/harness.sh"
run lambada_openai,wikitext,piqa,hellaswag,winogrande,arc_easy,arc_challenge,openbookqa,sciq,boolq,copa 0
run lambada_openai,hellaswag,piqa,winogrande,arc_easy,arc_challenge,openbookqa,sciq,boolq,copa 5
