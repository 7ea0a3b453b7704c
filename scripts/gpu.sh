#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds with the CUDA launcher, runs op and model tests on the GPU, a part of them under
# compute-sanitizer, and trains GPT-2: losses against the CPU's, and those on two GPUs against those on one where there are
# two, tokens/s and MFU, with PyTorch's where it is installed; the largest preset that fits, and the time of each op.
# Needs nvcc, cuBLAS and libraries of scripts/setup.sh (not Kokkos, MPI, oneDNN), and says which are missing; no network.
# CMAKE_PREFIX_PATH names the folders of libraries that are not the system's.
#   scripts/gpu.sh                    all of it
#   scripts/gpu.sh --no-tests         without the tests, which take most of the time to compile
#   scripts/gpu.sh -- OPTIONS         options of benchmarks/gpt2_gpu.py, as in -- --preset gpt2-774m --batch 8
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tests=yes
while [ $# -gt 0 ]; do
  case $1 in
    --no-tests) tests=no ;;
    -h | --help)
      sed -n '2,/^#   .*-- OPTIONS/s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) misuse "unknown option '$1'; there are --no-tests, and -- before options of benchmarks/gpt2_gpu.py" ;;
  esac
  shift
done

python3 benchmarks/gpt2_gpu.py --check-options "$@" # before minutes of compiling
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || die "no nvcc, neither in PATH nor in /usr/local/cuda/bin: install the CUDA toolkit"
command -v nvidia-smi >/dev/null || die "no nvidia-smi: this machine has no driver for NVIDIA GPUs"
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader ||
  die "nvidia-smi shows no GPU: check the driver, and CUDA_VISIBLE_DEVICES"
architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d . | sort -nu | paste -sd ';')
[[ $architectures =~ ^[0-9]+(\;[0-9]+)*$ ]] || die "nvidia-smi names no compute capability ('$architectures'): update the driver"
[ "${architectures%%;*}" -ge 80 ] || die "a GPU of compute capability ${architectures%%;*}, but the kernels need 80 (A100) or later"

# The libraries: a project that only looks for them.
check=$(mktemp -d)
cat >"$check/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.22)
project(libraries LANGUAGES C CXX)
set(SHARDLIB_WITH_OPENMP AUTO)
include("$root/cmake/ShardlibDependencies.cmake")
find_package(Catch2 QUIET)
find_path(CATCH catch2/catch.hpp)
if(NOT Catch2_FOUND AND NOT CATCH)
  message(STATUS "no Catch2")
endif()
EOF
mkdir -p build/log
found=yes
cmake -G Ninja -S "$check" -B "$check/build" >build/log/gpu-libraries.log 2>&1 || found=no
rm -rf "$check"
missing=$(tr -s '\n ' ' ' <build/log/gpu-libraries.log | sed -n 's/.*shardlib: not found: \([^;]*\);.*/\1/p')
[ -z "$missing" ] || die "not found: $missing: install them (on Debian scripts/setup.sh does), or name the folders that" \
  "have their include and lib in CMAKE_PREFIX_PATH, as in CMAKE_PREFIX_PATH=/opt/fmt:/opt/eigen scripts/gpu.sh"
[ $found = yes ] || die "looking for libraries failed; build/log/gpu-libraries.log: $(tail -n 5 build/log/gpu-libraries.log)"
if [ $tests = yes ] && grep -q 'no Catch2' build/log/gpu-libraries.log; then
  die "not found: Catch2, which the tests need: install it (Debian's catch2), or give --no-tests"
fi

# Tests of the kernels' bodies, of GPT-2, and of the ops that have kernels of their own for it.
files='kernel_.*|map_numbers|ops_(attention|dropout|einsum|index|linear_cross_entropy|norms|statistics)|model_gpt2'
quietly build/log/gpu-configure.log "configuring" cmake --preset release -B build/gpu -DSHARDLIB_LAUNCHER=cuda \
  -DCMAKE_CUDA_COMPILER="$nvcc" "-DCMAKE_CUDA_ARCHITECTURES=$architectures" -DSHARDLIB_BUILD_BENCHMARKS=OFF \
  "-DSHARDLIB_TEST_FILES=$files"
quietly build/log/gpu-build.log "building the trainers" cmake --build build/gpu -j "$jobs" --target gpt2 gpt_fsdp
if [ $tests = yes ]; then
  quietly build/log/gpu-build-tests.log "building the tests" cmake --build build/gpu -j "$jobs" --target shardlib_tests
  quietly build/log/gpu-tests.log "tests on the GPU" \
    ctest --test-dir build/gpu -R '^threads_gpu$' --no-tests=error --output-on-failure
  tail -n 3 build/log/gpu-tests.log
  sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$(readlink -f "$nvcc")")/compute-sanitizer")
  if [ -x "$sanitizer" ]; then
    # All tensors lie in one block of CUDA, so memcheck sees accesses outside of the pool alone. Races for the memory that a
    # block's threads share, and barriers that some of them miss, are those of any pool.
    declare -A looks=([memcheck]="causal_attention*"
      [racecheck]="causal_attention in segments,softmax and norms,max*,linear_cross_entropy of logits*"
      [synccheck]="causal_attention in segments,softmax and norms,max*,linear_cross_entropy of logits*")
    for tool in memcheck racecheck synccheck; do
      log=build/log/gpu-$tool.log
      SHARDLIB_TEST_DEVICE=gpu quietly "$log" "compute-sanitizer --tool $tool" \
        "$sanitizer" --tool $tool --error-exitcode 9 build/gpu/tests/shardlib_tests "${looks[$tool]}"
      grep -E '[1-9][0-9]* assertion' "$log" || die "compute-sanitizer: $log shows no assertion of the tests ${looks[$tool]}"
      echo "compute-sanitizer --tool $tool: no errors in the tests ${looks[$tool]}"
    done
  else
    echo "compute-sanitizer: left out, as it is neither in PATH nor beside nvcc"
  fi
fi
exec python3 benchmarks/gpt2_gpu.py --build build/gpu --largest --times "$@"
