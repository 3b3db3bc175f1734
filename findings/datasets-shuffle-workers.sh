#!/usr/bin/env bash
# datasets 5.2.0, torchdata 0.11.0, torch 2.11.0
#
# A shuffled stream in a StatefulDataLoader does not resume with 2 workers: IndexError at every state. It does with one worker,
# and with shuffle's option max_buffer_input_shards=1.
#
#   1 worker: resumed; 2 workers: IndexError; 2 workers, max_buffer_input_shards=1: resumed
#
# A worker loads its state into the stream of all files first, then into the one of its files. The page Stream shows a
# StatefulDataLoader with workers. An interrupted training ends with an error when it resumes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 torchdata==0.11.0 datasets==5.2.0
export HF_HOME=$scratch/hf HF_HUB_OFFLINE=1
got=$(py <<'EOF'
import logging

import datasets
import torchdata.stateful_dataloader

datasets.disable_progress_bars()
datasets.logging.set_verbosity_error()
files = [f"{k}.parquet" for k in range(4)]
for k, name in enumerate(files):
    datasets.Dataset.from_dict({"number": list(range(10 * k, 10 * k + 10))}).to_parquet(name)


def loader(workers, **options):
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    rows = rows.shuffle(seed=1, buffer_size=1, **options)
    return torchdata.stateful_dataloader.StatefulDataLoader(rows, batch_size=4, num_workers=workers)


def resumed(workers, **options):
    whole = [batch["number"].tolist() for batch in loader(workers, **options)]
    before = loader(workers, **options)
    for _, batch in zip(range(3), before):
        state = before.state_dict()
    after = loader(workers, **options)
    after.load_state_dict(state)
    try:
        rest = [batch["number"].tolist() for batch in after]
    except IndexError as error:
        return type(error).__name__
    return "resumed" if rest == whole[3:] else "other samples"


print(f"1 worker: {resumed(1)}; 2 workers: {resumed(2)}; "
      f"2 workers, max_buffer_input_shards=1: {resumed(2, max_buffer_input_shards=1)}")
EOF
)
expect '1 worker: resumed; 2 workers: IndexError; 2 workers, max_buffer_input_shards=1: resumed' "$got"
