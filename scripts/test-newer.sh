#!/usr/bin/env bash
# Builds shardlib and runs its tests on a newer Debian, in a folder of its own (a debootstrap and a chroot; root only):
# the newest g++, Kokkos 5 with OpenMP, Catch2 3, newer Open MPI, fmt and Eigen. What is there is used again; delete
# the folder to begin afresh. Not part of CI.
#   scripts/test-newer.sh [--suite sid|trixie] [--compiler g++|clang++] [--folder DIR] [--clean] [CTEST OPTION...]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

suite=""
compiler=g++
folder=/var/tmp/shardlib-newer
clean=no
while [ $# -gt 0 ]; do
  case $1 in
    --suite) suite=${2:?} && shift ;;
    --compiler) compiler=${2:?} && shift ;;
    --folder) folder=${2:?} && shift ;;
    --clean) clean=yes ;;
    *) break ;;
  esac
  shift
done
log=build/log/newer

[ "$(id -u)" = 0 ] || die "must run as root (debootstrap, chroot)"
command -v debootstrap >/dev/null ||
  quietly $log-setup.log "installing debootstrap" apt-get -q -y install --no-install-recommends debootstrap

# The mirror is the host's own: its first Debian archive that is not the one for security.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
  awk '$1 ~ /\/debian\/?$/ {print $1; exit}')
[ -n "$mirror" ] || die "the apt sources name no Debian mirror"

if [ -z "$suite" ]; then # Kokkos 5 is in sid only; trixie still has newer compilers and MPI
  if [ -f "$folder/sid.ready" ] || [ ! -f "$folder/trixie.ready" ]; then suite=sid; else suite=trixie; fi
fi
system=$folder/$suite

# in_system COMMAND... : runs it in the chroot, with /proc, /sys, /dev/shm and our sources (read-only) bound into a mount
# namespace that ends with the command. Nothing stays mounted whatever happens.
in_system() {
  unshare --mount --propagation private bash -euc '
    system=$1 source=$2
    shift 2
    mount -t proc proc "$system/proc"
    mount -t sysfs -o ro sysfs "$system/sys"
    mkdir -p "$system/dev/shm" "$system/dev/pts" "$system/shardlib"
    mount -t tmpfs tmpfs "$system/dev/shm"
    mount -t devpts devpts "$system/dev/pts"
    mount --bind "$source" "$system/shardlib"
    mount -o remount,bind,ro "$system/shardlib"
    exec chroot "$system" env -i HOME=/root TERM=dumb LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin \
      DEBIAN_FRONTEND=noninteractive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
      PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 CCACHE_DIR=/var/cache/ccache "$@"
  ' in_system "$system" "$root" "$@"
}

make_system() {
  rm -rf "$system" "$system.ready"
  mkdir -p "$folder"
  echo "test-newer.sh: debootstrap of $suite into $system"
  quietly $log-debootstrap.log "debootstrap" debootstrap --variant=minbase "$suite" "$system" "$mirror" || return 1
  # A mirror that stands still (a snapshot) has an index past its date; its signature is checked all the same.
  echo 'Acquire::Check-Valid-Until "false";' >"$system/etc/apt/apt.conf.d/90shardlib"
  cp /etc/resolv.conf /etc/hosts "$system/etc/"
  quietly $log-update.log "apt-get update in $suite" in_system apt-get -q update || return 1
  install_packages || return 1
  touch "$system.ready"
}

# What setup.sh installs, with the suite's own clang; of alternatives the first that the suite has.
install_packages() {
  local package one names=(clang libomp-dev)
  for package in $(scripts/setup.sh --list --test | grep -v '^clang-'); do
    for one in ${package//|/ }; do
      if in_system apt-cache show "$one" >/dev/null 2>&1; then break; fi
    done
    names+=("$one")
  done
  quietly $log-install.log "installing packages in $suite" \
    in_system apt-get -q -y install --no-install-recommends "${names[@]}"
}

if [ $clean = yes ]; then rm -rf "$system.ready"; fi
if [ ! -f "$system.ready" ]; then
  if ! make_system; then
    [ "$suite" = sid ] || die "no newer system could be made; see $log-*.log"
    echo "test-newer.sh: sid does not install at the moment; trixie instead"
    suite=trixie
    system=$folder/$suite
    [ -f "$system.ready" ] || make_system || die "no newer system could be made; see $log-*.log"
  fi
else
  install_packages || die "packages that shardlib has come to need do not install in $system"
fi

echo "test-newer.sh: Debian $suite, $(in_system "$compiler" --version | head -n 1)"
in_system dpkg-query -W -f '  ${Package} ${Version}\n' cmake libkokkos-dev libtrilinos-kokkos-dev libeigen3-dev \
  libfmt-dev libcatch2-dev libopenmpi-dev libdnnl-dev librandom123-dev 2>/dev/null || true

build=/var/tmp/build-$compiler
quietly $log-configure.log "configuring" in_system cmake -S /shardlib -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS_RELEASE="-O2 -DNDEBUG"
grep 'shardlib:' $log-configure.log
# Every error counts here, so the build goes on after the first.
quietly $log-build.log "building" in_system cmake --build "$build" -j "$jobs" -- -k 0
in_system ctest --test-dir "$build" --output-on-failure --no-tests=error "$@"
