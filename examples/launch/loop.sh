#!/usr/bin/env bash
# Starts N processes of a program on this host as the ranks of one job, and ends all when one fails. SIGTERM, SIGINT and
# SIGHUP end the ranks, a second one at once. Its status is that of the first rank that has one other than 0.
#
#   loop.sh N PROGRAM [ARGUMENT...]
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "usage: loop.sh N PROGRAM [ARGUMENT...]" >&2; exit 2; }
export WORLD_SIZE=$1 LOCAL_WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29500} TORCHSTREAM_JOB
TORCHSTREAM_JOB="loop $$ at $(date +%s)"
shift
declare -A running=()
status=0
told=

# Notes the ranks that have ended, and the first status other than 0. wait -n is not enough: it
# forgets a rank that a signal ended before the call.
note() {
  local pid ended
  for pid in "${!running[@]}"; do
    kill -0 "$pid" 2>/dev/null && continue
    unset "running[$pid]"
    ended=0
    wait "$pid" || ended=$?
    ((status != 0)) || status=$ended
  done
}

# Ends the ranks that run, and waits for them. Each gets SIGTERM once, since a second one ends a rank
# that writes its checkpoint. Those that have not ended after 30 s are killed.
stop() {
  local n
  ((${#running[@]} == 0)) || kill "${!running[@]}" 2>/dev/null || true
  for ((n = 0; n < 300 && ${#running[@]} > 0; n++)); do
    sleep 0.1
    note
  done
  ((${#running[@]} == 0)) || kill -KILL "${!running[@]}" 2>/dev/null || true
  while ((${#running[@]} > 0)); do
    sleep 0.1
    note
  done
}
trap stop EXIT
trap 'told=yes; trap '\''kill -KILL "${!running[@]}" 2>/dev/null || true'\'' TERM INT HUP' TERM INT HUP

# Each rank has a process group of its own, so that Ctrl-C in a terminal reaches the loop alone.
set -m
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$rank "$@" </dev/null &
  running[$!]=1
done
set +m
while ((${#running[@]} > 0)); do
  note
  if [[ -n $told ]] || ((status != 0)); then
    stop
  else
    sleep 0.1
  fi
done
exit "$status"
