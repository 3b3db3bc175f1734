#!/usr/bin/env python3
"""Compares `torchstream bench loader` with other libraries on the same archive and cores, in turn.

    make bench-loader                                    (an archive of 1,000 photographs is made first)
    make bench-loader ARCHIVE=train.tgz BENCH="-rounds 5 -contracts train -peers pytorch,dali"

The script installs the peers of lab/loaders/requirements.txt into TORCHSTREAM_CACHE, once, in their own virtual environment, if a
step needs them: a peer, the comparison of outputs, the archive of photographs, or the Parquet file. SPDL also needs the system's
FFmpeg. A peer that cannot run has a row with the reason.

With peers the script first compares outputs: it runs the first images through contract eval and compares them with Pillow's (peak
signal-to-noise ratio in dB; over 35 means the same picture). Then every round runs each entry once, after some warm-up batches, on
the same cores (taskset). The table has medians over the rounds, for a peer those of its best number of workers. -json FILE keeps
every measurement, and is written after each round.
"""
import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PEERS = {  # name: (title in the table, worker counts to try on n cores)
    'pytorch': ('PyTorch DataLoader + torchvision', lambda n: [n - 1, n, n + 1]),
    'pillow': ('PyTorch DataLoader + Pillow', lambda n: [n, n + 1]),
    'webdataset': ('WebDataset, the .tgz', lambda n: [0, 1]),
    'webdataset-shards': ('WebDataset, a .tar a worker', lambda n: [n, n + 1]),
    'datasets': ('datasets, Parquet, torchvision', lambda n: [n, n + 1]),
    'dali': ('DALI on the CPU, image_random_crop', lambda n: [n, n + 1]),
    'spdl': ('SPDL', lambda n: [n, n + 1]),
    'tfdata': ('tf.data, decode_and_crop_jpeg', lambda n: [n, n + 1]),
}
OURS = {  # name: (title in the table, the archive's kind, options)
    'tgz-first': ('torchstream, .tgz, a first pass', 'tgz', ['-no-index', '-memory', '1', '-epochs', '1']),
    'tgz': ('torchstream, .tgz with its index', 'tgz', ['-memory', '1']),
    'tgz-memory': ('torchstream, .tgz with its index, in memory', 'tgz', []),
    'tar': ('torchstream, .tar with its index', 'tar', []),
    'zip': ('torchstream, .zip, stored', 'zip', []),
    'zip-deflated': ('torchstream, .zip, deflated', 'zip-deflated', []),
    'parquet': ('torchstream, Parquet with its index, uncompressed', 'parquet', []),
}
PREPARED = {'zip': 'archive.zip', 'zip-deflated': 'deflated.zip', 'parquet': 'archive.parquet'}  # kind: file


def say(text):
    print(text, file=sys.stderr, flush=True)


def cache():
    return os.environ.get('TORCHSTREAM_CACHE') or os.path.expanduser('~/.cache/torchstream')


def needs(args):
    """Return the steps that need the peers' environment."""
    steps = [f'peer "{name}"' for name in args.peers]
    if args.outputs:
        steps.append('the comparison of outputs')
    if 'parquet' in args.ours:
        steps.append('the Parquet file, which "datasets" writes')
    if not args.archive and not os.path.exists(photos()):
        steps.append('the archive of photographs')
    return steps


def peers_python(steps):
    """Return the interpreter of the peers' environment; install it if necessary."""
    wanted = os.path.join(HERE, 'requirements.txt')
    with open(wanted, 'rb') as f:
        digest = hashlib.sha256(f.read() + sys.version.encode()).hexdigest()[:12]
    target = os.path.join(cache(), f'bench-peers-{digest}')
    if not os.path.exists(os.path.join(target, 'complete')):
        say(f'bench: installing the peers into {target} (about 4 GB; this takes minutes) for {", ".join(steps)}; -python sets another interpreter')
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run([sys.executable, '-m', 'venv', target], check=True)
        done = subprocess.run([os.path.join(target, 'bin', 'pip'), 'install', '--quiet', '--no-deps', '--no-cache-dir', '--disable-pip-version-check', '-r', wanted])
        if done.returncode:
            sys.exit('bench: cannot install the peers: see above. lab/loaders/requirements.txt lists them; -peers "" runs without them')
        open(os.path.join(target, 'complete'), 'w').close()
    return os.path.join(target, 'bin', 'python')


