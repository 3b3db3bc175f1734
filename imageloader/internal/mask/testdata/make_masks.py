#!/usr/bin/env python3
"""Write what torchvision makes of masks, for masks_test.go: masks.json in this folder.

Needs torch 2.11, torchvision 0.26, numpy and Pillow; the tests need none of them.
"""
import io
import json
import os
import random
import zlib

import numpy as np
import torch
import torchvision.transforms.v2.functional as F
from PIL import Image
from torchvision import tv_tensors

HERE = os.path.dirname(os.path.abspath(__file__))
rng = random.Random(17)


def mask(width, height, classes):
    """Return class numbers; masks_test.go makes the same."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return ((x * 7 + y * 13 + x * y % 11) % classes).astype(np.int64)


def crc(classes):
    return zlib.crc32(np.asarray(classes).astype("<u2").tobytes())


def through(classes, step):
    return step(tv_tensors.Mask(torch.from_numpy(classes.copy())[None])).numpy()[0]


def nearest():
    """Where each output of a side comes from: [in, out, CRC-32]."""
    sides = [(i, o) for i in range(1, 40) for o in range(1, 40)]
    sides += [(rng.randint(1, 5000), rng.randint(1, 600)) for _ in range(600)]
    out = []
    for i, o in sides:
        line = np.broadcast_to(np.arange(i, dtype=np.int64), (2, i))
        out.append([i, o, crc(through(line, lambda m: F.resize(m, [2, o]))[0])])
    return out


def crops():
    """resized_crop and a flip: [width, height, classes, x, y, w, h, size, flip, CRC-32]."""
    out = []
    for width, height, classes in [(61, 47, 21), (48, 64, 256), (40, 40, 2), (133, 90, 60000)]:
        for _ in range(20):
            w, h = rng.randint(1, width), rng.randint(1, height)
            x, y = rng.randint(0, width - w), rng.randint(0, height - h)
            size, flip = rng.choice([16, 24, 32, 80]), rng.random() < 0.5
            got = through(mask(width, height, classes), lambda m: F.resized_crop(m, y, x, h, w, [size, size]))
            if flip:
                got = through(got, F.horizontal_flip)
            out.append([width, height, classes, x, y, w, h, size, flip, crc(got)])
    return out


def resizes():
    """Resize and CenterCrop: [width, height, resize, size, CRC-32]."""
    out = []
    for width, height, resize, size in [(61, 47, 40, 32), (48, 64, 32, 32), (30, 90, 47, 31), (200, 33, 40, 16)]:
        out.append([width, height, resize, size, crc(through(mask(width, height, 21), lambda m: F.center_crop(F.resize(m, [resize]), [size, size])))])
    return out


def moves():
    """Steps on masks of 32 x 32: name to [classes, fill, CRC-32]."""
    steps = {
        "rotation": lambda m, fill: F.rotate(m, 33.5, fill=fill),
        "quarter turn": lambda m, fill: F.rotate(m, 90, fill=fill),
        "affine": lambda m, fill: F.affine(m, angle=-20, translate=[0, 0], scale=1.25, shear=[5.0, -7.0], fill=fill),
        "flip": lambda m, fill: F.vertical_flip(m),
        "pad": lambda m, fill: F.center_crop(F.pad(m, [3, 5, 7, 1], fill=fill), [32, 32]),
        "pad edge": lambda m, fill: F.center_crop(F.pad(m, [3, 5, 7, 1], padding_mode="edge"), [32, 32]),
        "colours": lambda m, fill: m,
    }
    out = {}
    for name, step in steps.items():
        out[name] = []
        for classes, fill in [(21, 0), (21, 255), (60000, 65535)]:
            out[name].append([classes, fill, crc(through(mask(32, 32, classes), lambda m: step(m, fill)))])
    return out


def files():
    """PNG files of every kind of mask, and the classes in them: name to [hexadecimal file, width, height, CRC-32]."""
    out = {}

    def save(name, image, classes, **options):
        data = io.BytesIO()
        image.save(data, "PNG", **options)
        if image.mode not in ("1", "L"):  # Pillow stretches levels of fewer than 8 bits
            assert (np.asarray(Image.open(io.BytesIO(data.getvalue()))) == classes).all(), name
        height, width = classes.shape
        out[name] = [data.getvalue().hex(), width, height, crc(classes)]

    small = mask(23, 17, 16)
    colours = [rng.randint(0, 255) for _ in range(3 * 16)]
    for bits in (1, 2, 4, 8):
        classes = small % (1 << bits)
        image = Image.fromarray(classes.astype(np.uint8), "P")
        image.putpalette(colours[: 3 * min(16, 1 << bits)])
        save(f"palette {bits}", image, classes, bits=bits)
    save("palette transparent", image, small, transparency=3)
    save("grey 1", Image.fromarray((small % 2).astype(bool)), small % 2)
    save("grey 8", Image.fromarray(mask(23, 17, 256).astype(np.uint8)), mask(23, 17, 256))
    save("grey transparent", Image.fromarray(mask(23, 17, 256).astype(np.uint8)), mask(23, 17, 256), transparency=7)
    save("grey 16", Image.fromarray(mask(23, 17, 60000).astype(np.uint16)), mask(23, 17, 60000))
    return out


with open(os.path.join(HERE, "masks.json"), "w") as file:
    json.dump({"nearest": nearest(), "crops": crops(), "resizes": resizes(), "moves": moves(), "files": files()}, file, separators=(",", ":"))
    file.write("\n")
