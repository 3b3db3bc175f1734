#!/usr/bin/env bash
# torchvision 0.26.0 with torch 2.11.0
#
# decode_image with ImageReadMode.RGB_ALPHA gives an 8-bit grey PNG the opaque alpha 255, and a 1-bit grey PNG the alpha
# 1. The colours of both are scaled to 0 to 255.
#
#   white RGBA: 8 bits 255,255,255,255; 1 bit 255,255,255,1
#
# Masks, scans and line art are often 1-bit PNGs. Blended by their alpha they vanish: 1 of 255 is nearly transparent.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 torchvision==0.26.0 pillow==12.3.0 numpy==2.4.6
got=$(py <<'EOF'
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

pixels = []
for mode, white in (("L", 255), ("1", 1)):
    Image.new(mode, (8, 8), white).save("a.png")
    pixels.append(",".join(str(v) for v in decode_image("a.png", mode=ImageReadMode.RGB_ALPHA)[:, 0, 0].tolist()))
print(f"white RGBA: 8 bits {pixels[0]}; 1 bit {pixels[1]}")
EOF
)
expect 'white RGBA: 8 bits 255,255,255,255; 1 bit 255,255,255,1' "$got"
