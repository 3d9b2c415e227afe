#!/usr/bin/env bash
# Fetches the headers of cuDNN's frontend, of one version with known contents, and prints their folder:
#   cudnn_frontend.sh [FOLDER]   FOLDER: where they go (build/cudnn-frontend); nothing is fetched where it has them
# They come from NVIDIA's Python package, of which nothing else is kept.
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "error: there is no flag $1; see $0 --help" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
folder=${1:-build/cudnn-frontend}
version=1.32.0
digest=106a646b280df5f76f14a0f8215a60422dae9614bf8281205d5655eba9c4d299

digest_of() {  # of the files below FOLDER and their names
  (cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)
}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ ! -d "$folder/include" ] || [ "$(digest_of "$folder/include")" != "$digest" ]; then
  echo "Fetching the headers of cuDNN's frontend $version into $folder" >&2
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  python=$(scripts/python_environment.sh "$work/python" pip)
  "$python" -m pip download --quiet --retries 1 --no-deps --only-binary :all: -d "$work" "nvidia-cudnn-frontend==$version" >&2
  "$python" -m zipfile -e "$work"/*.whl "$work/package"
  found=$(digest_of "$work/package/include")
  if [ "$found" != "$digest" ]; then
    echo "error: the headers of cuDNN's frontend $version are not those that are known: $found" >&2
    exit 1
  fi
  rm -rf "$folder/include"
  mv "$work/package/include" "$folder/include"
fi
echo "$folder/include"
