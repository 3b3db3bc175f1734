#!/usr/bin/env bash
# pillow 13.0.0
#
# Image.save to AVIF removes the orientation from the Exif object that the caller passes. A later save with the same
# object writes no orientation. Saving to JPEG, PNG, WebP and TIFF leaves the object as it is.
#
#   orientation after saving: JPEG 6, PNG 6, WEBP 6, TIFF 6, AVIF None
#
# When a program writes an image in several formats with one Exif object, every file after the AVIF loses its
# orientation, and training sees it sideways.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages pillow==13.0.0
got=$(py <<'EOF'
import io
from PIL import Image

after = []
for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (30, 20)).save(io.BytesIO(), kind, exif=exif)
    after.append(f"{kind} {exif.get(274)}")
print("orientation after saving:", ", ".join(after))
EOF
)
expect 'orientation after saving: JPEG 6, PNG 6, WEBP 6, TIFF 6, AVIF None' "$got"
