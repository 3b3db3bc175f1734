#!/usr/bin/env bash
# opencv-python-headless 5.0.0.93, pillow 13.0.0
#
# cv2.imread returns None for every TIFF whose Orientation turns the image by 90 degrees (5 to 8), and logs an internal
# error. imdecode reads the same bytes, and turns them. imread reads orientations 1 to 4.
#
#   imread None: 5 6 7 8; imdecode None: none
#
# A loader that skips what imread cannot read loses the portrait images. A test on landscape images does not show it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages opencv-python-headless==5.0.0.93 pillow==13.0.0 numpy==2.4.6
export OPENCV_LOG_LEVEL=SILENT
got=$(py <<'EOF'
import cv2
import numpy
from PIL import Image

read, decoded = [], []
for orientation in range(1, 9):
    exif = Image.Exif()
    exif[274] = orientation
    Image.new("RGB", (30, 20)).save("a.tif", exif=exif)
    if cv2.imread("a.tif") is None:
        read.append(str(orientation))
    if cv2.imdecode(numpy.fromfile("a.tif", numpy.uint8), cv2.IMREAD_COLOR) is None:
        decoded.append(str(orientation))
print(f"imread None: {' '.join(read) or 'none'}; imdecode None: {' '.join(decoded) or 'none'}")
EOF
)
expect 'imread None: 5 6 7 8; imdecode None: none' "$got"
