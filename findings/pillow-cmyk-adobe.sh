#!/usr/bin/env bash
# pillow 13.0.0 (11.3.0 and 12.3.0 behave alike)
#
# Adobe's CMYK JPEGs hold inverted values, and have an Adobe segment (APP14). In the others 0 is no ink, says libjpeg's
# documentation. Pillow inverts the values of a CMYK JPEG with and without the segment.
#
#   cyan with the Adobe segment: (255, 0, 0, 0); without: (255, 0, 0, 0)
#
# A file without the segment that holds plain values becomes a negative. Decoders disagree on such files: Go 1.26's
# image/jpeg refuses them.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages pillow==13.0.0
got=$(py <<'EOF'
import io
from PIL import Image

data = io.BytesIO()
Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(data, "JPEG", quality=100)
adobe = data.getvalue()
start = adobe.index(b"\xff\xee")
end = start + 2 + int.from_bytes(adobe[start + 2:start + 4], "big")
assert adobe[start + 4:start + 9] == b"Adobe", "the first APP14 is another"
plain = adobe[:start] + adobe[end:]
pixels = [Image.open(io.BytesIO(d)).getpixel((0, 0)) for d in (adobe, plain)]
print(f"cyan with the Adobe segment: {pixels[0]}; without: {pixels[1]}")
EOF
)
expect 'cyan with the Adobe segment: (255, 0, 0, 0); without: (255, 0, 0, 0)' "$got"
