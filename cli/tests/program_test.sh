#!/bin/sh
# The program itself, its help, and the verbs that need no data.
. "$(dirname "$0")/shell_test.sh"

succeeds 'flashgla train'
succeeds '^flashgla [0-9]+\.[0-9]+' --version
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
succeeds 'All is well' doctor

succeeds '341,707,776' info gla-340m
refuses 'no-such-model' info no-such-model

refuses 'frobnicate.*known: ' bench frobnicate
refuses 'tpu' bench --device tpu
refuses 'cuda' bench --device cuda:99
refuses '--seconds' bench --seconds -1
refuses "nothing.*--only 'K7'" bench swiglu --seconds 0.01 --only K7
refuses "nothing.*--implementation 'fastest'" bench swiglu --seconds 0.01 --implementation fastest
succeeds '"operation": ?"swiglu' bench swiglu --seconds 0.01 --json
cp stdout stdout.json
holds 'the JSON of bench is JSON' python3 -c 'import json; assert all("operation" in row for row in json.load(open("stdout.json")))'
finish
