#!/usr/bin/env python3
"""Makes the archives of photographs that the examples use: photos-train.tgz and photos-test.tgz.

    python3 -m venv /tmp/photos && /tmp/photos/bin/pip install pillow==12.0.0
    /tmp/photos/bin/python make_photos.py fetch /tmp/photos/pictures     # download the twelve source pictures, once
    /tmp/photos/bin/python make_photos.py make /tmp/photos/pictures      # write both archives beside this script, with the same bytes
    /tmp/photos/bin/python make_photos.py check /tmp/photos/pictures     # make them in memory and compare
    python3 make_photos.py big photos-train.tgz OUT.tgz 8000   # a benchmark archive with samples as large as ImageNet's
    python3 make_photos.py big /tmp/photos/pictures OUT.tar 8000 --like imagenet   # the same with ImageNet's mixture of sizes and samplings

A class is a picture. Its training samples are random crops from one part of the picture and its test samples are random crops from
another. The parts lie at least GAP pixels apart, so no pixel of a test sample is in a training sample. PROVENANCE.md names the
pictures' origins and licences.
"""
import argparse
import bz2
import concurrent.futures
import gzip
import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import PIL
from PIL import Image

PILLOW = '12.0.0'  # its wheel contains the JPEG and PNG encoders, which determine the bytes
GAP = 8            # pixels between the training and the test parts
TRAIN, TEST = 48, 16  # samples per class

SCIKIT_IMAGE = 'scikit-image==0.25.2'
SCIPY = 'scipy==1.9.3'

# class: wheel, file in the wheel, its sha256, parts for training and for testing as (left, top, right, bottom) in thousandths.
PICTURES = {
    'astronaut': (SCIKIT_IMAGE, 'skimage/data/astronaut.png', '88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5',
                  [(0, 0, 1000, 400), (0, 700, 1000, 1000)], [(0, 420, 1000, 680)]),
    'brick': (SCIKIT_IMAGE, 'skimage/data/brick.png', '7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf',
              [(0, 0, 600, 1000)], [(620, 0, 1000, 1000)]),
    'cameraman': (SCIKIT_IMAGE, 'skimage/data/camera.png', 'b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a',
                  [(0, 0, 400, 1000), (660, 0, 1000, 1000)], [(420, 0, 640, 1000)]),
    'cat': (SCIKIT_IMAGE, 'skimage/data/chelsea.png', '596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb',
            [(0, 0, 390, 1000), (690, 0, 1000, 1000)], [(410, 0, 670, 1000)]),
    'clock': (SCIKIT_IMAGE, 'skimage/data/clock_motion.png', 'f029226b28b642e80113d86622e9b215ee067a0966feaf5e60604a1e05733955',
              [(150, 150, 490, 850)], [(510, 150, 850, 850)]),
    'coffee': (SCIKIT_IMAGE, 'skimage/data/coffee.png', 'cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7',
               [(0, 0, 490, 1000)], [(510, 0, 1000, 1000)]),
    'galaxies': (SCIKIT_IMAGE, 'skimage/data/hubble_deep_field.jpg', '3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4',
                 [(0, 0, 600, 1000)], [(620, 0, 1000, 1000)]),
    'grass': (SCIKIT_IMAGE, 'skimage/data/grass.png', 'b6b6022426b38936c43a4ac09635cd78af074e90f42ffa8227ac8b7452d39f89',
              [(0, 0, 600, 1000)], [(620, 0, 1000, 1000)]),
    'gravel': (SCIKIT_IMAGE, 'skimage/data/gravel.png', 'c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12',
               [(0, 0, 600, 1000)], [(620, 0, 1000, 1000)]),
    'raccoon': (SCIPY, 'scipy/misc/face.dat', '9d8b0b4d081313e2b485748c770472e5a95ed1738146883d84c7030493e82886',
                [(0, 0, 450, 1000), (720, 0, 1000, 1000)], [(470, 0, 700, 1000)]),
    'retina': (SCIKIT_IMAGE, 'skimage/data/retina.jpg', '38a07f36f27f095e818aea7b96d34202c05176d30253c66733f2e00379e9e0e6',
               [(60, 150, 600, 850)], [(620, 150, 940, 850)]),
    'rocket': (SCIKIT_IMAGE, 'skimage/data/rocket.jpg', 'c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c',
               [(0, 0, 425, 1000), (645, 0, 1000, 1000)], [(445, 0, 625, 1000)]),
}


