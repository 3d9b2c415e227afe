#!/usr/bin/env bash
# Installs what is missing of the Debian packages that FlashGLA builds with. Says what; does nothing when all is there.
#   install_dependencies.sh [python] [check]   with what the Python package needs, with what scripts/check.sh needs
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config   # build
  libdnnl-dev                        # oneDNN: matrix products on the CPU
  libhwy-dev                         # Highway: SIMD with run-time dispatch
  libsentencepiece-dev libpcre2-dev libutf8proc-dev   # tokenizers
  librandom123-dev                   # counter-based random numbers, on every device
  nlohmann-json3-dev libcli11-dev libfmt-dev libxxhash-dev
  libgtest-dev libgmock-dev          # tests
  python3                            # the structure test, and checks of JSON output
  gnuplot-nox                        # loss curves as PNG
)
for group; do
  case $group in
    python) packages+=(python3-dev python3-venv) ;;
    check) packages+=(clang llvm libclang-rt-dev libomp-dev clang-format clang-tidy shellcheck git python3-venv) ;;
    *) echo "error: there is no group '$group'; known: python, check" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "error: these Debian packages are missing and there is no apt-get to install them: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "error: run as root or install sudo; missing: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "Installing: ${missing[*]}"
log=$(mktemp)
if ! { "${as_root[@]}" apt-get update && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
       apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "error: installing failed; the whole log is in $log" >&2
  exit 1
fi
rm -f "$log"
