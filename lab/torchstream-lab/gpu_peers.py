"""Measures how fast a Python library decodes JPEGs on a GPU, for `torchstream-lab loader -peers`, which gives the argument
and reads the JSON.

    python gpu_peers.py '{"peer": "torchvision", "archive": "train.tar", "images": 2048, "device": 0, "batch": 256, "size": 224,
        "dtype": "bfloat16", "seconds": 3, "threads": [1, 4]}'

The peer has the archive's first images, those that are JPEGs, in memory as bytes, and makes batches of RandomResizedCrop(size)
with antialiasing and a flip, on the device: uint8, or normalised. "device": -1 is the CPU, which tries this file on a machine
without a GPU.
"""
import itertools
import json
import sys
import tarfile
import threading
import time

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def jpegs(job):
    """Return the bytes of the archive's first JPEGs, as `torchstream bench loader -peers` chooses them."""
    found, total = [], 0
    with tarfile.open(job['archive']) as archive:
        for member in archive:
            if not member.isfile() or member.size > job['bytes']:
                continue
            data = archive.extractfile(member).read()
            if not data.startswith(b'\xff\xd8\xff'):
                continue
            found.append(data)
            total += len(data)
            if len(found) == job['images'] or total >= job['bytes']:
                break
    return found


def measure(threads, seconds, warm, start, finish):
    """Run `threads` threads for a while. start(k) returns a function that makes the next batch of thread k and returns its size."""
    barrier, counts, errors = threading.Barrier(threads + 1), [0] * threads, []

    def work(k):
        try:
            batch = start(k)
            for _ in range(warm):
                batch()
            finish()
            barrier.wait()
            while counts[k] == 0 or time.perf_counter() < end[0]:
                counts[k] += batch()
        except Exception as error:
            errors.append(error)
            barrier.abort()

    end = [float('inf')]
    workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    for worker in workers:
        worker.start()
    try:
        begin, cpu = time.perf_counter(), time.process_time()
        barrier.wait()
        begin, cpu = time.perf_counter(), time.process_time()
        end[0] = begin + seconds
    except threading.BrokenBarrierError:
        end[0] = 0
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    finish()
    elapsed = time.perf_counter() - begin
    return {'threads': threads, 'images': sum(counts), 'seconds': elapsed, 'cpu_seconds': time.process_time() - cpu}


def torchvision_rows(job):
    import torch
    import torchvision
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    gpu = job['device'] >= 0
    device = torch.device('cuda', job['device']) if gpu else torch.device('cpu')
    if gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    files = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in jpegs(job)]
    count = min(job['batch'], len(files))
    transform = v2.Compose([v2.RandomResizedCrop(job['size'], antialias=True), v2.RandomHorizontalFlip()])
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))

    def start(make):
        def of_thread(k):
            stream = torch.cuda.Stream(device) if gpu else None
            at = itertools.count(k)

            def batch():
                first = next(at) * count
                some = [files[(first + i) % len(files)] for i in range(count)]
                if not gpu:
                    make(some)
                else:
                    with torch.cuda.device(device), torch.cuda.stream(stream):
                        make(some)
                return count
            return batch
        return of_thread

    def decode(some):
        return decode_jpeg(some, mode=ImageReadMode.RGB, device=device)

    def whole(some):
        images = torch.stack([transform(image) for image in decode(some)])
        if job['dtype'] == 'uint8':
            return images.contiguous(memory_format=torch.channels_last)
        if job['dtype'] == 'float32':
            return images.float().sub_(mean).div_(std)
        return images.to(getattr(torch, job['dtype'])).sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)

    finish = (lambda: torch.cuda.synchronize(device)) if gpu else (lambda: None)
    version = f'torchvision {torchvision.__version__}'
    rows = []
    for way, make in (('decode_jpeg alone, whole images', decode), (f'decode_jpeg, RandomResizedCrop and flip of each image, {job["dtype"]}', whole)):
        rows += [{'way': f'{version}, {way}', 'batch': count, **measure(threads, job['seconds'], 3, start(make), finish)} for threads in job['threads']]
    return rows


def dali_rows(job):
    import numpy as np
    import nvidia.dali
    from nvidia.dali import fn, pipeline_def, types

    gpu = job['device'] >= 0
    files = [np.frombuffer(data, dtype=np.uint8) for data in jpegs(job)]
    count = min(job['batch'], len(files))
    size, area, aspect = job['size'], [0.08, 1], [3 / 4, 4 / 3]
    decoder, rest = ('mixed', 'gpu') if gpu else ('cpu', 'cpu')
    dtype = {'uint8': types.UINT8, 'float32': types.FLOAT, 'bfloat16': types.FLOAT16}[job['dtype']]  # DALI has no bfloat16

    def batches():
        for k in itertools.count():
            yield [files[(k * count + i) % len(files)] for i in range(count)]

    def row(crop_in_decoder, threads):
        @pipeline_def(batch_size=count, num_threads=threads, device_id=job['device'] if gpu else None, prefetch_queue_depth=2, seed=1)
        def define():
            encoded = fn.external_source(source=batches(), dtype=types.UINT8, ndim=1)
            resize = {'interp_type': types.INTERP_LINEAR, 'antialias': True}
            if crop_in_decoder:
                images = fn.decoders.image_random_crop(encoded, device=decoder, output_type=types.RGB, random_area=area, random_aspect_ratio=aspect)
                images = fn.resize(images, device=rest, resize_x=size, resize_y=size, **resize)
            else:
                images = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
                images = fn.random_resized_crop(images, device=rest, size=[size, size], random_area=area, random_aspect_ratio=aspect, **resize)
            mirror = fn.random.coin_flip()
            if job['dtype'] == 'uint8':
                return fn.flip(images, device=rest, horizontal=mirror)
            return fn.crop_mirror_normalize(images, device=rest, mirror=mirror, dtype=dtype, output_layout='CHW' if job['dtype'] == 'float32' else 'HWC',
                                            mean=[255 * m for m in MEAN], std=[255 * s for s in STD])

        pipeline = define()
        pipeline.build()

        def batch():
            pipeline.run()
            return count
        way = 'decoders.image_random_crop, resize' if crop_in_decoder else 'decoders.image, random_resized_crop'
        said = 'float16' if dtype == types.FLOAT16 else job['dtype']
        return {'way': f'DALI {nvidia.dali.__version__}, {way}, flip, {said}', 'batch': count,
                **measure(1, job['seconds'], 6, lambda k: batch, lambda: None), 'threads': threads}

    return [row(crop, threads) for crop in (False, True) for threads in job['threads']]


def main():
    job = json.loads(sys.argv[1])
    rows = {'torchvision': torchvision_rows, 'dali': dali_rows}[job['peer']](job)
    json.dump({'rows': rows}, sys.stdout)


if __name__ == '__main__':
    main()
