#!/usr/bin/env python3
"""Resizes photographs of 12 megapixels to a shorter side of 512 pixels by torchstream pack, Pillow and ImageMagick.

  compare.py TORCHSTREAM [PHOTOGRAPHS]

TORCHSTREAM is the command, PHOTOGRAPHS their number (24). Needs Pillow or Pillow-SIMD, NumPy, and ImageMagick's mogrify.
Prints the medians of three rounds, in which all ways run in turn: seconds, and seconds of CPU a photograph. All ways use
two processes or threads and write JPEGs of quality 90.
"""

import glob
import multiprocessing
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time

import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIDE, ROUNDS = 512, 3


def make(folder, count):
    """Enlarges photographs of the examples to 4000 x 3000 pixels, and adds noise."""
    random = np.random.default_rng(1)
    with tarfile.open(ROOT / "examples/data/photos-train.tgz") as archive:
        members = [m for m in archive if m.name.endswith(".jpg")][:count]
        for number, member in enumerate(members):
            picture = Image.open(archive.extractfile(member)).convert("RGB").resize((4000, 3000), Image.BICUBIC)
            noisy = np.asarray(picture, dtype=np.int16) + (random.standard_normal((3000, 4000, 1)) * 6).astype(np.int16)
            name = folder / "abc"[number % 3] / f"{number:03}.jpg"
            name.parent.mkdir(exist_ok=True)
            Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(name, quality=90)
    return len(members)


def pillow(task):
    path, out, draft = task
    picture = Image.open(path)
    scale = SIDE / min(picture.size)
    size = tuple(int(side * scale) for side in picture.size)
    if draft:
        picture.draft("RGB", tuple(2 * side for side in size))
    picture.convert("RGB").resize(size, Image.BILINEAR).save(os.path.join(out, os.path.basename(path)), quality=90)


def with_pillow(folder, out, draft):
    with multiprocessing.Pool(2) as pool:
        pool.map(pillow, [(path, out, draft) for path in glob.glob(f"{folder}/*/*.jpg")])


def with_magick(folder, out, *hint):
    files = "\0".join(glob.glob(f"{folder}/*/*.jpg"))
    subprocess.run(["xargs", "-0", "-P2", "-n4", "mogrify", "-path", out, *hint, "-resize", f"{SIDE}x{SIDE}^", "-quality",
                    "90"], input=files.encode(), check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def used():
    """Returns the CPU time of this process and its children that have ended."""
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def main():
    command, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 24
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary, "photographs")
        folder.mkdir()
        count = make(folder, count)
        ways = {
            "torchstream pack": lambda out: subprocess.run([command, "pack", "-archive", folder, "-o", out, "-side",
                                                            str(SIDE), "-workers", "2"], check=True, stdout=subprocess.DEVNULL),
            f"Pillow {Image.__version__}": lambda out: with_pillow(folder, out, False),
            "the same, with draft": lambda out: with_pillow(folder, out, True),
            "ImageMagick": lambda out: with_magick(folder, out),
            "the same, with jpeg:size": lambda out: with_magick(folder, out, "-define", f"jpeg:size={2 * SIDE}x{2 * SIDE}"),
        }
        results = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                with tempfile.TemporaryDirectory() as out:
                    began, cpu = time.monotonic(), used()
                    way(out)
                    results[name].append((time.monotonic() - began, used() - cpu))
        print(f"{count} photographs\nway\tseconds\tCPU ms a photograph")
        for name, rounds in results.items():
            wall, cpu = (statistics.median(column) for column in zip(*rounds))
            print(f"{name}\t{wall:.2f}\t{1000 * cpu / count:.0f}")


if __name__ == "__main__":
    main()
