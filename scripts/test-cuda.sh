#!/usr/bin/env bash
# Compiles the headers, the kernels, the op tests and the trainers with nvcc, for sm_80 and sm_90, without warnings:
#   - the headers, the kernels and the trainers as a program that uses shardlib on the CPU; one of them has to train;
#   - trainers and op tests as a build for GPUs. On the CPU they have to train, and to pass. On a machine without a GPU the
#     trainers have to end with an error if they ask for one.
# The script needs no GPU (scripts/gpu.sh is for machines that have one). If nvcc is missing, the script says so and ends with
# status 0.
#   scripts/test-cuda.sh           runs all of this
#   scripts/test-cuda.sh --quick   compiles headers, kernels, the two-layer FSDP example and the step of gpt_fsdp to PTX. It is a
#                                  part of scripts/test.sh
#   scripts/test-cuda.sh --kokkos DIR
#                                  instead builds gpt2 with the Kokkos of CUDA that is installed in DIR, which then starts the
#                                  kernels (docs/gpus.md), and runs it in the same way
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

target=check_cuda
architectures="80-real;90-real"
flags=(-DCMAKE_CUDA_FLAGS= "-DCMAKE_CUDA_FLAGS_RELEASE=-O3 -DNDEBUG")
kokkos=""
while [ $# -gt 0 ]; do
  case $1 in
    --quick) # errors of the sources show without optimization and machine code, too, in a sixth of the time
      target=check_cuda_quick architectures=90-virtual
      flags=("-DCMAKE_CUDA_FLAGS=-Xcicc -O0" "-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG")
      ;;
    --kokkos) kokkos=${2:?} && shift && kokkos=$(cd "$from" && realpath -m -- "$1") ;;
    *) misuse "unknown option '$1'; there are --quick and --kokkos DIR" ;;
  esac
  shift
done

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
  echo "test-cuda.sh: left out, as this machine has no nvcc (neither in PATH nor in /usr/local/cuda/bin)"
  exit 0
fi

if [ -n "$kokkos" ]; then
  quietly build/log/cuda-kokkos-configure.log "configuring with Kokkos" cmake --preset release -B build/cuda-kokkos \
    -U "SHARDLIB_KOKKOS_*" -U Kokkos_DIR -DSHARDLIB_LAUNCHER=kokkos "-DCMAKE_PREFIX_PATH=$kokkos" -DCMAKE_CUDA_COMPILER="$nvcc" \
    -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_BENCHMARKS=OFF
  # It is elsewhere if the one in DIR does not work.
  grep 'shardlib: Kokkos.*CUDA' build/log/cuda-kokkos-configure.log | grep -F ", $kokkos/" ||
    die "$kokkos has no Kokkos of CUDA that works; see build/log/cuda-kokkos-configure.log"
  quietly build/log/cuda-kokkos-build.log "linking with Kokkos" cmake --build build/cuda-kokkos -j "$jobs" --target gpt2
  # Kokkos links CUDA's driver. Where there is none, the toolkit's stub takes its place.
  if ! PATH=$PATH:/sbin:/usr/sbin ldconfig -p | grep 'libcuda\.so\.1' >/dev/null; then
    ln -sf "$(dirname "$(realpath "$nvcc")")/../lib64/stubs/libcuda.so" build/cuda-kokkos/libcuda.so.1
    export LD_LIBRARY_PATH="$root/build/cuda-kokkos${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  fi
  train_without_gpu build/log/cuda-kokkos-run.log gpt2 build/cuda-kokkos/examples/gpt2 --heads=2 --data=README.md
  echo "test-cuda.sh: gpt2 passed with the Kokkos in $kokkos"
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
    -DSHARDLIB_LAUNCHER=cuda -DCMAKE_CUDA_COMPILER="$nvcc" "-DCMAKE_CUDA_ARCHITECTURES=$architectures" \
    -DCMAKE_CUDA_FLAGS=-Werror=all-warnings "-DCMAKE_CUDA_FLAGS_RELEASE=-O1 -DNDEBUG" \
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" -DSHARDLIB_BUILD_TESTS=ON "-DSHARDLIB_TEST_FILES=ops_.*" -DSHARDLIB_BUILD_BENCHMARKS=OFF
  quietly build/log/cuda-launcher-build.log "linking a GPU build" \
    cmake --build build/cuda-launcher -j "$jobs" --target gpt2 gpt_fsdp gpt_pipeline moe shardlib_tests
  for program in "gpt2 --heads=2" "gpt_fsdp --n-kv=2 --d-head=4" "gpt_pipeline --n-kv=2 --d-head=4" "moe --n-kv=2 --d-head=4"; do
    read -ra command <<<"build/cuda-launcher/examples/$program --data=README.md"
    train_without_gpu build/log/cuda-launcher-run.log "$program" "${command[@]}"
  done
  quietly build/log/cuda-launcher-tests.log "op tests of a GPU build, on the CPU" \
    build/cuda-launcher/tests/shardlib_tests "~[exhaustive]~[.]"
fi
version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
echo "test-cuda.sh: $target passed with nvcc $version for $architectures"
