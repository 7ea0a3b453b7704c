#!/usr/bin/env bash
# Builds shardlib and runs its tests on a newer Debian: the newest g++, Kokkos 5 with OpenMP, Catch2 3, newer Open MPI, fmt
# and Eigen. It installs that Debian into a folder with debootstrap, and uses it with chroot (root only). An existing system
# and build are used again; delete the folder to start again. CI does not run this script.
#   scripts/test-newer.sh [--suite sid|trixie] [--compiler g++|clang++] [--folder DIR] [--clean] [CTEST OPTION...]
#     --suite, --compiler   the Debian release (default sid; trixie if only that exists, or sid does not install), and the
#                           compiler (default g++)
#     --folder DIR          where the systems are (default /var/tmp/shardlib-newer)
#     --clean               installs the system again
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source scripts/system.sh

suite=""
compiler=g++
folder=/var/tmp/shardlib-newer
clean=no
while [ $# -gt 0 ]; do
  case $1 in
    --suite) suite=${2:?} && shift ;;
    --compiler) compiler=${2:?} && shift ;;
    --folder) folder=${2:?} && folder=$(cd "$from" && realpath -m -- "$folder") && shift ;;
    --clean) clean=yes ;;
    *) break ;;
  esac
  shift
done
log=build/log/newer

if [ -z "$suite" ]; then # Kokkos 5 is in sid only; trixie still has newer compilers and MPI
  if [ -f "$folder/sid.ready" ] || [ ! -f "$folder/trixie.ready" ]; then suite=sid; else suite=trixie; fi
fi
system=$folder/$suite

if [ $clean = yes ]; then rm -rf "$system.ready"; fi
if [ ! -f "$system.ready" ]; then
  if ! newer_system "$suite" "$system" $log; then
    [ "$suite" = sid ] || die "no newer system could be made; see $log-*.log"
    echo "test-newer.sh: sid does not install at the moment; trixie instead"
    suite=trixie
    system=$folder/$suite
    [ -f "$system.ready" ] || newer_system "$suite" "$system" $log || die "no newer system could be made; see $log-*.log"
  fi
else
  newer_packages "$suite" "$system" $log || die "packages that shardlib needs by now do not install in $system"
fi

echo "test-newer.sh: Debian $suite, $(in_system "$system" "$compiler" --version | head -n 1)"
in_system "$system" dpkg-query -W -f '  ${Package} ${Version}\n' cmake libkokkos-dev libtrilinos-kokkos-dev libeigen3-dev \
  libfmt-dev libcatch2-dev libopenmpi-dev libdnnl-dev librandom123-dev 2>/dev/null || true

build=/var/tmp/build-$compiler
quietly $log-configure.log "configuring" in_system "$system" cmake -S /shardlib -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS_RELEASE="-O2 -DNDEBUG"
grep 'shardlib:' $log-configure.log
# The build continues after an error, to show all of them.
quietly $log-build.log "building" in_system "$system" cmake --build "$build" -j "$jobs" -- -k 0
in_system "$system" ctest --test-dir "$build" --output-on-failure --no-tests=error "$@"
