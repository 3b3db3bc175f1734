#!/usr/bin/env python3
"""Write ../data/: small images and the results of Pillow and torchvision for them, for parity_test.cc.

Needs torch 2.11, torchvision 0.26, Pillow and numpy; the test itself needs none of them. Run it in this folder. It stops
if Pillow and torchvision differ on an image, except for images that they define differently (noted beside the image below).

data/parity.txt has one line for each result, with the CRC-32 of the RGB bytes:
    decode FILE WIDTH HEIGHT CRC
    geometry FILE CROP_X CROP_Y CROP_W CROP_H RESIZE_W RESIZE_H WINDOW_X WINDOW_Y WINDOW_W WINDOW_H FLIP CRC
    upright ORIENTATION FILE ...    as geometry, on the image turned upright (Pillow's ImageOps.exif_transpose)
    interpolation NUMBER ORIENTATION FILE ...    as upright, with another interpolation than bilinear (TS_INTERPOLATION_)
"""
import io
import os
import random
import struct
import zlib

import numpy as np
import torch
import torchvision
import torchvision.transforms.v2.functional as F
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode

HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
# Images that only Pillow decodes as torchstream_image.h defines: Pillow's pixels are the expected result.
PILLOW_ONLY = {"rgb16.png": "torchvision keeps 16 bits"}


def picture(width, height, channels, seed):
    """Return slopes, edges and noise, which are hard for a codec and a resize."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = []
    for c in range(channels):
        plane = 127 + 90 * np.sin(x / (9.0 + 3 * c)) * np.cos(y / (7.0 + c)) + 60 * ((x // 17 + y // 13 + c) % 2)
        planes.append(plane + rng.normal(0, 8, plane.shape))
    return np.stack(planes, -1).clip(0, 255).astype(np.uint8)


def png(width, height, color_type, depth, rows):
    """Return a PNG of a kind that Pillow does not write."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    raw = b"".join(b"\0" + row for row in rows)
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def images():
    def save(image, kind, **options):
        out = io.BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    color = Image.fromarray(picture(211, 157, 3, 1))
    yield "444.jpg", save(color, "JPEG", quality=92, subsampling=0)
    yield "422.jpg", save(color, "JPEG", quality=88, subsampling=1)
    yield "420.jpg", save(color, "JPEG", quality=85, subsampling=2)
    yield "restart.jpg", save(color, "JPEG", quality=75, subsampling=2, restart_marker_rows=1)
    yield "progressive.jpg", save(color, "JPEG", quality=85, subsampling=2, progressive=True)
    yield "tall.jpg", save(Image.fromarray(picture(75, 410, 3, 2)), "JPEG", quality=80, subsampling=2)
    yield "grey.jpg", save(Image.fromarray(picture(120, 90, 1, 3)[..., 0]), "JPEG", quality=90)
    yield "cmyk.jpg", save(Image.fromarray(picture(90, 70, 4, 4), "CMYK"), "JPEG", quality=90)
    small = Image.fromarray(picture(47, 31, 3, 5))
    yield "rgb.png", save(small, "PNG")
    yield "grey.png", save(small.convert("L"), "PNG")
    yield "bilevel.png", save(small.convert("1"), "PNG")
    yield "palette.png", save(small.quantize(16), "PNG")
    yield "palette-transparent.png", save(small.quantize(200), "PNG", transparency=3)
    yield "rgba.png", save(Image.fromarray(picture(47, 31, 4, 6), "RGBA"), "PNG")
    yield "grey-alpha.png", save(Image.fromarray(picture(47, 31, 2, 7), "LA"), "PNG")
    wide = np.random.default_rng(8).integers(0, 65536, (19, 23, 3), dtype=np.uint16)
    yield "lossy.webp", save(color, "WEBP", quality=80)
    yield "lossy-alpha.webp", save(Image.fromarray(picture(61, 45, 4, 9), "RGBA"), "WEBP", quality=60)
    yield "lossless.webp", save(small, "WEBP", lossless=True)
    yield "lossless-alpha.webp", save(Image.fromarray(picture(47, 31, 4, 10), "RGBA"), "WEBP", lossless=True, exact=True)
    yield "rgb16.png", png(23, 19, 2, 16, [row.astype(">u2").tobytes() for row in wide])


def turned():
    """Yield images with each of EXIF's orientations, as (file, orientation, bytes)."""
    small = Image.fromarray(picture(47, 31, 3, 11))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        kinds = [("jpg", "JPEG", {"quality": 80})]
        if orientation == 6:
            kinds += [("png", "PNG", {}), ("webp", "WEBP", {"quality": 80})]
        for extension, kind, options in kinds:
            out = io.BytesIO()
            small.save(out, kind, exif=exif.tobytes(), **options)
            yield f"orientation-{orientation}.{extension}", orientation, out.getvalue()


def crc(pixels):
    return f"{zlib.crc32(np.ascontiguousarray(pixels).tobytes()):08x}"


def hwc(tensor):
    return tensor.permute(1, 2, 0).numpy()


