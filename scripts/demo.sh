#!/usr/bin/env bash
# Trains examples/gpt_fsdp on the King James Bible with 2 MPI ranks, and samples a text from the model.
#   scripts/demo.sh [OPTION OF gpt_fsdp...]     for example: scripts/demo.sh --steps 20 --mesh d=1,t=2
# These options override those of the script. They may follow a --.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ranks=2
options=(--mesh "d=2,t=1" --data "$root/build/data/kjv.txt" --batch 32 --seq 128 --learning-rate 6e-3
  --layers 4 --d-model 128 --n-kv 2 --n-q-per-kv 1 --d-head 64 --d-ff 384 --max-tokens 300
  --run "$root/build/demo/runs/$(date -u +%Y%m%d-%H%M%S)")

if [ "${1:-}" = -- ]; then shift; fi
# gpt_fsdp refuses what it does not know, but only after the build. Each of its options stands in quotes in a source file.
known=$(grep -rhoE '"--[a-z0-9-]+"' include/shardlib/run examples | tr -d '"')
for word in "$@"; do
  name=${word%%=*}
  if [[ $name == --?* ]] && ! grep -qxF -e "$name" -e "--${name#--no-}" <<<"$known"; then
    misuse "unknown option '$name'; build/demo/examples/gpt_fsdp --help lists them, after a first run of this script"
  fi
done
case " $*" in *" --epochs"*) ;; *) options+=(--steps 500) ;; esac # the program takes only one of the two

scripts/setup.sh

scripts/text.sh

if [ ! -x build/demo/examples/gpt_fsdp ]; then echo "demo.sh: building gpt_fsdp (some minutes; build/log/demo-build.log shows how far)"; fi
# The demo has its own build folder, so it needs none of the tests' packages.
quietly build/log/demo-configure.log "configuring" cmake --preset release -B build/demo -DSHARDLIB_BUILD_TESTS=OFF \
  -DSHARDLIB_BUILD_BENCHMARKS=OFF -DSHARDLIB_WITH_MPI=ON
quietly build/log/demo-build.log "building" cmake --build build/demo -j "$jobs" --target gpt_fsdp

# If there is exactly one core for each rank, bind the ranks: ranks that move between cores lose a few percent of speed.
cores=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l) || cores=unknown
if [ "$cores" = $ranks ] && [ "$(nproc)" = $ranks ]; then
  binding=(--bind-to core)
else
  binding=(--bind-to none --oversubscribe)
fi
cd "$from"
exec mpirun -n $ranks "${binding[@]}" "$root/build/demo/examples/gpt_fsdp" "${options[@]}" "$@"
