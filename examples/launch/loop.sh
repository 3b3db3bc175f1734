#!/usr/bin/env bash
# Starts N processes of a program on this host as the ranks of one job, and ends all when one fails.
#
#   loop.sh N PROGRAM [ARGUMENT...]
set -euo pipefail
(($# >= 2)) || { echo "usage: loop.sh N PROGRAM [ARGUMENT...]" >&2; exit 2; }
export WORLD_SIZE=$1 LOCAL_WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29500}
shift
ranks=()
stop() { kill "${ranks[@]}" 2>/dev/null || true; }
trap stop EXIT
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$rank "$@" &
  ranks+=($!)
done
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  wait -n "${ranks[@]}" || exit # with the status of the rank that failed
done
