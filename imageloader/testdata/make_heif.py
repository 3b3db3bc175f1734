#!/usr/bin/env python3
"""Writes heif/: small HEIC and AVIF files, and what pillow_heif and Pillow make of them, as PNG of the same name.

large/ has images of 4096 x 4096 pixels, of 10 bits and with alpha, whose decoding takes the most memory. Needs Pillow 13,
pillow_heif 1.8, imagecodecs and numpy.
"""
import io
import os
import struct

import imagecodecs
import numpy as np
import pillow_heif
from PIL import Image

from make_formats import picture, save

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "heif")


def box(name, content, version=None):
    head = b"" if version is None else struct.pack(">I", version << 24)
    return struct.pack(">I4s", 8 + len(head) + len(content), name) + head + content


def boxes(data, at, end):
    while at < end:
        size, name = struct.unpack(">I4s", data[at : at + 8])
        yield name, at + 8, at + size
        at += size


def find(data, *path):
    """The place of the first box of a path; meta has a version before its boxes."""
    at, end = 0, len(data)
    for name in path:
        found = [(a, e) for n, a, e in boxes(data, at, end) if n == name]
        at, end = found[0]
        if name == b"meta":
            at += 4
    return at, end


def coded(data):
    """The configuration and the bit stream of the picture of a HEIC, whose only item comes first."""
    at, end = find(data, b"meta", b"iprp", b"ipco", b"hvcC")
    begin, stop = find(data, b"mdat")
    return data[at:end], data[begin:stop]


def grid(tiles, columns, side, width, height):
    """A HEIC of tiles, as phones write it. tiles are pairs of coded()."""
    rows = len(tiles) // columns
    assert len({configuration for configuration, _ in tiles}) == 1
    entries = [(i + 1, b"hvc1") for i in range(len(tiles))] + [(len(tiles) + 1, b"grid")]
    iinf = struct.pack(">H", len(entries)) + b"".join(box(b"infe", struct.pack(">HH4sB", i, 0, kind, 0), 2) for i, kind in entries)
    properties = [box(b"hvcC", tiles[0][0]), box(b"ispe", struct.pack(">II", side, side), 0), box(b"ispe", struct.pack(">II", width, height), 0)]
    ipma = struct.pack(">I", len(entries))
    for i, kind in entries:
        ipma += struct.pack(">HB", i, 2) + b"\x81\x02" if kind == b"hvc1" else struct.pack(">HB", i, 1) + b"\x83"
    iref = box(b"dimg", struct.pack(">HH", len(entries), len(tiles)) + struct.pack(f">{len(tiles)}H", *range(1, len(entries))))
    data = struct.pack(">BBBBHH", 0, 0, rows - 1, columns - 1, width, height)

    def whole(first):
        iloc, at = struct.pack(">HH", 0x4400, len(entries)), first
        for (i, kind), (_, stream) in zip(entries, tiles + [(b"", data)]):
            place, method = (at, 0) if kind == b"hvc1" else (0, 1)
            iloc += struct.pack(">HHHHII", i, method, 0, 1, place, len(stream))
            at += len(stream) if kind == b"hvc1" else 0
        hdlr = box(b"hdlr", struct.pack(">I4s12x", 0, b"pict") + b"\0", 0)
        pitm = box(b"pitm", struct.pack(">H", len(entries)), 0)
        iprp = box(b"iprp", box(b"ipco", b"".join(properties)) + box(b"ipma", ipma, 0))
        meta = hdlr + pitm + box(b"iinf", iinf, 0) + box(b"iref", iref, 0) + iprp + box(b"idat", data) + box(b"iloc", iloc, 1)
        head = box(b"ftyp", b"heic\0\0\0\0mif1heic") + box(b"meta", meta, 0)
        return head, head + box(b"mdat", b"".join(stream for _, stream in tiles))

    return whole(len(whole(0)[0]) + 8)[1]


def files():
    color = Image.fromarray(picture(50, 38, 3, 30) // 2 + 60)
    alpha = Image.fromarray(picture(50, 38, 4, 31))
    exif = Image.Exif()
    exif[274] = 6
    yield "still.heic", save(color, "HEIF", quality=80)
    yield "444.heic", save(color, "HEIF", quality=90, chroma=444)
    yield "alpha.heic", save(alpha, "HEIF", quality=90, chroma=444)
    yield "turned.heic", save(color, "HEIF", quality=90, chroma=444, exif=exif.tobytes())
    side = 64
    large = Image.fromarray(picture(2 * side, 2 * side, 3, 32))
    corners = [(x, y) for y in (0, side) for x in (0, side)]
    tiles = [coded(save(large.crop((x, y, x + side, y + side)), "HEIF", quality=90, chroma=444)) for x, y in corners]
    yield "grid.heic", grid(tiles, 2, side, 2 * side - 18, 2 * side - 30)
    flat = Image.new("RGB", (400, 300), (90, 120, 60))
    yield "flat.heic", save(flat, "HEIF", quality=50)
    yield "flat.avif", save(flat, "AVIF", quality=50)
    yield "still.avif", save(color, "AVIF", quality=90)
    pure = Image.fromarray((picture(50, 38, 3, 30) > 150) * np.uint8(255))
    yield "saturated.avif", save(pure, "AVIF", quality=90)
    yield "444.avif", save(color, "AVIF", quality=90, subsampling="4:4:4")
    odd = color.crop((0, 0, 49, 37))
    yield "odd.avif", save(odd, "AVIF", quality=90)
    yield "limited.avif", save(odd, "AVIF", quality=90, range="limited")
    yield "bt709.avif", imagecodecs.avif_encode(np.asarray(color), level=90, pixelformat="420", primaries=1, transfer=13, matrix=1)
    yield "alpha-420.avif", save(alpha, "AVIF", quality=90)
    yield "10-bit.avif", imagecodecs.avif_encode(np.asarray(color).astype(np.uint16) * 4, level=90, bitspersample=10, pixelformat="420")
    yield "grey.avif", save(color.convert("L"), "AVIF", quality=90, subsampling="4:0:0")
    yield "alpha.avif", save(alpha, "AVIF", quality=90, subsampling="4:4:4")


pillow_heif.register_heif_opener()
os.makedirs(os.path.join(HERE, "large"), exist_ok=True)
for name, data in files():
    with open(os.path.join(HERE, name), "wb") as file:
        file.write(data)
    with open(os.path.join(HERE, name + ".png"), "wb") as file:
        file.write(save(Image.open(io.BytesIO(data)).convert("RGB"), "PNG", optimize=True))
flat = np.full((4096, 4096, 4), 600, np.uint16)
with open(os.path.join(HERE, "large", "10-bit.avif"), "wb") as file:
    file.write(imagecodecs.avif_encode(flat, level=30, bitspersample=10, pixelformat="444"))
pillow_heif.from_bytes("RGBA;16", (4096, 4096), (flat * 64).tobytes()).save(os.path.join(HERE, "large", "10-bit.heic"), quality=30, chroma=444)
