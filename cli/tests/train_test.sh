#!/bin/sh
# flashgla train and plot, driven from the shell: a small run, resumed, interrupted, refused.
. "$(dirname "$0")/shell_test.sh"

"$flashgla" data stories --seed 7 --megabytes 0.1 --out stories.jsonl --quiet >/dev/null
"$flashgla" data prepare stories.jsonl --out tokens --quiet >/dev/null
small="--data tokens --preset gla-tiny --batch 2 --length 64"

succeeds 'parameters' train $small --steps 20 --out run
holds 'metrics are JSON lines' python3 -c '
import json
rows = [json.loads(line) for line in open("run/metrics.jsonl")]
assert sum("loss" in row for row in rows) >= 20, rows'
succeeds '' train $small --steps 24 --out run --resume
succeeds '' plot run --out loss.png
holds 'a PNG was drawn' sh -c 'head -c 4 loss.png | grep -q PNG'
succeeds '.' plot run --terminal
holds 'without gnuplot it says so' sh -c 'PATH=$PWD "$1" plot run --out none.png 2>&1 | grep -q "no gnuplot on PATH"' \
  - "$flashgla"
holds 'without a folder for temporary files it says so' sh -c \
  '! TMPDIR=/nonexistent "$1" plot run --out none.png 2>said && grep -q "no folder for temporary files: TMPDIR" said' - "$flashgla"
refuses '--resume' train $small --steps 5 --out run
refuses 'model: model_type is "transformer"; expected "gla" as in the run' \
  train --preset transformer-tiny --steps 30 --out run --resume
refuses "dtype is 'bf16'; expected 'f32', with which the run was begun" train --dtype bf16 --steps 30 --out run --resume
refuses "optimizer_state is 'half'; expected 'full', with which the run was begun" \
  train --optimizer-state half --steps 30 --out run --resume
refuses 'sequence_length is 32; expected 64, with which the run was begun' train --length 32 --steps 30 --out run --resume
refuses 'batch_tokens is 256; expected 128, with which the run was begun' train --batch 4 --steps 30 --out run --resume
refuses "order is 'segments'; expected 'windows', with which|order is 'segments'; expected 'packed', with which" \
  train --order segments --steps 30 --out run --resume
refuses "initial_weights is 'other'; expected '', with which the run was begun" \
  train --initial-weights other --steps 30 --out run --resume
holds 'what cannot change of a run is no remedy' sh -c '! "$1" train --memory-limit 1MB --out run --resume 2>said &&
  grep -q "remedies: a higher memory_limit, a device with more memory" said' - "$flashgla"
refuses 'nowhere: there is no run to go on with' train --out nowhere --resume
refuses 'initial-weights brings its model' train $small --initial-weights run --out a

"$flashgla" train $small --steps 100000 --out interrupted >stdout 2>stderr &
process=$!
for _ in $(seq 150); do
  [ -f interrupted/metrics.jsonl ] && [ "$(wc -l <interrupted/metrics.jsonl)" -gt 5 ] && break
  sleep 0.2
done
cp -r interrupted/train.json interrupted/metrics.jsonl .
refuses 'interrupted: another process trains in this folder' train $small --steps 5 --out interrupted
refuses 'interrupted: another process trains in this folder' train --data stories.jsonl --preset gla-tiny --out interrupted
succeeds 'memory' train $small --steps 7 --out interrupted --plan
holds 'a plan leaves a run as it is' sh -c 'cmp train.json interrupted/train.json &&
  head -n "$(wc -l <metrics.jsonl)" interrupted/metrics.jsonl | cmp metrics.jsonl -'
kill -INT $process
wait $process
cat stdout stderr >said
holds 'Ctrl-C says how to go on' grep -q -- '--resume' said
succeeds '.' generate interrupted --prompt One --max-tokens 5 --seed 1

cat >narrow.py <<'END'
import fcntl, os, pty, struct, sys, termios
process, terminal = pty.fork()
if process == 0:
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    os.execv(sys.argv[1], sys.argv[1:])
text = b""
try:
    while piece := os.read(terminal, 65536):
        text += piece
except OSError:  # the program has ended
    pass
lines = [line.removeprefix(b"\x1b[K") for line in text.replace(b"\r\n", b"\r").split(b"\r") if b"training" in line]
assert lines and all(b"loss" in line and len(line) < 40 for line in lines), lines
END
holds 'a narrow terminal shows the loss' python3 narrow.py "$flashgla" train $small --steps 2 --out narrow
refuses '/dev/null: not a regular file' train --data /dev/null --preset gla-tiny --out a
# Messages that nobody reads end no run.
for streams in '>&- 2>&-' '2>/dev/full' '2>&1 >stdout | true'; do
  rm -rf unread
  sh -c "\"\$1\" train $small --steps 3 --out unread $streams" - "$flashgla" >/dev/null 2>&1
  holds "a run goes on with $streams" test -f unread/checkpoints/latest
