#!/usr/bin/env bash
# Makes FOLDER a Python environment that builds and tests the Python package, unless it is one already; prints its
# interpreter: python_environment.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
python=$(cd "$1" && pwd)/bin/python
if ! "$python" -c 'import ml_dtypes, nanobind, numpy, pytest, tokenizers' 2>/dev/null; then
  echo "Installing nanobind, numpy, ml_dtypes, pytest and tokenizers into $1" >&2
  log=$1/install.log
  if ! { python3 -m venv "$1" && "$python" -m pip install 'nanobind>=2.4' numpy ml_dtypes pytest &&
         "$python" -m pip install --no-deps tokenizers; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "error: installing failed; the whole log is in $log" >&2
    exit 1
  fi
fi
echo "$python"
