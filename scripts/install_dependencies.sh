#!/usr/bin/env bash
# Installs what is missing of the Debian packages that FlashGLA builds with. Says what; does nothing when all is there.
# Without gnuplot, which draws loss curves and nothing else, it goes on.
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

optional=gnuplot-nox
find_missing() {  # sets missing
  missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
  done
}
find_missing
[ ${#missing[@]} -eq 0 ] && exit 0
give_up() {
  if [ "${missing[*]}" = "$optional" ]; then
    echo "notice: $optional is missing and could not be installed ($*); there will be no loss curves"
    exit 0
  fi
  echo "error: $*; missing: ${missing[*]}" >&2
  exit 1
}

command -v apt-get >/dev/null || give_up "there is no apt-get to install Debian packages with"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || give_up "run as root or install sudo"
  as_root=(sudo)
fi
echo "Installing: ${missing[*]}"
log=$(mktemp)
if ! { "${as_root[@]}" apt-get update && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
       apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  find_missing
  give_up "installing failed; the whole log is in $log"
fi
rm -f "$log"
