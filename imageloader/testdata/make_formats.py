#!/usr/bin/env python3
"""Writes formats/ and features/: small GIF, BMP, TIFF, WebP and PNG files, and what Pillow's convert("RGB") makes of them in
features/pixels.json.

formats/ has what usual programs write, and is part of the digests of batches; features/ has the rest. Needs Pillow 13 and
numpy. Each file's entry is [width, height, CRC-32 of the RGB bytes, EXIF orientation]. Where Pillow's
pixels are not the expected ones, the generators yield these, with the reason. refused.json has files that are refused, and
words of the error. Bytes that Pillow does not write, this script does.
"""
import base64
import io
import json
import os
import struct
import zlib

import numpy as np
from PIL import Image, PngImagePlugin

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


def bitmap(size, bits, compression, pixels, width, height, palette=b"", masks=b"", colours=0, gap=b"", dib=False):
    """A BMP with any header. masks lie in the header if it is large enough, otherwise behind it."""
    if size == 12:
        fields = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        fields = struct.pack("<IiiHHIIiiII", size, width, height, 1, bits, compression, len(pixels), 2835, 2835, colours, 0)
        if size > 40:
            fields += masks
            masks = b""
        fields = fields.ljust(size, b"\0")
    head = fields + masks + palette + gap
    return (b"" if dib else b"BM" + struct.pack("<IHHI", 14 + len(head) + len(pixels), 0, 0, 14 + len(head))) + head + pixels


