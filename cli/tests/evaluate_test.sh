#!/bin/sh
# flashgla evaluate, driven from the shell: every kind of data, interruption, bad arguments.
. "$(dirname "$0")/shell_test.sh"

"$flashgla" data stories --seed 7 --megabytes 0.1 --out stories.jsonl --quiet >/dev/null
"$flashgla" data prepare stories.jsonl --out tokens --quiet >/dev/null
"$flashgla" train --data tokens --preset gla-tiny --batch 2 --length 64 --steps 10 --out run >/dev/null 2>&1
head -n 6 stories.jsonl >few.jsonl
printf 'Once there was a fox.\nIt lived in a wood, and was happy there. Long ago a lamp was lit by a road.\n' >text.txt

# text, documents, tokens
succeeds 'perplexity +[0-9]' evaluate run --data text.txt --quiet
succeeds '"bits_per_byte": [0-9]' evaluate run --data few.jsonl --window 64 --json --quiet
succeeds '"documents": 6' evaluate run --data few.jsonl --window 64 --stride 16 --json --quiet
succeeds 'word_perplexity' evaluate run --data few.jsonl --carry --window 50 --quiet
succeeds 'bits_per_byte' evaluate run --data tokens --limit 5 --quiet
succeeds 'loss' evaluate run --data tokens/train.bin --limit 5 --quiet
loss() { "$flashgla" evaluate run --data few.jsonl --json --quiet "$@" | sed -n 's/.*"loss": //p'; }
holds 'batches are of no consequence' test "$(loss --window 64 | cut -c 1-6)" = "$(loss --window 64 --batch-tokens 100 | cut -c 1-6)"

# examples
cat >choices.jsonl <<'END'
{"context": "Once there was", "choices": ["a fox", "zzzz", "the lamp"], "answer": 0}
{"context": "It lived in", "choices": ["qqqq xx", "a wood"], "answer": 1}
END
printf '{"context": "Once there", "continuation": " was a fox"}\n{"context": "", "continuation": "Once"}\n' >continuations.jsonl
succeeds '"acc_norm": [01]' evaluate run --data choices.jsonl --json --quiet
succeeds '"log_likelihoods"' evaluate run --data choices.jsonl --json --samples --quiet
succeeds '"log_likelihood": -' evaluate run --data continuations.jsonl --json --quiet
tokens() { "$flashgla" evaluate run --data choices.jsonl --json --quiet "$@" | sed -n 's/.*"tokens_read": //p'; }
holds 'shared contexts are read once' test "$(tokens)" -lt "$(tokens --no-reuse)"

# a task: what training says of its last checkpoint
"$flashgla" data mqar --vocabulary 80 --length 32 --pairs 4 --train 200 --validation 21 --out task --quiet >/dev/null
"$flashgla" train --data task --preset gla-tiny --batch 4 --length 32 --steps 60 --learning-rate 5e-3 --out recall >/dev/null 2>&1
succeeds '"answers": 84' evaluate recall --data task --json --quiet --batch-tokens 100
cp stdout answers
holds 'accuracy and loss are those of training' python3 -c '
import json
seen = json.load(open("answers"))
said = [row for row in map(json.loads, open("recall/metrics.jsonl")) if row["kind"] == "eval"][-1]
assert seen["accuracy"] == said["accuracy"] and abs(seen["loss"] - said["loss"]) < 1e-5 * said["loss"], (seen, said)'
succeeds 'sequences +5' evaluate recall --data task --limit 5 --quiet
refuses 'task is a task; .* are for text' evaluate recall --data task --window 16

# length
cp -r run other
succeeds '0 .. 64 +loss' evaluate run other --data few.jsonl --extrapolate 256 --bucket 64 --window 100 --png curve.png --quiet
holds 'the picture is one' sh -c 'head -c 4 curve.png | grep -q PNG'
succeeds '"sequences": 3' evaluate run --data few.jsonl --extrapolate 200 --sequences 3 --json --quiet

