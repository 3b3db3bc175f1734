#!/usr/bin/env python3
"""Writes formats/: small GIF, BMP, TIFF and WebP files, and formats.json with what Pillow's convert("RGB") makes of them.

Needs Pillow 13 and numpy. Each file's entry is [width, height, CRC-32 of the RGB bytes, EXIF orientation].
"""
import io
import json
import os
import zlib

import numpy as np
from PIL import Image

HERE = os.path.dirname(os.path.abspath(__file__))


def picture(width, height, channels, seed):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 90 * np.sin(x / (9.0 + 3 * c)) * np.cos(y / (7.0 + c)) + rng.normal(0, 8, x.shape) for c in range(channels)]
    return np.stack(planes, -1).clip(0, 255).astype(np.uint8)


def save(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def files():
    color = Image.fromarray(picture(37, 23, 3, 1))
    grey = color.convert("L")
    alpha = Image.fromarray(picture(37, 23, 4, 2), "RGBA")
    few = color.quantize(200)
    yield "palette.gif", save(few, "GIF")
    yield "interlaced.gif", save(few, "GIF", interlace=1)
    yield "transparent.gif", save(few, "GIF", transparency=3)
    yield "grey.gif", save(grey, "GIF")
    yield "animated.gif", save(few, "GIF", save_all=True, append_images=[few.rotate(90), few.rotate(180)], duration=10)
    yield "rgb.bmp", save(color, "BMP")
    yield "palette.bmp", save(few, "BMP")
    yield "grey.bmp", save(grey, "BMP")
    yield "bilevel.bmp", save(color.convert("1"), "BMP")
    yield "alpha.bmp", save(alpha, "BMP")
    yield "rgb.tiff", save(color, "TIFF")
    yield "lzw.tiff", save(color, "TIFF", compression="tiff_lzw")
    yield "predictor.tiff", save(color, "TIFF", compression="tiff_lzw", tiffinfo={317: 2})
    yield "deflate.tiff", save(color, "TIFF", compression="tiff_adobe_deflate")
    yield "packbits.tiff", save(color, "TIFF", compression="packbits")
    yield "grey.tiff", save(grey, "TIFF")
    yield "palette.tiff", save(few, "TIFF")
    yield "bilevel.tiff", save(color.convert("1"), "TIFF")
    yield "alpha.tiff", save(alpha, "TIFF")
    yield "orientation-6.tiff", save(color, "TIFF", tiffinfo={274: 6})
    yield "lossy.webp", save(color, "WEBP", quality=80)


os.makedirs(os.path.join(HERE, "formats"), exist_ok=True)
results = {}
for name, data in files():
    with open(os.path.join(HERE, "formats", name), "wb") as file:
        file.write(data)
    image = Image.open(io.BytesIO(data))
    orientation = image.getexif().get(274, 1)
    # Pillow turns TIFF files upright as it loads them; what is stored comes from a file without the tag.
    if name.startswith("orientation"):
        image = Image.open(os.path.join(HERE, "formats", "rgb.tiff"))
    pixels = np.asarray(image.convert("RGB"))
    results[name] = [pixels.shape[1], pixels.shape[0], f"{zlib.crc32(np.ascontiguousarray(pixels).tobytes()):08x}", orientation]
with open(os.path.join(HERE, "formats", "formats.json"), "w") as file:
    file.write("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results.items()) + "\n}\n")
with open(os.path.join(HERE, "formats", "fax.tiff"), "wb") as file:  # is not decoded
    file.write(save(Image.fromarray(picture(37, 23, 3, 1)).convert("1"), "TIFF", compression="group4"))
print(f"{len(results)} files")
