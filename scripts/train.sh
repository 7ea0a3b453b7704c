#!/usr/bin/env bash
# Runs a trainer under mpirun, and starts it again when a rank dies. The run resumes from its newest whole checkpoint.
#
#   scripts/train.sh [--ranks N,M,...] [--hosts HOST:SLOTS,...] [--restarts N] [--mpirun "COMMAND"] -- PROGRAM OPTION...
#
#   --ranks N,M,...  the number of ranks (default 1). With several numbers, the script takes the first for which --hosts has
#                    room, and the next one after two starts in a row without a new checkpoint. "{ranks}" in an option of
#                    the program stands for the number: --mesh d={ranks},t=1. Every mesh can resume from every checkpoint.
#   --hosts ...      the hosts on which ranks run. Before each start the script leaves out hosts that do not answer. It asks
#                    by TRAIN_PROBE (default "ssh -o BatchMode=yes -o ConnectTimeout=5"), followed by the host and "true".
#   --restarts N     the number of restarts in a row without a new checkpoint after which the script gives up (default 5).
#                    It waits 1, 2, 4 ... seconds between them, at most 60.
#   --mpirun "..."   the launcher and its flags (default mpirun)
#
# The program needs --run DIR. If it ends with status 0 or 2 (a wrong option), the script ends with the same status. SIGTERM,
# SIGINT, SIGHUP and SIGUSR1 make the run save and stop. The script then ends with 0, or with 143 if the run has failed.
set -uo pipefail

misuse() {
  echo "train.sh: $*; see $0 --help" >&2
  exit 2
}
say() { echo "train.sh: $*" >&2; }

if [ "${1-}" = --help ]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
fi
ranks=(1) hosts=() restarts=5 launcher=(mpirun)
while [ $# -gt 0 ]; do
  option=$1
  [ "$option" = -- ] && shift && break
  [[ $option == --* ]] || misuse "'$option' stands before --"
  [ $# -gt 1 ] || misuse "$option needs a value"
  case $option in
    --ranks) IFS=, read -r -a ranks <<<"$2" ;;
    --hosts) IFS=, read -r -a hosts <<<"$2" ;;
    --restarts) restarts=$2 ;;
    --mpirun) read -r -a launcher <<<"$2" ;;
    *) misuse "unknown option '$option'" ;;
  esac
  shift 2
done
for number in "${ranks[@]}"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || misuse "--ranks: '$number' is not a number of ranks"
done
[[ $restarts =~ ^[0-9]+$ ]] || misuse "--restarts: '$restarts' is not a number"
for host in "${hosts[@]}"; do
  [[ $host =~ ^[^:]+:[1-9][0-9]*$ ]] || misuse "--hosts: '$host' is not HOST:SLOTS"
