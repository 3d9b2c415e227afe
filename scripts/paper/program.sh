# shellcheck shell=bash
# Sourced by the scripts of figures and of table 2: sets root, and flashgla, the program that they run. usage() says
# what is above a script's first command, take_options() reads its arguments, need_program() stops where the program is
# not built.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
flashgla=${FLASHGLA_PROGRAM:-$root/build/bin/flashgla}

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

need_program() {
  command -v "$flashgla" >/dev/null && return
  echo "error: there is no $flashgla" >&2
  echo "to mend: scripts/build.sh release, in the project's folder, or FLASHGLA_PROGRAM=the program" >&2
  exit 1
}

# "NAME..." ARGUMENTS: --some-name VALUE sets some_name; only these names, each with a value.
take_options() {
  local names=" $1 " name
  shift
  while [ $# -gt 0 ]; do
    name=${1#--}
    [[ $# -ge 2 && $1 == --* && $names == *" $name "* ]] || usage
    printf -v "${name//-/_}" %s "$2"
    shift 2
  done
}
