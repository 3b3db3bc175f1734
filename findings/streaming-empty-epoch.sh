#!/usr/bin/env bash
# mosaicml-streaming 0.13.0, torch 2.11.0
#
# A StreamingDataLoader whose state is saved after the loop over an epoch resumes with an empty epoch.
#
#   saved at the last batch: 0 3; after the loop: 0 3
#
# The numbers are the batches of two loops after the resume. Both states are the same. A training that saves a checkpoint
# after each epoch, and continues with the next one, loses an epoch at each restart.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 mosaicml-streaming==0.13.0
got=$(py <<'EOF'
import streaming

with streaming.MDSWriter(out="data", columns={"number": "int"}) as out:
    for i in range(12):
        out.write({"number": i})


def loader():
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local="data", batch_size=4, shuffle=True)
    return streaming.StreamingDataLoader(dataset, batch_size=4)


def resumed(state):
    after = loader()
    after.load_state_dict(state)
    return f"{len(list(after))} {len(list(after))}"


before = loader()
for batch in before:
    last = before.state_dict()
ended = before.state_dict()
del before
print(f"saved at the last batch: {resumed(last)}; after the loop: {resumed(ended)}")
EOF
)
expect 'saved at the last batch: 0 3; after the loop: 0 3' "$got"
