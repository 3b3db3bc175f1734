#!/usr/bin/env bash
# torch 2.11.0, AOTInductor on a CPU (needs a C++ compiler)
#
# load_constants with user_managed makes the package compute with the caller's tensors and not with copies. The package
# keeps a reference to each of them for ever: a later load_constants replaces a tensor, but its memory stays. Without
# user_managed, memory does not grow.
#
#   copied: 0 tensors; user-managed: 20 tensors
#
# These are the tensors by which resident memory has grown in 20 replacements of a weight of 16 MB, after 5 to warm up.
# A service that takes new weights without a copy, to save memory, loses the memory of all weights at each update.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 numpy==2.4.6
got=$(py 2>"$scratch/log" <<'EOF'
import resource

import torch
from torch import nn

model = nn.Linear(1000, 4000, bias=False).eval()
program = torch.export.export(model, (torch.ones(2, 1000),))
path = torch._inductor.aoti_compile_and_package(program, package_path="model.pt2")


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def grown(user_managed):
    """Returns by how many weights resident memory grows in 20 replacements."""
    loader = torch._inductor.aoti_load_package(path, run_single_threaded=True).loader
    for i in range(25):
        if i == 5:
            before = resident()
        weight = torch.full((4000, 1000), float(i))
        loader.load_constants({"weight": weight}, False, False, user_managed)
        assert loader.run([torch.ones(2, 1000)])[0][0, 0].item() == 1000 * i
        del weight
    return round((resident() - before) / (4 * 4000 * 1000))


print(f"copied: {grown(False)} tensors; user-managed: {grown(True)} tensors")
EOF
) || { cat "$scratch/log" >&2 && exit 1; }
expect 'copied: 0 tensors; user-managed: 20 tensors' "$got"
