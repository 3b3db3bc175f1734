#!/usr/bin/env python3
"""Runs one peer of `torchstream bench loader`: another library turns the same archive into the same batches.

    python lab/loaders/peers.py NAME -archive train.tgz -contract train -batch 64 -workers 2 -seconds 10
    python lab/loaders/peers.py NAME -archive train.tgz -outputs 32

NAME is pytorch, pillow, webdataset, webdataset-shards, datasets, dali, spdl or tfdata, each used as its own documentation recommends for this
task. The contracts are those of `torchstream bench loader`, in batches of host memory, in an endless series of complete shuffled epochs:

    train        RandomResizedCrop(224) with antialiasing, horizontal flip with probability 1/2: uint8
    train-float  the same, normalised with ImageNet's mean and standard deviation: float32
    eval         the shorter side resized to 256, the central 224 x 224: uint8

Each library's preferred input is prepared before the clock starts: pytorch and pillow hold the files' bytes in memory, dali, spdl and
tfdata read files from a folder (in the page cache), webdataset reads the .tgz itself and webdataset-shards one .tar per worker.
datasets reads -parquet FILE, which -write-parquet writes, through its cache of Arrow files. The script prints one JSON object to
stdout.

With -outputs N the run is untimed: the first N images, by name, go through contract eval and are compared with Pillow's own
Resize(256) and CenterCrop(224).
"""
import argparse
import io
import itertools
import json
import math
import os
import random
import sys
import tarfile
import tempfile
import time

import numpy as np

SIZE, SHORT = 224, 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES = ('.jpg', '.jpeg', '.png')


def members(path):
    """Return (name, bytes) of every image of the archive, sorted by name."""
    with tarfile.open(path) as tar:
        return sorted((m.name, tar.extractfile(m).read()) for m in tar if m.isfile() and m.name.lower().endswith(IMAGES))


def labels_of(names):
    of = [os.path.basename(os.path.dirname(n)) for n in names]
    classes = sorted(set(of))
    return [classes.index(c) for c in of]


def tree(path, folder):
    """Unpack the archive's images; return their paths and labels."""
    paths, names = [], []
    for i, (name, data) in enumerate(members(path)):
        path = os.path.join(folder, os.path.basename(os.path.dirname(name)), f'{i}-{os.path.basename(name)}')
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as f:
            f.write(data)
        paths.append(path)
        names.append(name)
    return paths, labels_of(names)


def random_box(width, height):
    """Return x, y, width, height like torchvision's RandomResizedCrop.get_params, for libraries without such a crop."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    return 0, 0, width, height


class Peer:
    """Base of the peers: batches(workers) yields arrays or tensors of whole batches, endlessly."""

    def __init__(self, args, folder):
        self.args, self.folder, self.contract = args, folder, args.contract

    def ordered(self, n):
        """Return the first n images by name, contract eval: an array [n, 224, 224, 3]."""
        raise NotImplementedError


class TorchVision(Peer):
    """A DataLoader over bytes in memory, torchvision's decoder and its v2 transforms on uint8 tensors."""

    def prepare(self):
        import torch
        import torchvision.transforms.v2 as v2
        torch.set_num_threads(1)
        if self.contract == 'eval':
            steps = [v2.Resize(SHORT, antialias=True), v2.CenterCrop(SIZE)]
        else:
            steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
        if self.contract == 'train-float':
            steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self.transform = v2.Compose(steps)

    def decode(self, data):
        import torch
        from torchvision.io import ImageReadMode, decode_image, decode_jpeg
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return (decode_jpeg if data[0] == 0xFF else decode_image)(data, mode=ImageReadMode.RGB)

    def dataset(self):
        import torch
        peer, samples = self, members(self.args.archive)
        labels = labels_of([n for n, _ in samples])

        class Samples(torch.utils.data.Dataset):
            def __len__(self):
                return len(samples)

            def __getitem__(self, i):
                return peer.transform(peer.decode(samples[i][1])), labels[i]
        return Samples()

    def batches(self, workers):
        import torch
        self.prepare()
        loader = torch.utils.data.DataLoader(self.dataset(), self.args.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0,
                                             prefetch_factor=2 if workers else None)
        while True:
            yield from (images for images, _ in loader)

    def ordered(self, n):
        self.prepare()
        return np.stack([self.transform(self.decode(data)).permute(1, 2, 0).numpy() for _, data in members(self.args.archive)[:n]])