# an interruption
"$flashgla" evaluate run --data few.jsonl --window 64 --batch-tokens 64 --json --quiet >whole
cp whole whole.few
holds 'what was interrupted goes on' sh -c "
  '$flashgla' evaluate run --data few.jsonl --window 64 --batch-tokens 64 --log log.jsonl --quiet >part 2>message &
  program=\$!
  while [ \"\$(cat log.jsonl 2>/dev/null | wc -l)\" -lt 3 ]; do kill -0 \$program || break; sleep 0.01; done
  kill -INT \$program
  wait \$program && ! grep -q interrupted message
  '$flashgla' evaluate run --data few.jsonl --window 64 --batch-tokens 64 --log log.jsonl --resume --json --quiet >rest &&
  cmp whole rest"
tr -d '\n' <few.jsonl >long.txt
"$flashgla" evaluate run --data long.txt --carry --window 16 --batch-tokens 16 --json --quiet >whole
holds 'inside a document, too' sh -c "
  '$flashgla' evaluate run --data long.txt --carry --window 16 --batch-tokens 16 --log carry.jsonl --quiet >part 2>message &
  program=\$!
  while [ \"\$(cat carry.jsonl 2>/dev/null | wc -l)\" -lt 5 ]; do kill -0 \$program || break; sleep 0.01; done
  kill -INT \$program
  wait \$program && ! grep -q interrupted message
  '$flashgla' evaluate run --data long.txt --carry --window 16 --batch-tokens 16 --log carry.jsonl --resume --json --quiet >rest &&
  cmp whole rest && test ! -e carry.jsonl.state"
head -c 20000 stories.jsonl >stories.txt
"$flashgla" evaluate run run --data stories.txt --window 4 --log losses.jsonl --quiet >whole
holds 'between windows of --kl, too' sh -c "
  '$flashgla' evaluate run run --data stories.txt --window 4 --kl 1000000 --log kl.jsonl --json --quiet >part 2>message &
  program=\$!
  while [ \"\$(cat kl.jsonl 2>/dev/null | wc -l)\" -lt \"\$(wc -l <losses.jsonl)\" ]; do kill -0 \$program || break; sleep 0.01; done
  kill -INT \$program
  wait \$program; test \$? -eq 130 && grep -q 'interrupted; the same with --resume' message &&
  grep -q 'once more to stop at once' message &&
  grep -q '\"kl\": 0.0' part && grep -q '\"complete\": false' part"
refuses 'another window' evaluate run --data few.jsonl --window 32 --batch-tokens 64 --log log.jsonl --resume --quiet
again() { # MODEL COMMAND...: runs the command with the evaluation of that model, gone on with
  model=$1
  shift
  "$@" evaluate "$model" --data few.jsonl --window 64 --batch-tokens 64 --log log.jsonl --resume --json --quiet
}
cp -r run moved && cp few.jsonl kept.jsonl
again moved "$flashgla" >whole.moved
holds 'a folder that was moved is the same model' sh -c "grep -v model whole.moved >rest && grep -v model whole.few | cmp - rest"
sed 's/a/e/' kept.jsonl >few.jsonl
again run refuses 'log.jsonl: is of an evaluation with another data'
mv kept.jsonl few.jsonl
"$flashgla" train --data tokens --preset gla-tiny --batch 2 --length 64 --steps 10 --seed 2 --out trained >/dev/null 2>&1
rm -r moved && mv trained moved
again moved refuses 'log.jsonl: is of an evaluation with another model'
sed 's/"loss":[0-9.]*,//' log.jsonl >without.jsonl
refuses 'without.jsonl: a result in it is damaged: .*loss' \
  evaluate run --data few.jsonl --window 64 --batch-tokens 64 --log without.jsonl --resume --quiet
sed 's/"loss":[0-9.]*/"loss":"much"/' log.jsonl >words.jsonl
refuses 'words.jsonl: a result in it is damaged: .*number' \
  evaluate run --data few.jsonl --window 64 --batch-tokens 64 --log words.jsonl --resume --quiet
refuses 'log.jsonl: exists' evaluate run --data few.jsonl --log log.jsonl --quiet
refuses '--resume needs the --log' evaluate run --data few.jsonl --resume --quiet

# a name that is not UTF-8
odd=$(printf 'odd\377')
cp -r run "$odd"
succeeds '"loss": [0-9]' evaluate "$odd" --data few.jsonl --json --quiet --log "$odd.jsonl"
holds 'its log is gone on from' "$flashgla" evaluate "$odd" --data few.jsonl --quiet --log "$odd.jsonl" --resume
"$flashgla" evaluate run --data few.jsonl --quiet --text-field "$odd" --log field.jsonl 2>said
holds 'a field of such a name is looked for' grep -qa 'line 1: there is no "odd' said

# damaged weights, by which no number is one
damage run damaged
refuses 'damaged: .*choices.jsonl, line 1: the log-likelihood is NaN; the model.s weights may be damaged' \
  evaluate damaged --data choices.jsonl --json --quiet
refuses 'damaged: .*loss is NaN; the model.s weights may be damaged' evaluate damaged --data text.txt --quiet
refuses 'damaged: .*loss is NaN' evaluate damaged --data few.jsonl --carry --window 50 --json --quiet
refuses 'damaged: .*loss is NaN' evaluate damaged --data few.jsonl --extrapolate 64 --quiet
refuses 'damaged: .*loss is NaN' evaluate run damaged --data few.jsonl --window 64 --kl 20 --quiet
damage recall forgetful
refuses 'forgetful: .*loss of an answer is NaN' evaluate forgetful --data task --quiet

# bad input
refuses '--kl compares .* two or more' evaluate run --data text.txt --kl 10
refuses '--kl compares .* two or more' evaluate run moved --data few.jsonl --kl 10 --extrapolate 64
succeeds 'kl +0[.]0000' evaluate run run --data text.txt --kl 20 --quiet
refuses 'models is required' evaluate --data text.txt
refuses '--data is required' evaluate run
refuses 'absent: no such file' evaluate run --data absent
refuses 'absent' evaluate absent --data text.txt
printf '{"context": "a"}\n' >bad.jsonl
refuses 'bad.jsonl, line 1: there is no "continuation"' evaluate run --data bad.jsonl --quiet
refuses 'continuations.jsonl, line 1: the continuation has 10 tokens; the window is 4' evaluate run --data continuations.jsonl --window 4 --quiet
refuses 'positions needs 10000001' evaluate run --data text.txt --extrapolate 10000000 --quiet
refuses 'unknown device' evaluate run --data text.txt --device tpu
refuses '--png goes with --extrapolate' evaluate run --data text.txt --png x.png
refuses 'are for text' evaluate run --data choices.jsonl --carry
mkdir bare && cp run/checkpoints/"$(cat run/checkpoints/latest)"/config.json run/checkpoints/"$(cat run/checkpoints/latest)"/model.safetensors bare
refuses 'bare has no tokenizer' evaluate bare --data text.txt --quiet
"$flashgla" data prepare stories.jsonl --out pieces --tokenizer train:400 --quiet >/dev/null
refuses 'they do not belong together' evaluate bare --data text.txt --tokenizer pieces --quiet
refuses 'another tokenizer' evaluate run --data pieces --quiet

finish
