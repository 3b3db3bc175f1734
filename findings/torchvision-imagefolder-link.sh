#!/usr/bin/env bash
# torchvision 0.26.0 with torch 2.11.0, Linux
#
# ImageFolder follows symbolic links and does not look for loops. A link a/up to the parent of the class folder a
# repeats the dataset until Linux refuses a path with more than 40 links. The images of b get the label of a too. There
# is no warning.
#
#   8 files: 8 samples; with a/up: 328 samples of 8 files, 160 images of b labelled a
#
# The epoch takes 41 times as long, and half of the labels in class a are wrong.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 torchvision==0.26.0 pillow==12.3.0 numpy==2.4.6
got=$(py 2>&1 <<'EOF'
import os
from PIL import Image
from torchvision.datasets import ImageFolder

for name in "ab":
    os.makedirs(f"root/{name}")
    for i in range(4):
        Image.new("RGB", (4, 4)).save(f"root/{name}/{i}.png")
before = len(ImageFolder("root"))
os.symlink("..", "root/a/up")
folder = ImageFolder("root")
files = {os.path.realpath(path) for path, _ in folder.samples}
wrong = sum(os.path.basename(os.path.dirname(path)) == "b" and label == 0 for path, label in folder.samples)
print(f"8 files: {before} samples; with a/up: {len(folder)} samples of {len(files)} files, "
      f"{wrong} images of b labelled a")
EOF
)
expect '8 files: 8 samples; with a/up: 328 samples of 8 files, 160 images of b labelled a' "$got"
