#!/usr/bin/env bash
# Makes FOLDER a Python environment that has PACKAGE..., unless it is one already; prints its interpreter:
#   python_environment.sh FOLDER PACKAGE... [--no-deps PACKAGE...]   PACKAGE: as pip takes them, such as 'nanobind>=2.4'
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
mkdir -p "$folder"
python=$(cd "$folder" && pwd)/bin/python
installed=$folder/installed
if [ ! -x "$python" ] || [ "$(cat "$installed" 2>/dev/null)" != "$*" ]; then
  echo "Installing $* into $folder" >&2
  log=$folder/install.log
  packages=()
  wanted=$*
  while [ $# -gt 0 ] && [ "$1" != --no-deps ]; do packages+=("$1"); shift; done
  if ! { python3 -m venv "$folder" && "$python" -m pip install "${packages[@]}" &&
         { [ $# -eq 0 ] || "$python" -m pip install "$@"; }; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "error: installing failed; the whole log is in $log" >&2
    exit 1
  fi
  echo "$wanted" >"$installed"
fi
echo "$python"
