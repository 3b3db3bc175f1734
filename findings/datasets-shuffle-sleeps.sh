#!/usr/bin/env bash
# datasets 5.2.0
#
# The iterator of a shuffled stream of several Parquet files sleeps for 5 seconds after its last row, and when a program
# leaves its loop early.
#
#   shuffled: 5 s; not shuffled: 0 s; shuffled, max_buffer_input_shards=1: 0 s
#
# Each epoch takes 5 seconds more, in each worker. The sleep gives PyArrow time to end its threads.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages datasets==5.2.0
export HF_HOME=$scratch/hf HF_HUB_OFFLINE=1
got=$(py <<'EOF'
import time

import datasets

datasets.disable_progress_bars()
files = [f"{k}.parquet" for k in range(2)]
for name in files:
    datasets.Dataset.from_dict({"number": [1, 2, 3]}).to_parquet(name)
rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
list(rows)


def sleeps(rows):
    start = time.monotonic()
    list(rows)
    return f"{(time.monotonic() - start) // 5 * 5:.0f} s"


print(f"shuffled: {sleeps(rows.shuffle(seed=1))}; not shuffled: {sleeps(rows)}; "
      f"shuffled, max_buffer_input_shards=1: {sleeps(rows.shuffle(seed=1, max_buffer_input_shards=1))}")
EOF
)
expect 'shuffled: 5 s; not shuffled: 0 s; shuffled, max_buffer_input_shards=1: 0 s' "$got"
