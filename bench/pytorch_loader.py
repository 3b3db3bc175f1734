#!/usr/bin/env python3
"""The peer of `torchstream bench loader`: a PyTorch DataLoader with torchvision's decode_jpeg on the same archive.

    python bench/pytorch_loader.py -archive train.tgz -batch 64 -workers 1,2,3,4 -seconds 10

Every worker count is measured; one JSON object goes to stdout, with the best count's figures first and all of them under "all". The contract is that of
`torchstream bench loader`: whole shuffled epochs, RandomResizedCrop(224) with antialiasing and horizontal flip, uint8 batches in host memory. The archive
is read into memory before the clock starts, so that nothing is paid for gunzip and tar: that is the faster way to run it. Ours does the same with an archive
of up to 256 MiB; a larger .tgz it reads and inflates again in every epoch, inside the measured time.

Needs: torch 2.11, torchvision 0.26. Both sides run on the same cores: taskset -c 0,1.
"""
import argparse
import json
import os
import sys
import tarfile
import time

import torch
import torchvision
import torchvision.transforms.v2 as transforms
from torchvision.io import ImageReadMode, decode_image, decode_jpeg


class Archive(torch.utils.data.Dataset):
    def __init__(self, path, size):
        self.samples, names = [], []
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isfile():
                    self.samples.append(torch.frombuffer(bytearray(tar.extractfile(member).read()), dtype=torch.uint8))
                    names.append(os.path.basename(os.path.dirname(member.name)))
        classes = sorted(set(names))
        self.labels = [classes.index(n) for n in names]
        self.transform = transforms.Compose([transforms.RandomResizedCrop(size, antialias=True), transforms.RandomHorizontalFlip()])

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        data = self.samples[i]
        jpeg = data[0] == 0xFF and data[1] == 0xD8
        return self.transform((decode_jpeg if jpeg else decode_image)(data, mode=ImageReadMode.RGB)), self.labels[i]


def forever(loader):
    while True:
        yield from loader


def cpu_seconds():
    """CPU time of this process and its worker processes."""
    total, tick = 0, os.sysconf('SC_CLK_TCK')
    me = os.getpid()
    for pid in os.listdir('/proc'):
        if pid.isdigit():
            try:
                with open(f'/proc/{pid}/stat') as f:
                    fields = f.read().rpartition(')')[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(pid) == me or int(fields[1]) == me:
                total += int(fields[11]) + int(fields[12])
    return total / tick


def measure(dataset, batch, workers, seconds):
    loader = torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers, drop_last=False, persistent_workers=True, prefetch_factor=2)
    start = time.perf_counter()
    batches = forever(loader)
    next(batches)
    first = time.perf_counter() - start
    for _ in range(3 * workers + 2):  # until every worker is at work
        next(batches)
    images, cpu, begin = 0, cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        images += len(next(batches)[1])
    return {'images_per_second': round(images / elapsed, 1), 'cpu_seconds_per_1000_images': round((cpu_seconds() - cpu) / images * 1000, 3),
            'first_batch_seconds': round(first, 3), 'workers': workers, 'images': images, 'seconds': round(elapsed, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-archive', required=True)
    parser.add_argument('-batch', type=int, default=64)
    parser.add_argument('-size', type=int, default=224)
    parser.add_argument('-workers', default='1,2,3,4', help='worker counts to try')
    parser.add_argument('-seconds', type=float, default=10, help='for each worker count')
    args = parser.parse_args()
    dataset = Archive(args.archive, args.size)
    results = []
    for workers in (int(w) for w in args.workers.split(',')):
        results.append(measure(dataset, args.batch, workers, args.seconds))
        print(results[-1], file=sys.stderr, flush=True)
    best = max(results, key=lambda r: r['images_per_second'])
    print(json.dumps({**best, 'batch': args.batch, 'size': args.size, 'cores': len(os.sched_getaffinity(0)), 'torch': torch.__version__,
                      'torchvision': torchvision.__version__, 'all': results}))


if __name__ == '__main__':
    main()
