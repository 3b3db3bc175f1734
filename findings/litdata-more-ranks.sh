#!/usr/bin/env bash
# litdata 0.2.76, torch 2.11.0
#
# A StreamingDataLoader that resumes on more ranks than its state was saved on starts the epoch anew, and after the half of
# the epoch raises ValueError. On fewer ranks it continues with the rest.
#
#   1 to 2 ranks after 4 of 40 samples: 4 repeated; after 28: ValueError; 2 to 1 ranks after 8: 0 repeated
#
# LitData's README says that world_size may change, and that remaining samples are never duplicated.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 litdata==0.2.76 numpy==2.1.3
got=$(py <<'EOF'
import logging
import os

logging.disable(logging.WARNING)
import litdata
import litdata.streaming.writer

writer = litdata.streaming.writer.BinaryWriter("data", chunk_size=10)
for i in range(40):
    writer[i] = {"number": i}
writer.done()
writer.merge(num_workers=1)


def epoch(rank, world, batches=None, state=None):
    """Run a rank; return its samples and its state after some batches."""
    os.environ.update(WORLD_SIZE=str(world), GLOBAL_RANK=str(rank))
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset("data", shuffle=True, drop_last=False), batch_size=4)
    if state:
        loader.load_state_dict(state)
    samples = []
    for n, batch in enumerate(loader, 1):
        samples += batch["number"].tolist()
        if n == batches:
            return samples, loader.state_dict()
    return samples, None


def resumed(before, after, batches):
    runs = [epoch(rank, before, batches) for rank in range(before)]
    seen = [sample for samples, _ in runs for sample in samples]
    try:
        rest = [sample for rank in range(after) for sample in epoch(rank, after, state=dict(runs[0][1]))[0]]
    except ValueError as error:
        return type(error).__name__
    return f"{len(seen) + len(rest) - len(set(seen + rest))} repeated"


print(f"1 to 2 ranks after 4 of 40 samples: {resumed(1, 2, 1)}; after 28: {resumed(1, 2, 7)}; "
      f"2 to 1 ranks after 8: {resumed(2, 1, 1)}")
EOF
)
expect '1 to 2 ranks after 4 of 40 samples: 4 repeated; after 28: ValueError; 2 to 1 ranks after 8: 0 repeated' "$got"
