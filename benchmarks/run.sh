#!/usr/bin/env bash
# Builds the benchmarks, runs all of them, and writes their figures to benchmarks/results.md, and a plot next to it:
#   - ratios to the GEMM library, the erased core, the machine's FMA peak and the MPI library's own collectives;
#   - a training step of GPT-2 124M, those of its peers, and its memory;
#   - a mixture of experts, its one-hot form and PyTorch;
#   - pipelines and FSDP, also over a slow link;
#   - over links: the overlap of FSDP, tensor and context parallelism, and the predictions of --plan;
#   - the cost of compiling.
# The file begins with a table of the aims and the figures reached (ratios.py).
# Run it on an idle machine. It takes about 45 minutes on two cores with a --torch-root and --llmc, 5 of them for building.
#   benchmarks/run.sh [--torch-root DIR]... [--llmc DIR]
#     --torch-root DIR   a newer PyTorch, in a folder that `scripts/torch-root.sh DIR` makes
#     --llmc DIR         a checkout of llm.c
#     --help             print this text
# Peers need to be installed, the plot needs python3-matplotlib, and links (network namespaces) need root and iproute2. The script
# names what is missing, and measures the rest. If a benchmark fails, results.md stays as it was.
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"

given=("$@")
peers=()
while [ $# -gt 0 ]; do
  case $1 in
    --torch-root | --llmc)
      [ $# -gt 1 ] || misuse "a folder follows $1"
      folder=$(cd "$from" && realpath -m "$2")
      case $1 in
        --torch-root) [ -f "$folder.ready" ] || misuse "$folder has no PyTorch; scripts/torch-root.sh $folder makes it" ;;
        --llmc)
          [ -f "$folder/train_gpt2.c" ] ||
            misuse "$folder is not a checkout of llm.c; git clone https://github.com/karpathy/llm.c $folder makes one"
          ;;
      esac
      peers+=("$1" "$folder")
      shift 2
      ;;
    *) misuse "unknown option '$1'; there are --torch-root, --llmc and --help" ;;
  esac
done

SECONDS=0
# The commit of the measured sources. Files that a run writes do not count as changes.
commit=$(git rev-parse --short HEAD 2>/dev/null || echo "no commit")
if [ -n "$(git status --porcelain -- . ':!benchmarks/results.md' ':!benchmarks/gpt2_step.svg' 2>/dev/null)" ]; then
  commit="$commit with changes"
fi
scripts/setup.sh
scripts/text.sh
mkdir -p build/log
as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
for package in python3 iproute2 python3-matplotlib libopenblas0-openmp python3-torch; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' $package 2>/dev/null)" = installed ] ||
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
      install --no-install-recommends $package >"build/log/benchmarks-$package.log" 2>&1 ||
    echo "run.sh: apt-get cannot install $package (build/log/benchmarks-$package.log)"
done
command -v python3 >/dev/null || die "python3 runs the benchmarks, and is not there"
echo "run.sh: building (build/log/benchmarks-build.log)"
quietly build/log/benchmarks-configure.log "configuring" cmake --preset release -B build/benchmarks \
  -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_BENCHMARKS=ON -DSHARDLIB_WITH_MPI=ON
quietly build/log/benchmarks-build.log "building" cmake --build build/benchmarks -j "$jobs" \
  --target figures peak moe_layer tensor_parallel ring_attention gpt2 gpt_fsdp gpt_pipeline

# Written next to what is built first: a run that ends early leaves the figures of the one before.
results=build/benchmarks/results.md
parts=build/benchmarks/parts.md
plot=build/benchmarks/gpt2_step.svg
rm -f "$results" "$parts" "$plot"
failed=()

say() { printf '%s\n' "$@" | tee -a "$parts"; }

quoted() { # as the shell reads it; DIR stands for a folder of this machine
  local word words=() previous=
  for word in "$@"; do
    case $previous in --torch-root | --llmc) word=DIR ;; esac
    words+=("$word")
    previous=$word
  done
  python3 -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "${words[@]}"
}

measure() { # COMMAND... : its output, under its name; status 77 says that the machine lacks what it takes
  local status=0 log=build/log/benchmarks-run.log
  say "" "By \`$(quoted "$@")\`:" "" '```'
  "$@" 2>"$log" | tee -a "$parts" || status=$?
  case $status in
    0) ;;
    77) say "not measured: $(tail -n 1 "$log")" ;;
    *)
      say "failed with status $status"
      cat "$log" >&2
      failed+=("$*")
      ;;
  esac
  say '```'
}

say "# Kernels and collectives"
figures=build/benchmarks/benchmarks/figures
measure "$figures"
measure mpirun -n 2 --bind-to none "$figures"
measure mpirun -n 4 --bind-to none --oversubscribe "$figures"
say "" "# One process and two ranks, nothing between"
measure benchmarks/gpt2_step.py --ours --batches 4x64 --only '^shardlib, (1 process(, [dt]=2)?|2 ranks)$' --turns 4
say "" "# A training step of GPT-2 124M"
# The system's Python is the one that has the package matplotlib.
measure /usr/bin/python3 benchmarks/gpt2_step.py --plot "$plot" "${peers[@]}"
if [ -f "$plot" ]; then say "" "![milliseconds a step](gpt2_step.svg)"; fi
measure benchmarks/step_profile.py
measure benchmarks/always_on.py
say "" "# Mixture of experts"
torch_roots=()
for ((i = 0; i < ${#peers[@]}; i += 2)); do
  [ "${peers[i]}" != --torch-root ] || torch_roots+=("${peers[@]:i:2}")
done
measure benchmarks/moe.py "${torch_roots[@]}"
say "" "# Memory"
measure benchmarks/memory.py
say "" "# Pipelines"
measure benchmarks/pipeline.py
measure benchmarks/pipeline.py --rate 1 --rounds 1
say "" "# Communication beside computation"
measure benchmarks/overlap.py
measure benchmarks/node_links.py
measure benchmarks/gather.py
say "" "# Tensor parallelism over links"
measure benchmarks/tensor_parallel.py
say "" "# Context parallelism over links"
measure benchmarks/ring_attention.py
say "" "# What --plan predicts of a step"
measure benchmarks/prediction.py
say "" "# Compile cost"
measure benchmarks/compile_cost_run.py

cores="$(nproc) cores,$(sed -n 's/^model name.*:/ /p' /proc/cpuinfo | head -n 1 | tr -s ' ')"
{
  printf '%s\n' "# Figures" "" "Printed by \`$(quoted benchmarks/run.sh "${given[@]}")\` on $(date -u +%Y-%m-%d), $cores, in \
$((SECONDS / 60)) minutes, of commit $commit." "" "By \`benchmarks/ratios.py\`, of the figures below:" ""
} >"$results"
echo
benchmarks/ratios.py "$parts" | tee -a "$results" || failed+=("benchmarks/ratios.py $parts")
{
  echo
  cat "$parts"
} >>"$results"

echo
if [ ${#failed[@]} != 0 ]; then
  printf 'run.sh: failed: %s\n' "${failed[@]}" >&2
  die "benchmarks/results.md is as it was; what was measured is in $results"
fi
rm -f benchmarks/gpt2_step.svg
if [ -f "$plot" ]; then mv "$plot" benchmarks/; fi
mv "$results" benchmarks/results.md
echo "run.sh: benchmarks/results.md, in $((SECONDS / 60)) minutes"
