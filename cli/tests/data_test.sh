#!/bin/sh
# flashgla data, driven from the shell with good and bad arguments.
. "$(dirname "$0")/shell_test.sh"

succeeds 'stories' data --help
succeeds '--megabytes' data stories --help
refuses 'subcommand' data

# stories
succeeds '"entropy_bits_per_byte": 0\.[0-9]' data stories --megabytes 0.2 --seed 7 --out a.jsonl --quiet --json
succeeds 'true entropy 0\.[0-9]+ bits per byte' data stories --megabytes 0.2 --seed 7 --out b.jsonl --quiet
holds 'equal seeds give equal corpora' cmp a.jsonl b.jsonl
holds 'figures lie beside the corpus' test -s a.json
refuses 'positive number' data stories --megabytes 0
refuses 'positive number' data stories --megabytes -3
refuses 'ends in .jsonl' data stories --out a.txt
succeeds 'stories' data stories --megabytes 0.01 --out absent/folder/a.jsonl
refuses 'cannot make the folder absent/folder/a.jsonl' data stories --out absent/folder/a.jsonl/b.jsonl
refuses '--size' data stories --size 3
refuses 'megabytes is 1e[+]300; expected above 0' data stories --megabytes 1e300
refuses "out is '.; expected a file" data stories --out ''
refuses '--seed: must be a whole number from 0 to 2.53, not .-1' data stories --seed -1
succeeds 'seed 1000' data stories --megabytes 0.001 --seed 1e3 --out seeded.jsonl --quiet
succeeds "^next: .*flashgla data prepare 'a b/it'.''s.jsonl' --out 'a b/it'.''s'$" \
  data stories --megabytes 0.001 --out "a b/it's.jsonl" --quiet

# mqar
succeeds '--pairs' data mqar --help
succeeds '50 sequences for training, 5 for validation: 32 tokens, 4 pairs' data mqar --vocabulary 80 --length 32 --pairs 4 --train 50 --validation 5 --out task --quiet
succeeds '4 places of each document are asked for' data info task
refuses 'length is 62; expected at least 64' data mqar --length 62 --out x
refuses 'vocabulary is 64' data mqar --length 64 --vocabulary 64 --out x
refuses '--out is required' data mqar
refuses '--pairs: must be a whole number from 1 to 1e15' data mqar --pairs 0 --out x
refuses "seed: must be a whole number from 0 to 2.53, not '-1'" data mqar --seed -1 --out x

# prepare
succeeds '"documents": [1-9]' data prepare a.jsonl --out bytes --quiet --json
succeeds 'byte, 258 words' data prepare a.jsonl --out bytes --quiet
succeeds 'sentencepiece, 400 words' data prepare a.jsonl --out pieces --tokenizer train:400 --quiet
succeeds 'sentencepiece, 400 words' data prepare b.jsonl --out again --tokenizer pieces --quiet
holds 'the same text and tokenizer give the same tokens' cmp pieces/train.bin again/train.bin
printf 'one\n\ntwo\n\nthree' >plain.txt
succeeds 'train .* 3 documents' data prepare plain.txt --out plain --separator '\n\n' --validation 0 --quiet
mkdir folder && cp plain.txt folder/x.txt && printf '\000' >folder/binary
succeeds 'passed over 1 file' data prepare folder --out f --quiet
holds 'what is replaced is told' sh -c "'$flashgla' data prepare folder --out f 2>&1 >/dev/null | grep -q 'replacing the prepared data in f'"
refuses "seed: must be a whole number from 0 to 2.53, not 'some'" data prepare plain.txt --out x --seed some
succeeds '"out": "caf' data prepare plain.txt --out "$(printf 'caf\351')" --quiet --json
holds 'progress is shown unless quiet' sh -c "'$flashgla' data prepare a.jsonl --out p 2>&1 >/dev/null | grep -q '100%'"
holds 'standard input is read' sh -c "'$flashgla' data prepare - --out piped --quiet --json <plain.txt | grep -q text_bytes"
holds 'standard input may be JSON lines' sh -c "'$flashgla' data prepare - --json-lines --out piped --quiet <a.jsonl"
holds 'piped lines give the same tokens' cmp piped/train.bin bytes/train.bin
refuses 'inputs is required' data prepare --out x
refuses '--out is required' data prepare plain.txt
refuses 'nothere: no such file' data prepare nothere --out x
refuses 'not a folder' data prepare plain.txt --out plain.txt
refuses 'between 0 and 0.5' data prepare plain.txt --out x --validation 0.9
refuses 'no field "body"' data prepare a.jsonl --out x --text-field body
refuses 'plain.txt is not a SentencePiece model' data prepare plain.txt --out x --tokenizer plain.txt

