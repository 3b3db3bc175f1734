#!/usr/bin/env bash
# torchvision 0.26.0 with torch 2.11.0
#
# v2.functional.resized_crop clamps boxes to the crop, then multiplies them by the ratio of the sizes in float32. An
# edge on the crop's border can end outside the new image: 21 * (24 / 21) is 24.000002. SanitizeBoundingBoxes removes
# every box with a coordinate outside the image.
#
#   whole 21x21 to 24x24: edge 24.000002, 0 of 1 boxes kept, 1 after ClampBoundingBoxes; crops of 100 to 499 pixels to
#   224: 46 of 400 sides lose the box
#
# A box that fills the crop, often the only one of a close-up, vanishes with its label, for some sizes of the crop only.
# The documentation of SanitizeBoundingBoxes advises ClampBoundingBoxes before it. The clamping in the crop is not
# enough.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages torch==2.11.0 torchvision==0.26.0 pillow==12.3.0 numpy==2.4.6
got=$(py <<'EOF'
from torchvision import tv_tensors
from torchvision.transforms import v2

sanitize = v2.SanitizeBoundingBoxes(labels_getter=None)


def resized(side, size):
    """Returns the box of a whole square image after a crop of all of it."""
    box = tv_tensors.BoundingBoxes([[0.0, 0, side, side]], format="XYXY", canvas_size=(side, side))
    return v2.functional.resized_crop(box, 0, 0, side, side, [size, size])


box = resized(21, 24)
kept = [len(sanitize(b)) for b in (box, v2.ClampBoundingBoxes()(box))]
lost = sum(len(sanitize(resized(side, 224))) == 0 for side in range(100, 500))
print(f"edge {box[0, 2].item():.6f}, {kept[0]} of 1 boxes kept, {kept[1]} after ClampBoundingBoxes; "
      f"crops of 100 to 499 pixels to 224: {lost} of 400 sides lose the box")
EOF
)
expect "edge 24.000002, 0 of 1 boxes kept, 1 after ClampBoundingBoxes; crops of 100 to 499 pixels to 224: 46 of 400\
 sides lose the box" "$got"