done
[ $# -gt 0 ] || misuse "no program follows --"
command -v "${launcher[0]}" >/dev/null || misuse "there is no command '${launcher[0]}'"

run=
previous=
for word in "$@"; do
  [ "$previous" = --run ] && run=$word
  [[ $word == --run=* ]] && run=${word#--run=}
  previous=$word
done
[ -n "$run" ] || misuse "the program has no --run DIR, so it would have no checkpoint to resume from"

# Prints the name of the newest complete checkpoint, or nothing.
newest() { cat "$run/checkpoints/LATEST" 2>/dev/null; }

# Sets `at` to the hosts that answer, and `slots` to their room.
find_hosts() {
  local probe host
  read -r -a probe <<<"${TRAIN_PROBE:-ssh -o BatchMode=yes -o ConnectTimeout=5}"
  at=() slots=0
  for host in "${hosts[@]}"; do
    if "${probe[@]}" "${host%:*}" true </dev/null >/dev/null 2>&1; then
      at+=("$host")
      slots=$((slots + ${host##*:}))
    else
      say "host ${host%:*} does not answer: it is left out"
    fi
  done
}

# Prints the ranks that a process has started on this machine, directly or through another process. It looks at all threads,
# because Open MPI 6 starts ranks from a thread of its own.
local_ranks() {
  local pid child
  for pid in "$1" $(cat "/proc/$1/task/"*/children 2>/dev/null); do
    for child in $(cat "/proc/$pid/task/"*/children 2>/dev/null); do
      grep -qsz '^OMPI_COMM_WORLD_RANK=' "/proc/$child/environ" && echo "$child"
    done
  done
}

# Ends an mpirun whose ranks on this machine have ended, after 10 seconds. Open MPI 4's mpirun may wait forever then, for nodes
# that it cannot reach, or because a rank died while it connected. Ranks of other machines are not visible here.
mind() {
  local had_ranks=no alone=0 most=30
  if [ ${#hosts[@]} = 0 ]; then had_ranks=yes; fi
  while kill -0 "$1" 2>/dev/null; do
    if [ -n "$(local_ranks "$1")" ]; then
      had_ranks=yes alone=0 most=10
    elif [ $had_ranks = yes ] && [ $((alone += 2)) -ge $most ]; then
      say "no rank is left on this machine, but ${launcher[0]} still waits: killing it"
      kill -KILL "$1"
    fi
    sleep 2
  done
}

stopped=no told=no
child=
# mpirun passes SIGUSR1 on to the ranks, which save and stop. Other signals make mpirun kill the ranks. A signal that comes
# before mpirun has started them is lost, so wait for them.
pass_on() {
  local waited
  for waited in {1..50}; do
    [ -n "$(local_ranks "$1")" ] && break
    sleep 0.1
  done
  [ "$waited" = 1 ] || sleep 1
  kill -USR1 "$1" 2>/dev/null
}
tell() {
  if [ $stopped = no ] || [ -z "$child" ] || [ $told = yes ]; then return; fi
  told=yes
  pass_on "$child" &
}
stop() {
  stopped=yes
  tell
}
trap stop TERM INT HUP USR1

choice=0  # the number of ranks is ranks[choice]
failed=0  # starts in a row without a new checkpoint
while :; do
  where=()
  if [ ${#hosts[@]} -gt 0 ]; then
    find_hosts
    while [ "$choice" -lt ${#ranks[@]} ] && [ "${ranks[$choice]}" -gt "$slots" ]; do choice=$((choice + 1)); done
    if [ "$choice" = ${#ranks[@]} ]; then
      say "the hosts that answer have room for $slots ranks, and --ranks has no smaller number than ${ranks[-1]}"
      exit 1
    fi
    where=(--host "$(IFS=,; echo "${at[*]}")")
  fi
  if [ $stopped = yes ]; then exit 143; fi
  count=${ranks[$choice]}
  before=$(newest)
  started=$SECONDS
  # A session of its own, so the terminal's Ctrl-C reaches this script alone.
  setsid "${launcher[@]}" -n "$count" "${where[@]}" "${@//\{ranks\}/$count}" &
  child=$!
  tell
  mind "$child" &
  minder=$!
  wait "$child"
  status=$?
  while [ "$status" -gt 128 ] && kill -0 "$child" 2>/dev/null; do # a trap has interrupted the wait
    wait "$child"
    status=$?
  done
  child=
  kill "$minder" 2>/dev/null
  wait "$minder" 2>/dev/null
  if [ $status = 0 ] || [ $status = 2 ]; then exit $status; fi
  if [ $stopped = yes ]; then
    say "stopped by a signal, and the run ended with status $status"
    exit 143
  fi
  after=$(newest)
  if [ "$after" != "$before" ]; then failed=0; fi
  failed=$((failed + 1))
  if [ $failed -gt "$restarts" ]; then
    say "status $status after $((SECONDS - started)) s; $failed starts in a row made no new checkpoint: giving up"
    exit 1
  fi
  if [ $failed -ge 2 ] && [ $((failed % 2)) = 0 ] && [ $((choice + 1)) -lt ${#ranks[@]} ]; then choice=$((choice + 1)); fi
  delay=$((failed < 7 ? 1 << (failed - 1) : 60))
  say "status $status after $((SECONDS - started)) s; starting again from ${after:-the beginning} in $delay s with ${ranks[$choice]} ranks"
  sleep "$delay" &
  wait $!
  if [ $stopped = yes ]; then exit 143; fi
done
