#!/usr/bin/env bash
# Builds and prints the first figures: ratios against the GEMM library, the erased core, the machine's FMA peak and the MPI
# library's own collectives; then pipelines against FSDP, also over a slow link (network namespaces: needs root). Run it on an idle machine. Writes benchmarks/results.md too.
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"

scripts/setup.sh
scripts/text.sh
quietly build/log/benchmarks-configure.log "configuring" cmake --preset release -B build/benchmarks \
  -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_BENCHMARKS=ON -DSHARDLIB_WITH_MPI=ON
quietly build/log/benchmarks-build.log "building" cmake --build build/benchmarks -j "$jobs" --target figures gpt_pipeline
figures=build/benchmarks/benchmarks/figures

{
  echo "# First figures"
  echo
  echo "Printed by \`benchmarks/run.sh\` on $(date -u +%Y-%m-%d), $(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)."
  echo
  echo '```'
  "$figures"
  mpirun -n 2 --bind-to none "$figures"
  echo '```'
  echo
  echo "# Pipelines"
  echo
  echo '```'
  benchmarks/pipeline.py
  echo
  if [ "$(id -u)" = 0 ] && command -v ip >/dev/null && command -v tc >/dev/null; then
    benchmarks/pipeline.py --rate 1gbit --rounds 1
  else
    echo "(not over a slow link: benchmarks/pipeline.py --rate 1gbit needs root and iproute2)"
  fi
  echo '```'
} | tee benchmarks/results.md
