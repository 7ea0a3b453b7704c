#!/usr/bin/env bash
# Compiles the headers, the kernels, tests of ops and the trainers with nvcc, for sm_80 and sm_90, without warnings. Trains
# with one of them on the CPU. Then links three trainers with the launcher for GPUs, as a GPU build does. These have to train
# on the CPU, and to end with an error if they ask for a GPU on a machine without one. The script needs no GPU (scripts/gpu.sh
# is for machines that have one). If nvcc is missing, the script says so and ends with status 0.
#   scripts/test-cuda.sh           runs all of this
#   scripts/test-cuda.sh --quick   compiles headers, kernels, the two-layer FSDP example and a step of a GPT to PTX. It is a
#                                  part of scripts/test.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

target=check_cuda
architectures="80-real;90-real"
flags=(-DCMAKE_CUDA_FLAGS= "-DCMAKE_CUDA_FLAGS_RELEASE=-O3 -DNDEBUG")
for option in "$@"; do
  case $option in
    --quick) # errors of the sources show without optimization and machine code, too, in a sixth of the time
      target=check_cuda_quick architectures=90-virtual
      flags=("-DCMAKE_CUDA_FLAGS=-Xcicc -O0" "-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG")
      ;;
    *) misuse "unknown option '$option'; the only one is --quick" ;;
  esac
done

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
  echo "test-cuda.sh: left out, as this machine has no nvcc (neither in PATH nor in /usr/local/cuda/bin)"
  exit 0
fi

# The same options as in test.sh, so the compiler cache already has the library.
quietly build/log/cuda-configure.log "configuring with nvcc" cmake --preset release -B build/cuda \
  -DSHARDLIB_CHECK_CUDA=ON -DSHARDLIB_INSTALL_COMPILED=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 -DCMAKE_CUDA_COMPILER="$nvcc" \
  "-DCMAKE_CUDA_ARCHITECTURES=$architectures" "${flags[@]}" \
  -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_EXAMPLES=OFF -DSHARDLIB_BUILD_BENCHMARKS=OFF
quietly build/log/cuda-build.log "compiling with nvcc" cmake --build build/cuda -j "$jobs" --target $target
quietly build/log/cuda-run.log "mlp_fsdp compiled by nvcc" build/cuda/mlp_fsdp_cuda --mesh d=2

# A build for GPUs. Only its linker finds some mistakes, such as a kernel that no source instantiates.
if [ $target = check_cuda ]; then
  quietly build/log/cuda-launcher-configure.log "configuring a GPU build" cmake --preset release -B build/cuda-launcher \
    -DSHARDLIB_LAUNCHER=cuda -DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_ARCHITECTURES=90 \
    -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_BENCHMARKS=OFF
  quietly build/log/cuda-launcher-build.log "linking a GPU build" \
    cmake --build build/cuda-launcher -j "$jobs" --target gpt2 gpt_fsdp gpt_pipeline
  small=(--data=README.md "--mesh=d=1,t=1" --layers=1 --d-model=16 --d-ff=16 --batch=2 --seq=16 --steps=2 --warmup=1 --max-tokens=0)
  for program in "gpt2 --heads=2" "gpt_fsdp --n-kv=2 --d-head=4" "gpt_pipeline --n-kv=2 --d-head=4"; do
    read -ra command <<<"build/cuda-launcher/examples/$program"
    log=build/log/cuda-launcher-run.log
    quietly $log "$program on the CPU" "${command[@]}" "${small[@]}" --device=cpu
    if nvidia-smi -L >/dev/null 2>&1; then continue; fi # scripts/gpu.sh trains there
    status=0
    "${command[@]}" "${small[@]}" --device=gpu >$log 2>&1 || status=$?
    if [ $status != 2 ] || ! grep -q -E -e '--device gpu: this machine (has no driver|shows no GPU)' $log; then
      die "$program --device=gpu, where there is no GPU: status $status in place of 2; $log: $(tail -n 5 $log)"
    fi
  done
fi
version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
echo "test-cuda.sh: $target passed with nvcc $version for $architectures"
