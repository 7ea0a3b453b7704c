#!/usr/bin/env bash
# Builds and prints the figures: ratios against the GEMM library, the erased core, the machine's FMA peak and the MPI
# library's own collectives; a training step of GPT-2 124M beside PyTorch's, and its memory; then pipelines against FSDP,
# also over a slow link, and over links what overlaps and what --plan predicts (network namespaces: needs root). Run it on an idle machine. Writes benchmarks/results.md and the plot beside it.
#   benchmarks/run.sh [--torch-root DIR]... [--llmc DIR]
# --torch-root: a newer PyTorch, in a folder that `scripts/torch-root.sh DIR` makes; --llmc: a checkout of llm.c, with its
# starter pack.
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"

peers=()
while [ $# -gt 0 ]; do
  case $1 in
    --torch-root | --llmc) peers+=("$1" "$(realpath "${2:?a folder follows $1}")") && shift ;;
    *) die "unknown option '$1'; there are --torch-root and --llmc" ;;
  esac
  shift
done

scripts/setup.sh
scripts/text.sh
# Peers and the plot. What cannot be installed is named by the benchmark that misses it.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  quietly build/log/benchmarks-install.log "installing peers" \
    apt-get -q -y install --no-install-recommends python3-torch libopenblas0-openmp python3-matplotlib || true
fi
quietly build/log/benchmarks-configure.log "configuring" cmake --preset release -B build/benchmarks \
  -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_BENCHMARKS=ON -DSHARDLIB_WITH_MPI=ON
quietly build/log/benchmarks-build.log "building" cmake --build build/benchmarks -j "$jobs" --target figures peak gpt2 gpt_fsdp gpt_pipeline
figures=build/benchmarks/benchmarks/figures

over_links() { # COMMAND... : a benchmark over network namespaces
  if [ "$(id -u)" = 0 ] && command -v ip >/dev/null && command -v tc >/dev/null; then
    "$@"
  else
    echo "(not measured: $* needs root and iproute2)"
  fi
}

{
  echo "# Figures"
  echo
  echo "Printed by \`benchmarks/run.sh\` on $(date -u +%Y-%m-%d), $(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)."
  echo
  echo '```'
  "$figures"
  mpirun -n 2 --bind-to none "$figures"
  echo '```'
  echo
  echo "# A training step of GPT-2 124M"
  echo
  echo '```'
  rm -f benchmarks/gpt2_step.svg
  # The system's Python is the one that has the package matplotlib.
  /usr/bin/python3 benchmarks/gpt2_step.py --plot benchmarks/gpt2_step.svg "${peers[@]}"
  echo '```'
  if [ -f benchmarks/gpt2_step.svg ]; then
    echo
    echo "![milliseconds a step](gpt2_step.svg)"
  fi
  echo
  echo "# Memory"
  echo
  echo '```'
  benchmarks/memory.py
  echo '```'
  echo
  echo "# Pipelines"
  echo
  echo '```'
  benchmarks/pipeline.py
  echo
  over_links benchmarks/pipeline.py --rate 1gbit --rounds 1
  echo '```'
  echo
  echo "# Communication beside computation"
  echo
  echo '```'
  over_links benchmarks/overlap.py
  echo '```'
  echo
  echo "# What --plan predicts of a step"
  echo
  echo '```'
  over_links benchmarks/prediction.py
  echo '```'
} | tee benchmarks/results.md
