#!/usr/bin/env python3
"""Writes jpegs/, small square JPEGs of every kind, and jpegs/pixels.json with what Pillow reads in them.

An entry is the CRC-32 of the RGB bytes of ImageOps.exif_transpose(image).convert("RGB"), or null where Pillow refuses the file.
Needs Pillow 13, numpy, imagecodecs (YCCK, 12 bits, the lossless process), and cjpeg and jpegtran of libjpeg-turbo.
"""
import io
import json
import os
import struct
import subprocess
import tempfile
import zlib

import imagecodecs
import numpy as np
from PIL import Image, ImageOps

HERE = os.path.dirname(os.path.abspath(__file__))
SIDE = 128


def picture(side, channels=3, seed=1):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side]
    planes = [127 + 80 * np.sin(x / (9.0 + 5 * c)) * np.cos(y / (17.0 - 4 * c)) + rng.normal(0, 6, x.shape) for c in range(channels)]
    return np.stack(planes, -1).clip(0, 255).astype(np.uint8)


def pillow(image=None, **options):
    out = io.BytesIO()
    (image or Image.fromarray(picture(SIDE))).save(out, "JPEG", **{"quality": 85, "subsampling": 0, **options})
    return out.getvalue()


def run(program, data, *options):
    return subprocess.run([program, *options], input=data, capture_output=True, check=True).stdout


def cjpeg(*options, grey=False):
    out = io.BytesIO()
    image = Image.fromarray(picture(SIDE))
    (image.convert("L") if grey else image).save(out, "PPM")
    return run("cjpeg", out.getvalue(), "-quality", "85", *options)


def segments(data):
    """The marker segments up to the first scan's header, each with its marker, and the rest."""
    at, parts = 2, []
    while data[at + 1] != 0xDA:
        length = struct.unpack(">H", data[at + 2 : at + 4])[0]
        parts.append(data[at : at + 2 + length])
        at += 2 + length
    return parts, data[at:]


def segment(marker, body):
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


JFIF = segment(0xE0, b"JFIF\0\1\2\0\0\1\0\1\0\0")


def adobe(transform):
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


def rewritten(data, first=(), without=(), ids=None):
    """A file with other segments in front, without those of some markers, and with other component ids."""
    parts, rest = segments(data)
    parts = list(first) + [p for p in parts if p[1] not in without]
    if ids is not None:
        for i, p in enumerate(parts):
            if 0xC0 <= p[1] <= 0xCF and p[1] not in (0xC4, 0xC8, 0xCC):
                p = bytearray(p)
                for k, value in enumerate(ids):
                    p[10 + 3 * k] = value
                parts[i] = bytes(p)
        rest = bytearray(rest)
        for k, value in enumerate(ids):
            rest[5 + 2 * k] = value
    return b"\xff\xd8" + b"".join(parts) + bytes(rest)


