#!/bin/sh
# Compiler launcher for CUDA: runs the command, keeps what ptxas says beside the object as OBJECT.ptxas (registers and
# spills of every kernel; scripts/checks/ptxas.py reads it), and shows the rest.
previous=''
object=''
for argument; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" 2>"$object.ptxas"
status=$?
grep -v -e '^ptxas info' -e '^ *[0-9]* bytes stack frame' "$object.ptxas" >&2
exit $status
