#!/usr/bin/env bash
# Fuzzes every reader of the library (tests/fuzz/targets.hpp) with libFuzzer, AddressSanitizer and
# UndefinedBehaviorSanitizer. It starts from the files of tests/fuzz/corpus.
#   scripts/fuzz.sh [--seconds N] [TARGET...]   fuzzes each TARGET (default: all) for N seconds (default 60)
# Inputs that break a reader stay in build/fuzz/found. Add such an input to the corpus together with the fix.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

seconds=60
targets=()
while [ $# -gt 0 ]; do
  case $1 in
    --seconds)
      [ $# -gt 1 ] || misuse "--seconds needs a number"
      seconds=$2
      shift
      [[ $seconds =~ ^[1-9][0-9]*$ ]] || misuse "--seconds '$seconds' is not a number of seconds"
      ;;
    -*) misuse "unknown option '$1'; there is --seconds N" ;;
    *)
      [ -d "tests/fuzz/corpus/$1" ] || misuse "'$1' is not a target; they are: $(ls tests/fuzz/corpus | tr '\n' ' ')"
      targets+=("$1")
      ;;
  esac
  shift
done
if [ ${#targets[@]} = 0 ]; then mapfile -t targets < <(ls tests/fuzz/corpus); fi

scripts/setup.sh --test
quietly build/log/fuzz-configure.log "configuring fuzz" cmake --preset fuzz
quietly build/log/fuzz-build.log "building fuzz" cmake --build build/fuzz -j "$jobs" --target shardlib_fuzz

failed=0
fuzz() { # TARGET
  local folder=build/fuzz/found/$1
  mkdir -p "$folder/corpus"
  SHARDLIB_FUZZ_TARGET=$1 build/fuzz/tests/fuzz/shardlib_fuzz -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2000 \
    -max_len=20000 -artifact_prefix="$folder/" "$folder/corpus" "tests/fuzz/corpus/$1" >"build/log/fuzz-$1.log" 2>&1 &
  local process=$! status=0
  wait $process || status=$?
  rm -rf "/dev/shm/shardlib_fuzz_$process"
  if [ $status = 0 ]; then
    echo "fuzz.sh: $1: $(grep -oE 'Done [0-9]+ runs in [0-9]+ second' "build/log/fuzz-$1.log")s"
  else
    echo "fuzz.sh: $1: FAILED; the end of build/log/fuzz-$1.log:"
    grep -aE '^[a-z_]+: |ERROR|SUMMARY|Test unit written' "build/log/fuzz-$1.log" | cut -c 1-400
    return 1
  fi
}
# Run as many targets at a time as there are processors.
running=()
for target in "${targets[@]}"; do
  fuzz "$target" &
  running+=($!)
  if [ ${#running[@]} -ge "$jobs" ]; then
    wait "${running[0]}" || failed=$((failed + 1))
    running=("${running[@]:1}")
  fi
done
for process in "${running[@]}"; do wait "$process" || failed=$((failed + 1)); done
echo "fuzz.sh: ${#targets[@]} targets, $failed failed"
[ $failed = 0 ]