done
refuses '--steps is 9000000, of 9000000000000 tokens each' train --data tokens --batch-tokens 9T --steps 9M --out a
refuses '.-resume needs --out' train --resume
refuses "recompute is 'much'; expected automatic, nothing" train $small --recompute much --out a
refuses 'cannot make the folder tokens/data.json/data: Not a directory' train --data stories.jsonl --preset gla-tiny --out tokens/data.json
succeeds '64 tokens' train --data tokens --preset gla-tiny --batch-tokens 64 --length 64 --steps 1e3 --plan --out planned
holds 'a plan writes nothing' test ! -e planned
mkdir elsewhere
holds 'data that are elsewhere are asked for' sh -c 'cd elsewhere && ! "$1" train --out ../run --resume 2>../said &&
  grep -q "tokens: there is no such data here, with which the run was begun; --data says" ../said' - "$flashgla"
refuses 'train_tokens is 256; expected at least the 3072 that the run has had .step 24.' train --steps 2 --out run --resume

# A plain text: its tokens are made anew for another text or when they were not finished, but not under a run.
yes 'one text' | head -c 8000 >one.txt
yes 'another text' | head -c 8000 >other.txt
text="--preset gla-tiny --batch 2 --length 64 --steps 2 --out texts"
succeeds 'parameters' train --data one.txt $text --plan
rm texts/data/data.json
succeeds 'parameters' train --data one.txt $text --plan
succeeds 'finished' train --data other.txt $text
holds 'the tokens are of the other text' sh -c '"$1" data info texts/data | grep -q "another text"' - "$flashgla"
refuses 'one.txt, but the run in texts was begun with another text, other.txt' train --data one.txt $text --resume
succeeds 'finished' train --data other.txt $text --resume
mkdir -p moved/below && cp -r texts moved/
holds 'a run on a text goes on from another folder' sh -c 'cd moved/below && "$1" train --out ../texts --resume --quiet' - \
  "$flashgla"
mkdir -p mine/data && echo mine >mine/data/train.bin
refuses 'mine/data holds files already' train --data one.txt --preset gla-tiny --steps 2 --out mine
holds 'files of others are as they were' grep -q mine mine/data/train.bin

echo '{"lerning_rate": 1}' >misspelled.json
refuses "misspelled.json: there is no training field 'lerning_rate'; did you mean 'learning_rate'" \
  train $small --config misspelled.json --out a
refuses 'out is not UTF-8; expected text in UTF-8' train $small --out "$(printf 'caf\351')"
refuses 'epsilon is 1e-60; expected a positive f32' train $small --epsilon 1e-60 --out a
refuses "seed: '9007199254740993' is too large" train $small --seed 9007199254740993 --out a
refuses 'seed is -1; expected 0 or more' train $small --seed -1 --out a
refuses "model is 'no/model', where there is nothing; expected a preset, a folder" \
  train --data tokens --model no/model --out a
refuses 'no-such-data' train --data no-such-data --preset gla-tiny --out a
refuses "preset: unknown 'gla-13b'; did you mean 'gla-1.3b'.; known: gla-tiny" train --data tokens --model gla-13b --out a
refuses 'gla-gigantic.*gla-340m' train --data tokens --preset gla-gigantic --out a
refuses '--steps' train $small --steps many --out a
refuses 'learning.rate' train $small --steps 5 --learning-rate -1 --out a
refuses '--memory-limit|memory_limit: .0GiB. leaves nothing' train $small --steps 5 --memory-limit 0GiB --out a
refuses 'MiB of memory are needed on cpu, and 0.00 MiB are allowed' train $small --steps 5 --memory-limit 1KB --device cpu --out a
refuses 'GiB of memory are needed on cpu, and [0-9.]* GiB are there; remedies: micro_batch 0, ' \
  train --data tokens --preset gla-small --batch 80k --micro-batch 80k --length 256 --steps 1 --device cpu --plan --out a
refuses 'device cuda:99: ' train $small --steps 5 --device cuda:99 --out a
refuses 'model: a gla has no field "num_layers"' train --data tokens --model '{"num_layers": 2}' --steps 5 --out a
holds 'what was refused left nothing' test ! -e a

succeeds 'decoding later: .* a token with bf16 weights' train --data tokens --preset transformer-tiny --batch 2 --length 64 --plan --out planned

# A model whose sequences have an end, described in a file that leaves the vocabulary to the data.
echo '{"model_type": "hyena", "hidden_size": 32, "num_hidden_layers": 1, "l_max": 64}' >hyena.json
succeeds 'vocabulary 258' train --model hyena.json --data tokens --batch 2 --length 64 --steps 2 --out hyena
succeeds 'window +64' evaluate hyena --data tokens --limit 1 --quiet
succeeds '.' generate hyena --prompt One --max-tokens 60 --seed 1
refuses 'max-tokens is 61; expected at most 60: behind the prompt.s 4 tokens .* filter' \
  generate hyena --prompt One --max-tokens 61
refuses "there is no checkpoint 'step-9'; there are: step-00000002" generate hyena --checkpoint step-9 --prompt One

# Weights that are broken are no success, though they are saved: no gradient was seen of them.
holds 'a run whose validation is not finite fails' sh -c '! "$1" train --data tokens --preset gla-tiny --batch 2 --length 64 \
  --steps 2 --learning-rate 1e300 --out broken --quiet 2>said && grep -q "the validation loss is not finite .step 2" said' - "$flashgla"
refuses 'no-such-run' plot no-such-run --out x.png
finish
