#!/bin/sh
# flashgla plot, driven from the shell; train_test.sh has the curves of a run.
. "$(dirname "$0")/shell_test.sh"

mkdir run
for step in 1 2 3 4; do
  echo "{\"kind\": \"train\", \"step\": $step, \"tokens\": ${step}00, \"loss\": $((5 - step)), \"seconds\": $step}"
done >run/metrics.jsonl

succeeds 'loss .nats per token.' plot run --terminal
succeeds 'run \*' plot run/metrics.jsonl --terminal --x tokens --title curves
if [ -c /dev/full ]; then
  holds 'a terminal that takes nothing is told of' sh -c \
    '! "$1" plot run --terminal >/dev/full 2>said && grep -q "standard output could not be written" said' - "$flashgla"
fi
mkdir temporary
holds 'it is drawn into a temporary file' env TMPDIR="$PWD/temporary" "$flashgla" plot run --terminal
holds 'no temporary file stays' rmdir temporary
finish
