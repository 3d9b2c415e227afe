# shellcheck shell=bash
# Sourced by table1.sh and table3.sh: sets `arguments` from their MODEL OUT [cpu|cuda] [LIMIT], and run(), which runs
# tasks of lm-evaluation-harness with flashgla's model. Says what is missing before anything long begins.
if [ $# -lt 2 ]; then
  sed -n '2,/^set /{/^#/p}' "$0" | cut -c 3- >&2
  exit 2
fi
if [ ! -e "$1" ]; then
  echo "error: $1: no such folder; expected a model's, or a run's of flashgla train" >&2
  exit 1
fi
if ! missing=$(python3 -c 'import flashgla.lm_eval' 2>&1); then
  printf 'error: python3 cannot import flashgla.lm_eval: %s\n' "$(tail -n 1 <<<"$missing")" >&2
  echo "to mend: python3 -m pip install ./python lm_eval, in the project's folder" >&2
  exit 1
fi
arguments=(--model flashgla --model_args "pretrained=$1,device=${3:-cpu}" --output_path "$2")
[ -z "${4:-}" ] || arguments+=(--limit "$4")
out=$2
mkdir -p "$out"

run() {  # TASKS SHOTS
  local log=$out/tasks-$2-shot.log
  echo "tasks $1, $2 examples before each; log: $log"
  if ! python3 -m flashgla.lm_eval "${arguments[@]}" --tasks "$1" --num_fewshot "$2" >"$log" 2>&1; then
    tail -n 3 "$log" >&2
    if grep -qE 'ConnectionError|offline|Max retries|resolve|LocalEntryNotFound' "$log"; then
      echo "error: the data of these tasks come from huggingface.co, which this machine does not reach" >&2
    else
      echo "error: the harness failed; see $log" >&2
    fi
    exit 1
  fi
  grep '^|' "$log" || true  # the harness's table
}