class Pillow(TorchVision):
    """The same with Pillow decoding and resizing."""

    def prepare(self):
        super().prepare()
        import torchvision.transforms.v2 as v2
        self.transform = v2.Compose([*self.transform.transforms[:2], v2.PILToTensor(), *self.transform.transforms[2:]])

    def decode(self, data):
        from PIL import Image
        return Image.open(io.BytesIO(data)).convert('RGB')


class WebDataset(TorchVision):
    """WebDataset on the original archive, which only one worker can read."""

    def batches(self, workers):
        import webdataset as wds
        self.prepare()
        urls = self.urls(workers)
        dataset = wds.WebDataset(urls, shardshuffle=len(urls) if len(urls) > 1 else False, empty_check=False).shuffle(1000)
        dataset = dataset.to_tuple('jpg;jpeg;png', '__key__').map_tuple(lambda data: self.transform(self.decode(data)), lambda key: key).batched(self.args.batch)
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
        while True:
            yield from (images for images, _ in loader)

    def urls(self, workers):
        return [self.args.archive]


class WebDatasetShards(WebDataset):
    """WebDataset on one .tar per worker."""

    def urls(self, workers):
        names = [os.path.join(self.folder, f'{workers}-{i}.tar') for i in range(workers)]
        tars = [tarfile.open(n, 'w') for n in names]
        for i, (name, data) in enumerate(members(self.args.archive)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tars[i % workers].addfile(member, io.BytesIO(data))
        for tar in tars:
            tar.close()
        return names


class Dali(Peer):
    """DALI's CPU pipeline: the crop is drawn before the decode, and only the crop is decoded."""

    def pipeline(self, workers, contract, paths, labels, shuffle):
        from nvidia.dali import fn, pipeline_def, types

        @pipeline_def(batch_size=self.args.batch, num_threads=workers, device_id=None, prefetch_queue_depth=2)
        def define():
            jpegs, label = fn.readers.file(files=paths, labels=labels, random_shuffle=shuffle, initial_fill=1000, name='files')
            if contract == 'eval':
                images = fn.decoders.image(jpegs, device='cpu', output_type=types.RGB)
                images = fn.resize(images, device='cpu', resize_shorter=SHORT, interp_type=types.INTERP_LINEAR, antialias=True)
                return fn.crop(images, crop=(SIZE, SIZE)), label
            images = fn.decoders.image_random_crop(jpegs, device='cpu', output_type=types.RGB, random_area=[0.08, 1], random_aspect_ratio=[3 / 4, 4 / 3])
            images = fn.resize(images, device='cpu', resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_LINEAR, antialias=True)
            if contract == 'train':
                return fn.flip(images, horizontal=fn.random.coin_flip()), label
            return fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout='CHW',
                                            mean=[255 * m for m in MEAN], std=[255 * s for s in STD]), label
        pipeline = define()
        pipeline.build()
        return pipeline

    def batches(self, workers):
        pipeline = self.pipeline(workers, self.contract, *tree(self.args.archive, self.folder), True)
        while True:
            yield pipeline.run()[0].as_array()

    def ordered(self, n):
        paths, labels = tree(self.args.archive, self.folder)
        self.args.batch = n
        return np.stack(self.pipeline(2, 'eval', paths[:n], labels[:n], False).run()[0].as_array())


