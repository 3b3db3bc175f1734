#!/usr/bin/env bash
# torch 2.11.0, AOTInductor on a CPU (needs a C++ compiler)
#
# AOTInductor compiles constants of one dimension with at most 8 elements into the code. get_constant_fqns does not list
# such a parameter, and no call updates it. load_constants of the whole state_dict is an error. Given the listed names
# it succeeds, also with check_full_update, and the old values stay.
#
#   bias of 8, listed: weight; state_dict: Constant not found: bias; update to 5: 1.0;
#   bias of 9, listed: bias weight; state_dict: no error; update to 5: 5.0
#
# The bias of a classifier with up to 8 classes keeps its values from the compilation. A service that swaps in new
# weights then computes with parts of two checkpoints.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 numpy==2.4.6
got=$(py 2>"$scratch/log" <<'EOF'
import torch
from torch import nn

texts = []
for n in (8, 9):
    model = nn.Linear(4, n).eval()
    nn.init.ones_(model.bias)
    program = torch.export.export(model, (torch.ones(2, 4),))
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"model{n}.pt2")
    package = torch._inductor.aoti_load_package(path)
    state = {"weight": torch.zeros(n, 4), "bias": torch.full((n,), 5.0)}
    listed = sorted(package.get_constant_fqns())
    try:
        package.load_constants(state, check_full_update=True)
        whole = "no error"
    except RuntimeError as e:
        whole = str(e).splitlines()[0]
    package.load_constants({name: state[name] for name in listed}, check_full_update=True)
    value = package(torch.ones(2, 4))[0, 0].item()
    texts.append(f"bias of {n}, listed: {' '.join(listed)}; state_dict: {whole}; update to 5: {value}")
print("; ".join(texts))
EOF
) || { cat "$scratch/log" >&2 && exit 1; }
expect 'bias of 8, listed: weight; state_dict: Constant not found: bias; update to 5: 1.0;'\
' bias of 9, listed: bias weight; state_dict: no error; update to 5: 5.0' "$got"