def rows(values, bits):
    """Rows of a BMP, from the bottom up; values are pixels as whole numbers."""
    out = b""
    for row in values[::-1]:
        if bits < 8:
            packed = np.packbits(((row[:, None] >> np.arange(bits)[::-1]) & 1).astype(np.uint8).ravel()).tobytes()
        else:
            packed = b"".join(int(v).to_bytes(bits // 8, "little") for v in row)
        out += packed + b"\0" * (-len(packed) % 4)
    return out


def runs(values, four):
    """RLE8 or RLE4: each row as literals and runs in turn, and ends of rows."""
    out = b""
    for row in values[::-1]:
        x = 0
        while x < len(row):
            count = min(5 + x % 3, len(row) - x)
            if x // 5 % 2 and count >= 3:  # literals
                part = [int(v) for v in row[x : x + count]]
                if four:
                    part = [a << 4 | b for a, b in zip(part[::2], part[1::2] + [0])]
                out += bytes([0, count]) + bytes(part) + b"\0" * (len(part) % 2)
            else:
                count = 1
                while x + count < len(row) and count < 255 and row[x + count] == row[x]:
                    count += 1
                out += bytes([count, int(row[x]) * 17 if four else int(row[x])])
            x += count
        out += b"\0\0"
    return out + b"\0\1"


def bitmaps():
    height, width = 13, 19
    few = np.asarray(Image.fromarray(picture(width, height, 3, 3)).quantize(200)).astype(int)
    colours = np.random.default_rng(4).integers(0, 256, (256, 3), np.uint8)
    palette = b"".join(bytes(c) + b"\0" for c in colours)
    rgb = picture(width, height, 4, 5).astype(np.uint32)

    def packed(masks):
        total = np.zeros((height, width), np.uint32)
        for channel, mask in enumerate(masks):
            if mask:
                shift = (mask & -mask).bit_length() - 1
                total |= (rgb[..., channel] * (mask >> shift) // 255) << shift
        return total

    def unpacked(values, masks):
        planes = []
        for mask in masks[:3]:
            shift = (mask & -mask).bit_length() - 1
            planes.append(((values & mask) >> shift).astype(np.uint64) * 255 // (mask >> shift))
        return np.stack(planes, -1).astype(np.uint8)

    for bits in (1, 4, 8):
        values = few % (1 << bits)
        for name, size in (("os2", 12), ("v3", 40), ("v5", 124)):
            entries = b"".join(bytes(c) for c in colours[: 1 << bits]) if size == 12 else palette[: 4 << bits]
            yield f"{name}-{bits}.bmp", bitmap(size, bits, 0, rows(values, bits), width, height, entries), None
    values = few % 16
    yield "dib.bmp", bitmap(40, 4, 0, rows(values, 4), width, height, palette[:64], dib=True), None
    yield "top-down.bmp", bitmap(40, 8, 0, rows(few[::-1], 8), width, -height, palette), None
    yield "gap.bmp", bitmap(40, 8, 0, rows(few, 8), width, height, palette, gap=b"gap of 10b"), None
    # Pillow's index without a colour is black.
    yield "few-colours.bmp", bitmap(40, 8, 0, rows(few % 40, 8), width, height, palette[:120], colours=30), None
    yield "rle8.bmp", bitmap(40, 8, 1, runs(few, False), width, height, palette), None
    yield "rle4.bmp", bitmap(40, 4, 2, runs(values, True), width, height, palette[:64]), None
    # A jump, a row of nothing and an early end, which Pillow refuses: pixels that are left out have the first colour.
    jump = b"\3\5\0\2\4\2\2\7\0\0\0\0\1\11\0\1"
    indices = np.zeros((height, width), np.uint8)
    indices[height - 1, :3], indices[height - 3, 7:9], indices[height - 5, 0] = 5, 7, 9
    yield "rle8-jump.bmp", bitmap(40, 8, 1, jump, width, height, palette), colours[indices][..., ::-1]

    yield "555.bmp", bitmap(40, 16, 0, rows(packed((0x7C00, 0x3E0, 0x1F)), 16), width, height), None
    for name, size, bits, compression, masks, by_pillow in (
        ("565", 40, 16, 3, (0xF800, 0x7E0, 0x1F), True),
        ("565-v4", 108, 16, 3, (0xF800, 0x7E0, 0x1F, 0), True),
        ("bgra-v3", 56, 32, 3, (0xFF0000, 0xFF00, 0xFF, 0xFF000000), True),
        ("rgba-v5", 124, 32, 3, (0xFF, 0xFF00, 0xFF0000, 0xFF000000), True),
        ("abgr-v4", 108, 32, 3, (0xFF000000, 0xFF0000, 0xFF00, 0xFF), True),
        ("bgrx-v5", 124, 32, 0, (0xFF0000, 0xFF00, 0xFF, 0), True),
        # Layouts that Pillow refuses: ten bits a colour, four bits a colour, masks of alpha behind a short header.
        ("1010102", 40, 32, 3, (0x3FF00000, 0xFFC00, 0x3FF), False),
        ("4444", 108, 16, 3, (0xF00, 0xF0, 0xF, 0xF000), False),
        ("alpha-fields", 40, 32, 6, (0xFF, 0xFF00, 0xFF0000, 0xFF000000), False),
    ):
        values = packed(masks)
        data = bitmap(size, bits, compression, rows(values, bits), width, height, masks=struct.pack(f"<{len(masks)}I", *masks))
        yield f"{name}.bmp", data, None if by_pillow else unpacked(values, masks)


def refused_bitmaps():
    for name, size, bits, compression, words in (
        ("jpeg", 40, 24, 4, "a JPEG or PNG inside"),
        ("os2-huffman", 64, 1, 3, "Huffman"),
        ("os2-rle24", 64, 24, 4, "run-length encoding of OS/2"),
        ("cmyk", 108, 32, 11, "compression 11"),
        ("64-bits", 40, 64, 0, "64 bits"),
        ("short-header", 16, 8, 0, "a header of 16 bytes"),
    ):
        yield f"{name}.bmp", bitmap(size, bits, compression, bytes(99), 3, 3), words
    gaps = struct.pack("<4I", 0xFF00FF, 0xFF00, 0xFF, 0)
    yield "gaps-in-field.bmp", bitmap(108, 32, 3, bytes(99), 3, 3, masks=gaps), "with gaps"


def directory(order, tags, blocks, big=False, unsorted=False):
    """A TIFF. tags are (number, type, values); blocks are the strips or tiles, whose tags are added."""
    kinds = {1: "B", 3: "H", 4: "I", 7: "B", 16: "Q"}
    tiled = any(number == 322 for number, _, _ in tags)
    place = [(324 if tiled else 273, 4, [0] * len(blocks)), (325 if tiled else 279, 4, [len(b) for b in blocks])]
    head = order.encode() * 2 + struct.pack(order_sign(order) + ("HHHQ" if big else "HI"), *((43, 8, 0, 16) if big else (42, 8)))
    entries = tags + place
    size = (16 + 20 * len(entries)) if big else (6 + 12 * len(entries))
    sizes = [len(values) * struct.calcsize(kinds[kind]) for _, kind, values in entries]
    extra_at = len(head) + size
    blocks_at = extra_at + sum(s + s % 2 for s in sizes if s > (8 if big else 4))
    for block in range(len(blocks)):
        place[0][2][block] = blocks_at + sum(len(b) for b in blocks[:block])
    entries = entries if unsorted else sorted(entries)
    out, extra = struct.pack(order_sign(order) + ("Q" if big else "H"), len(entries)), b""
    for number, kind, values in entries:
        value = struct.pack(order_sign(order) + str(len(values)) + kinds[kind], *values)
        if len(value) > (8 if big else 4):
            place_of = extra_at + len(extra)
            extra += value + b"\0" * (len(value) % 2)
            value = struct.pack(order_sign(order) + ("Q" if big else "I"), place_of)
        out += struct.pack(order_sign(order) + ("HHQ" if big else "HHI"), number, kind, len(values)) + value.ljust(8 if big else 4, b"\0")
    return head + out + bytes(8 if big else 4) + extra + b"".join(blocks)


def order_sign(order):
    return "<" if order == "I" else ">"


def tags_of(width, height, photometric, depths, **others):
    numbers = {"compression": 259, "fill": 266, "planar": 284, "rows": 278, "t4": 292, "predictor": 317, "palette": 320,
               "tile_width": 322, "tile_height": 323, "extra": 338, "format": 339, "subsampling": 530, "orientation": 274, "ink": 332}
    tags = [(256, 3, [width]), (257, 3, [height]), (258, 3, depths), (262, 3, [photometric]), (277, 3, [len(depths)])]
    for name, value in others.items():
        tags.append((numbers[name], 3, value if isinstance(value, list) else [value]))
    return sorted(tags)


def strips(array, order, rows_each, depth, pack=lambda b: b):
    """Blocks of rows of an array [height, width, samples]."""
    out = []
    for y in range(0, len(array), rows_each):
        part = array[y : y + rows_each]
        if depth == 16:
            raw = part.astype(order_sign(order) + "u2").tobytes()
        else:
            raw = b"".join(np.packbits(((row.ravel()[:, None] >> np.arange(depth)[::-1]) & 1).astype(np.uint8)).tobytes() for row in part)
        out.append(pack(raw))
    return out


def tiles(array, side, pack=lambda b: b):
    height, width, samples = array.shape
    out = []
    for y in range(0, height, side):
        for x in range(0, width, side):
            tile = np.zeros((side, side, samples), array.dtype)
            part = array[y : y + side, x : x + side]
            tile[: part.shape[0], : part.shape[1]] = part
            out.append(pack(tile.tobytes()))
    return out


def split_jpeg(image, **options):
    """The tables of a JPEG, and the JPEG without them."""
    return save(image, "JPEG", streamtype=1, **options), save(image, "JPEG", streamtype=2, **options)


def tiffs():
    height, width = 21, 35
    rgb = picture(width, height, 3, 6)
    rgba = picture(width, height, 4, 7)
    grey = picture(width, height, 1, 8)
    wide = (picture(width, height, 4, 9).astype(np.uint16) << 8) | picture(width, height, 4, 10)
    eight = lambda array: [8] * array.shape[2]
    planes = lambda array: [array[..., c : c + 1] for c in range(array.shape[2])]

    # Planes: in strips, in tiles, and with a predictor.
    yield "planar.tiff", directory("I", tags_of(width, height, 2, [8] * 3, planar=2, rows=8), sum([strips(p, "I", 8, 8) for p in planes(rgb)], [])), None
    tiled = dict(planar=2, tile_width=16, tile_height=16, compression=8)
    yield "planar-tiled.tiff", directory("M", tags_of(width, height, 2, [8] * 3, **tiled), sum([tiles(p, 16, zlib.compress) for p in planes(rgb)], [])), None
    difference = lambda p: np.concatenate([p[:, :1], p[:, 1:] - p[:, :-1]], 1)
    packed = [strips(difference(p), "I", 30, 8, zlib.compress)[0] for p in planes(rgb)]
    yield "planar-predictor.tiff", directory("I", tags_of(width, height, 2, [8] * 3, planar=2, compression=8, predictor=2), packed), None
    # Pillow does not decode alpha in a plane of its own here: the pixels are those of the colours.
    yield "planar-alpha.tiff", directory("I", tags_of(width, height, 2, [8] * 4, planar=2, extra=2), [p.tobytes() for p in planes(rgba)]), rgba[..., :3]
    yield "tiled.tiff", directory("I", tags_of(width, height, 2, [8] * 3, tile_width=16, tile_height=16), tiles(rgb, 16)), None

    # Alpha and extra samples.
    alpha = rgba[..., 3:].astype(np.uint16)
    alpha[:3], alpha[3:6] = 0, 255
    multiplied = np.concatenate([rgba[..., :3] * alpha // 255, alpha], 2).astype(np.uint8)
    yield "associated.tiff", directory("I", tags_of(width, height, 2, [8] * 4, extra=1), [multiplied.tobytes()]), None
    over = multiplied.copy()
    over[..., 3] //= 2  # colours above alpha
    yield "associated-over.tiff", directory("M", tags_of(width, height, 2, [8] * 4, extra=1, compression=8), [zlib.compress(over.tobytes())]), None
    multiplied16 = multiplied.astype(np.uint16) * 257
    yield "associated-16.tiff", directory("M", tags_of(width, height, 2, [16] * 4, extra=1), strips(multiplied16, "M", 99, 16)), None
    yield "extra-0.tiff", directory("I", tags_of(width, height, 2, [8] * 4, extra=0), [rgba.tobytes()]), None
    six = np.concatenate([rgba, rgb[..., :2]], 2)
    yield "extra-3.tiff", directory("I", tags_of(width, height, 2, [8] * 6, extra=[0, 0, 0]), [six.tobytes()]), None
    yield "extra-unsaid.tiff", directory("I", tags_of(width, height, 2, [8] * 4), [rgba.tobytes()]), None
    yield "grey-alpha.tiff", directory("I", tags_of(width, height, 1, [8] * 2, extra=2), [rgba[..., 2:].tobytes()]), None
    # Pillow opens grey with associated alpha, and cannot convert it to RGB: divided as its RGB is.
    pair = multiplied[..., [0, 3]]
    divided = np.where(alpha == 0, 0, np.minimum(pair[..., :1].astype(int) * 255 // np.maximum(alpha, 1), 255)).astype(np.uint8)
    yield "grey-associated.tiff", directory("I", tags_of(width, height, 1, [8] * 2, extra=1), [pair.tobytes()]), divided.repeat(3, 2)

    # CMYK.
    yield "cmyk.tiff", directory("I", tags_of(width, height, 5, [8] * 4), [rgba.tobytes()]), None
    yield "cmyk-16.tiff", directory("M", tags_of(width, height, 5, [16] * 4, compression=8, rows=9), strips(wide, "M", 9, 16, zlib.compress)), None
    yield "cmyk-extra.tiff", directory("I", tags_of(width, height, 5, [8] * 6, extra=[0, 0]), [six.tobytes()]), None
    yield "cmyk-planar.tiff", directory("I", tags_of(width, height, 5, [8] * 4, planar=2, compression=8), [zlib.compress(p.tobytes()) for p in planes(rgba)]), None

    # Depths. Pillow clips 16-bit grey at 255, and does not invert it; here the high byte counts.
    for depth in (2, 4):
        low = grey >> (8 - depth)
        yield f"grey-{depth}.tiff", directory("I", tags_of(width, height, 1, [depth]), strips(low, "I", 99, depth)), None
        yield f"white-{depth}.tiff", directory("M", tags_of(width, height, 0, [depth]), strips(low, "M", 99, depth)), None
        colours = np.random.default_rng(depth).integers(0, 65536, 3 << depth).tolist()
        yield f"palette-{depth}.tiff", directory("I", tags_of(width, height, 3, [depth], palette=colours), strips(low, "I", 99, depth)), None
    yield "white-8.tiff", directory("I", tags_of(width, height, 0, [8]), [grey.tobytes()]), None
    for name, order, photometric in (("grey-16", "I", 1), ("grey-16-big", "M", 1), ("white-16", "I", 0)):
        high = wide[..., :1] >> 8
        expected = (255 - high if photometric == 0 else high).astype(np.uint8).repeat(3, 2)
        yield f"{name}.tiff", directory(order, tags_of(width, height, photometric, [16]), strips(wide[..., :1], order, 99, 16)), expected
    twelve = (wide[..., 1:2] >> 4).astype(np.uint16)
    data = save(Image.fromarray(wide[..., 0]), "PNG")
    yield "grey-16.png", data, (wide[..., :1] >> 8).astype(np.uint8).repeat(3, 2)
    yield "grey-12.tiff", directory("I", tags_of(width, height, 1, [12]), strips(twelve, "I", 99, 12)), (twelve >> 4).astype(np.uint8).repeat(3, 2)
    yield "rgb-16.tiff", directory("I", tags_of(width, height, 2, [16] * 3, compression=8, predictor=2), [zlib.compress(difference(wide[..., :3]).astype("<u2").tobytes())]), None
    yield "rgb-16-big.tiff", directory("M", tags_of(width, height, 2, [16] * 3), strips(wide[..., :3], "M", 99, 16)), None
    yield "palette-alpha.tiff", directory("I", tags_of(width, height, 3, [8, 8], palette=list(range(0, 768 * 80, 80)), extra=2), [rgba[..., :2].tobytes()]), None

    # The order of tags and of bits, missing and wrong tags, BigTIFF.
    shuffled = tags_of(width, height, 2, [8] * 3)[::-1]
    yield "unsorted.tiff", directory("M", shuffled, [rgb.tobytes()], unsorted=True), None
    reverse = lambda b: bytes(int(f"{v:08b}"[::-1], 2) for v in b)
    yield "reversed.tiff", directory("I", tags_of(width, height, 1, [8], fill=2), [reverse(grey.tobytes())]), None
    yield "reversed-deflate.tiff", directory("I", tags_of(width, height, 2, [8] * 3, fill=2, compression=8), [reverse(zlib.compress(rgb.tobytes()))]), None
    yield "one-depth.tiff", directory("I", [t if t[0] != 258 else (258, 3, [8]) for t in tags_of(width, height, 2, [8] * 3)], [rgb.tobytes()]), None
    no_counts = directory("I", tags_of(width, height, 2, [8] * 3), [rgb.tobytes()]).replace(struct.pack("<HHI", 279, 4, 1), struct.pack("<HHI", 60000, 4, 1))
    yield "no-counts.tiff", no_counts, rgb
    yield "ignored-predictor.tiff", directory("I", tags_of(width, height, 2, [8] * 3, predictor=2), [rgb.tobytes()]), None
    for order in "IM":  # Pillow recognises the first only
        yield f"bigtiff-{order}.tiff", directory(order, tags_of(width, height, 2, [8] * 3, rows=5), strips(rgb, order, 5, 8), big=True), rgb

    # Fax: the three compressions, two-dimensional rows, strips, both meanings of 0, both orders of bits.
    page = Image.fromarray(((picture(300, 40, 1, 11)[..., 0] > 127) * 255).astype(np.uint8)).convert("1")
    narrow = page.crop((0, 0, 37, 40))
    for name, kind, options in (
        ("huffman", "tiff_ccitt", {}),
        ("group3", "group3", {}),
        ("group3-2d", "group3", {292: 1}),
        ("group3-fill", "group3", {292: 4}),
        ("group3-2d-fill", "group3", {292: 5}),
        ("group4", "group4", {}),
        ("group4-strips", "group4", {278: 7}),
        ("group4-black", "group4", {262: 1}),
        ("group4-reversed", "group4", {266: 2}),
        ("group3-reversed", "group3", {266: 2}),
    ):
        yield f"{name}.tiff", save(page if "strips" not in name else narrow, "TIFF", compression=kind, tiffinfo=options), None
    # Runs of all lengths, up to those of several makeup codes.
    lengths = np.random.default_rng(12).permutation(np.concatenate([np.arange(1, 70), np.arange(64, 2600, 61), [2559, 2560, 2561, 2623, 5200]]))
    page = np.zeros((12, 6000), np.uint8)
    for y in range(len(page)):
        edges = np.cumsum(np.roll(lengths, 9 * y))
        page[y] = np.searchsorted(edges, np.arange(6000), "right") % 2 * 255
    page[5], page[6] = 0, 255
    for name, kind in (("huffman", "tiff_ccitt"), ("group3", "group3"), ("group4", "group4")):
        yield f"{name}-runs.tiff", save(Image.fromarray(page).convert("1"), "TIFF", compression=kind), None

    # JPEG: strips and tiles, with tables of their own and shared ones.
    yield "jpeg.tiff", save(Image.fromarray(rgb), "TIFF", compression="jpeg", quality=90), None
    yield "jpeg-grey.tiff", save(Image.fromarray(grey[..., 0]), "TIFF", compression="jpeg", quality=90), None
    for name, subsampling, photometric in (("jpeg-420", 2, 6), ("jpeg-444", 0, 6), ("jpeg-rgb", 0, 2)):
        options = dict(quality=85, subsampling=subsampling)
        if photometric == 2:
            options["keep_rgb"] = True
        parts = []
        for y in (0, 32):
            for x in (0, 32, 64):
                part = Image.fromarray(picture(96, 64, 3, 13)[y : y + 32, x : x + 32])
                tables, jpeg = split_jpeg(part, **options)
                parts.append(jpeg)
        factor = 2 if subsampling else 1
        tags = tags_of(90, 50, photometric, [8] * 3, compression=7, tile_width=32, tile_height=32, **({"subsampling": [factor, factor]} if photometric == 6 else {}))
        yield f"{name}.tiff", directory("I", sorted(tags + [(347, 7, list(tables))]), parts), None


def refused_tiffs():
    rgb = picture(9, 7, 3, 14)
    raw = [rgb.tobytes() * 4]
    for name, tags, words in (
        ("float", tags_of(9, 7, 1, [32], format=3), "floating-point samples"),
        ("signed", tags_of(9, 7, 1, [16], format=2), "signed samples"),
        ("32-bits", tags_of(9, 7, 1, [32]), "samples of 32 bits"),
        ("mixed", tags_of(9, 7, 2, [5, 6, 5]), "different depths"),
        ("lab", tags_of(9, 7, 8, [8] * 3), "CIELAB"),
        ("ycbcr", tags_of(9, 7, 6, [8] * 3), "YCbCr without JPEG"),
        ("inks", tags_of(9, 7, 5, [8] * 4, ink=2), "inks other than CMYK"),
        ("raw-photo", tags_of(9, 7, 32803, [8]), "colour filter array"),
        ("mask", tags_of(9, 7, 4, [1]), "transparency mask"),
        ("old-jpeg", tags_of(9, 7, 6, [8] * 3, compression=6), "YCbCr without JPEG"),
        ("fax-words", tags_of(9, 7, 1, [1], compression=32771), "16-bit words of fax"),
        ("zstd", tags_of(9, 7, 2, [8] * 3, compression=50000), "Zstandard"),
        ("lzma", tags_of(9, 7, 2, [8] * 3, compression=34925), "LZMA"),
        ("unknown", tags_of(9, 7, 2, [8] * 3, compression=4711), "compression 4711"),
        ("predictor-3", tags_of(9, 7, 2, [8] * 3, compression=8, predictor=3), "predictor 3"),
        ("predictor-1-bit", tags_of(9, 7, 1, [1], compression=8, predictor=2), "predictor with 1 bits"),
        ("palette-16", tags_of(9, 7, 3, [16], palette=[0] * 768), "palette of 16-bit indices"),
        ("jpeg-planar", tags_of(9, 7, 2, [8] * 3, compression=7, planar=2), "JPEG compression of separate planes"),
        ("jpeg-cmyk", tags_of(9, 7, 5, [8] * 4, compression=7), "JPEG compression of other"),
        ("samples", tags_of(9, 7, 2, [8] * 17), "17 samples"),
    ):
        yield f"{name}.tiff", directory("I", tags, raw), words


def gif(canvas, frame, pixels, colours=b"", local=b"", background=0, control=b"", interlaced=False, bits=3):
    """A GIF of one frame, whose pixels cost a code of bits + 1 bits each."""
    size = lambda palette: 0x80 | (len(palette) // 3).bit_length() - 2 if palette else 0
    data = b"GIF89a" + struct.pack("<HHBBB", *canvas, size(colours), background, 0) + colours
    if control:
        data += b"!\xf9\4" + control + b"\0"
    data += b"," + struct.pack("<HHHHB", *frame, size(local) | (0x40 if interlaced else 0)) + local + bytes([bits])
    codes, clear = [], 1 << bits
    for i, value in enumerate(pixels):
        if i % ((1 << bits) - 2) == 0:
            codes.append(clear)
        codes.append(int(value))
    codes.append(clear + 1)
    stream = sum(code << (bits + 1) * i for i, code in enumerate(codes)).to_bytes((len(codes) * (bits + 1) + 7) // 8, "little")
    while stream:
        data += bytes([min(len(stream), 255)]) + stream[:255]
        stream = stream[255:]
    return data + b"\0;"


def gifs():
    pixels = np.random.default_rng(15).integers(0, 8, 99)
    colours = bytes(np.random.default_rng(16).integers(0, 256, 24, np.uint8))
    local = colours[::-1]
    control = lambda index: bytes([1, 5, 0, index])
    yield "frame.gif", gif((19, 17), (5, 4, 11, 9), pixels, colours, background=3), None
    yield "frame-transparent.gif", gif((19, 17), (5, 4, 11, 9), pixels, colours, background=3, control=control(6)), None
    yield "frame-local.gif", gif((19, 17), (5, 4, 11, 9), pixels, colours, local, background=2), None
    yield "frame-interlaced.gif", gif((19, 17), (5, 4, 11, 9), pixels, colours, interlaced=True), None
    yield "frame-leaves.gif", gif((12, 8), (5, 4, 11, 9), pixels, colours, control=control(2)), None
    yield "no-canvas.gif", gif((0, 0), (0, 0, 11, 9), pixels, colours), None
    yield "no-palette.gif", gif((11, 9), (0, 0, 11, 9), pixels), None
    yield "few-colours.gif", gif((11, 9), (0, 0, 11, 9), pixels, colours[:12]), None


def oriented():
    """PNG, JPEG and WebP whose orientation is in EXIF data, in text, or in XMP."""
    color = Image.fromarray(picture(37, 23, 3, 17))
    attribute = lambda value: f'<x:xmpmeta><rdf:Description tiff:Orientation="{value}"/></x:xmpmeta>'
    element = lambda value: f"<x:xmpmeta><tiff:Orientation>{value}</tiff:Orientation></x:xmpmeta>"
    exif = Image.Exif()
    exif[274] = 8
    other = Image.Exif()
    other[305] = "a program"
    wrong = Image.Exif()
    wrong[274] = 9
    profile = lambda exif: "\nexif\n%8d\n%s\n" % (len(exif.tobytes()), "\n".join(exif.tobytes().hex()[i : i + 72] for i in range(0, 2 * len(exif.tobytes()), 72)))

    def png(texts, **options):
        info = PngImagePlugin.PngInfo()
        for keyword, value, packed in texts:
            (info.add_itxt if keyword.startswith("XML") else info.add_text)(keyword, value, zip=packed)
        return save(color, "PNG", pnginfo=info, **options)

    xmp, raw = "XML:com.adobe.xmp", "Raw profile type exif"
    yield "xmp.png", png([(xmp, attribute(6), False)]), None
    yield "xmp-element.png", png([(xmp, element(5), False)]), None
    yield "xmp-packed.png", png([(xmp, attribute(7), True)]), None
    yield "xmp-wrong.png", png([(xmp, attribute(9), False)]), None
    yield "xmp-twice.png", png([(xmp, attribute(3), False), (xmp, attribute(2), False)]), None
    yield "profile.png", png([(raw, profile(exif), False)]), None
    yield "profile-packed.png", png([(raw, profile(exif), True)]), None
    yield "profile-and-xmp.png", png([(raw, profile(exif), False), (xmp, attribute(6), False)]), None
    yield "exif-and-xmp.png", png([(xmp, attribute(6), False)], exif=exif), None
    yield "other-exif-and-xmp.png", png([(xmp, attribute(6), False)], exif=other), None
    yield "wrong-exif-and-xmp.png", png([(xmp, attribute(6), False)], exif=wrong), None
    info = PngImagePlugin.PngInfo()
    info.add(b"iTXt", xmp.encode() + bytes(5) + attribute(4).encode(), after_idat=True)
    yield "xmp-behind.png", save(color, "PNG", pnginfo=info), None
    yield "xmp.jpg", save(color, "JPEG", xmp=attribute(6).encode()), None
    yield "other-exif-and-xmp.jpg", save(color, "JPEG", xmp=element(3).encode(), exif=other), None
    yield "exif-and-xmp.jpg", save(color, "JPEG", xmp=attribute(6).encode(), exif=exif), None
    yield "xmp.webp", save(color, "WEBP", lossless=True, xmp=attribute(6).encode()), None
    yield "exif-and-xmp.webp", save(color, "WEBP", lossless=True, xmp=attribute(6).encode(), exif=exif), None


def riff(name, data):
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def animation(canvas, frames, background=0):
    """An animated WebP. A frame is (x, y, a WebP, blended)."""
    three = lambda value: struct.pack("<I", value)[:3]
    data = riff(b"VP8X", bytes([0x12, 0, 0, 0]) + three(canvas[0] - 1) + three(canvas[1] - 1)) + riff(b"ANIM", struct.pack("<IH", background, 0))
    for x, y, image, blended in frames:
        width, height = Image.open(io.BytesIO(image)).size
        parts = image[12:]
        if parts[:4] == b"VP8X":
            parts = parts[18:]
        data += riff(b"ANMF", three(x // 2) + three(y // 2) + three(width - 1) + three(height - 1) + three(40) + bytes([0 if blended else 2]) + parts)
    return riff(b"RIFF", b"WEBP" + data)


def animations():
    webp = lambda pixels, **options: save(Image.fromarray(pixels), "WEBP", **options)
    rgb, rgba = picture(21, 17, 3, 18), picture(21, 17, 4, 19)
    second = (0, 0, webp(picture(10, 10, 3, 20), lossless=True), True)
    yield "animated.webp", animation((21, 17), [(0, 0, webp(rgb, quality=90), True), second]), None
    yield "animated-part.webp", animation((40, 30), [(6, 4, webp(rgb, quality=90), True), second], 0xFF2040A0), None
    yield "animated-lossless.webp", animation((40, 30), [(18, 12, webp(rgb, lossless=True), False), second]), None
    yield "animated-alpha.webp", animation((40, 30), [(2, 0, webp(rgba, lossless=True, exact=True), True), second]), None
    yield "animated-lossy-alpha.webp", animation((40, 30), [(2, 12, webp(rgba, quality=80, exact=True), True), second]), None


def main():
    results = {}
    usual = [("formats/" + name, data, None) for name, data in files()]
    rare = [("features/" + name, data, expected) for name, data, expected in [*bitmaps(), *tiffs(), *gifs(), *oriented(), *animations()]]
    for folder in ("formats", "features"):
        os.makedirs(os.path.join(HERE, folder), exist_ok=True)
    for name, data, expected in usual + rare:
        with open(os.path.join(HERE, name), "wb") as file:
            file.write(data)
        if expected is not None:
            results[name] = [expected.shape[1], expected.shape[0], f"{zlib.crc32(np.ascontiguousarray(expected).tobytes()):08x}", 1]
            continue
        image = Image.open(io.BytesIO(data))
        orientation = image.getexif().get(274, 1)
        if not 1 <= orientation <= 8:  # exif_transpose leaves the image as it is
            orientation = 1
        # Pillow turns TIFF files upright as it loads them; what is stored comes from a file without the tag.
        if name.endswith("orientation-6.tiff"):
            image = Image.open(os.path.join(HERE, "formats", "rgb.tiff"))
        pixels = np.asarray(image.convert("RGB"))
        results[name] = [pixels.shape[1], pixels.shape[0], f"{zlib.crc32(np.ascontiguousarray(pixels).tobytes()):08x}", orientation]
    with open(os.path.join(HERE, "features", "pixels.json"), "w") as file:
        file.write("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results.items()) + "\n}\n")
    refused = [*refused_bitmaps(), *refused_tiffs()]
    packed = {name: [words, base64.b64encode(zlib.compress(data, 9)).decode()] for name, data, words in refused}
    with open(os.path.join(HERE, "features", "refused.json"), "w") as file:  # words of the error; the file, deflated, in base 64
        file.write("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in packed.items()) + "\n}\n")
    # The digests of batches have a file that is refused: fax in words of 16 bits.
    fax = save(Image.fromarray(picture(37, 23, 3, 1)).convert("1"), "TIFF", compression="group4")
    with open(os.path.join(HERE, "formats", "fax.tiff"), "wb") as file:
        file.write(fax.replace(struct.pack("<HHIH", 259, 3, 1, 4), struct.pack("<HHIH", 259, 3, 1, 32771)))
    print(f"{len(results)} files, {len(refused)} that are refused")


if __name__ == "__main__":
    main()