def geometries(rng, width, height):
    """Yield geometries of the loader's transforms, then arbitrary geometries."""
    for _ in range(6):  # RandomResizedCrop(224) and a horizontal flip
        w, h = rng.randint(max(1, width // 4), width), rng.randint(max(1, height // 4), height)
        x, y = rng.randint(0, width - w), rng.randint(0, height - h)
        yield (x, y, w, h), (224, 224), (0, 0, 224, 224), rng.random() < 0.5
    for short, side in ((256, 224), (64, 56)):  # Resize(short), CenterCrop(side)
        size = (short, int(short * height / width)) if width < height else (int(short * width / height), short)
        x, y = int(round((size[0] - side) / 2.0)), int(round((size[1] - side) / 2.0))
        yield (0, 0, width, height), size, (x, y, side, side), False
    yield (0, 0, width, height), (width, height), (0, 0, width, height), False
    yield (0, 0, width, height), (width, 50), (3, 5, width - 3, 40), True
    yield (0, 0, width, height), (50, height), (3, 5, 40, height - 5), True
    yield (0, 0, width, height), (1, 1), (0, 0, 1, 1), False
    for _ in range(12):
        w, h = rng.randint(1, width), rng.randint(1, height)
        x, y = rng.randint(0, width - w), rng.randint(0, height - h)
        size = rng.randint(1, 400), rng.randint(1, 400)
        ww, wh = rng.randint(1, size[0]), rng.randint(1, size[1])
        yield (x, y, w, h), size, (rng.randint(0, size[0] - ww), rng.randint(0, size[1] - wh), ww, wh), rng.random() < 0.5


def main():
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        raise SystemExit(f"torchvision resizes in float on this processor ({capability}): run this on one with AVX2")
    os.makedirs(HERE, exist_ok=True)
    rng = random.Random(1)
    lines = [f"# torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {Image.__version__}; make_parity.py"]
    for name, data in images():
        with open(os.path.join(HERE, name), "wb") as file:
            file.write(data)
        pillow = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        if name not in PILLOW_ONLY:
            vision = hwc(decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB))
            if not np.array_equal(pillow, vision):
                raise SystemExit(f"{name}: Pillow and torchvision differ by {np.abs(pillow.astype(int) - vision).max()}")
        height, width = pillow.shape[:2]
        lines.append(f"decode {name} {width} {height} {crc(pillow)}")
        tensor = torch.from_numpy(pillow.copy()).permute(2, 0, 1)
        for (x, y, w, h), size, (wx, wy, ww, wh), flip in geometries(rng, width, height):
            out = F.resized_crop(tensor, y, x, h, w, [size[1], size[0]], antialias=True)[:, wy : wy + wh, wx : wx + ww]
            if flip:
                out = F.horizontal_flip(out)
            numbers = (x, y, w, h, *size, wx, wy, ww, wh, int(flip))
            lines.append(f"geometry {name} {' '.join(map(str, numbers))} {crc(hwc(out))}")
    for name, orientation, data in turned():
        with open(os.path.join(HERE, name), "wb") as file:
            file.write(data)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        tensor = torch.from_numpy(np.asarray(upright).copy()).permute(2, 0, 1)
        vision = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB, apply_exif_orientation=True)
        if not name.endswith("webp") and not torch.equal(tensor, vision):  # torchvision reads no EXIF in WebP
            raise SystemExit(f"{name}: Pillow and torchvision turn it in different ways")
        height, width = upright.height, upright.width
        for (x, y, w, h), size, (wx, wy, ww, wh), flip in [((0, 0, width, height), (width, height), (0, 0, width, height), False), *list(geometries(rng, width, height))[-6:]]:
            out = F.resized_crop(tensor, y, x, h, w, [size[1], size[0]], antialias=True)[:, wy : wy + wh, wx : wx + ww]
            if flip:
                out = F.horizontal_flip(out)
            numbers = (x, y, w, h, *size, wx, wy, ww, wh, int(flip))
            lines.append(f"upright {orientation} {name} {' '.join(map(str, numbers))} {crc(hwc(out))}")
    rng = random.Random(2)
    plain = [(name, 0, data) for name, data in images() if name in ("420.jpg", "tall.jpg", "progressive.jpg", "rgb.png", "lossy.webp")]
    for name, orientation, data in plain + list(turned()):
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        tensor = torch.from_numpy(np.asarray(upright).copy()).permute(2, 0, 1)
        for number, mode in ((1, InterpolationMode.NEAREST), (3, InterpolationMode.BICUBIC)):
            for (x, y, w, h), size, (wx, wy, ww, wh), flip in geometries(rng, upright.width, upright.height):
                out = F.resized_crop(tensor, y, x, h, w, [size[1], size[0]], interpolation=mode, antialias=True)[:, wy : wy + wh, wx : wx + ww]
                if flip:
                    out = F.horizontal_flip(out)
                numbers = (x, y, w, h, *size, wx, wy, ww, wh, int(flip))
                lines.append(f"interpolation {number} {orientation} {name} {' '.join(map(str, numbers))} {crc(hwc(out))}")
    # Checks that the evaluation geometry above equals torchvision's own two steps.
    tensor = torch.from_numpy(picture(211, 157, 3, 1)).permute(2, 0, 1)
    steps = F.center_crop(F.resize(tensor, [256], antialias=True), [224, 224])
    once = F.resize(tensor, [256, int(256 * 211 / 157)], antialias=True)[:, 16:240, 60:284]
    assert torch.equal(steps, once)
    with open(os.path.join(HERE, "parity.txt"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print(f"{len(lines) - 1} results")


main()
