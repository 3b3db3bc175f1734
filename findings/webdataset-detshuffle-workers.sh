#!/usr/bin/env bash
# webdataset 1.0.2, torch 2.11.0
#
# The stage detshuffle counts epochs in its process. A DataLoader makes new workers for each epoch, and each one counts from
# zero. So with workers every epoch has the same order.
#
#   orders of 3 epochs: 3 without workers, 1 with 2 workers, 3 with 2 persistent workers
#
# WebDataset(detshuffle=True) uses the stage for shards. A program can set the attribute epoch of the stage before each epoch.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 webdataset==1.0.2 numpy==2.1.3
got=$(py <<'EOF'
import io
import tarfile

import torch
import webdataset

for k in range(2):
    with tarfile.open(f"{k}.tar", "w") as tar:
        for i in range(50 * k, 50 * k + 50):
            member = tarfile.TarInfo(f"{i:03}.cls")
            member.size = len(str(i))
            tar.addfile(member, io.BytesIO(str(i).encode()))


def orders(workers, **options):
    dataset = webdataset.WebDataset(["0.tar", "1.tar"], shardshuffle=False, workersplitter=webdataset.split_by_worker)
    dataset = dataset.compose(webdataset.detshuffle(100, seed=1)).decode().to_tuple("cls")
    loader = torch.utils.data.DataLoader(dataset, batch_size=10, num_workers=workers, **options)
    return len({tuple(i for (batch,) in loader for i in batch.tolist()) for _ in range(3)})


print(f"orders of 3 epochs: {orders(0)} without workers, {orders(2)} with 2 workers, "
      f"{orders(2, persistent_workers=True)} with 2 persistent workers")
EOF
)
expect 'orders of 3 epochs: 3 without workers, 1 with 2 workers, 3 with 2 persistent workers' "$got"
