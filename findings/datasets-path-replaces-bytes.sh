#!/usr/bin/env bash
# datasets 5.2.0
#
# An image that is given as {"bytes": B, "path": P} loses its bytes if a file P exists: the feature Image keeps the path.
# to_parquet then writes the path alone.
#
#   no such file: 3054 bytes, path photo.jpg; a file: no bytes, path photo.jpg
#
# The Parquet file has no images on another machine, and none here after the folder has moved. The same program writes the
# images where it cannot see the files.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages datasets==5.2.0 pillow==13.0.0
export HF_HOME=$scratch/hf HF_HUB_OFFLINE=1
got=$(py <<'EOF'
import io
import os

import datasets
import pyarrow.parquet
from PIL import Image

datasets.disable_progress_bars()
encoded = io.BytesIO()
Image.new("RGB", (500, 2)).save(encoded, "BMP")
encoded = encoded.getvalue()


def written(name):
    features = datasets.Features({"image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": encoded, "path": "photo.jpg"}]}, features=features)
    rows.to_parquet(name)
    image = pyarrow.parquet.read_table(name).to_pylist()[0]["image"]
    size = f"{len(image['bytes'])} bytes" if image["bytes"] else "no bytes"
    return f"{size}, path {os.path.basename(image['path'])}"


absent = written("a.parquet")
with open("photo.jpg", "wb") as f:
    f.write(encoded)
print(f"no such file: {absent}; a file: {written('b.parquet')}")
EOF
)
expect 'no such file: 3054 bytes, path photo.jpg; a file: no bytes, path photo.jpg' "$got"