# A tokenizer.json as checkpoints ship it: characters, two merges, and text that spells a special token.
cat >tokenizer.json <<'END'
{"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "normalizer": {"type": "Lowercase"},
 "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "</s>", "special": true}],
 "model": {"type": "BPE", "unk_token": "<unk>", "vocab": {"<unk>": 0, "</s>": 1, "t": 2, "h": 3, "e": 4, "th": 5,
 "the": 6}, "merges": ["t h", "th e"]}}
END
printf 'The thé </s>the\n' >the.txt
succeeds 'huggingface, 7 words' data prepare the.txt --out hub --tokenizer tokenizer.json --quiet --validation 0
succeeds '6,5,0,1,6,1' data info hub --first 6
holds 'the folder carries the file' cmp tokenizer.json hub/tokenizer.json
succeeds 'huggingface, 7 words' data prepare the.txt --out hub2 --tokenizer hub --quiet --validation 0
sed 's/WhitespaceSplit/UnicodeScripts/' tokenizer.json >other.json
refuses 'other.json: pre_tokenizer: the pre-tokenizer UnicodeScripts' data prepare the.txt --out x --tokenizer other.json
refuses 'train:8192' data prepare plain.txt --out x --tokenizer train:lots
refuses 'too large for this text; --tokenizer train:[0-9]* or less' data prepare plain.txt --out x --tokenizer train:5000
refuses 'tokenizer train:0: a vocabulary of 0 is too small' data prepare plain.txt --out x --tokenizer train:0
refuses 'tokenizer train:1000000 or less' data prepare plain.txt --out x --tokenizer train:2000000
mkdir model && echo '{}' >model/config.json
refuses '--out model is the folder of a model or a run' data prepare plain.txt --out model
printf '{"text": "fine"}\n{"text": 3}\n' >bad.jsonl
refuses 'bad.jsonl, line 2' data prepare bad.jsonl --out bytes
succeeds 'tokens in' data info bytes
: >empty.txt
refuses 'no text' data prepare empty.txt --out x
holds 'what was refused left nothing' sh -c '[ -z "$(ls -A x 2>/dev/null)" ]'

# A full disk, by the limit on file sizes.
holds 'a full disk is an error in one line' sh -c "
  trap '' XFSZ; ulimit -f 20
  '$flashgla' data stories --megabytes 2 --out full.jsonl --quiet 2>message && exit 1
  grep -q '^flashgla: error: cannot write full.jsonl' message"
holds 'and leaves nothing half-written' sh -c '! ls full* 2>/dev/null | grep -q .'

# An interruption.
holds 'an interrupted run leaves nothing half-written' sh -c "
  mkfifo pipe; (cat a.jsonl a.jsonl a.jsonl; exec sleep 20) >pipe &
  writer=\$!
  '$flashgla' data prepare - --json-lines --out stopped --quiet <pipe 2>message &
  program=\$!
  while ! ls stopped/train.bin.partial* >files 2>&1; do kill -0 \$program || exit 1; sleep 0.05; done
  kill -TERM \$program
  wait \$program && exit 1
  kill \$writer
  grep -qi '^flashgla: error: .*interrupted' message && [ -z \"\$(ls -A stopped)\" ]"

# info
succeeds 'megatron u16' data info bytes --first 5
succeeds '"vocab_size": 400' data info pieces --json
succeeds 'tokenizer: byte' data info bytes/train.bin
cp bytes/train.bin raw.bin
succeeds 'nanogpt u16' data info raw.bin
succeeds 'Once|Long ago|story' data info raw.bin --tokenizer bytes
refuses 'plain.txt is no token file' data info plain.txt
refuses 'nothere: no such file or folder' data info nothere
refuses 'no prepared data' data info folder
refuses 'auto,megatron,nanogpt,llm.c' data info raw.bin --format csv
refuses '20240520' data info raw.bin --format llm.c
head -c 1001 raw.bin >cut.bin
refuses 'truncated' data info cut.bin
cp cut.bin bytes/train.bin
refuses 'bytes/train.bin holds 1001 bytes' data info bytes

finish
