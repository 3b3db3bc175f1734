#!/usr/bin/env python3
"""Compares how this library, Pillow and torchvision decode damaged images.

    make image && python3 lab/loaders/damaged.py [-copies 1000] [-seed 1] [-png] [-write FOLDER]

Needs numpy, Pillow, torch and torchvision. Takes the photographs of examples/data, damages copies of
them in ways that a seed decides (bytes changed, cut out, inserted, the end cut off), and decodes each
with Pillow (load(), without and with LOAD_TRUNCATED_IMAGES), with torchvision's decode_jpeg or
decode_png, and with libtorchstream_image's three answers to damage. Exit status 1 if Pillow opens a
file that "warned" refuses. -write also keeps the files, in folders by kind of damage.

    python3 lab/loaders/damaged.py -sample imageloader/testdata/damaged.tgz

writes a few damaged files, and digests of their pixels as the others decode them, for the Go tests.
"""
import argparse
import collections
import ctypes
import gzip
import hashlib
import io
import json
import os
import random
import sys
import tarfile

import numpy
import PIL
import torch
import torchvision
from PIL import Image, ImageFile, features
from torchvision.io import ImageReadMode, decode_jpeg, decode_png

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ANSWERS = ("refuse", "warned", "partial")  # TS_IMAGE_DAMAGE_


class Info(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.c_int32)
        for name in ("format", "width", "height", "components", "bit_depth", "orientation")
    ] + [("progressive", ctypes.c_bool)]


class Geometry(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.c_int32)
        for name in ("crop_x", "crop_y", "crop_width", "crop_height", "resize_width", "resize_height",
                     "window_x", "window_y", "window_width", "window_height", "orientation")
    ] + [("flip", ctypes.c_bool)]


class Library:
    """libtorchstream_image, with one decoder."""

    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        for name in ("ts_image_get_info", "ts_image_decoder_new", "ts_image_decoder_set_damage", "ts_image_decode"):
            getattr(self.c, name).restype = ctypes.c_void_p
        for name in ("ts_error_message", "ts_jpeg_version", "ts_image_decoder_tolerated"):
            getattr(self.c, name).restype = ctypes.c_char_p
        self.decoder = ctypes.c_void_p()
        self.check(self.c.ts_image_decoder_new(ctypes.c_int64(0), ctypes.byref(self.decoder)))

    def check(self, error):
        if not error:
            return
        error = ctypes.c_void_p(error)
        message = self.c.ts_error_message(error).decode()
        self.c.ts_error_free(error)
        raise ValueError(message)

    def decode(self, data, answer):
        self.check(self.c.ts_image_decoder_set_damage(self.decoder, ctypes.c_int32(ANSWERS.index(answer))))
        size = ctypes.c_size_t(len(data))
        info = Info(size=ctypes.sizeof(Info))
        self.check(self.c.ts_image_get_info(data, size, ctypes.byref(info)))
        w, h = info.width, info.height
        geometry = Geometry(ctypes.sizeof(Geometry), 0, 0, w, h, w, h, 0, 0, w, h, 0, False)
        pixels = numpy.empty((h, w, 3), numpy.uint8)
        self.check(self.c.ts_image_decode(self.decoder, data, size, ctypes.byref(geometry),
                                          ctypes.c_void_p(pixels.ctypes.data), ctypes.c_size_t(3 * w)))
        return pixels


def pillow(data, truncated):
    ImageFile.LOAD_TRUNCATED_IMAGES = truncated
    image = Image.open(io.BytesIO(data))
    image.load()
    return numpy.asarray(image.convert("RGB"))


def photographs(png, progressive):
    """(name, bytes) of every photograph. The archives' own JPEGs, or others made of them."""
    for archive in ("photos-train.tgz", "photos-test.tgz"):
        with tarfile.open(os.path.join(ROOT, "examples/data", archive)) as tar:
            for i, member in enumerate(m for m in tar if m.isfile()):
                data = tar.extractfile(member).read()
                if not png and not data.startswith(b"\xff\xd8"):
                    continue
                if png or progressive and i % 4 == 0:
                    image = Image.open(io.BytesIO(data))
                    if png and i % 2 == 0:
                        image = image.quantize(64)
                    out = io.BytesIO()
                    image.save(out, "PNG" if png else "JPEG", **({} if png else {"progressive": True, "quality": 85}))
                    data = out.getvalue()
                yield member.name, data


