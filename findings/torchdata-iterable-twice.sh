#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.11.0
#
# A StatefulDataLoader resumes an iterable dataset that has no state by skipping batches, and counts the skipped ones twice.
# The state of a resumed loader skips too many: a second resume loses batches, or raises StopIteration if it reaches the end.
#
#   8 batches, 2 + 1 before the second resume: 3 of 5 left; 4 + 1: StopIteration
#
# A training on webdataset or another stream that is interrupted twice in an epoch loses samples, usually without an error.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 torchdata==0.11.0 numpy==2.1.3
got=$(py <<'EOF'
import logging

logging.disable(logging.WARNING)
import torch.utils.data
import torchdata.stateful_dataloader


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(32))


def loader(state=None):
    made = torchdata.stateful_dataloader.StatefulDataLoader(Numbers(), batch_size=4)
    if state:
        made.load_state_dict(state)
    return made


def stopped(loader, batches):
    for _ in zip(range(batches), loader):
        state = loader.state_dict()
    return state


def rest(first):
    state = stopped(loader(stopped(loader(), first)), 1)
    try:
        return len(list(loader(state)))
    except StopIteration as error:
        return type(error).__name__


print(f"8 batches, 2 + 1 before the second resume: {rest(2)} of 5 left; 4 + 1: {rest(4)}")
EOF
)
expect '8 batches, 2 + 1 before the second resume: 3 of 5 left; 4 + 1: StopIteration' "$got"
