#!/usr/bin/env python3
"""Compares `torchstream bench loader` with a PyTorch DataLoader on the same archive and the same cores, taking turns.

    go build -o bin/torchstream ./cmd/torchstream
    python3 bench/loader.py -archive train.tgz -python .venv/bin/python -cores 0,1 -rounds 3 -seconds 10

-python is an interpreter with torch 2.11 and torchvision 0.26; everything else needs the standard library only. Every round runs ours, then theirs with
each worker count, on the same cores. What is printed: medians over the rounds, of theirs for the best worker count, and the ratio.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys


def run(command, cores):
    done = subprocess.run(['taskset', '-c', cores, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f'{" ".join(command)}:\n{done.stderr}')
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-archive', required=True)
    parser.add_argument('-torchstream', default='bin/torchstream')
    parser.add_argument('-python', default=sys.executable)
    parser.add_argument('-cores', default='0,1')
    parser.add_argument('-batch', default='64')
    parser.add_argument('-rounds', type=int, default=3)
    parser.add_argument('-seconds', default='10')
    parser.add_argument('-memory', default='256', help='MB that ours may hold compressed images in; 1: it inflates the .tgz every epoch. PyTorch holds them all')
    parser.add_argument('-workers', default='1,2,3,4', help="PyTorch's worker counts; ours is the number of cores")
    args = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    common = ['-archive', args.archive, '-batch', args.batch, '-seconds', args.seconds]
    count = str(len(args.cores.split(',')))
    ours, theirs = [], []
    for i in range(args.rounds):
        ours.append(run([args.torchstream, 'bench', 'loader', *common, '-workers', count, '-memory', args.memory, '-json'], args.cores))
        theirs.append(run([args.python, os.path.join(here, 'pytorch_loader.py'), *common, '-workers', args.workers], args.cores))
        print(f'round {i + 1}: torchstream {ours[-1]["images_per_second"]:.0f}, PyTorch', ', '.join(
            f'{r["images_per_second"]:.0f} ({r["workers"]} workers)' for r in theirs[-1]['all']), file=sys.stderr, flush=True)
    rates = {}
    for result in theirs:
        for r in result['all']:
            rates.setdefault(r['workers'], []).append(r)
    best = max(rates.values(), key=lambda rs: statistics.median(r['images_per_second'] for r in rs))

    def median(results, field):
        return statistics.median(r[field] for r in results)

    print(json.dumps({
        'torchstream_images_per_second': median(ours, 'images_per_second'), 'pytorch_images_per_second': median(best, 'images_per_second'),
        'ratio': round(median(ours, 'images_per_second') / median(best, 'images_per_second'), 3),
        'torchstream_cpu_seconds_per_1000': round(median(ours, 'cpu_seconds_per_1000_images'), 3),
        'pytorch_cpu_seconds_per_1000': round(median(best, 'cpu_seconds_per_1000_images'), 3),
        'torchstream_first_batch_seconds': round(median(ours, 'first_batch_seconds'), 3), 'pytorch_workers': best[0]['workers'],
        'cores': args.cores, 'memory_mb': int(args.memory), 'rounds': args.rounds, 'contract': ours[0]['contract']}, indent=1))


if __name__ == '__main__':
    main()