class Spdl(Peer):
    """SPDL's pipeline of threads, with FFmpeg's decoder and filters. FFmpeg's bilinear scaler averages when it shrinks, like antialiasing."""

    def sizes(self, paths):
        from PIL import Image
        return {p: Image.open(p).size for p in paths}  # headers, before the clock starts

    def filter(self, size, contract):
        w, h = size
        scale = 'scale={}:{}:flags=bilinear+accurate_rnd'
        if contract == 'eval':
            short = (SHORT, SHORT * h // w) if w <= h else (SHORT * w // h, SHORT)
            return ','.join([scale.format(*short), f'crop={SIZE}:{SIZE}', 'format=pix_fmts=rgb24'])
        x, y, cw, ch = random_box(w, h)
        return ','.join([f'crop={cw}:{ch}:{x}:{y}:exact=1', scale.format(SIZE, SIZE), *(['hflip'] if random.random() < 0.5 else []), 'format=pix_fmts=rgb24'])

    def frames(self, path, size, contract):
        import spdl.io
        return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=self.filter(size, contract))

    def batches(self, workers):
        import spdl.io
        from spdl.pipeline import PipelineBuilder
        paths, _ = tree(self.args.archive, self.folder)
        sizes = self.sizes(paths)

        def forever():
            while True:
                yield from random.sample(paths, len(paths))

        def convert(frames):
            images = spdl.io.to_numpy(spdl.io.convert_frames(frames))
            if self.contract == 'train-float':
                images = (images.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
            return images
        builder = PipelineBuilder().add_source(forever()).pipe(lambda p: self.frames(p, sizes[p], self.contract), concurrency=workers)
        pipeline = builder.aggregate(self.args.batch).pipe(convert).add_sink(3).build(num_threads=workers + 1)
        with pipeline.auto_stop():
            yield from pipeline

    def ordered(self, n):
        import spdl.io
        paths, _ = tree(self.args.archive, self.folder)
        sizes = self.sizes(paths[:n])
        return spdl.io.to_numpy(spdl.io.convert_frames([self.frames(p, sizes[p], 'eval') for p in paths[:n]]))


class TfData(Peer):
    """tf.data with AUTOTUNE on a private pool of threads; the crop is decoded by decode_and_crop_jpeg."""

    def function(self, contract):
        import tensorflow as tf

        def evaluate(path):
            image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
            shape = tf.shape(image)
            short = tf.minimum(shape[0], shape[1])
            size = shape[:2] * SHORT // short
            image = tf.image.resize(image, size, antialias=True)
            top, left = tf.unstack(tf.cast(tf.round((size - SIZE) / 2), tf.int32))
            return tf.cast(tf.clip_by_value(tf.round(image[top:top + SIZE, left:left + SIZE]), 0, 255), tf.uint8)

        def train(path):
            data = tf.io.read_file(path)  # JPEG only
            begin, size, _ = tf.image.sample_distorted_bounding_box(tf.image.extract_jpeg_shape(data), tf.zeros([1, 0, 4]), area_range=(0.08, 1),
                                                                    aspect_ratio_range=(3 / 4, 4 / 3), use_image_if_no_bounding_boxes=True)
            image = tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
            image = tf.image.random_flip_left_right(tf.image.resize(image, [SIZE, SIZE], antialias=True))
            if contract == 'train-float':
                return (image / 255 - MEAN) / STD
            return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
        return evaluate if contract == 'eval' else train

    def batches(self, workers):
        import tensorflow as tf
        paths, _ = tree(self.args.archive, self.folder)
        data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).repeat()
        data = data.map(self.function(self.contract), num_parallel_calls=tf.data.AUTOTUNE).batch(self.args.batch, drop_remainder=True).prefetch(2)
        options = tf.data.Options()
        options.threading.private_threadpool_size = workers
        options.threading.max_intra_op_parallelism = 1
        yield from data.with_options(options).as_numpy_iterator()

    def ordered(self, n):
        import tensorflow as tf
        paths, _ = tree(self.args.archive, self.folder)
        return np.stack([image.numpy() for image in map(self.function('eval'), map(tf.constant, paths[:n]))])


