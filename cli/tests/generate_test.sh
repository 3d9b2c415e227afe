#!/bin/sh
# flashgla generate, driven from the shell: sampling flags, batches, state files, bad arguments.
. "$(dirname "$0")/shell_test.sh"

"$flashgla" data stories --seed 7 --megabytes 0.1 --out stories.jsonl --quiet >/dev/null
"$flashgla" data prepare stories.jsonl --out tokens --quiet >/dev/null
"$flashgla" train --data tokens --preset gla-tiny --batch 2 --length 64 --steps 10 --out run >/dev/null 2>&1

succeeds '.' generate run --max-tokens 40 --prompt Once --seed 5
cp stdout first
cat stdout stderr >said
holds 'the seed is said' grep -qE 'seed:? 5' said
succeeds '.' generate run --max-tokens 40 --prompt Once --seed 5
cp stdout second
holds 'the same seed writes the same' cmp first second
succeeds '.' generate run --max-tokens 40 --prompt Once --greedy
succeeds '.' generate run --max-tokens 40 --prompt Once --temperature 0.7 --top-k 20 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1
printf 'Once\nOne morning\n\303\244\n' >prompts.txt
succeeds '.' generate run --max-tokens 40 --prompts prompts.txt --seed 1
succeeds '.' generate run --max-tokens 40 --prompt 'A long story about a fox' --save-state fox.state --seed 1
holds 'the state is a file' test -s fox.state
succeeds '.' generate run --max-tokens 40 --load-state fox.state --prompt ' and' --seed 1
holds 'standard input is read' sh -c "echo 'Once upon' | '$flashgla' generate run --max-tokens 5 --seed 1"


# A prompt may be kept without a word written, also where the state grows by token.
"$flashgla" train --data tokens --preset transformer-tiny --batch 2 --length 64 --steps 2 --out softmax >/dev/null 2>&1
for model in run softmax; do
  succeeds '.' generate $model --max-tokens 0 --prompt 'A long story' --save-state kept-$model.state
  "$flashgla" generate $model --max-tokens 20 --prompt 'A long story' --only-new --ignore-end --seed 1 >whole 2>said
  "$flashgla" generate $model --max-tokens 20 --load-state kept-$model.state --ignore-end --seed 1 >rest 2>said </dev/null
  holds "and $model goes on from there" cmp whole rest
done

printf 'Once\n/what\n//slash\n/save kept.state\n/save no/such/folder\n/reset\n\n' |
  "$flashgla" generate run --interactive --max-tokens 5 --seed 1 >written 2>said
holds 'a conversation ends well' test $? -eq 0
holds 'an unknown command is named' grep -q 'no such command: /what' said
holds 'a text may begin with a slash' grep -q '^/slash' written
holds '/save keeps the state' test -s kept.state
holds 'a state that cannot be written is said' grep -q 'no/such/folder' said
# Where sequences have an end a conversation says so and goes on.
echo '{"model_type": "hyena", "hidden_size": 32, "num_hidden_layers": 1, "l_max": 32}' >hyena.json
"$flashgla" train --model hyena.json --data tokens --batch 2 --length 32 --steps 2 --out sequence-ends >/dev/null 2>&1
printf 'Once upon a time\nthere was a fox\n/reset\nThere was a fox\n' |
  "$flashgla" generate sequence-ends --interactive --max-tokens 99 --ignore-end --seed 1 --save-state end.state >written 2>said
holds 'a conversation goes on at the end of a sequence' test $? -eq 0
holds 'which is said' grep -q 'no room for that: 32 of the 32 .*l_max.* are taken, and it has 15; /reset' said
holds 'and what comes behind /reset is written' grep -q '^There was a fox.' written
holds 'with its state kept' test -s end.state
mkfifo keys
"$flashgla" generate run --interactive --max-tokens 5 --seed 1 --save-state left.state <keys >waiting 2>said &
process=$!
exec 3>keys
echo Once >&3
for _ in $(seq 50); do [ -s waiting ] && break; sleep 0.2; done
sleep 0.5
kill -INT $process
for _ in $(seq 50); do [ -f left.state ] && break; sleep 0.2; done
holds 'Ctrl-C at the prompt keeps the state' test -s left.state
exec 3>&-
wait $process
holds 'and leaves well' test $? -eq 0

# Ctrl-C: what was written is kept, a prompt that was not read is not.
interrupt() { # INPUT COMMAND...: its exit code is $code, what it said is in the files written and said
  input=$1
  shift
  rm -f said
  "$@" <"$input" >written 2>said &
  process=$!
  while [ ! -e said ]; do sleep 0.1; done
  while kill -INT $process 2>failed; do
    sleep 0.5
    grep -q stopping said && break
  done
  wait $process
  code=$?
}
head -c 4000000 /dev/zero | tr '\0' 'a' >long.txt
interrupt long.txt "$flashgla" generate run --max-tokens 0 --save-state long.state
holds 'Ctrl-C ends the reading of a prompt' test $code -eq 130
holds 'a second one is spoken of' grep -q 'stopping; once more to stop at once' said
holds 'which is said' grep -q 'interrupted after [0-9]* of 4000001 prompt tokens; long.state is not written' said
holds 'its state is not written' test ! -e long.state
interrupt long.txt "$flashgla" generate run --interactive --max-tokens 5 --seed 1
holds 'a conversation goes on' test $code -eq 0
holds 'where a line was not read to its end' grep -q 'interrupted after [0-9]* of 4000001 prompt tokens' said
interrupt /dev/null "$flashgla" generate run --prompt Once --max-tokens 1e9 --ignore-end --save-state long.state
holds 'Ctrl-C ends a text' test $code -eq 130
holds 'which is written' grep -q Once written
holds 'as its state is' test -s long.state
interrupt /dev/null "$flashgla" generate run --prompt Once --max-tokens 1e9 --ignore-end --json
holds 'JSON says so' grep -q '"finish":"interrupted"' written

printf 'Once\r\n\r\n{"prompt": "Long"}\r\n' >lines.txt
succeeds '"prompt":"Once"' generate run --max-tokens 2 --prompts lines.txt --seed 1 --json
cp stdout written
holds 'lines may end as in Windows' test "$(wc -l <written)" -eq 2
succeeds '^Once' generate run --prompt Once --max-tokens 3 --top-p 1e-20 --seed 1
refuses '--top-p: must be above 0 and at most 1, not .0.' generate run --prompt x --top-p 0
refuses '--interactive excludes --json' generate run --interactive --json

refuses 'no-such-model' generate no-such-model --prompt x
refuses 'no checkpoints\); did you mean .*run\?' generate . --prompt x
refuses 'temperature' generate run --prompt x --temperature -1
refuses 'top-p' generate run --prompt x --top-p 2
refuses 'max-tokens' generate run --prompt x --max-tokens -5
refuses 'no-such-prompts' generate run --prompts no-such-prompts
refuses '--prompts run: cannot be read' generate run --prompts run
refuses '--stop is empty' generate run --prompt x --stop ''
refuses '--seed: must be -1 or a whole number from 0' generate run --prompt x --seed -2
refuses '--temperature excludes --greedy' generate run --prompt x --greedy --temperature 0.5
refuses 'expected f32 or bf16' generate run --prompt x --dtype q8
refuses 'no/such/folder' generate run --prompt x --save-state no/such/folder/x.state
refuses 'Is a directory' generate run --prompt x --save-state run
refuses 'no-such-state' generate run --prompt x --load-state no-such-state
head -c 100 fox.state >broken.state
refuses 'broken.state' generate run --prompt x --load-state broken.state
finish
