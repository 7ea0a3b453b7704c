#!/usr/bin/env bash
# Builds shardlib for AMD's GPUs (-DSHARDLIB_LAUNCHER=hip), for gfx90a and gfx942, without warnings: the kernels, two trainers,
# and tests of map and of norms. Trains with both and runs the tests on the CPU, and checks the error of --device=gpu. The
# script needs no GPU, and runs nothing on one. If hipcc is missing, it says so and ends with status 0. CI does not run it.
#   scripts/test-hip.sh                       takes the hipcc of this machine, in PATH or in /opt/rocm/bin
#   scripts/test-hip.sh --sid [--folder DIR]  as root, takes that of Debian sid: installs sid, unless test-newer.sh has, and
#                                             hipcc in it. DIR is where the systems are (default /var/tmp/shardlib-newer)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

sid=no
folder=""
while [ $# -gt 0 ]; do
  case $1 in
    --sid) sid=yes ;;
    --folder) folder=${2:?} && shift && folder=$(cd "$from" && realpath -m -- "$1") ;;
    *) misuse "unknown option '$1'; there are --sid and --folder DIR" ;;
  esac
  shift
done
if [ $sid = no ] && [ -n "$folder" ]; then misuse "--folder names the folder of --sid, which is not given"; fi
log=build/log/hip

# there COMMAND... : runs it where hipcc is, which sees our sources in the folder $sources.
if [ $sid = yes ]; then
  source scripts/system.sh
  system=${folder:-/var/tmp/shardlib-newer}/sid sources=/shardlib build=/var/tmp/build-hip hipcc=hipcc
  there() { in_system "$system" "$@"; }
  packages=(hipcc libamdhip64-dev libhipblas-dev)
  if [ -f "$system.ready" ]; then
    quietly $log-update.log "apt-get update in sid" there apt-get -q update || die "apt-get update fails in $system"
    newer_packages sid "$system" $log "${packages[@]}" || die "hipcc does not install in $system; see $log-*.log"
  else
    newer_system sid "$system" $log "${packages[@]}" || die "no Debian sid with hipcc could be made; see $log-*.log"
  fi
else
  sources=$root build=$root/build/hip hipcc=$(command -v hipcc || echo /opt/rocm/bin/hipcc)
  there() { "$@"; }
  if [ ! -x "$hipcc" ]; then
    echo "test-hip.sh: left out, as this machine has no hipcc (neither in PATH nor in /opt/rocm/bin); --sid takes that of Debian sid"
    exit 0
  fi
fi
about=$(there "$hipcc" --version)
version=$(sed -n 's/^HIP version: *//p' <<<"$about")
clang=$(sed -n 's/^InstalledDir: *//p' <<<"$about")/clang++ # it compiles the C++ too
major=$(sed -n 's/.*clang version \([0-9]*\).*/\1/p' <<<"$about")
[ -n "$major" ] || die "$hipcc --version names no version of clang: $(head -n 3 <<<"$about")"
if [ "$major" -lt 19 ]; then
  echo "test-hip.sh: left out, as hipcc is clang $major here, and shardlib needs 19"
  exit 0
fi

quietly $log-configure.log "configuring with HIP" there cmake -S "$sources" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DSHARDLIB_LAUNCHER=hip "-DCMAKE_HIP_ARCHITECTURES=gfx90a;gfx942" -DCMAKE_CXX_COMPILER="$clang" \
  "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" "-DCMAKE_HIP_FLAGS_RELEASE=-O1 -DNDEBUG" "-DCMAKE_HIP_FLAGS=-Wall -Wextra -Werror" \
  -DSHARDLIB_BUILD_TESTS=ON "-DSHARDLIB_TEST_FILES=map_numbers|ops_norms" -DSHARDLIB_BUILD_BENCHMARKS=OFF
quietly $log-build.log "compiling with HIP" there cmake --build "$build" -j "$jobs" \
  --target gpu_kernels mlp_fsdp gpt_fsdp shardlib_tests
quietly $log-run.log "mlp_fsdp on the CPU" there "$build/examples/mlp_fsdp" --mesh d=2
quietly $log-tests.log "tests on the CPU" there "$build/tests/shardlib_tests" "~[exhaustive]"
train_without_gpu $log-run.log gpt_fsdp there "$build/examples/gpt_fsdp" "--data=$sources/README.md" --n-kv=2 --d-head=4
echo "test-hip.sh: passed with HIP $version for gfx90a and gfx942"
