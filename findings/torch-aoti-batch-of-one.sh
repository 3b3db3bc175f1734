#!/usr/bin/env bash
# torch 2.11.0, AOTInductor on a CPU (needs a C++ compiler)
#
# torch.export with Dim("batch", min=1) gives the program the range 1 to infinity. The package that AOTInductor compiles
# from it computes a batch of one, but with AOTI_RUNTIME_CHECK_INPUTS=1 in the environment it refuses that batch: the
# compiled check has the lower bound 2.
#
#   range from 1; one row without checks: equal to eager; with checks: two rows: no error,expected it to be >= 2, but
#   got: 1
#
# A service that turns the checks on works until the first batch with a single request. For this case
# torch/_inductor/config.py has the option aot_inductor.check_lowerbound.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 numpy==2.4.6
unset AOTI_RUNTIME_CHECK_INPUTS
start=$(py 2>"$scratch/log" <<'EOF'
import torch

model = torch.nn.Linear(4, 9).eval()
rows = {0: torch.export.Dim("batch", min=1)}
program = torch.export.export(model, (torch.ones(3, 4),), dynamic_shapes=(rows,))
lower = [r.lower for r in program.range_constraints.values()]
path = torch._inductor.aoti_compile_and_package(program, package_path="model.pt2")
package = torch._inductor.aoti_load_package(path)
row = torch.ones(1, 4)
equal = torch.allclose(package(row), model(row))
print(f"range from {lower[0]}; one row without checks: {'equal to' if equal else 'differs from'} eager")
EOF
) || { cat "$scratch/log" >&2 && exit 1; }
checked=$(AOTI_RUNTIME_CHECK_INPUTS=1 py 2>&1 <<'EOF'
import torch

package = torch._inductor.aoti_load_package("model.pt2")
package(torch.ones(2, 4))
print("two rows: no error", flush=True)
try:
    package(torch.ones(1, 4))
    print("one row: no error")
except RuntimeError:
    pass
EOF
)
checked=$(grep -Eo '(two rows|one row): no error|expected it to be >=.*' <<<"$checked" | paste -sd, || true)
expect 'range from 1; one row without checks: equal to eager; with checks: two rows: no error,expected it to be >= 2, '\
'but got: 1' "$start; with checks: $checked"
