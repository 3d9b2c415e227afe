#!/bin/sh
# A build with CUDA beside a driver that is too old: old_driver_test.sh PROGRAM FOLDER-OF-THE-DRIVER.
driver=$2
. "$(dirname "$0")/shell_test.sh"
LD_LIBRARY_PATH=$driver:$LD_LIBRARY_PATH
export LD_LIBRARY_PATH

"$flashgla" data stories --seed 7 --megabytes 0.1 --out stories.jsonl --quiet >/dev/null
"$flashgla" data prepare stories.jsonl --out tokens --quiet >/dev/null
small="--data tokens --preset gla-tiny --batch 2 --length 64 --steps 2"
too_old='driver is for CUDA 11.4 and this program for [0-9.]*; update the driver'

succeeds '.' train $small --out run
cp stderr said
holds 'training on the CPU says why' grep -q "^flashgla: running on the CPU: the NVIDIA $too_old\$" said
succeeds '.' generate run --prompt One --max-tokens 2 --seed 1
cp stderr said
holds 'so does generating' grep -q "^flashgla: running on the CPU: the NVIDIA $too_old\$" said
succeeds '.' generate run --prompt One --max-tokens 2 --seed 1 --device cpu
cp stderr said
holds 'a device that was named is not commented on' sh -c '! grep -q driver said'
refuses "cuda:0: the NVIDIA $too_old" train $small --out other --device cuda
finish
