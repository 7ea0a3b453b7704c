#!/usr/bin/env bash
# Builds, tests and measures shardlib on a machine with an NVIDIA GPU:
#   - builds with the CUDA launcher;
#   - runs tests of ops and models on the GPU, and some of them under compute-sanitizer;
#   - trains GPT-2, and compares its losses with those of the CPU and, if there are two GPUs, those of two GPUs with those of
#     one;
#   - measures tokens/s and MFU, also those of PyTorch if it is installed, the largest preset that fits, and the time of each
#     family of kernels.
# If a stage fails, the others still run, and the status is 1.
# The script needs g++, CMake, ninja, Python, nvcc, cuBLAS and the libraries of scripts/setup.sh except Kokkos, MPI and oneDNN.
# It says which are missing. It needs no network. CMAKE_PREFIX_PATH names the folders of libraries outside of the system's.
#   scripts/gpu.sh                    runs all stages
#   scripts/gpu.sh --no-tests         leaves out the tests, which take most of the time to compile
#   scripts/gpu.sh --libraries DIR    copies this Debian's libraries into DIR, for a machine without them and without a
#                                     network. There, run CMAKE_PREFIX_PATH=DIR scripts/gpu.sh
#   scripts/gpu.sh -- OPTIONS         passes OPTIONS to benchmarks/gpt2_gpu.py, as in -- --preset gpt2-774m --batch 8
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Copies headers, CMake's files and shared libraries, and the libraries that these load.
copy_libraries() { # DIR
  local to=$1 triplet file real
  local packages=(libeigen3-dev libfmt-dev librandom123-dev libtomlplusplus-dev nlohmann-json3-dev libutf8proc-dev libblosc-dev
    zlib1g-dev libzstd-dev catch2)
  if dpkg -L libcatch2-dev >/dev/null 2>&1; then packages+=(libcatch2-dev); fi # Catch2 3: its package catch2 is empty
  dpkg -L "${packages[@]}" >/dev/null 2>&1 || die "--libraries: not all of these packages are installed: ${packages[*]}: run scripts/setup.sh --test"
  triplet=$(gcc -print-multiarch)
  mkdir -p "$to/lib/$triplet"
  # The file of a library is in another package than its header, so copy the files to which links lead.
  dpkg -L "${packages[@]}" | grep -E '^/usr/(include|lib|share/(eigen3|cmake))/' | sort -u | while read -r file; do
    if [ -f "$file" ]; then
      mkdir -p "$to/$(dirname "${file#/usr/}")"
      cp -L "$file" "$to/${file#/usr/}"
    fi
  done
  for file in "$to/lib/$triplet"/*.so; do
    real=/usr/${file#"$to/"}
    ldd "$real" | awk '/=> \// && $1 !~ /^(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt)\.so/ {print $3}' |
      while read -r needed; do cp -L "$needed" "$to/lib/$triplet/"; done
    cp "$file" "$to/lib/$triplet/$(objdump -p "$real" | awk '$1 == "SONAME" {print $2}')"
    cp "$file" "$to/lib/$triplet/$(basename "$(readlink -f "$real")")" # as CMake's files name it
  done
}

tests=yes
while [ $# -gt 0 ]; do
  case $1 in
    --no-tests) tests=no ;;
    --libraries)
      [ $# = 2 ] || misuse "--libraries takes the folder to copy them into, and nothing after it"
      command -v dpkg >/dev/null || die "--libraries copies those of Debian's packages, and this system has no dpkg"
      to=$(cd "$from" && realpath -m "$2")
      copy_libraries "$to"
      echo "copied $(du -sh "$to" | cut -f 1) into $to: take it to the machine with the GPU, and start there" \
        "CMAKE_PREFIX_PATH=DIR scripts/gpu.sh"
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) misuse "unknown option '$1'; there are --no-tests, --libraries DIR, and -- before options of benchmarks/gpt2_gpu.py" ;;
  esac
  shift
done

for tool in python3 g++ cmake ninja; do
  command -v $tool >/dev/null || die "no $tool: install it (on Debian scripts/setup.sh does)"
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

# A CMake project that only looks for the libraries says which are missing. The libraries that they load are in the same
# folders.
triplet=$(gcc -print-multiarch 2>/dev/null || true)
IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
for prefix in "${prefixes[@]}"; do
  LD_LIBRARY_PATH="$prefix/lib:$prefix/lib/$triplet${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
done
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
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

# The tests of the kernels' bodies, of GPT-2, and of the ops that have kernels of their own for a GPU.
files='kernel_.*|map_numbers|ops_(attention|dropout|einsum(_bias)?|index|linear_cross_entropy|norms|statistics)|model_gpt2'
# With several GPUs, those of collectives by NCCL.
if [ "$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)" -gt 1 ]; then files+='|ops_collectives'; fi
quietly build/log/gpu-configure.log "configuring" cmake --preset release -B build/gpu -DSHARDLIB_LAUNCHER=cuda \
  -DCMAKE_CUDA_COMPILER="$nvcc" "-DCMAKE_CUDA_ARCHITECTURES=$architectures" -DSHARDLIB_BUILD_BENCHMARKS=OFF \
  "-DSHARDLIB_TEST_FILES=$files" -DSHARDLIB_TEST_TIMEOUT=3600
quietly build/log/gpu-build.log "building the trainers" cmake --build build/gpu -j "$jobs" --target gpt2 gpt_fsdp
failed=()
run_tests() {
  quietly build/log/gpu-build-tests.log "building the tests" cmake --build build/gpu -j "$jobs" --target shardlib_tests || return 1
  quietly build/log/gpu-tests.log "tests on the GPU" \
    ctest --test-dir build/gpu -R '^threads_gpu$' --no-tests=error --output-on-failure || return 1
  tail -n 3 build/log/gpu-tests.log
}
# All tensors lie in one allocation of CUDA, so memcheck finds only accesses outside of the pool. racecheck and synccheck look
# at the shared memory and the barriers of thread blocks, which do not depend on the pool. The tools keep data of their own in
# the GPU's memory, so the pool leaves room for it.
declare -A looks=([memcheck]="causal_attention*"
  [racecheck]="causal_attention in segments,softmax and norms,max*,linear_cross_entropy of logits*"
  [synccheck]="causal_attention in segments,softmax and norms,max*,linear_cross_entropy of logits*")
sanitize() { # TOOL
  local log=build/log/gpu-$1.log more=()
  # The library throws for each call of its own that fails. memcheck also reports what other libraries expect to fail, and may
  # report a query of an event that is not there yet.
  if [ "$1" = memcheck ]; then more=(--report-api-errors no); fi
  if ! SHARDLIB_TEST_DEVICE=gpu SHARDLIB_GPU_MEMORY=0.2 "$sanitizer" --tool "$1" "${more[@]}" --error-exitcode 9 \
    build/gpu/tests/shardlib_tests "${looks[$1]}" >"$log" 2>&1; then
    if grep -m 1 'Device not supported' "$log"; then
      echo "compute-sanitizer --tool $1: left out, as it does not support this machine"
      return 0
    fi
    echo "compute-sanitizer --tool $1 failed; the end of $log:" >&2
    tail -n 30 "$log" | cut -c 1-300 >&2
    return 1
  fi
  if ! grep -E '[1-9][0-9]* assertion' "$log"; then
    echo "compute-sanitizer: $log shows no assertion of the tests ${looks[$1]}" >&2
    return 1
  fi
  echo "compute-sanitizer --tool $1: no errors in the tests ${looks[$1]}"
}
if [ $tests = yes ]; then
  run_tests || failed+=("tests on the GPU")
  sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$(readlink -f "$nvcc")")/compute-sanitizer")
  if [ ! -x build/gpu/tests/shardlib_tests ]; then
    echo "compute-sanitizer: left out, as there are no tests"
  elif [ -x "$sanitizer" ]; then
    for tool in memcheck racecheck synccheck; do sanitize $tool || failed+=("compute-sanitizer --tool $tool"); done
  else
    echo "compute-sanitizer: left out, as it is neither in PATH nor beside nvcc"
  fi
fi
python3 benchmarks/gpt2_gpu.py --build build/gpu --largest --times "$@" || failed+=("benchmarks/gpt2_gpu.py")
if [ ${#failed[@]} -gt 0 ]; then
  printf 'gpu.sh: failed, see above: %s\n' "${failed[@]}" >&2
  exit 1
fi
