#!/usr/bin/env bash
# datasets 5.2.0 with dill 0.4.1 and pyarrow 26.0.1
#
# Dataset.from_dict hashes its table with dill. dill pickles a Python module by reference if its path starts with
# sys.prefix or contains "site-packages". It pickles other modules with their content, and pyarrow has a class that it
# cannot pickle. So packages from pip install --target work in a folder of one name, and not in another.
#
#   deps: PicklingError Can't pickle <class 'MonthDayNano'>; site-packages: 2 rows
#
# Images for functions as a service and jobs that ship their packages in a folder install this way. Every Dataset fails
# there, and the same program works in a virtual environment. Renaming the folder mends it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages --target "$scratch/deps" datasets==5.2.0 dill==0.4.1 pyarrow==26.0.1
export HF_HOME=$scratch/hf HF_HUB_OFFLINE=1
rows() {
  PYTHONPATH=$scratch/$1 py 2>/dev/null <<'EOF'
from datasets import Dataset

try:
    print(len(Dataset.from_dict({"label": [1, 2]})), "rows")
except Exception as e:
    print(type(e).__name__, str(e).split(":")[0])
EOF
}
before=$(rows deps)
mv "$scratch/deps" "$scratch/site-packages"
expect "deps: PicklingError Can't pickle <class 'MonthDayNano'>; site-packages: 2 rows" \
  "deps: $before; site-packages: $(rows site-packages)"