class Datasets(TorchVision):
    """Hugging Face's datasets: a Parquet file of {bytes, path}, whose Arrow copy it maps into memory; torchvision decodes."""

    def write(self):
        import datasets
        samples = members(self.args.archive)
        labels = labels_of([n for n, _ in samples])
        features = datasets.Features({'image': datasets.Image(), 'label': datasets.ClassLabel(num_classes=max(labels) + 1)})
        rows = {'image': [{'bytes': data, 'path': name} for name, data in samples], 'label': labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(self.args.parquet)  # compresses no images

    def dataset(self):
        import datasets
        datasets.disable_progress_bars()
        data = datasets.load_dataset('parquet', data_files=self.args.parquet, split='train', cache_dir=os.path.join(self.folder, 'cache'))

        def decode(rows):
            return {'image': [self.transform(self.decode(image['bytes'])) for image in rows['image']], 'label': rows['label']}
        return data.cast_column('image', datasets.Image(decode=False)).with_transform(decode)

    def batches(self, workers):
        import torch
        self.prepare()
        loader = torch.utils.data.DataLoader(self.dataset(), self.args.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0,
                                             prefetch_factor=2 if workers else None)
        while True:
            yield from (rows['image'] for rows in loader)


PEERS = {'pytorch': TorchVision, 'pillow': Pillow, 'webdataset': WebDataset, 'webdataset-shards': WebDatasetShards, 'datasets': Datasets, 'dali': Dali, 'spdl': Spdl, 'tfdata': TfData}


def family():
    """Return (CPU seconds, resident bytes) of this process and all its descendants."""
    parent, cpu, rss, tick = {}, {}, {}, os.sysconf('SC_CLK_TCK')
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{pid}/stat') as f:
                fields = f.read().rpartition(')')[2].split()
        except OSError:
            continue  # the process has ended meanwhile
        parent[int(pid)], cpu[int(pid)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / tick
        rss[int(pid)] = int(fields[21]) * os.sysconf('SC_PAGE_SIZE')
    mine = {os.getpid()}
    while more := {p for p, up in parent.items() if up in mine and p not in mine}:
        mine |= more
    return sum(cpu[p] for p in mine), sum(rss[p] for p in mine)


def measure(peer, workers, seconds):
    start = time.perf_counter()
    batches = iter(peer.batches(workers))
    next(batches)
    first = time.perf_counter() - start
    for _ in range(3 * workers + 2):  # warm up until every worker is busy
        next(batches)
    cpu, peak, images, looked, begin = family()[0], family()[1], 0, 0.0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        images += len(next(batches))
        if elapsed - looked > 1:
            looked, peak = elapsed, max(peak, family()[1])
    cpu = family()[0] - cpu
    return {'images_per_second': round(images / elapsed, 1), 'cpu_seconds_per_1000_images': round(cpu / images * 1000, 3), 'peak_rss_bytes': peak,
            'first_batch_seconds': round(first, 3), 'workers': workers, 'images': images, 'seconds': round(elapsed, 2)}


def pillow_outputs(path, n):
    from PIL import Image
    out = []
    for _, data in members(path)[:n]:
        image = Image.open(io.BytesIO(data)).convert('RGB')
        w, h = image.size
        w, h = (SHORT, SHORT * h // w) if w <= h else (SHORT * w // h, SHORT)
        image = image.resize((w, h), Image.BILINEAR)
        left, top = round((w - SIZE) / 2), round((h - SIZE) / 2)
        out.append(np.asarray(image.crop((left, top, left + SIZE, top + SIZE))))
    return np.stack(out)


def compare(ours, reference):
    """Return the difference of uint8 images [n, 224, 224, 3] from Pillow's."""
    difference = ours.astype(np.float64) - reference
    squares = np.square(difference).mean(axis=(1, 2, 3))
    psnr = 10 * np.log10(255 * 255 / np.maximum(squares, 1e-9))
    return {'images': len(ours), 'psnr_db': round(float(np.median(psnr)), 1), 'least_psnr_db': round(float(psnr.min()), 1), 'mean': round(float(ours.mean()), 2),
            'pillow_mean': round(float(reference.mean()), 2), 'largest_difference': int(np.abs(difference).max())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('peer', choices=[*PEERS, 'file'])
    parser.add_argument('-archive', required=True)
    parser.add_argument('-parquet', metavar='FILE', help='what peer "datasets" reads')
    parser.add_argument('-write-parquet', action='store_true', help='with peer "datasets": write the archive to that file instead')
    parser.add_argument('-contract', choices=['train', 'train-float', 'eval'], default='train')
    parser.add_argument('-batch', type=int, default=64)
    parser.add_argument('-workers', type=int, help='required without -outputs')
    parser.add_argument('-seconds', type=float, default=10)
    parser.add_argument('-outputs', type=int, metavar='N', help='compare the outputs for the first N images instead')
    parser.add_argument('-file', help='with peer "file" and -outputs: raw uint8 images [N, 224, 224, 3], in order of name')
    args = parser.parse_args()
    if args.outputs:
        args.contract = 'eval'
    with tempfile.TemporaryDirectory(prefix='torchstream-bench-') as folder:
        if args.write_parquet:
            PEERS['datasets'](args, folder).write()
            result = {'bytes': os.path.getsize(args.parquet)}
        elif args.peer == 'file':
            result = compare(np.fromfile(args.file, np.uint8).reshape(-1, SIZE, SIZE, 3)[:args.outputs], pillow_outputs(args.archive, args.outputs))
        elif args.outputs:
            result = compare(PEERS[args.peer](args, folder).ordered(args.outputs), pillow_outputs(args.archive, args.outputs))
        else:
            result = measure(PEERS[args.peer](args, folder), args.workers, args.seconds)
        print(json.dumps({'peer': args.peer, 'contract': args.contract, **result}), flush=True)
        # Some libraries leave threads behind that abort an ordinary exit.
        sys.stdout.flush()
    os._exit(0)


if __name__ == '__main__':
    main()