def damage(data, draw):
    """(kind, copy) of an image with one kind of damage."""
    data = bytearray(data)
    kind = draw.choice(("changed", "changed in the header", "bytes cut out", "inserted", "end cut off"))
    header = min(700, len(data) // 4)
    if kind == "changed":
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(header, len(data))] = draw.randrange(256)
    elif kind == "changed in the header":
        for _ in range(draw.randint(1, 2)):
            data[draw.randrange(2, header)] = draw.randrange(256)
    elif kind == "bytes cut out":
        at = draw.randrange(2, len(data))
        del data[at:at + draw.randint(1, 400)]
    elif kind == "inserted":
        at = draw.randrange(2, len(data))
        data[at:at] = draw.randbytes(draw.randint(1, 40))
    else:
        del data[-draw.randint(1, len(data) // 2 if draw.random() < 0.5 else 40):]
    return kind, bytes(data)


def attempt(decode, *arguments):
    try:
        return decode(*arguments)
    except Exception as error:  # whatever a library raises for damage
        return str(error) or repr(error)


def by_torchvision(data):
    of = decode_png if data.startswith(b"\x89PNG") else decode_jpeg
    return of(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()


def write_sample(path, seed):
    """A .tgz of damaged files and digests.json: by file, "warned" and "partial", each the SHA-256 of the RGB
    rows that Pillow decodes without and with LOAD_TRUNCATED_IMAGES; missing where Pillow refuses the file.
    Files that Pillow and torchvision decode to different pixels (their versions of libjpeg-turbo smooth
    incomplete progressive images differently) are left out."""
    draw = random.Random(seed)
    files, digests = {}, {}
    for png, want in ((False, 40), (True, 20)):
        taken = 0
        for i, (_, data) in enumerate(photographs(png, True)):
            kind, data = damage(data, draw)
            warned, partial, other = attempt(pillow, data, False), attempt(pillow, data, True), attempt(by_torchvision, data)
            if not isinstance(warned, str) and not isinstance(other, str) and not numpy.array_equal(warned, other):
                continue
            if isinstance(warned, str) and i % 3 != 0:  # mostly files that Pillow opens
                continue
            name = f"{kind.replace(' ', '-')}/{i:04d}." + ("png" if png else "jpg")
            files[name] = data
            digests[name] = {
                answer: hashlib.sha256(result.tobytes()).hexdigest()
                for answer, result in (("warned", warned), ("partial", partial)) if not isinstance(result, str)
            }
            taken += 1
            if taken == want:
                break
    files["digests.json"] = json.dumps(digests, indent=1, sort_keys=True).encode()
    with open(path, "wb") as out, gzip.GzipFile("", "wb", fileobj=out, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-copies", type=int, default=1000)
    options.add_argument("-seed", type=int, default=1)
    options.add_argument("-png", action="store_true", help="PNGs made of the photographs instead of JPEGs")
    options.add_argument("-progressive", action="store_true", help="every fourth JPEG is made progressive first")
    options.add_argument("-write", metavar="FOLDER", help="keep the damaged files, in folders by kind of damage")
    options.add_argument("-show", type=int, default=5, help="how many differing files are named, a kind of difference")
    options.add_argument("-sample", metavar="FILE", help="write the sample of the Go tests instead")
    o = options.parse_args()
    if o.sample:
        return write_sample(o.sample, o.seed)

    library = Library(os.path.join(ROOT, "cshim/build/lib/libtorchstream_image.so"))
    print(library.c.ts_jpeg_version().decode(), "here; Pillow", PIL.__version__, "with libjpeg-turbo",
          features.version("libjpeg_turbo"), "; torchvision", torchvision.__version__)

    counts, named = collections.Counter(), collections.defaultdict(list)
    draw = random.Random(o.seed)
    originals = list(photographs(o.png, o.progressive))
    failed = False
    for i in range(o.copies):
        name, data = originals[i % len(originals)]
        kind, data = damage(data, draw)
        label = f"{i:04d} {kind} {name}"
        if o.write:
            folder = os.path.join(o.write, kind)
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"{i:04d}" + (".png" if o.png else ".jpg")), "wb") as out:
                out.write(data)
        ours = {answer: attempt(library.decode, data, answer) for answer in ANSWERS}
        theirs = {
            "Pillow": attempt(pillow, data, False),
            "Pillow with LOAD_TRUNCATED_IMAGES": attempt(pillow, data, True),
            "torchvision": attempt(by_torchvision, data),
        }
        for who, result in {**ours, **theirs}.items():
            counts[f"opened: {who}"] += not isinstance(result, str)
        for who, answer in (("Pillow", "warned"), ("torchvision", "warned"), ("Pillow with LOAD_TRUNCATED_IMAGES", "partial")):
            mine, other = ours[answer], theirs[who]
            if isinstance(mine, str) and isinstance(other, str):
                continue
            if isinstance(mine, str):
                what = f"{who} opens, {answer} refuses"
                failed = failed or who == "Pillow"
            elif isinstance(other, str):
                what = f"{answer} opens, {who} refuses"
            else:
                same = mine.shape == other.shape and (mine == other).all()
                what = f"{answer} and {who} open, pixels " + ("equal" if same else "differ")
            counts[what] += 1
            if not what.endswith("equal"):
                named[what].append(label + ": " + (mine if isinstance(mine, str) else other if isinstance(other, str) else ""))
        if not isinstance(theirs["Pillow"], str) and not isinstance(theirs["torchvision"], str):
            same = theirs["Pillow"].shape == theirs["torchvision"].shape and (theirs["Pillow"] == theirs["torchvision"]).all()
            counts["Pillow and torchvision open, pixels " + ("equal" if same else "differ")] += 1
    print(f"{o.copies} damaged copies of {len(originals)} photographs, seed {o.seed}")
    for what, n in sorted(counts.items()):
        print(f"{n:7d}  {what}")
        for label in named[what][:o.show]:
            print("          ", label)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
