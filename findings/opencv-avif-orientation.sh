#!/usr/bin/env bash
# opencv-python-headless 5.0.0.93, pillow 13.0.0
#
# cv2.imread turns JPEG, PNG and WebP images as their EXIF orientation says. It ignores the rotation of AVIF images
# (irot), which Pillow reads as orientation 6.
#
#   30x20 with orientation 6: jpg 20x30, png 20x30, webp 20x30, avif 30x20
#
# A dataset that is converted to AVIF to save space reaches the network sideways, while the JPEG original did not.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages opencv-python-headless==5.0.0.93 pillow==13.0.0 numpy==2.4.6
got=$(py <<'EOF'
import cv2
from PIL import Image

sizes = []
for kind in ("jpg", "png", "webp", "avif"):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (30, 20)).save(f"a.{kind}", exif=exif)
    with Image.open(f"a.{kind}") as image:
        assert kind != "avif" or b"irot" in open("a.avif", "rb").read(), "the AVIF has no irot"
        assert image.getexif()[274] == 6, f"{kind}: orientation {image.getexif().get(274)}"
    height, width, _ = cv2.imread(f"a.{kind}").shape
    sizes.append(f"{kind} {width}x{height}")
print("30x20 with orientation 6:", ", ".join(sizes))
EOF
)
expect '30x20 with orientation 6: jpg 20x30, png 20x30, webp 20x30, avif 30x20' "$got"
