#!/usr/bin/env bash
# Installs the missing ones of the Debian packages that shardlib needs.
#   scripts/setup.sh          the packages to build the library and to run the demo
#   scripts/setup.sh --test   also those of the tests (Catch2, clang 19, ccache, Python 3 with zarr and markdown-it)
#   scripts/setup.sh --list [--test]   prints the packages, one on each line, and installs nothing
# Prints nothing if no package is missing. Run it as root, or with a sudo that asks for no password.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# "a|b": one of the two is enough. If both are missing, the first that the system offers is installed.
packages="g++ cmake ninja-build libkokkos-dev|libtrilinos-kokkos-dev libeigen3-dev libfmt-dev libopenmpi-dev openmpi-bin
  libdnnl-dev librandom123-dev libtomlplusplus-dev nlohmann-json3-dev libutf8proc-dev
  libblosc-dev zlib1g-dev libzstd-dev bible-kjv"
list=no
for option in "$@"; do
  case $option in
    --test) packages="$packages catch2 graphviz python3 python3-zarr python3-markdown-it ccache clang-19 libclang-rt-19-dev" ;;
    --list) list=yes ;;
    *) misuse "unknown option '$option'; there are --test and --list" ;;
  esac
done
if [ $list = yes ]; then
  printf '%s\n' $packages
  exit 0
fi

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# Sets `names` to the missing packages. Of alternatives it takes the first in the system's package lists, or the last if
# the lists have none of them.
choose() {
  local package one chosen
  names=()
  for package in "${missing[@]}"; do
    chosen=${package##*|}
    for one in ${package//|/ }; do
      if apt-cache show "$one" >/dev/null 2>&1; then
        chosen=$one
        break
      fi
    done
    names+=("$chosen")
  done
}

missing=()
for package in $packages; do
  found=no
  for one in ${package//|/ }; do
    if installed "$one"; then found=yes; fi
  done
  if [ $found = no ]; then missing+=("$package"); fi
done
if [ ${#missing[@]} = 0 ]; then exit 0; fi

command -v apt-get >/dev/null || die "this system has no apt-get; install by other means: ${missing[*]}"
as_root=()
if [ "$(id -u)" != 0 ]; then
  if ! sudo -n true 2>/dev/null; then
    choose
    die "packages are missing and sudo would ask for a password. Run as root:
  apt-get update && apt-get install ${names[*]}"
  fi
  as_root=(sudo -n)
fi
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 "$@"
}

# An update may fail because of a source that has none of our packages. So only a failed installation is an error.
updated=yes
apt update >/dev/null 2>&1 || updated=no
choose
echo "setup.sh: installing ${names[*]}"
hint=""
if [ $updated = no ]; then hint=" ('apt-get update' failed too: is there a network?)"; fi
quietly build/log/setup.log "installing packages$hint" apt install --no-install-recommends "${names[@]}"
