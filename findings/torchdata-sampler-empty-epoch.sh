#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.11.0
#
# A StatefulDataLoader whose state is saved after the loop over an epoch resumes with the next epoch. With torchdata's
# StatefulDistributedSampler and without workers it resumes with an empty epoch. With workers it does not.
#
#   shuffle, 0 workers: 3 3; sampler, 0 workers: 0 3; sampler, 2 workers: 3 3
#
# The numbers are the batches of the two loops after the resume. A training that saves a checkpoint after each epoch loses
# an epoch at each restart. The page of torchdata.stateful_dataloader documents states in the middle of an epoch.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 torchdata==0.11.0 numpy==2.1.3
got=$(py <<'EOF'
import torchdata.stateful_dataloader
import torchdata.stateful_dataloader.sampler

data = list(range(12))


def loader(kind, workers):
    how = {"shuffle": True}
    if kind == "sampler":
        how = {"sampler": torchdata.stateful_dataloader.sampler.StatefulDistributedSampler(data, num_replicas=1, rank=0)}
    return torchdata.stateful_dataloader.StatefulDataLoader(data, batch_size=4, num_workers=workers, **how)


def resumed(kind, workers):
    before, after = loader(kind, workers), loader(kind, workers)
    list(before)
    after.load_state_dict(before.state_dict())
    return f"{kind}, {workers} workers: {len(list(after))} {len(list(after))}"


print(resumed("shuffle", 0), resumed("sampler", 0), resumed("sampler", 2), sep="; ")
EOF
)
expect 'shuffle, 0 workers: 3 3; sampler, 0 workers: 0 3; sampler, 2 workers: 3 3' "$got"
