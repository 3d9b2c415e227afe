# shellcheck shell=sh
# Sourced by the verbs' shell tests (VERB_test.sh PROGRAM): runs in a fresh folder, removed at the end.
#   succeeds PATTERN ARGUMENT...   exit code 0, and standard output matches the pattern (grep -E)
#   refuses PATTERN ARGUMENT...    exit code not 0, and standard error holds exactly one line "flashgla: error: ...",
#                                  which matches the pattern; standard output is empty
#   holds MESSAGE COMMAND...       the command succeeds
#   damage RUN OUT                 OUT is the newest checkpoint of a run in f32, but for its weights, which are NaN
flashgla=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
checks=0
failures=0

report() {
  failures=$((failures + 1))
  printf 'FAILED: %s\n' "$1"
  sed 's/^/  stdout: /' stdout | head -n 20
  sed 's/^/  stderr: /' stderr | head -n 20
}

succeeds() {
  pattern=$1
  shift
  checks=$((checks + 1))
  if ! "$flashgla" "$@" >stdout 2>stderr; then
    report "flashgla $* did not succeed"
  elif ! grep -Eq -- "$pattern" stdout; then
    report "flashgla $* does not say: $pattern"
  fi
}

refuses() {
  pattern=$1
  shift
  checks=$((checks + 1))
  if "$flashgla" "$@" >stdout 2>stderr; then
    report "flashgla $* was not refused"
  elif [ -s stdout ] || [ "$(grep -c '^flashgla: error: ' stderr)" -ne 1 ]; then
    report "flashgla $* does not end in one line of error alone"
  elif ! grep '^flashgla: error: ' stderr | grep -Eq -- "$pattern"; then
    report "flashgla $* does not say: $pattern"
  fi
}

holds() {
  message=$1
  shift
  checks=$((checks + 1))
  : >stdout
  "$@" >/dev/null 2>stderr || report "$message"
}

damage() {
  mkdir "$2" && cp "$1"/checkpoints/"$(cat "$1"/checkpoints/latest)"/* "$2" && python3 -c '
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
(size,) = struct.unpack("<Q", data[:8])
header = json.loads(data[8:8 + size])
del header["__metadata__"]  # the checksum is there
text = json.dumps(header).encode()
weights = struct.pack("<f", float("nan")) * ((len(data) - 8 - size) // 4)
open(sys.argv[1], "wb").write(struct.pack("<Q", len(text)) + text + weights)' "$2"/model.safetensors
}

finish() {
  printf '%s checks, %s failed\n' "$checks" "$failures"
  [ "$failures" -eq 0 ]
}
