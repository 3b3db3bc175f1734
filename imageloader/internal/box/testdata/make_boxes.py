#!/usr/bin/env python3
"""Write what torchvision makes of bounding boxes: boxes.json in this folder for box_test.go, and
../../../transform/testdata/boxes.json for the test of the steps that move pixels.

Needs torch 2.11 and torchvision 0.26; the tests need neither.
"""
import json
import os
import random

import torch
import torchvision.transforms.v2 as v2
import torchvision.transforms.v2.functional as F
from torchvision import tv_tensors

HERE = os.path.dirname(os.path.abspath(__file__))
rng = random.Random(23)


def some(width, height, n=6):
    """Return boxes, of which some reach the image's edge, some are outside of it, and some are small."""
    out = []
    for _ in range(n):
        x, y = rng.uniform(-0.2, 1) * width, rng.uniform(-0.2, 1) * height
        out.append([x, y, x + rng.uniform(0, 0.4) * width, y + rng.uniform(0, 0.4) * height])
    out.append([width / 2, height / 2, width / 2 + 0.5, height / 2 + 9])
    out.append([0, 0, width, height])
    return [[round(v, 3) for v in b] for b in out]


def boxes(list, width, height, format="XYXY"):
    return tv_tensors.BoundingBoxes(torch.tensor(list, dtype=torch.float32), format=format, canvas_size=(height, width))


def numbers(b):
    return [[round(v, 6) for v in row] for row in b.tolist()]


def sanitized(b):
    """The boxes that SanitizeBoundingBoxes keeps, each with its number as a label.

    Without ClampBoundingBoxes it drops boxes whose edges float32 rounds to positions outside of the image.
    """
    out = v2.SanitizeBoundingBoxes()(v2.ClampBoundingBoxes()({"boxes": b, "labels": torch.arange(len(b))}))
    return [row + [label] for row, label in zip(numbers(out["boxes"]), out["labels"].tolist())]


def crops():
    """resized_crop and a flip: [width, height, x, y, w, h, size, flip, boxes, result]."""
    out = []
    for width, height in [(61, 47), (48, 64), (4000, 3000), (133, 90)]:
        for _ in range(15):
            w, h = rng.randint(1, width), rng.randint(1, height)
            x, y = rng.randint(0, width - w), rng.randint(0, height - h)
            size, flip, list = rng.choice([16, 24, 32, 224]), rng.random() < 0.5, some(width, height)
            got = F.resized_crop(boxes(list, width, height), y, x, h, w, [size, size])
            if flip:
                got = F.horizontal_flip(got)
            out.append([width, height, x, y, w, h, size, flip, list, sanitized(got)])
    return out


def resizes():
    """Resize and CenterCrop: [width, height, resize, size, boxes, result]."""
    out = []
    for width, height, resize, size in [(61, 47, 40, 32), (48, 64, 32, 32), (30, 90, 47, 31), (2000, 333, 256, 224)]:
        list = some(width, height)
        got = F.center_crop(F.resize(boxes(list, width, height), [resize]), [size, size])
        out.append([width, height, resize, size, list, sanitized(got)])
    return out


def formats():
    """The same numbers in each format: name to [boxes, XYXY, clamped]."""
    out = {}
    for format in ["XYXY", "XYWH", "CXCYWH"]:
        list = [[10.5, 20, 30, 40], [50, 40, 60, 50.25]]
        got = F.convert_bounding_box_format(boxes(list, 100, 90, format), new_format=tv_tensors.BoundingBoxFormat.XYXY)
        got = F.clamp_bounding_boxes(got)
        out[format] = [list, numbers(got)]
    return out


def moves():
    """Steps on images of 32 x 32: name to [boxes, result], without SanitizeBoundingBoxes."""
    corners = [[0, 0], [31, 0], [31, 31], [0, 31]]
    steps = {
        "horizontal flip": F.horizontal_flip,
        "vertical flip": F.vertical_flip,
        "rotation": lambda b: F.rotate(b, 33.5),
        "rotation around a point": lambda b: F.rotate(b, -20, center=[4.0, 9.0]),
        "quarter turn": lambda b: F.rotate(b, 90),
        "half turn": lambda b: F.rotate(b, 180),
        "three quarters": lambda b: F.rotate(b, 270),
        "affine": lambda b: F.affine(b, angle=-20, translate=[3, -5], scale=1.25, shear=[5.0, -7.0]),
        "shear and crop": lambda b: F.center_crop(F.pad(F.affine(b, angle=0, translate=[0, 0], scale=0.5, shear=[40.0, 0.0]), [9, 1, 2, 3]), [32, 32]),
        "pad": lambda b: F.center_crop(F.pad(b, [3, 5, 7, 1]), [32, 32]),
        "crop and back": lambda b: F.pad(F.crop(b, 4, 6, 20, 24), [4, 6, 4, 6]),
        "perspective": lambda b: F.perspective(b, corners, [[3, 2], [28, 5], [25, 30], [1, 27]]),
        "strong perspective": lambda b: F.perspective(b, corners, [[12, 11], [20, 3], [29, 21], [2, 25]]),
        "two turns": lambda b: F.rotate(F.rotate(b, 10), 10),
    }
    out = {}
    for name, step in steps.items():
        list = some(32, 32)
        out[name] = [list, numbers(step(F.clamp_bounding_boxes(boxes(list, 32, 32))))]
    return out


def write(path, value):
    with open(os.path.join(HERE, path), "w") as file:
        json.dump(value, file, separators=(",", ":"))
        file.write("\n")


write("boxes.json", {"crops": crops(), "resizes": resizes(), "formats": formats()})
write("../../../transform/testdata/boxes.json", moves())
