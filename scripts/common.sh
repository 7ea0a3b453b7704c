# shellcheck shell=bash
# Sourced by the other scripts: where things are, how many jobs, and one clear message when a step fails.
set -euo pipefail
exec </dev/null # no command here may ask a question

if [ "${1-}" = --help ]; then # the comment at the head of the script
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
fi

from=$PWD # paths that a user gives are relative to it
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

die_with() {
  local status=$1
  shift
  echo "$(basename "$0"): $*" >&2
  exit "$status"
}
die() { die_with 1 "$@"; }
misuse() { die_with 2 "$@"; } # a wrong command line, for which the programs end with status 2 as well

# Compiling the largest example takes 2 GB, so memory bounds the jobs as well as the processors do.
jobs=$(nproc)
# A container may have less than the machine; its limit is a number of bytes, or "max".
gigabytes=$(awk '/^MemAvailable:/ {least = $2 * 1024} /^[0-9]+$/ && $1 < least {least = $1}
                 END {print int(least / 1073741824)}' /proc/meminfo <(cat /sys/fs/cgroup/memory.max 2>/dev/null))
if [ "$jobs" -gt $((gigabytes / 2)) ]; then jobs=$((gigabytes / 2)); fi
if [ "$jobs" -lt 1 ]; then jobs=1; fi

# Open MPI runs as root only if both variables are set. The launcher of version 5 and later has other names for them.
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# quietly LOG WHAT COMMAND... : writes the command's output to LOG, and shows its end if the command fails.
quietly() {
  local log=$1 what=$2
  shift 2
  mkdir -p "$(dirname "$log")"
  if "$@" >"$log" 2>&1; then return 0; fi
  {
    echo "$(basename "$0"): $what failed: $*"
    grep -m 5 -E '(error|Error|FAILED)[: ]' "$log" | cut -c 1-300 || true
    echo "... the end of $log:"
    tail -n 30 "$log" | cut -c 1-300
  } >&2
  return 1
}

# train_without_gpu LOG NAME COMMAND... : trains for two steps on the CPU with the program of a GPU build that COMMAND starts. If
# this machine has no GPU, it also has to end with an error when it is asked for one.
train_without_gpu() {
  local log=$1 name=$2 status=0
  local command=("${@:3}" "--mesh=d=1,t=1" --layers=1 --d-model=16 --d-ff=16 --batch=2 --seq=16 --steps=2 --warmup=1 --max-tokens=0)
  quietly "$log" "$name on the CPU" "${command[@]}" --device=cpu
  if [ -e /dev/kfd ] || nvidia-smi -L >/dev/null 2>&1; then return 0; fi # what happens on a GPU is not this script's
  "${command[@]}" --device=gpu >"$log" 2>&1 || status=$?
  if [ $status != 2 ] || ! grep -q -E -e '--device gpu: this machine (has no driver|shows no GPU)' "$log"; then
    die "$name --device=gpu, where there is no GPU: status $status in place of 2; $log: $(tail -n 5 "$log")"
  fi
}
