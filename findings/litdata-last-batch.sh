#!/usr/bin/env bash
# litdata 0.2.76, torch 2.11.0
#
# The state of a StreamingDataLoader after the last batch of an epoch counts that batch as a full one. A loader with the same
# number of workers resumes from it with a whole epoch, not with the empty rest. With another number it raises ValueError.
#
#   12 of 10 samples; 1 worker: 3 3; 2 workers: ValueError
#
# The numbers after "1 worker" are the batches of two loops after the resume. A training that saves its state every N batches
# repeats an epoch if the last one is among them. LitData's README says that the number of workers may change.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 litdata==0.2.76 numpy==2.1.3
got=$(py <<'EOF'
import litdata
import litdata.streaming.writer

writer = litdata.streaming.writer.BinaryWriter("data", chunk_size=5)
for i in range(10):
    writer[i] = {"number": i}
writer.done()
writer.merge(num_workers=1)


def loader(workers):
    dataset = litdata.StreamingDataset("data", shuffle=True, drop_last=False)
    return litdata.StreamingDataLoader(dataset, batch_size=4, num_workers=workers)


def resumed(workers, state):
    after = loader(workers)
    after.load_state_dict(state)
    try:
        return f"{workers} worker{'s' * (workers > 1)}: {len(list(after))} {len(list(after))}"
    except ValueError as error:
        return f"{workers} workers: {type(error).__name__}"


before = loader(1)
for _, batch in zip(range(3), before):
    state = before.state_dict()
print(f"{state['num_samples_yielded']} of 10 samples", resumed(1, state), resumed(2, state), sep="; ")
EOF
)
expect '12 of 10 samples; 1 worker: 3 3; 2 workers: ValueError' "$got"
