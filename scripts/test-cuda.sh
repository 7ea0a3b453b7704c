#!/usr/bin/env bash
# Compiles with nvcc: the headers, the kernels, tests of ops and the trainers, for sm_80 and sm_90, without warnings.
# Trains with one of them on the CPU; a GPU is not needed (scripts/gpu.sh is for machines that have one). Where nvcc is
# missing, it says so and ends with status 0.
#   scripts/test-cuda.sh           all of it
#   scripts/test-cuda.sh --quick   headers, kernels and the two-layer FSDP example, for sm_90; a part of scripts/test.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

target=check_cuda
architectures="80-real;90-real"
for option in "$@"; do
  case $option in
    --quick) target=check_cuda_quick architectures=90-real ;;
    *) misuse "unknown option '$option'; the only one is --quick" ;;
  esac
done

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
  echo "test-cuda.sh: left out, as this machine has no nvcc (neither in PATH nor in /usr/local/cuda/bin)"
  exit 0
fi

quietly build/log/cuda-configure.log "configuring with nvcc" cmake --preset release -B build/cuda \
  -DSHARDLIB_CHECK_CUDA=ON -DSHARDLIB_INSTALL_COMPILED=ON -DCMAKE_CUDA_COMPILER="$nvcc" \
  "-DCMAKE_CUDA_ARCHITECTURES=$architectures" \
  -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_EXAMPLES=OFF -DSHARDLIB_BUILD_BENCHMARKS=OFF
quietly build/log/cuda-build.log "compiling with nvcc" cmake --build build/cuda -j "$jobs" --target $target
quietly build/log/cuda-run.log "mlp_fsdp compiled by nvcc" build/cuda/mlp_fsdp_cuda --mesh d=2
version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
echo "test-cuda.sh: $target passed with nvcc $version for $architectures"
