#!/bin/sh
# flashgla info and convert, driven from the shell, on checkpoints good and damaged.
. "$(dirname "$0")/shell_test.sh"

"$flashgla" data stories --seed 7 --megabytes 0.1 --out stories.jsonl --quiet >/dev/null
"$flashgla" data prepare stories.jsonl --out tokens --quiet >/dev/null
"$flashgla" train --data tokens --preset gla-tiny --batch 2 --length 64 --steps 5 --out run >/dev/null 2>&1

succeeds '.' convert run bf16 --dtype bf16
succeeds 'bf16' info bf16
odd=$(printf 'odd\377') # not UTF-8
succeeds '.' convert run "$odd"
succeeds '"parameters": [0-9]' info "$odd" --json
succeeds '.' convert run shards --shard-size 1MB
holds 'there is an index' test -s shards/model.safetensors.index.json
succeeds '.' generate shards --prompt One --max-tokens 5 --seed 1
succeeds '.' convert run fused --layout fused-mlp
refuses 'layout authors: has no place for' convert run authors --layout authors
succeeds '.' generate fused --prompt One --max-tokens 5 --seed 1

for preset in q8 q4 q4-safe; do
  succeeds "$preset" convert run $preset --quantise $preset --quiet
  succeeds 'quantised' info $preset
  succeeds '.' generate $preset --prompt One --max-tokens 5 --greedy
  cp stdout copied
  succeeds '.' generate $preset --prompt One --max-tokens 5 --greedy --mmap
  cp stdout mapped
  holds 'mapped weights write the same' cmp mapped copied
  succeeds 'nats|loss' evaluate $preset --data tokens --limit 2 --quiet
done
succeeds '.' convert run some --quantise q4 --quantise-only mlp --quiet
succeeds 'as q4, q8 and' convert q4 copied-q4 --quiet
succeeds '[(].*, q4 and q8[)]' info copied-q4
succeeds 'weights +[0-9.]+ .?B as stored; decoded' info copied-q4
succeeds '.' convert q4 decoded --dtype bf16
succeeds '.' generate decoded --prompt One --max-tokens 5 --mmap
succeeds '.' generate q4 --prompt One --max-tokens 5 --save-state q4.state
succeeds '.' convert run calibrated --quantise q4 --calibrate stories.jsonl --calibration-tokens 500 --quiet
succeeds '.' convert run gptq --quantise q4 --calibrate stories.jsonl --method gptq --calibration-tokens 500 --quiet
succeeds 'kl' evaluate run calibrated gptq --data tokens --limit 1 --kl 100 --quiet
refuses 'calibrate' convert run out --quantise q4 --method gptq
refuses 'gptq is for matrices of 4 bits, and q8 has none' \
  convert run out --quantise q8 --calibrate stories.jsonl --method gptq
refuses 'would have to be decoded as bf16' generate q4 --prompt One --mmap --dtype bf16
refuses "output is a run's folder, run" convert run run --quantise q4
refuses 'another model' generate q8 --load-state q4.state
refuses '8 or 4 bits' train --data tokens --initial-weights q4 --steps 1 --out again
refuses '8 or 4 bits already' convert q4 out --quantise q8
refuses 'q8, q4, q4-safe' convert run out --quantise q3
refuses 'quantise' convert run out --quantise-only mlp
refuses 'no matrix with .nosuch. in its name becomes q4; those that do: .*down_proj' \
  convert run out --quantise q4 --quantise-only nosuch

refuses 'no-such-model' convert no-such-model out
refuses 'the output is empty' convert run ''
refuses 'tokens, is a folder of prepared data' convert run tokens
: >empty.txt
refuses 'calibrate empty.txt: there is no text in it' convert run out --quantise q4 --calibrate empty.txt --quiet
damage run damaged
succeeds '.' convert damaged damaged-bf16 --dtype bf16
cp stderr said
holds 'NaN among the weights is told' grep -q '^flashgla: damaged: .* of the .* weights of .* are NaN or infinite' said
succeeds '.' convert damaged-bf16 damaged-again
cp stderr said
holds 'and kept' grep -q '^flashgla: damaged-bf16: .* are NaN or infinite' said
refuses 'model.embeddings.weight holds nan' convert damaged damaged-q4 --quantise q4 --quiet
succeeds '.' convert run whole --dtype bf16
cp stderr said
holds 'of whole ones nothing is told' sh -c '! grep NaN said'
refuses 'int3' convert run out --dtype int3
cp -r bf16 truncated && truncate -s -100 truncated/model.safetensors
refuses 'truncated/model.safetensors' generate truncated --prompt x
cp -r bf16 flipped
printf '\377\377' | dd of=flipped/model.safetensors bs=1 seek=$(($(stat -c %s flipped/model.safetensors) - 50)) conv=notrunc status=none
refuses 'checksum' generate flipped --prompt x
cp -r bf16 disagree && sed -i 's/"hidden_size": *[0-9]*/"hidden_size": 64/' disagree/config.json
refuses 'shape' generate disagree --prompt x
cp -r bf16 noconfig && rm noconfig/config.json
refuses 'config.json' generate noconfig --prompt x
holds 'what was refused left nothing' test ! -e out
finish
