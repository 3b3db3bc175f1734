#!/usr/bin/env bash
# datasets 5.2.0
#
# load_dataset("imagefolder") looks for the names of splits in the class folders. One class that ends with -test or
# _eval, or starts with dev_, becomes a split without labels. The other classes are left out without a warning.
#
#   cat dog bird: train 3 labelled; cat dog road-test: test 1 unlabelled; cat dog dev_board: validation 1 unlabelled
#
# One folder's name removes all the other classes from the dataset, and the labels with them.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages datasets==5.2.0 pillow==13.0.0
export HF_HOME=$scratch/hf HF_HUB_OFFLINE=1
got=$(py <<'EOF'
import pathlib
import datasets
from PIL import Image

datasets.disable_progress_bars()


def load(*classes):
    root = pathlib.Path("-".join(classes).replace("test", "t").replace("dev", "d")).absolute()
    for name in classes:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(root / name / "0.jpg")
    loaded = datasets.load_dataset("imagefolder", data_dir=str(root))
    splits = [f"{split} {len(rows)} {'labelled' if 'label' in rows.features else 'unlabelled'}"
              for split, rows in loaded.items()]
    return " ".join(classes) + ": " + ", ".join(splits)


print(load("cat", "dog", "bird"), load("cat", "dog", "road-test"), load("cat", "dog", "dev_board"), sep="; ")
EOF
)
want='cat dog bird: train 3 labelled; cat dog road-test: test 1 unlabelled; '
expect "${want}cat dog dev_board: validation 1 unlabelled" "$got"
