#!/usr/bin/env bash
# A newer PyTorch than this system's packages have, for benchmarks/run.sh --torch-root: that of another Debian, in a folder
# of its own (a debootstrap and a chroot of about 2 GB; root only). What is there is used again; delete the folder to begin
# afresh.
#   scripts/torch-root.sh [--suite trixie|sid] DIR    makes it, where it is not there yet
#   scripts/torch-root.sh DIR SCRATCH COMMAND...      runs a command in it: our sources are /shardlib, SCRATCH is /scratch
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source scripts/system.sh

suite=trixie
if [ "${1:-}" = --suite ]; then
  suite=${2:?a suite follows --suite}
  shift 2
fi
[ $# -ge 1 ] || misuse "give the folder to make"
system=$(cd "$from" && realpath -m "$1")
shift
if [ ! -f "$system.ready" ]; then
  # Never over a folder that holds something else.
  [ ! -e "$system" ] || [ -f "$system.begun" ] ||
    die "$system is there, and was not begun by this script: choose another folder, or delete it"
  mkdir -p "$(dirname "$system")"
  touch "$system.begun"
  new_system "$suite" "$system" build/log/torch
  # PyTorch's packages are content with the reference BLAS, which is fifty times slower.
  quietly build/log/torch-install.log "installing python3-torch in $system" \
    in_system "$system" apt-get -q -y install --no-install-recommends python3-torch libopenblas0-openmp
  mv "$system.begun" "$system.ready"
fi
if [ $# -gt 0 ]; then
  scratch=$(cd "$from" && realpath "$1")
  shift
  in_system "$system" "$@"
fi
