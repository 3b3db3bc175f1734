#!/usr/bin/env bash
# Trains a small network on labelled photographs, then predicts some photographs in a second program.
#
# ARCHIVE=FILE   train on this archive or folder, which has a folder for each class; TEST=FILE is the held-back archive, if any
# DEVICE=cuda|cpu, CHECKPOINT=FILE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkpoint=${CHECKPOINT:-cshim/build/demo.safetensors}
train=() predict=examples/data/photos-test.tgz
if [[ -n ${ARCHIVE:-} ]]; then
  [[ -e $ARCHIVE ]] || { echo "demo: error: ARCHIVE=$ARCHIVE: no such file or folder (relative to $PWD)" >&2 && exit 1; }
  train+=(-archive "$ARCHIVE")
  if [[ -n ${TEST:-} ]]; then
    [[ -e $TEST ]] || { echo "demo: error: TEST=$TEST: no such file or folder (relative to $PWD)" >&2 && exit 1; }
    train+=(-test "$TEST")
  fi
  predict=${TEST:-$ARCHIVE}
fi
[[ -z ${DEVICE:-} ]] || train+=(-device "$DEVICE")
go run ./examples/01-train train "${train[@]}" -checkpoint "$checkpoint"
echo
echo "demo: predicting from the checkpoint, in a new process"
go run ./examples/01-train predict -checkpoint "$checkpoint" "$predict"