def environment(own):
    """Return an environment in which torch and DALI find NVIDIA's libraries, and datasets asks no server. own: the script installed the peers."""
    if not own:
        return {**os.environ, 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    site = subprocess.run(['make', '-s', '-C', ROOT, 'libtorch-path'], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    folders = [os.path.join(site, 'nvidia', n, 'lib') for n in sorted(os.listdir(os.path.join(site, 'nvidia')))]
    return {**os.environ, 'LD_LIBRARY_PATH': ':'.join(f for f in folders if os.path.isdir(f)), 'TF_CPP_MIN_LOG_LEVEL': '3', 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}


def photos():
    """Return the path of the archive of photographs."""
    return os.path.join(cache(), 'photos-1000.tgz')


def photographs(python):
    """Return the path of the archive of photographs; make it if necessary."""
    path = photos()
    if not os.path.exists(path):
        say(f'bench: making {path}')
        part = os.path.join(cache(), 'part-photos-1000.tgz')  # the suffix makes the script compress it
        subprocess.run([python, os.path.join(ROOT, 'examples/data/make_photos.py'), 'big', os.path.join(ROOT, 'examples/data/photos-train.tgz'), part, '1000'], check=True)
        os.replace(part, path)
    return path


def zipped(tar, path, method):
    """Write the members of a .tar to a .zip."""
    with tarfile.open(tar) as archive, zipfile.ZipFile(path, 'w', method) as out:
        for member in archive:
            if member.isfile():
                out.writestr(member.name, archive.extractfile(member).read())


def prepare(kind, tgz, tar, folder, python):
    """Write the images of the archive in another format; return the file."""
    path = os.path.join(folder, PREPARED[kind])
    if kind == 'parquet':
        subprocess.run([python, os.path.join(HERE, 'peers.py'), 'datasets', '-archive', tgz, '-parquet', path, '-write-parquet'], check=True, stdout=subprocess.DEVNULL)
    else:
        zipped(tar, path, zipfile.ZIP_STORED if kind == 'zip' else zipfile.ZIP_DEFLATED)
    return path


class Bench:
    def __init__(self, args, python, archives, scratch):
        self.args, self.python, self.archives, self.scratch = args, python, archives, scratch
        self.env, self.cores = environment(python and not args.python), args.cores.split(',')
        self.failed = {}

    def run(self, command):
        done = subprocess.run(['taskset', '-c', self.args.cores, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env, cwd=self.scratch)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return None, (done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1]
        return json.loads(lines[-1]), None

    def peer(self, name, *options):
        return self.run([self.python, os.path.join(HERE, 'peers.py'), name, '-archive', self.archives['tgz'], '-parquet', self.archives.get('parquet', ''), *options])

    def ours(self, name, contract, *options):
        _, kind, extra = OURS[name]
        return self.run([self.args.torchstream, 'bench', 'loader', '-json', '-archive', self.archives[kind], '-contract', contract, '-batch', str(self.args.batch),
                         '-workers', str(len(self.cores)), '-seconds', str(self.args.seconds), *extra, *options])

    def outputs(self):
        n, rows = self.args.outputs, {}
        for name in self.args.ours:
            file = os.path.join(self.scratch, f'{name}.raw')
            result, why = self.ours(name, 'eval', '-outputs', file, '-images', str(n))
            if not why:
                result, why = self.peer('file', '-file', file, '-outputs', str(n))
            rows[name] = result or why
        for name in self.args.peers:
            result, why = self.peer(name, '-outputs', str(n))
            rows[name] = result or why
        return rows

    def round(self, contract, into):
        for name in self.args.ours:
            result, why = self.ours(name, contract)
            into.setdefault(name, {}).setdefault(len(self.cores), []).append(result or why)
        for name in self.args.peers:
            for workers in PEERS[name][1](len(self.cores)):
                result, why = self.peer(name, '-contract', contract, '-batch', str(self.args.batch), '-seconds', str(self.args.seconds), '-workers', str(workers))
                into.setdefault(name, {}).setdefault(workers, []).append(result or why)


def title(name):
    return (OURS.get(name) or PEERS[name])[0]


def median(results, field):
    return statistics.median(r[field] for r in results)


def best(by_workers):
    """Return the measurements of the best number of workers and that number, or None and the reason why there are none."""
    good = {w: [r for r in rs if isinstance(r, dict)] for w, rs in by_workers.items()}
    good = {w: rs for w, rs in good.items() if rs}
    if not good:
        return None, next(iter(by_workers.values()))[-1]
    workers = max(good, key=lambda w: median(good[w], 'images_per_second'))
    return good[workers], workers


def table(rows, head):
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        print('  '.join(str(c).ljust(w) if i == 0 else str(c).rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-archive', help='a .tgz of JPEG photographs in folders; default: 1,000 photographs, made once')
    parser.add_argument('-torchstream', default=os.path.join(ROOT, 'bin', 'torchstream'))
    parser.add_argument('-contracts', default='train,train-float,eval', type=lambda s: s.split(','))
    parser.add_argument('-peers', default=','.join(PEERS), type=lambda s: [p for p in s.split(',') if p])
    parser.add_argument('-python', help="the peers' interpreter; default: an environment that the script installs")
    parser.add_argument('-ours', default=','.join(OURS), type=lambda s: [p for p in s.split(',') if p])
    parser.add_argument('-cores', default='0,1')
    parser.add_argument('-batch', type=int, default=64)
    parser.add_argument('-rounds', type=int, default=3)
    parser.add_argument('-seconds', type=float, default=8)
    parser.add_argument('-outputs', type=int, metavar='N', help='images to compare with Pillow; 0: none; default: 64, or 0 without peers')
    parser.add_argument('-json', metavar='FILE')
    args = parser.parse_args()
    for name in args.peers:
        if name not in PEERS:
            sys.exit(f'bench: no peer "{name}": {", ".join(PEERS)}')
    if args.outputs is None:
        args.outputs = 64 if args.peers else 0
    steps = needs(args)
    python = args.python or (peers_python(steps) if steps else None)
    with tempfile.TemporaryDirectory(prefix='torchstream-bench-') as scratch:
        tgz = os.path.abspath(args.archive) if args.archive else photographs(python)
        tar = os.path.join(scratch, 'archive.tar')
        with open(tar, 'wb') as f:
            subprocess.run(['gzip', '-dc', tgz], check=True, stdout=f)
        if os.path.dirname(tgz) != cache():  # the index goes beside the archive: keep it out of the user's folder
            tgz = shutil.copy(tgz, os.path.join(scratch, 'archive.tgz'))
        archives = {'tgz': tgz, 'tar': tar}
        for kind in PREPARED:
            if kind in args.ours or kind == 'parquet' and 'datasets' in args.peers:
                archives[kind] = prepare(kind, tgz, tar, scratch, python)
        for kind in ('tgz', 'tar', 'parquet'):  # a zip has its own directory
            if kind in archives:
                subprocess.run([args.torchstream, 'index', archives[kind]], check=True, stdout=subprocess.DEVNULL)
        bench = Bench(args, python, archives, scratch)
        print(f'{os.path.basename(args.archive or tgz)}, {os.path.getsize(tgz) / 1e6:.0f} MB; cores {args.cores} of {cpu()}; batches of {args.batch}; '
              f'medians of {args.rounds} rounds of {args.seconds:g} s\n')
        report = {'archive': os.path.basename(args.archive or tgz), 'cpu': cpu(), 'cores': args.cores, 'batch': args.batch, 'rounds': args.rounds, 'seconds': args.seconds}
        if args.outputs:
            report['outputs'] = bench.outputs()
            table([(title(n), *((r['psnr_db'], r['least_psnr_db'], r['mean'], r['largest_difference']) if isinstance(r, dict) else (r[:60], '', '', '')))
                   for n, r in report['outputs'].items()], (f'outputs against Pillow, {args.outputs} images', 'PSNR dB', 'minimum', 'mean', 'largest difference'))
            print()
        begin = time.time()
        report['measured'] = {c: {} for c in args.contracts}
        for i in range(args.rounds):
            for contract in args.contracts:
                bench.round(contract, report['measured'][contract])
            say(f'bench: round {i + 1} of {args.rounds} after {time.time() - begin:.0f} s')
            if args.json:
                with open(args.json, 'w') as f:
                    json.dump(report, f, indent=1)
        for contract in args.contracts:
            rows, fastest = [], 0
            found = {n: best(by) for n, by in report['measured'][contract].items()}
            for name in args.peers:
                if found[name][0]:
                    fastest = max(fastest, median(found[name][0], 'images_per_second'))
            for name, (results, workers) in found.items():
                if not results:
                    rows.append((title(name), str(workers)[:60], '', '', '', '', ''))
                    continue
                rate = median(results, 'images_per_second')
                rows.append((title(name), f'{rate:.0f}', f'{rate / fastest:.2f}' if fastest else '', f'{median(results, "cpu_seconds_per_1000_images"):.2f}',
                             f'{median(results, "peak_rss_bytes") / 1e6:.0f}', f'{median(results, "first_batch_seconds"):.2f}', workers))
            table(rows, (contract, 'images/s', 'of the fastest peer', 'CPU s per 1,000', 'peak RSS MB', 'first batch s', 'workers'))
            print(flush=True)


def cpu():
    with open('/proc/cpuinfo') as f:
        return next((line.partition(':')[2].strip() for line in f if line.startswith('model name')), 'an unknown CPU')


if __name__ == '__main__':
    main()