def oriented(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return pillow(subsampling=2, exif=exif)


def scans(text, *options):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as script:
        script.write(text)
        script.flush()
        return cjpeg("-scans", script.name, *options)


def files():
    bare = (0xE0, 0xEE)  # JFIF and Adobe
    for name, sample in {
        "444": "1x1", "422": "2x1", "420": "2x2", "411": "4x1", "440": "1x2", "410": "4x2", "luma-1x4": "1x4", "luma-3x1": "3x1", "luma-1x3": "1x3",
        "all-2x1": "2x1,2x1,2x1", "chroma-2x1-of-2x2": "2x2,2x1,1x2", "chroma-larger": "1x1,2x2,2x2", "chroma-differs": "2x2,1x1,2x2",
    }.items():
        yield name, cjpeg("-sample", sample)
    odd = Image.fromarray(picture(SIDE - 11))
    yield "420-odd-size", pillow(odd, subsampling=2)
    yield "422-odd-size", pillow(odd, subsampling=1)
    yield "extended-sequential", pillow(qtables=[[300] * 64, [17] * 64])  # quantisers over 255
    yield "optimised-codes", pillow(optimize=True, subsampling=2)
    yield "restart-each-mcu", cjpeg("-sample", "2x2", "-restart", "1B")
    yield "restart-each-row", cjpeg("-sample", "2x2", "-restart", "1")
    yield "progressive", pillow(progressive=True, subsampling=2)
    yield "three-scans", scans("0;\n1;\n2;\n", "-sample", "2x2")
    yield "two-scans", scans("0;\n1 2;\n", "-sample", "2x1")
    yield "arithmetic", cjpeg("-arithmetic", "-sample", "2x2")
    yield "arithmetic-progressive", cjpeg("-arithmetic", "-progressive", "-sample", "2x2")

    yield "grey", cjpeg(grey=True)
    yield "grey-2x2", cjpeg("-sample", "2x2", grey=True)
    yield "grey-progressive", cjpeg("-progressive", grey=True)

    rgb = pillow(keep_rgb=True)
    yield "rgb-adobe-0", rgb
    yield "rgb-adobe-0-ids-1-2-3", rewritten(rgb, ids=b"\1\2\3")
    yield "rgb-ids", rewritten(rgb, without=bare)
    yield "rgb-ids-420", rewritten(cjpeg("-rgb", "-sample", "2x2"), without=bare)
    yield "rgb-adobe-0-third-smaller", rewritten(cjpeg("-rgb", "-sample", "2x2,2x2,1x1"), [adobe(0)], bare, b"RGB")  # as XYB
    yield "rgb-progressive", pillow(keep_rgb=True, progressive=True)
    ycc = cjpeg("-sample", "2x2")
    yield "jfif-adobe-0", rewritten(ycc, [JFIF, adobe(0)], bare)
    yield "jfif-adobe-1", rewritten(ycc, [JFIF, adobe(1)], bare)
    yield "jfif-ids-r-g-b", rewritten(ycc, [JFIF], bare, b"RGB")
    yield "adobe-1", rewritten(ycc, [adobe(1)], bare)
    yield "adobe-1-ids-r-g-b", rewritten(ycc, [adobe(1)], bare, b"RGB")
    yield "adobe-2", rewritten(ycc, [adobe(2)], bare)
    yield "adobe-before-jfif", rewritten(ycc, [adobe(0), JFIF], bare)
    yield "no-app", rewritten(ycc, without=bare)
    yield "no-app-ids-0-1-2", rewritten(ycc, without=bare, ids=b"\0\1\2")

    cmyk = pillow(Image.fromarray(picture(SIDE, 4), "CMYK"))
    yield "cmyk-adobe", cmyk
    yield "cmyk", rewritten(cmyk, without=bare)
    yield "ycck-adobe", imagecodecs.jpeg8_encode(picture(SIDE, 4), 85, colorspace="CMYK", outcolorspace="YCCK")

    for orientation in range(1, 9):
        yield f"orientation-{orientation}", oriented(orientation)
    tables = pillow(subsampling=1)
    yield "no-huffman-tables", rewritten(tables, without=(0xC4,))  # as Motion-JPEG: those of the standard
    out = io.BytesIO()
    Image.fromarray(picture(SIDE)).save(out, "MPO", save_all=True, append_images=[Image.fromarray(picture(SIDE, seed=2))], quality=85)
    yield "two-pictures", out.getvalue()

    twelve = picture(SIDE).astype(np.uint16) * 16
    yield "12-bits", imagecodecs.jpeg8_encode(twelve, 85, bitspersample=12)
    yield "lossless", imagecodecs.jpeg8_encode(picture(SIDE), lossless=True)


def pixels(data):
    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    except (OSError, SyntaxError):
        return None
    assert image.width == image.height
    return zlib.crc32(image.tobytes())


def main():
    folder = os.path.join(HERE, "jpegs")
    os.makedirs(folder, exist_ok=True)
    expected = {}
    for name, data in files():
        with open(os.path.join(folder, name + ".jpg"), "wb") as f:
            f.write(data)
        expected[name + ".jpg"] = pixels(data)
    with open(os.path.join(folder, "pixels.json"), "w") as f:
        json.dump(expected, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
