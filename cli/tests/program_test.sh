#!/bin/sh
# The program itself, its help, and the verbs that need no data.
. "$(dirname "$0")/shell_test.sh"

succeeds 'flashgla train'
succeeds '^flashgla [0-9]+\.[0-9]+\.[0-9]+ [(][0-9a-z-]+[)]$' --version
refuses 'fly' fly
refuses '--fly' --fly
for verb in train generate data bench convert info doctor plot; do
  succeeds 'Usage' $verb --help
done
refuses '--no-such-flag' train --no-such-flag
refuses '--no-such-flag' generate run --no-such-flag
refuses "there is no 'flashgla frobnicate'; known: train" frobnicate
refuses "there is no 'flashgla data frobnicate'; known: stories" data frobnicate
refuses '--no-such-flag' data info tokens --no-such-flag
refuses '--no-such-flag' bench --no-such-flag
refuses '--no-such-flag' convert in out --no-such-flag
refuses '--no-such-flag' info gla-tiny --no-such-flag
refuses '--no-such-flag' doctor --no-such-flag
refuses '--no-such-flag' plot run --no-such-flag

succeeds 'cpu_chunk +right' doctor
cp stdout said
holds 'doctor checks the kernels of few bits' grep -qE 'q8, q4 by portable +right' said
holds 'doctor says that all is well' grep -q 'All is well' said

succeeds '341,707,776' info gla-340m
refuses 'no-such-model' info no-such-model
refuses "'gla-13b' is neither .* nor a preset; did you mean 'gla-1.3b'.; presets: gla-tiny" info gla-13b
succeeds 'rwkv-169m +RWKV' info --help
echo '{"model_type": "hyena", "hidden_size": 32, "num_hidden_layers": 1, "l_max": 64, "vocab_size": 300}' >hyena.json
succeeds 'in_proj.weight +.96,32.' info hyena.json
echo '{"model_type": "gla"' >cut.json
refuses 'cut.json: not JSON .parse error at line 2, column 1' info cut.json
echo '{"model_type": "gla", "hiden_size": 32}' >misspelled.json
refuses 'misspelled.json: a gla has no field "hiden_size"; did you mean "hidden_size"' info misspelled.json

refuses 'frobnicate.*known: ' bench frobnicate
refuses 'frobnicate.*known: ' bench --threads 1,2 frobnicate
refuses 'tpu' bench --device tpu
refuses 'cuda' bench --device cuda:99
refuses '--seconds' bench --seconds -1
refuses "nothing.*--only 'K7' with --implementation 'fastest'" bench rotary --seconds 0.01 --only K7 --implementation fastest

"$flashgla" --help >help
holds 'help fits a screen' test "$(wc -l <help)" -le 30
for verb in train evaluate generate data plot info convert bench doctor; do "$flashgla" $verb --help; done >help
holds 'help fits 120 columns' sh -c '! grep -E "^.{121}" help | grep -v "^  flashgla "'

# What a newcomer is told to begin with works where nothing is there yet.
"$flashgla" --help | sed -n "s/^  \(flashgla .*[^ ]\)   .*/\1/p" | sed 's/megabytes 8/megabytes 0.1/' >first_run.sh
holds 'the first run has five lines' test "$(wc -l <first_run.sh)" -eq 5
holds 'the first run of the help works' sh -e -c 'program=$1; flashgla() { "$program" "$@"; }; . ./first_run.sh' - "$flashgla"

# How a mistake in the flags is told.
refuses 'there is no flag --no-such-flag; see flashgla train --help' train --no-such-flag 1
refuses 'there is no flag --stepps; did you mean .--steps..; see flashgla train --help' train --stepps=3
refuses '--steps is given more than once' train --steps 1 --steps 2
refuses '--steps needs a value' train --data d --steps
refuses '--max-tokens: must be a whole number from 0 to 1e15, not .99999999999999999999' \
  generate run --max-tokens 99999999999999999999
refuses '--threads: must be 0 .all. or at most 4096' bench rotary --threads 100000
holds 'a mistake in the flags ends with 2' sh -c '"$1" train --no-such-flag; [ $? -eq 2 ]' - "$flashgla"

# Standard streams that are full, closed or given up by their reader.
if [ -c /dev/full ]; then
  holds 'output that cannot be written is told' sh -c \
    '! "$1" info gla-tiny >/dev/full 2>said && grep -q "standard output could not be written" said' - "$flashgla"
fi
holds 'closed streams are no obstacle' sh -c '"$1" info gla-tiny >&- 2>&- <&-' - "$flashgla"

# Files of bench: what --save writes, --compare reads.
succeeds '"operation": ?"rotary' bench rotary --seconds 0.01 --json --save saved.json
cp stdout stdout.json
holds 'the JSON of bench is JSON' python3 -c 'import json; assert all("operation" in row for row in json.load(open("stdout.json")))'
holds 'a saved run says where it was made' python3 -c '
import json
run = json.load(open("saved.json"))
assert run["device"] == "cpu" and run["machine"] and run["threads"] > 0 and run["commit"] and run["date"] > "2026", run
assert run["command"] == "flashgla bench rotary --seconds 0.01" and run["rows"], run'
succeeds '[1-9][0-9]* rows compared, 0 slower' bench rotary --seconds 0.01 --compare saved.json --compare-share 1000
python3 -c '
import json
run = json.load(open("saved.json"))
for row in run["rows"]:
    if not row["operation"].startswith("ceiling"): row["milliseconds"] /= 1000
json.dump(run, open("faster.json", "w"))'
holds 'what became slower is said' sh -c "! \"$flashgla\" bench rotary --seconds 0.01 --compare faster.json >said 2>failed &&
  grep -q '^slower: rotary' said && grep -q 'became slower by more than 10%' failed"
printf '[]' >old.json
refuses 'old.json is no file of' bench rotary --seconds 0.01 --compare old.json
refuses '--compare' bench rotary --compare-share 0.2
finish
