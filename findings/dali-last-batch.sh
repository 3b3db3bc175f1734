#!/usr/bin/env bash
# nvidia-dali-cuda130 2.4.0, torch 2.11.0
#
# A DALIGenericIterator that resumes from the checkpoint of an epoch's last batch continues with the next epoch, not with the
# empty rest of this one. The checkpoint after the loop gives the same.
#
#   batches of 2 loops after batch 1: 2 3; after the last one: 3 3; after the loop: 3 3
#
# A training that saves its state every N batches runs an epoch too many if the last one is among them. The option auto_reset
# makes no difference.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 nvidia-dali-cuda130==2.4.0 numpy==2.1.3
got=$(py <<'EOF'
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

files = [f"{i}.txt" for i in range(10)]
for name in files:
    with open(name, "w") as f:
        f.write(name)


@pipeline_def
def numbers():
    return fn.readers.file(name="reader", files=files, labels=list(range(10)), random_shuffle=True, pad_last_batch=True)[1]


def loader(checkpoint=None):
    pipeline = numbers(batch_size=4, num_threads=1, device_id=None, seed=1, enable_checkpointing=True, checkpoint=checkpoint)
    return DALIGenericIterator([pipeline], ["number"], reader_name="reader", auto_reset=True,
                               last_batch_policy=LastBatchPolicy.PARTIAL)


def resumed(checkpoint):
    after = loader(checkpoint)
    return f"{len(list(after))} {len(list(after))}"


before = loader()
states = [before.checkpoints()[0] for _ in before]
states.append(before.checkpoints()[0])
print(f"batches of 2 loops after batch 1: {resumed(states[0])}; after the last one: {resumed(states[2])}; "
      f"after the loop: {resumed(states[3])}")
EOF
)
expect 'batches of 2 loops after batch 1: 2 3; after the last one: 3 3; after the loop: 3 3' "$got"
