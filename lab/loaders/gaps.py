#!/usr/bin/env python3
"""Says what a GPU that decodes waits for between its kernels.

    TORCHSTREAM_TRACE=run.json,epoch=1,first=60,batches=12 torchstream bench loader -archive FILE ...
    gaps.py run.json [--batches 10]

It prints a line for each batch, a sum for each cause of gaps, and the times of the kernels. A gap is a time in which no kernel
runs. Its cause is the copy that runs meanwhile, or the ranges of the prefetcher's driver and of its source (package ring).
"""
import argparse
import collections
import json
import re


def short(name):
    """Return a kernel's name without namespaces, template arguments and parameters."""
    name = re.sub(r'^void ', '', name.replace('(anonymous namespace)::', ''))
    return re.split(r'[<(]', name)[0].split('::')[-1]


def union(spans):
    """Return sorted spans without overlap."""
    out = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def length(spans):
    return sum(end - begin for begin, end in spans)


def overlap(spans, begin, end):
    return sum(max(0, min(e, end) - max(b, begin)) for b, e in spans)


class Recording:
    def __init__(self, path):
        with open(path) as f:
            events = json.load(f)['traceEvents']
        self.streams = {(e['pid'], e['tid']): e['args']['name'] for e in events if e['ph'] == 'M' and e['name'] == 'thread_name'}
        calls = {e['id']: e['ts'] for e in events if e['ph'] == 's'}
        # By stream and start: the start of the call that enqueued the work.
        self.enqueued = {(e['pid'], e['tid'], e['ts']): calls.get(e['id']) for e in events if e['ph'] == 'f'}
        whole = [e for e in events if e['ph'] == 'X']
        self.kernels = [e for e in whole if e['cat'] == 'kernel']
        self.copies = [e for e in whole if e['cat'] == 'copy']
        self.ranges = collections.defaultdict(list)
        for e in whole:
            if e['cat'] == 'range':
                self.ranges[e['name']].append((e['ts'], e['ts'] + e['dur']))
        self.calls = [e for e in whole if e['cat'] == 'runtime']

    def stream(self, e):
        return self.streams.get((e['pid'], e['tid']), '?')

    def batches(self):
        """Return the copies of plans to the device, which start the batches."""
        return sorted((e for e in self.copies if self.stream(e).startswith('decoder') and 'HtoD' in e['name']), key=lambda e: e['ts'])


def print_batches(r, batches):
    """Print for each batch, in microseconds: when its copy was enqueued and started, and when its kernels ran."""
    print('batch stream      enqueued  waited  copy us   GB/s | first kernel  entropy  decoded  kernels us  gaps us | next enqueue on this stream, after decoded')
    origin = batches[0]['ts']
    for i, b in enumerate(batches):
        same = [n for n in batches[i + 1:] if n['tid'] == b['tid']]
        end = same[0]['ts'] if same else float('inf')
        mine = sorted((k for k in r.kernels if k['tid'] == b['tid'] and b['ts'] <= k['ts'] < end), key=lambda k: k['ts'])
        if not mine:
            continue
        copied, done = b['ts'] + b['dur'], max(k['ts'] + k['dur'] for k in mine)
        call = r.enqueued.get((b['pid'], b['tid'], b['ts']))
        after = [r.enqueued.get((n['pid'], n['tid'], n['ts'])) for n in same[:1]]
        busy = length(union((k['ts'], k['ts'] + k['dur']) for k in mine))
        entropy = sum(k['dur'] for k in mine if short(k['name']) == 'entropy')
        print(f'{i:5} {r.stream(b):10} {(call or b["ts"]) - origin:9.0f} {b["ts"] - (call or b["ts"]):7.0f} {b["dur"]:8.0f} '
              f'{b["args"].get("GB/s", 0):6.1f} | {mine[0]["ts"] - copied:12.0f} {entropy:8.0f} {done - origin:8.0f} {busy:11.0f} '
              f'{done - mine[0]["ts"] - busy:8.0f} | {after[0] - done if after and after[0] else float("nan"):8.0f}')


def print_gaps(r, begin, end):
    """Print the time in which no kernel runs, by cause."""
    kernels = union((k['ts'], k['ts'] + k['dur']) for k in r.kernels)
    copies = union((c['ts'], c['ts'] + c['dur']) for c in r.copies if 'HtoD' in c['name'])
    total = end - begin
    gaps = [(a[1], b[0]) for a, b in zip(kernels, kernels[1:]) if b[0] > begin and a[1] < end]
    print(f'{total / 1e3:.2f} ms: a kernel ran in {100 * overlap(kernels, begin, end) / total:.1f} %, a copy to the device in '
          f'{100 * overlap(copies, begin, end) / total:.1f} %, neither in '
          f'{100 - 100 * overlap(union([*map(tuple, kernels), *map(tuple, copies)]), begin, end) / total:.1f} %')
    causes = collections.Counter()
    for a, b in gaps:
        if b - a < 10:
            causes['(gaps of less than 10 us)'] += b - a
            continue
        copying = overlap(copies, a, b)
        causes['a copy to the device runs'] += copying
        if copying > .9 * (b - a):
            continue
        share = {name: overlap(spans, a, b) for name, spans in r.ranges.items() if name.startswith('prefetcher: ')}
        driver = {n: t for n, t in share.items() if not n.startswith('prefetcher: lend')}
        lend = {n: t for n, t in share.items() if n.startswith('prefetcher: lend')}
        name = max(driver, key=driver.get) if driver and max(driver.values()) > 0 else 'the driver is in no range'
        if lend and max(lend.values()) > .3 * (b - a):
            name += ' + ' + max(lend, key=lend.get)
        causes[name.replace('prefetcher: ', '')] += b - a - copying
    for name, t in causes.most_common():
        print(f'  {100 * t / total:5.1f} %  {name}')
    print('gaps in us, the longest:', ' '.join(f'{g:.0f}' for g in sorted((b - a for a, b in gaps), reverse=True)[:16]))


def print_times(r, begin, end, count):
    """Print the mean time of each kernel, copy, range and CUDA call a batch."""
    for what, events in (('kernels', r.kernels), ('copies', r.copies), ('calls', r.calls)):
        total, times = collections.Counter(), collections.Counter()
        for e in events:
            if begin <= e['ts'] < end:
                name = short(e['name']) if what == 'kernels' else e['name']
                total[name] += e['dur']
                times[name] += 1
        print(f'{what} a batch:', ', '.join(f'{n} {t / count:.0f} us ({times[n] / count:.1f})' for n, t in total.most_common(12)))
    print('ranges a batch:', ', '.join(f'{n.replace("prefetcher: ", "")} {overlap(s, begin, end) / count:.0f} us ({sum(begin <= a < end for a, _ in s) / count:.1f})'
                                     for n, s in sorted(r.ranges.items()) if not n.startswith('batch ')))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('recording', help='a .json that TORCHSTREAM_TRACE has written')
    parser.add_argument('--batches', type=int, default=10)
    args = parser.parse_args()
    r = Recording(args.recording)
    batches = r.batches()
    if len(batches) < 4:
        raise SystemExit(f'{args.recording} has {len(batches)} copies of plans to a decoder, at least 4 are needed')
    batches = batches[1:args.batches + 2]
    print_batches(r, batches)
    begin, end = batches[0]['ts'], batches[-1]['ts']
    print_gaps(r, begin, end)
    print_times(r, begin, end, len(batches) - 1)


if __name__ == '__main__':
    main()
