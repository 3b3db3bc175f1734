#!/usr/bin/env bash
# Starts N processes of a program on this host as the ranks of one job, and ends all when one fails.
# Its status is that of the rank that failed.
#
#   loop.sh N PROGRAM [ARGUMENT...]
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "usage: loop.sh N PROGRAM [ARGUMENT...]" >&2; exit 2; }
export WORLD_SIZE=$1 LOCAL_WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29500} TORCHSTREAM_JOB="loop $$ at $(date +%s)"
shift
declare -A running=()

# Notes the ranks that have ended, and returns the status of one that failed. wait -n is not enough:
# it forgets a rank that a signal ended before the call.
note() {
  local pid
  for pid in "${!running[@]}"; do
    kill -0 "$pid" 2>/dev/null && continue
    unset "running[$pid]"
    wait "$pid" || return
  done
}

# Ends the ranks that run, and waits for them. It kills those that have not ended after 10 s.
stop() {
  local n
  for ((n = 0; n < 100 && ${#running[@]} > 0; n++)); do
    ((n > 0)) || kill "${!running[@]}" 2>/dev/null || true
    sleep 0.1
    note || true
  done
  if ((${#running[@]} > 0)); then
    kill -KILL "${!running[@]}" 2>/dev/null || true
    wait "${!running[@]}" || true
  fi
}
trap stop EXIT

for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$rank "$@" &
  running[$!]=1
done
while ((${#running[@]} > 0)); do
  note || exit
  sleep 0.1
done
