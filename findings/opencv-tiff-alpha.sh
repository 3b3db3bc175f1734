#!/usr/bin/env bash
# opencv-python-headless 5.0.0.93, pillow 13.0.0
#
# cv2.imread with IMREAD_UNCHANGED multiplies the colours of a TIFF by its alpha, although the file declares
# unassociated alpha (ExtraSamples 2). It returns the colours of a PNG as they are.
#
#   RGBA 200,100,50,128: png 200,100,50,128; tif 100,50,25,128
#
# The same image has half the brightness in the other format, and a transparent pixel is black. The colours cannot be
# restored.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages opencv-python-headless==5.0.0.93 pillow==13.0.0 numpy==2.4.6
got=$(py <<'EOF'
import cv2
from PIL import Image

image = Image.new("RGBA", (2, 2), (200, 100, 50, 128))
image.save("a.png")
image.save("a.tif")
assert Image.open("a.tif").tag_v2[338] == (2,), "the file has associated alpha"


def pixel(name):
    b, g, r, a = (int(v) for v in cv2.imread(name, cv2.IMREAD_UNCHANGED)[0, 0])
    return f"{r},{g},{b},{a}"


print(f"RGBA 200,100,50,128: png {pixel('a.png')}; tif {pixel('a.tif')}")
EOF
)
expect 'RGBA 200,100,50,128: png 200,100,50,128; tif 100,50,25,128' "$got"
