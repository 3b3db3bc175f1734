#!/usr/bin/env bash
# torch 2.11.0, x86-64
#
# {name: tensor.half()} of a whole state_dict also converts num_batches_tracked, an int64 count. Above 65,504 batches it
# becomes infinite. load_state_dict converts it back to the smallest int64, and returns <All keys matched successfully>.
#
#   70000 batches: half inf, loaded -9223372036854775808, All keys matched successfully; mean of 100s: 0
#
# The next step with momentum=None divides by the count, so the running mean and variance hardly move again: a batch of
# 100s moves the mean from 0 to -1e-17. Between 2,048 and 65,504 the count is rounded. Module.half() converts
# floating-point tensors alone. Other processors may convert infinity to another integer.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 numpy==2.4.6
got=$(py <<'EOF'
import torch

norm = torch.nn.BatchNorm1d(1, momentum=None)
norm.num_batches_tracked.fill_(70000)
half = {name: tensor.half() for name, tensor in norm.state_dict().items()}
loaded = torch.nn.BatchNorm1d(1, momentum=None)
keys = loaded.load_state_dict(half)
count = loaded.num_batches_tracked.item()
loaded(torch.full((8, 1), 100.0))
print(f"70000 batches: half {half['num_batches_tracked'].item()}, loaded {count}, {str(keys)[1:-1]}; "
      f"mean of 100s: {abs(round(loaded.running_mean.item(), 9)):.0f}")
EOF
)
expect '70000 batches: half inf, loaded -9223372036854775808, All keys matched successfully; mean of 100s: 0' "$got"
