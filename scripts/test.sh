#!/usr/bin/env bash
# Installs missing packages, builds shardlib and tests it:
#   - the release build with g++: threads, MPI, the gallery of compile errors, a project that uses the installed library;
#   - a selection of the tests under AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer;
#   - every tenth header, the examples and the benchmarks compiled with clang 19;
#   - each fuzzer for 2 seconds;
#   - if nvcc is installed, headers and an example compiled with it.
#   scripts/test.sh           runs all of this
#   scripts/test.sh --quick   runs the release build and its tests only
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

quick=no
for option in "$@"; do
  case $option in
    --quick) quick=yes ;;
    *) misuse "unknown option '$option'; the only one is --quick" ;;
  esac
done

scripts/setup.sh --test

passed=0
failed=0
summary=()
started=$SECONDS

# The script ends its background jobs when it ends, also after Ctrl-C, which does not reach them.
declare -A background=()
in_background() { # COMMAND...: runs it in a process group of its own, whose number is $!
  set -m
  "$@" &
  set +m
  background[$!]=$!
}
await() { # GROUP: waits for its end, and returns its status
  local status=0
  wait "$1" || status=$?
  unset "background[$1]"
  return $status
}
end_background() {
  local group
  for group in ${background[@]+"${background[@]}"}; do kill -- "-$group" 2>/dev/null || true; done
}
trap end_background EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# stage NAME FUNCTION: runs the function, and notes its time and result. A failure does not end the script, so one run shows
# all failures.
stage() {
  local name=$1 begin=$SECONDS
  echo "== $name"
  if "$2"; then
    summary+=("ok      $name ($((SECONDS - begin)) s)")
  else
    summary+=("FAILED  $name ($((SECONDS - begin)) s)")
  fi
  echo "${summary[-1]}"
}

check() { # COMMAND...: runs it, and counts it as one test
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)) && return 1; fi
}

build() { # PRESET TARGET [CMAKE OPTION...]
  local preset=$1 target=$2
  shift 2
  local begin=$SECONDS
  quietly "build/log/$preset-configure.log" "configuring $preset" cmake --preset "$preset" \
    -DSHARDLIB_BUILD_TESTS=ON -DSHARDLIB_TEST_BATCH=6 -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 "$@" &&
    quietly "build/log/$preset-build.log" "building $preset" \
      cmake --build "build/$preset" -j "$jobs" --target "$target" &&
    echo "built $preset ($((SECONDS - begin)) s)"
}

run_tests() { # PRESET [CTEST OPTION...]
  ctest --test-dir "build/$1" --output-on-failure --no-tests=error -j 2 "${@:2}" >"build/log/$1-ctest.log" 2>&1
}

count_tests() { # PRESET STATUS: prints and counts the results of run_tests
  local log="build/log/$1-ctest.log" line
  if [ "$2" = 0 ]; then
    grep -E '^ *[0-9]+/[0-9]+ Test|tests passed' "$log"
  else
    cut -c 1-400 "$log"
  fi
  line=$(grep -E 'tests? failed out of [0-9]+' "$log" || true)
  if [[ $line =~ ([0-9]+)\ tests?\ failed\ out\ of\ ([0-9]+) ]]; then
    failed=$((failed + BASH_REMATCH[1]))
    passed=$((passed + BASH_REMATCH[2] - BASH_REMATCH[1]))
  else
    failed=$((failed + 1))
  fi
  return "$2"
}

built() { # builds; a failure counts as one failed test
  if ! build "$@"; then failed=$((failed + 1)) && return 1; fi
}

# A build at low priority. It uses the cores while the other jobs wait, or keep only one core busy.
build_at_leisure() { # PRESET [GROUP]: begins when GROUP has ended
  renice -n 19 $BASHPID >/dev/null
  if [ -n "${2:-}" ]; then tail --pid="$2" -f /dev/null; fi
  build "$1" shardlib_tests
}
declare -A building=() sanitized=() # for each preset, the process group of its build, and that of its tests
start_builds() { # starts the builds of the sanitizers, unless they have been started
  if [ ${#building[@]} = 0 ]; then
    in_background build_at_leisure asan
    building[asan]=$!
    in_background build_at_leisure tsan "${building[asan]}"
    building[tsan]=$!
  fi
}
start_tests() { # PRESET REGEX: waits for the build of the preset, and starts its tests
  start_builds
  if ! await "${building[$1]}"; then failed=$((failed + 1)) && return 1; fi
  in_background run_tests "$1" -R "$2"
  sanitized[$1]=$!
}
quick_fuzz() { scripts/fuzz.sh --seconds 2 >build/log/fuzz.log 2>&1; }
quick_cuda() { quietly build/log/cuda.log "compiling with nvcc" scripts/test-cuda.sh --quick; }
fuzz="" cuda="" # their process groups

# The test of examples/template links the library that is installed here. The programs take their kernels from it, too, so
# -O1 is enough for their own code.
release() {
  local status=0
  # The last compilations of this build leave a core idle. If the memory is enough for twice as many compilers, the builds of
  # the sanitizers use it.
  if [ $quick = no ] && [ "$gigabytes" -ge $((6 * jobs)) ]; then start_builds; fi
  built release all -DSHARDLIB_INSTALL_COMPILED=ON -DSHARDLIB_BUILD_BENCHMARKS=OFF -DSHARDLIB_EXAMPLE_FLAGS=-O1 || return 1
  if [ $quick = no ]; then start_builds; fi
  run_tests release || status=$?
  count_tests release $status
}
# The tests of the two builds, the fuzzers and nvcc keep one core busy each, so they run while other stages compile.
# AddressSanitizer's tests also run over MPI without shared memory, whose code threads do not run.
sanitizers() {
  local status=0
  start_tests asan '^(threads|mpi_without_shm)$' || status=1
  in_background quick_fuzz
  fuzz=$!
  in_background quick_cuda
  cuda=$!
  start_tests tsan '^threads$' || status=1
  return $status
}
sanitized_tests() {
  local status=0 preset result
  for preset in "${!sanitized[@]}"; do
    result=0
    await "${sanitized[$preset]}" || result=$?
    count_tests "$preset" $result || status=1
  done
  return $status
}
# clang has compiled the gallery in the release stage, and the library's definitions in the stage of AddressSanitizer.
# tests/includes.py has checked the includes of all headers.
clang() {
  check quietly build/log/clang-configure.log "configuring clang" cmake --preset clang -DSHARDLIB_BUILD_TESTS=OFF \
    -DSHARDLIB_CHECK_HEADERS_EVERY=10 &&
    check quietly build/log/clang-headers.log "compiling headers and programs with clang" \
      cmake --build build/clang -j "$jobs" --target check_headers check_programs
}

fuzz_and_cuda() {
  local status=0
  check await "$cuda" && tail -n 1 build/log/cuda.log || status=1
  if ! await "$fuzz"; then
    status=1 failed=$((failed + 1))
    echo "test.sh: fuzzing the readers failed; the end of build/log/fuzz.log:" >&2
    tail -n 30 build/log/fuzz.log >&2
  else
    passed=$((passed + 1))
  fi
  return $status
}

stage "release: g++, all tests" release
if [ $quick = no ]; then
  stage "sanitizers: addresses and undefined behavior; threads" sanitizers
  stage "clang 19: headers, examples and benchmarks" clang
  stage "fuzz: every reader for a few seconds; nvcc: headers and an example" fuzz_and_cuda
  stage "sanitizers: the rest of their tests" sanitized_tests
fi

echo
echo "test.sh: $((SECONDS - started)) s"
printf '  %s\n' "${summary[@]}"
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