def fetch(folder):
    """Takes the pictures out of the wheels of the package index, each checked against its sha256."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        for package in (SCIKIT_IMAGE, SCIPY):
            print('fetching', package)
            subprocess.run([sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '--only-binary=:all:', '--implementation', 'cp',
                            '--python-version', '3.11', '--platform', 'manylinux2014_x86_64', '--platform', 'manylinux_2_17_x86_64',
                            '-d', wheels, package], check=True)
        for wheel in sorted(os.listdir(wheels)):
            with zipfile.ZipFile(os.path.join(wheels, wheel)) as z:
                for package, name, digest, _, _ in PICTURES.values():
                    if name in z.namelist():
                        data = z.read(name)
                        if hashlib.sha256(data).hexdigest() != digest:
                            sys.exit(f'{package}: {name} has an unexpected sha256')
                        with open(os.path.join(folder, os.path.basename(name)), 'wb') as f:
                            f.write(data)
                        print(' ', os.path.basename(name))


def load(folder, cls):
    _, name, digest, _, _ = PICTURES[cls]
    path = os.path.join(folder, os.path.basename(name))
    try:
        with open(path, 'rb') as f:
            data = f.read()
    except FileNotFoundError:
        sys.exit(f'{path} does not exist: run `make_photos.py fetch {folder}` first')
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit(f'{path} has an unexpected sha256: fetch it again')
    if name.endswith('.dat'):  # raw RGB, SciPy's format
        return Image.frombytes('RGB', (1024, 768), bz2.decompress(data))
    image = Image.open(io.BytesIO(data))
    return image.convert('L' if image.mode == 'L' else 'RGB')


def parts(cls, split, size):
    """Return the parts of a picture in pixels."""
    _, _, _, train, test = PICTURES[cls]
    w, h = size
    return [(l * w // 1000, t * h // 1000, r * w // 1000, b * h // 1000) for l, t, r, b in (train if split == 'train' else test)]


def gap(a, b):
    """Return the pixels between two boxes along the axis that separates them best; negative if they overlap."""
    return max(a[0] - b[2], b[0] - a[2], a[1] - b[3], b[1] - a[3])


def pick(rng, low, high):
    """Return an integer from low to high. Use only Random.random: Python guarantees that its sequence never changes."""
    return low + int(rng.random() * (high - low + 1))


def crop_box(rng, boxes, size, small, large):
    """Return a random box inside one of the boxes, with a side of `small` to `large` thousandths of the picture's shorter side."""
    areas = [(r - l) * (b - t) for l, t, r, b in boxes]
    at, i = rng.random() * sum(areas), 0
    while i + 1 < len(boxes) and at >= areas[i]:
        at, i = at - areas[i], i + 1
    left, top, right, bottom = boxes[i]
    side = min(size) * pick(rng, small, large) // 1000
    wide = pick(rng, 750, 1333)
    w = min(right - left, side if wide < 1000 else side * wide // 1000)
    h = min(bottom - top, side if wide >= 1000 else side * 1000 // wide)
    x, y = left + pick(rng, 0, right - left - w), top + pick(rng, 0, bottom - top - h)
    return x, y, x + w, y + h


def samples(folder, split):
    """Yield (member name, class, box, bytes), alternating between the classes."""
    images = {cls: load(folder, cls) for cls in PICTURES}
    for index in range(TRAIN if split == 'train' else TEST):
        for cls, image in images.items():
            rng = random.Random(f'{split}/{cls}/{index}')
            box = crop_box(rng, parts(cls, split, image.size), image.size, 200, 420)
            side = pick(rng, 88, 128)
            w, h = box[2] - box[0], box[3] - box[1]
            size = (side, max(64, side * h // w)) if w > h else (max(64, side * w // h), side)
            sample = image.crop(box).resize(size, Image.Resampling.BICUBIC)  # crop first: the filter must not read outside of the box
            kind = index % 16
            if kind in (3, 11):  # colour alone must not reveal a class
                sample = sample.convert('L')
            if kind == 7 and index < 16:
                yield f'{split}/{cls}/{index:03d}.png', cls, box, encode(sample, 'PNG', optimize=True)
            else:
                options = {} if sample.mode == 'L' else {'subsampling': 0 if kind % 4 == 1 else 2}
                yield (f'{split}/{cls}/{index:03d}.jpg', cls, box,
                       encode(sample, 'JPEG', quality=pick(rng, 74, 86), optimize=True, progressive=kind == 13, **options))


def encode(image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def pack(members):
    """Return a tar of (name, bytes) and its gzip form, independent of user and time."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w', format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue(), gzip.compress(out.getvalue(), compresslevel=9, mtime=0)


def archives(folder):
    """Return both archives, and check that no pixel is in both."""
    if PIL.__version__ != PILLOW:
        sys.exit(f'Pillow {PIL.__version__} is installed, {PILLOW} is needed: another version encodes different bytes')
    out, boxes = {}, {}
    for split in ('train', 'test'):
        made = list(samples(folder, split))
        for _, cls, box, _ in made:
            boxes.setdefault((cls, split), []).append(box)
        out[split] = pack([(name, data) for name, _, _, data in made]), len(made)
    for cls in PICTURES:
        closest = min(gap(a, b) for a in boxes[cls, 'train'] for b in boxes[cls, 'test'])
        if closest < GAP:
            sys.exit(f'{cls}: a training and a test sample are {closest} pixels apart, at least {GAP} are needed')
        print(f'{cls:10} training and test samples are at least {closest} pixels apart')
    return out


def big_sources(source):
    """Return (class, image, parts) for each picture in the folder, or for each sample of an archive that this script made."""
    if os.path.isdir(source):
        images = {cls: load(source, cls).convert('RGB') for cls in PICTURES}
        return [(cls, image, parts(cls, 'train', image.size)) for cls, image in images.items()]
    with tarfile.open(source) as tar:
        members = [(m.name.split('/')[-2], Image.open(io.BytesIO(tar.extractfile(m).read())).convert('RGB')) for m in tar]
    return [(cls, image, [(0, 0, *image.size)]) for cls, image in members]


# Samplings of ImageNet's training set, in thousandths; None is grey.
SAMPLINGS = [('4:4:4', 760), ('4:2:0', 200), ('4:2:2', 20), (None, 20)]


def imagenet_size(rng):
    """Return a size like those of ImageNet's training set: half are 500 pixels long, a twentieth has a short side of 512 or more.

    1,000 photographs of ImageNet have 0.202 megapixels and 468 x 401 pixels in the mean. These have 0.21 and 466 x 396.
    """
    kind = rng.random()
    if kind < .5:
        u = rng.random()
        size = 500, 375 if u < .55 else 333 if u < .8 else pick(rng, 281, 500)
        return size if rng.random() < .78 else size[::-1]
    if kind < .95:
        area, ratio = 120_000 * 2 ** (2 * (rng.random() - .5)), 1.16 * 2 ** (rng.random() - .5)
        return int((area * ratio) ** .5), int((area / ratio) ** .5)
    short = int(512 * 2 ** (1.5 * rng.random()))
    size = int(short * (1.2 + .3 * rng.random())), short
    return size if rng.random() < .75 else size[::-1]


def imagenet_sample(rng, image, boxes, sampling):
    """Return a JPEG like those of ImageNet's training set: sizes, samplings, bytes a pixel. Noise and quality differ from one to another."""
    size = imagenet_size(rng)
    sample = image.crop(crop_box(rng, boxes, image.size, 500, 950)).resize(size, Image.Resampling.BICUBIC)
    sample = Image.blend(sample, Image.effect_noise(size, 100).convert('RGB'), .06 + .2 * rng.random())
    quality = pick(rng, 91, 97)
    if sampling == 'all':
        at = rng.random() * 1000
        for sampling, share in SAMPLINGS:
            if at < share:
                break
            at -= share
    if sampling is None:
        return encode(sample.convert('L'), 'JPEG', quality=quality)
    return encode(sample, 'JPEG', quality=quality, subsampling=sampling)


def big_sample(task):
    """Return one sample of a benchmark archive: like ImageNet's training set in size and format, 4:4:4 or 4:2:0, with sensor noise."""
    source, index, like, sampling = task
    if source not in BIG:
        BIG[source] = big_sources(source)
    cls, image, boxes = BIG[source][index % len(BIG[source])]
    rng = random.Random(f'big/{cls}/{index}')
    if like == 'imagenet':
        return f'train/{cls}/{index:06d}.jpg', imagenet_sample(rng, image, boxes, sampling)
    box = crop_box(rng, boxes, image.size, 500, 950)
    area, ratio = 175_000 * 2 ** (1.3 * (rng.random() - .5)), 1.16 * 2 ** (rng.random() - .5)
    size = (int((area * ratio) ** .5), int((area / ratio) ** .5))
    sample = image.crop(box).resize(size, Image.Resampling.BICUBIC)
    noise = Image.effect_noise(size, 100).convert('RGB')
    sample = Image.blend(sample, noise, .12)
    data = encode(sample, 'JPEG', quality=pick(rng, 88, 96), subsampling=0 if rng.random() < .76 else 2)
    return f'train/{cls}/{index:06d}.jpg', data


BIG = {}  # sources read by this process


def big(source, path, count, like, sampling):
    total = 0
    zipped = {'compresslevel': 1} if path.endswith('gz') else {}
    with tarfile.open(path, 'w:gz' if zipped else 'w', format=tarfile.USTAR_FORMAT, **zipped) as tar, concurrent.futures.ProcessPoolExecutor() as pool:
        for name, data in pool.map(big_sample, ((source, i, like, sampling) for i in range(count)), chunksize=8):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
            total += len(data)
    print(f'{path}: {count} samples, {total / count / 1e3:.0f} KB on average')


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    for command in ('fetch', 'make', 'check', 'big'):
        sub = commands.add_parser(command)
        sub.add_argument('pictures', help='the folder of the source pictures; for big it may be an archive of photographs')
        if command == 'big':
            sub.add_argument('out')
            sub.add_argument('count', type=int)
            sub.add_argument('--like', choices=('plain', 'imagenet'), default='plain',
                             help="imagenet: ImageNet's mixture of sizes and samplings")
            sub.add_argument('--sampling', choices=('all', '4:4:4', '4:2:2', '4:2:0'), default='all',
                             help='with --like imagenet: one sampling instead of the mixture')
    args = parser.parse_args()
    if args.command == 'fetch':
        return fetch(args.pictures)
    if args.command == 'big':
        return big(args.pictures, args.out, args.count, args.like, args.sampling)
    for split, ((tar, tgz), count) in archives(args.pictures).items():
        path = os.path.join(here, f'photos-{split}.tgz')
        if args.command == 'make':
            with open(path, 'wb') as f:
                f.write(tgz)
        else:
            with open(path, 'rb') as f:
                there = f.read()
            if gzip.decompress(there) != tar:
                sys.exit(f'{path} differs from the output of this script')
            if there != tgz:
                print(f'{path}: the same tar, compressed by another zlib')
        print(f'photos-{split}.tgz: {count} samples, {len(tgz)} bytes, sha256 {hashlib.sha256(tgz).hexdigest()}')


if __name__ == '__main__':
    main()
