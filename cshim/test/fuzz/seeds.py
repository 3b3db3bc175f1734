#!/usr/bin/env python3
"""Makes seeds for the fuzzers whose input is not an image file alone, from the files of folders.

  seeds.py entries_fuzz|exif_fuzz|inflate_fuzz OUT FOLDER...
"""

import hashlib
import pathlib
import sys
import zlib


def entries(data):
    if data[:2] != b"\xff\xd8" or len(data) > 5900:
        return
    yield bytes([0, 3, 0, 0, 0]) + data  # not forged
    yield bytes([3, 2, 1, 0, 70, 0, 1, 2]) + data  # an entry moved
    yield bytes([3, 5, 2, 1, 44, 0, 2, 1, 50, 0, 0, 16, 200, 1, 1, 0]) + data  # forged fields, and the file changed
    yield bytes([2, 1, 1, 0, 9, 0, 3, 8]) + data  # cut off


def exif(data):
    if data[:2] == b"\xff\xd8":
        yield b"\x01" + data[2:2000]
        at = data.find(b"Exif\0\0")
        if at >= 0:
            size = int.from_bytes(data[at - 2 : at], "big")
            yield b"\0" + data[at + 6 : at - 2 + size]
    elif data[:4] == b"\x89PNG":
        yield b"\x02" + data[8:2000]
        xmp = b'<x tiff:Orientation="6"/>'
        profile = b"\nexif\n      26\n" + (b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x08\0\0" + bytes(4)).hex().encode()
        for name, text in (
            (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
            (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)),
            (b"tEXt", b"Raw profile type exif\0" + profile),
            (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)),
        ):
            yield b"\x02" + len(text).to_bytes(4, "big") + name + text + b"...."
    elif data[:4] == b"RIFF":
        yield b"\x03" + data[12:2000]


def inflate(data):
    for level, strategy in (0, 0), (1, 0), (9, 0), (6, zlib.Z_HUFFMAN_ONLY), (6, zlib.Z_RLE), (6, zlib.Z_FIXED):
        z = zlib.compressobj(level, zlib.DEFLATED, -15, 8, strategy)
        yield z.compress(data[:3000]) + z.flush(zlib.Z_FULL_FLUSH) + z.compress(data[3000:9000]) + z.flush()


make = {"entries_fuzz": entries, "exif_fuzz": exif, "inflate_fuzz": inflate}[sys.argv[1]]
out = pathlib.Path(sys.argv[2])
for folder in sys.argv[3:]:
    for path in sorted(pathlib.Path(folder).iterdir()):
        if path.is_file():
            for seed in make(path.read_bytes()):
                (out / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
