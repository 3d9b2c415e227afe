# shellcheck shell=sh
# Sourced by what runs tests: their files lie in memory where it has 2 GB for them. On a disk each checkpoint that a test
# saves waits until the disk has it.
available=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] && [ "${available:-0}" -gt 2000000 ]; then export TMPDIR=/dev/shm; fi
