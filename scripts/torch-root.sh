#!/usr/bin/env bash
# Installs the PyTorch of a newer Debian into a folder, for benchmarks/run.sh --torch-root. The folder is a system of about
# 2 GB, made with debootstrap and used with chroot (root only). An existing one is used again; delete the folder to make it
# again.
#   scripts/torch-root.sh [--suite trixie|sid] DIR    makes the system in DIR, unless it exists
#   scripts/torch-root.sh DIR SCRATCH COMMAND...      runs a command in it: our sources are /shardlib, SCRATCH is /scratch
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source scripts/system.sh

suite=trixie
if [ "${1:-}" = --suite ]; then
  case ${2:-} in
    trixie | sid) suite=$2 ;;
    *) misuse "--suite '${2:-}' is not trixie or sid" ;;
  esac
  shift 2
fi
case ${1:-} in
  "") misuse "give the folder of the system" ;;
  -*) misuse "unknown option '$1'; there is --suite trixie|sid" ;;
esac
system=$(cd "$from" && realpath -m "$1")
shift
if [ ! -f "$system.ready" ]; then
  # Never overwrite a folder that this script has not made.
  [ ! -e "$system" ] || [ -f "$system.begun" ] ||
    die "$system exists, and this script has not made it: choose another folder, or delete it"
  mkdir -p "$(dirname "$system")"
  touch "$system.begun"
  new_system "$suite" "$system" build/log/torch
  # PyTorch's packages also accept the reference BLAS, which is fifty times slower than OpenBLAS.
  quietly build/log/torch-install.log "installing python3-torch in $system" \
    in_system "$system" apt-get -q -y install --no-install-recommends python3-torch libopenblas0-openmp
  mv "$system.begun" "$system.ready"
fi
if [ $# -gt 0 ]; then
  scratch=$(cd "$from" && realpath "$1")
  shift
  in_system "$system" "$@"
fi
