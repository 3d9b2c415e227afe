#!/usr/bin/env bash
# Tries a wheel where nothing of this project's packages is: a minimal Debian with Python alone.
#   wheel_check.sh WHEEL [FOLDER]
# Makes FOLDER (/tmp/flashgla-bare) with debootstrap when it is not there, installs the wheel into an empty virtual
# environment in it, and trains, evaluates and generates with the program and the package. Needs root, debootstrap,
# unshare and Debian's mirror; the wheel must be for that Debian's Python (bookworm: 3.11).
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
wheel=$1 bare=${2:-/tmp/flashgla-bare}
[ -x "$bare/usr/bin/python3" ] ||
  debootstrap --variant=minbase --include=python3,python3-venv,python3-numpy bookworm "$bare" >/dev/null
rm -rf "$bare/opt/try"
mkdir -p "$bare/opt/try"
cp "$wheel" "$bare/opt/try"
cat >"$bare/opt/try/try.sh" <<'END'
set -euo pipefail
cd /opt/try
python3 -m venv --system-site-packages venv
venv/bin/pip install --quiet --no-index ./*.whl
export PATH=/opt/try/venv/bin:$PATH
mkdir empty
cd empty
ldconfig -p | grep -E 'dnnl|hwy|sentencepiece|gomp|utf8proc|libfmt' && { echo "error: this machine has the libraries"; exit 1; }
flashgla --version
flashgla data stories --megabytes 0.2 --seed 1 --out stories.jsonl --quiet >/dev/null
flashgla data prepare stories.jsonl --out tokens --tokenizer train:512 --quiet >/dev/null
flashgla train --preset gla-tiny --data tokens --out run --steps 5 --length 64 --batch 4 --quiet >/dev/null
flashgla evaluate run --data tokens --quiet --device cpu
flashgla generate run --prompt "It was" --max-tokens 8 --seed 1 --device cpu >/dev/null
flashgla doctor | tail -n 1
python3 - <<'PYTHON'
import flashgla
import numpy as np

x = np.ones((1, 70, 2, 16), np.float32)
flashgla.gated_linear_attention(x, x, x, -x)
maps = open("/proc/self/maps").read()
assert not [name for name in ("dnnl", "sentencepiece", "pcre2", "utf8proc", "xxhash", "_models") if name in maps]
model = flashgla.LanguageModel.load("run")
print(model.loglikelihood([("It was", " a")]), repr(model.generate("It was", max_tokens=5, seed=1).text))
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "flashgla" in line and ".so" in line}
print(f"with CUDA: {flashgla.with_cuda}; loaded from the wheel: {sorted(path.split('/')[-1] for path in libraries)}")
PYTHON
END
size=$(stat -c %s "$wheel")
echo "$(basename "$wheel"): $((size / 1000000)) MB"
[ "$size" -le 60000000 ] || { echo "error: more than 60 MB" >&2; exit 1; }
# $ORIGIN of a program is read from /proc.
unshare --mount --pid --fork bash -c "mount -t proc proc '$bare/proc' && exec chroot '$bare' bash /opt/try/try.sh"
echo "the wheel works in $bare"
