#!/usr/bin/env python3
"""Interrupts loaders at every batch, resumes them, and compares the samples with those of an undisturbed run.

    make lab                          # and the peers, as lab/README.md says
    python lab/resume/resume.py       # a table of all peers and torchstream
    python lab/resume/resume.py -peers litdata -cases once -stops     # also the verdict on each stop

Every loader runs two shuffled epochs of 100 small images in batches of 8, through its public interface (peers.py), on a
machine without a GPU. A run is a process. It ends after a batch and saves the loader's state and the number of the epoch.
The next process creates the same loader, loads the state and runs to the end of the second epoch. One model judges all:
per epoch and rank, the batches before and after the interruption must be those of the undisturbed run.

    once      a stop after each batch of both epochs without workers, and after every fourth one of the first epoch (-every) with
              2 workers, on one rank and on 2. The other cases too stop after every fourth batch, and the last one
    killed    2 workers; the process and its workers get SIGKILL
    twice     stop, resume, stop 3 batches later, resume
    end       the state is saved after the loop of the first epoch has ended
    left      the program leaves the loop of the first epoch after 3 batches, starts the second one, and stops there
    workers   stop with 2 workers, resume without; and the reverse
    ranks     stop on 2 ranks, resume on one; and the reverse. A loader that has a state for each rank gets that of rank 0
    few       3 samples on 4 ranks: the batches of each rank
    bad       samples 37 to 39 are damaged, on 2 ranks, and are skipped if the loader has an option for this

"exact" means equal batches. In the cases workers and ranks the order may differ: "all once" means that every sample occurs
once in an epoch. "an epoch too few" or "too many" means that the whole run has as many samples less or more.
Other verdicts say at how many stops (x) the whole run lost or doubled how many samples. An error's class means that it was
raised. "no end" means no batch and no exit in 30 s: run it again on a machine that is not busy.
"""
import argparse
import atexit
import collections
import gc
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

from peers import PEERS, make_data

HERE = os.path.dirname(os.path.abspath(__file__))
SAMPLES, EPOCHS, LEAVE, LATER, BAD = 100, 2, 3, 3, (37, 38, 39)
SILENCE = 30  # s
CASES = ['once', 'killed', 'twice', 'end', 'left', 'workers', 'ranks', 'few', 'bad']
Run = collections.namedtuple('Run', 'batches errors')  # of each rank: [(epoch, [sample])]; what ended it early, or ''


# ---- one process

def train(name, spec):
    """Be one process of a training: print every batch, load and save states."""
    if spec['world'] > 1:
        import torch.distributed
        torch.distributed.init_process_group('gloo', init_method='file://' + spec['store'], rank=spec['rank'], world_size=spec['world'])
    out = open(spec['out'], 'w')
    peer, first, taken = PEERS[name](spec), 0, 0
    if spec['load']:
        with open(spec['load'], 'rb') as f:
            saved = pickle.load(f)
        first = saved['epoch']
        peer.load(saved['state'])

    def save(epoch):
        with open(spec['save'], 'wb') as f:
            pickle.dump({'epoch': epoch, 'state': peer.state()}, f)
        if spec['wait']:
            print('{"saved": true}', file=out, flush=True)
            signal.pause()

    for epoch in range(first, spec['epochs']):
        count = 0
        for samples in peer.iterate(epoch):
            print(json.dumps({'epoch': epoch, 'samples': samples}), file=out, flush=True)
            count += 1
            if epoch == 0 and spec['leave']:
                if count == spec['leave']:
                    break
                continue
            taken += 1
            if taken == spec['stop']:
                return save(epoch)
        if spec['end']:
            return save(epoch + 1)


def start(name, spec, lab):
    """Start a process for a rank, as the leader of a group; return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        log = os.open(spec['out'] + '.log', os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(spec['rank']), WORLD_SIZE=str(spec['world']), LOCAL_RANK=str(spec['rank']),
                          LOCAL_WORLD_SIZE=str(spec['world']), GLOBAL_RANK=str(spec['rank']))
        if name == 'torchstream':
            os.dup2(os.open(spec['out'], os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
            os.execv(lab, command(spec, lab))
        train(name, spec)
        gc.collect()
        atexit._run_exitfuncs()  # as at the end of a program: loaders remove shared memory
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def command(spec, lab):
    """Return the command line of torchstream."""
    line = [lab, 'resume', '-archive', os.path.join(spec['folder'], 'train.tar'), '-rank', str(spec['rank']), '-world', str(spec['world']),
            '-workers', str(max(spec['workers'], 1)), '-epochs', str(spec['epochs']), '-leave', str(spec['leave']), '-stop', str(spec['stop'])]
    if spec['load']:
        line += ['-load', spec['load']]
    return line + ['-save', spec['save']] + ['-wait'] * spec['wait'] + ['-skip'] * spec['skip']


def write_torchstream(folder, data):
    from peers import write_tar
    write_tar(os.path.join(folder, 'train.tar'), [(f'c{i % 2}/{i:03}.jpg', jpg) for i, jpg in enumerate(data)])


class TorchStream:
    """imageloader.Loader and its State, through torchstream-lab resume."""
    write = staticmethod(write_torchstream)


PEERS['torchstream'] = TorchStream


# ---- runs of several ranks

class Loader:
    """Runs the processes of one peer."""

    def __init__(self, name, lab, folder, every=1):
        self.name, self.lab, self.folder, self.every, self.number, self.known = name, lab, folder, every, 0, {}

    def data(self, samples=SAMPLES, bad=()):
        folder = os.path.join(self.folder, f'data-{samples}-{len(bad)}')
        if not os.path.exists(folder):
            make_data(self.name, folder, samples, bad)
        return folder

    def run(self, workers=0, world=1, load=None, data=None, **spec):
        """Run all ranks of a process; load is the first part of the files of a former run's states and its number of ranks."""
        self.number += 1
        base = os.path.join(self.folder, f'run{self.number}')
        specs = []
        for rank in range(world):
            specs.append({'folder': data or self.data(), 'workers': workers, 'rank': rank, 'world': world, 'epochs': EPOCHS, 'leave': 0, 'stop': 0, 'end': False,
                          'wait': False, 'skip': False, 'even': False, 'load': self.states(load, rank, world), 'save': f'{base}.state{rank}',
                          'out': f'{base}.out{rank}', 'store': f'{base}.store', **spec})
        pids = [start(self.name, s, self.lab) for s in specs]
        try:
            ended = wait(pids, specs)
        finally:
            for pid in pids:  # also workers that are left over
                kill(pid)
        return Run([lines(s) for s in specs], [failure(s, e) for s, e in zip(specs, ended)]), (base, world)

    def states(self, load, rank, world):
        if load is None:
            return ''
        base, former = load
        files = [f'{base}.state{r}' for r in range(former)]
        if self.name == 'torchstream' and former != world:
            return ','.join(files)
        return files[rank if former == world else 0]

    def before(self, stop, workers, world, **spec):
        """Return the run up to a stop. Several cases use it."""
        key = stop, workers, world, *sorted(spec.items())
        if key not in self.known:
            self.known[key] = self.run(workers, world, stop=stop, **spec)
        return self.known[key]


def kill(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait(pids, specs):
    """Wait for all processes. Return the status of each, or None if it had to be killed."""
    ended, seen, since = {}, {}, time.monotonic()
    while len(ended) < len(pids):
        for pid in pids:
            if pid not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid], since = status, time.monotonic()
        sizes = [os.path.exists(s['out']) and os.path.getsize(s['out']) for s in specs]
        if sizes != seen:
            seen, since = sizes, time.monotonic()
        if all(s['wait'] and saved(s) for s in specs) or time.monotonic() - since > SILENCE:
            for pid in pids:
                if pid not in ended:
                    kill(pid)
                    os.waitpid(pid, 0)
                    ended[pid] = 0 if saved(specs[pids.index(pid)]) else None
        time.sleep(0.005)
    return [ended[pid] for pid in pids]


def text(path):
    if not os.path.exists(path):
        return ''
    with open(path) as f:
        return f.read()


def saved(spec):
    return '"saved"' in text(spec['out'])


def lines(spec):
    batches = []
    for line in text(spec['out']).splitlines():
        line = json.loads(line)
        if 'samples' in line:
            batches.append((line['epoch'], [s if isinstance(s, int) else int(s.split('/')[-1][:3]) for s in line['samples']]))
    return batches


def failure(spec, status):
    if status is None:
        return 'no end'
    if status == 0:
        return ''
    log = [line for line in text(spec['out'] + '.log').splitlines() if line.strip()]
    named = [line for line in log if re.match(r'[\w.]*(Error|Exception)(:|$)', line)]
    return (named or log or ['status %d' % status])[-1][:300]


# ---- the model

def judge(want, got, exact=True):
    """Return what a run did with the samples of each epoch, compared with the undisturbed one."""
    for error in got.errors:
        if error:
            return error.split(':')[0] if error != 'no end' else error
    if exact and want.batches == got.batches:
        return 'exact'
    lost, doubled, order = collections.Counter(), collections.Counter(), False
    for epoch in range(EPOCHS):
        w, g = ([[s for e, samples in rank if e == epoch for s in samples] for rank in run.batches] for run in (want, got))
        all_w, all_g = (collections.Counter(itertools.chain(*x)) for x in (w, g))
        lost[epoch] += sum((all_w - all_g).values())
        doubled[epoch] += sum((all_g - all_w).values())
        order |= w != g
    lost, doubled = sum(lost.values()), sum(doubled.values())
    whole = sum(len(samples) for rank in want.batches for e, samples in rank if e == EPOCHS - 1)
    if exact and abs(lost - doubled) == whole:
        return 'an epoch too few' if lost > doubled else 'an epoch too many'
    said = [f'{what} {n}' for what, n in (('lost', lost), ('doubled', doubled)) if n]
    if said:
        return ', '.join(said)
    return 'all once' if not exact else 'reordered' if order else 'other batches'


def joined(first, *more):
    """Return the runs one after the other, rank by rank."""
    batches, errors = [list(b) for b in first.batches], list(first.errors)
    for run in more:
        batches = [a + b for a, b in itertools.zip_longest(batches, run.batches, fillvalue=[])]
        errors = [a or b for a, b in itertools.zip_longest(errors, run.errors, fillvalue='')]
    return Run(batches, errors)


def summary(verdicts):
    """Return the verdicts in words: {stop: verdict} of each variant."""
    kinds = collections.defaultdict(list)
    for v in verdicts.values():
        kinds[' and '.join(sorted(p.split(' ')[0] for p in v.split(', '))) if v.startswith(('lost', 'doubled')) else v].append(v)
    if len(kinds) == 1 and len(verdicts) > 1 and list(kinds)[0] in ('exact', 'all once'):
        return list(kinds)[0]
    said = []
    for kind, vs in kinds.items():
        if kind.startswith(('lost', 'doubled')):
            n = {}
            for v in vs:
                for part in v.split(', '):
                    what, number = part.split(' ')
                    n.setdefault(what, []).append(int(number))
            kind = ', '.join(f'{what} {min(x)}' + (f' to {max(x)}' if max(x) > min(x) else '') for what, x in n.items())
        said.append(kind + (f' ({len(vs)}x)' if len(verdicts) > 1 else ''))
    return '; '.join(said)


# ---- the cases

def stops(l, want, epochs):
    """Return the numbers of batches after which a run of these epochs is interrupted: all of both epochs, or every Nth of the first."""
    last = min(len([b for b in rank if b[0] < epochs]) for rank in want.batches) - (epochs == EPOCHS)
    return range(last, 0, -1 if epochs == EPOCHS else -l.every)


def case_once(l, killed=False):
    verdicts = {}
    for workers, world, epochs in [(0, 1, EPOCHS), (2, 1, 1), (2, 2, 1)] if not killed else [(2, 1, 1)]:
        want, _ = l.run(workers, world)
        for n in stops(l, want, epochs):
            a, state = l.before(n, workers, world, wait=killed)
            b, _ = l.run(workers, world, load=state)
            verdicts[f'{workers} workers, {world} ranks, {n}'] = judge(want, joined(a, b))
    return verdicts


def case_killed(l):
    return case_once(l, killed=True)


def case_twice(l):
    verdicts = {}
    for workers in (0, 2):
        want, _ = l.run(workers)
        for n in stops(l, want, 1):
            a, state = l.before(n, workers, 1)
            b, state = l.run(workers, load=state, stop=LATER)
            c, _ = l.run(workers, load=state) if not any(b.errors) else (Run([[]], ['']), None)
            verdicts[f'{workers} workers, {n}'] = judge(want, joined(a, b, c))
    return verdicts


def case_end(l):
    verdicts = {}
    for workers in (0, 2):
        want, _ = l.run(workers)
        last = stops(l, want, 1)[0]
        a, state = l.run(workers, end=True) if l.name != 'torchstream' else l.before(last, workers, 1)
        b, _ = l.run(workers, load=state)
        verdicts[f'{workers} workers'] = judge(want, joined(a, b))
    return verdicts


def case_left(l):
    verdicts = {}
    for workers in (0, 2):
        want, _ = l.run(workers, leave=LEAVE)
        for n in range(len(want.batches[0]) - LEAVE - 1, 0, -l.every):
            a, state = l.run(workers, leave=LEAVE, stop=n)
            b, _ = l.run(workers, load=state)
            verdicts[f'{workers} workers, {n}'] = judge(want, joined(a, b))
    return verdicts


def other(l, before, after):
    """Interrupt the first epoch with one number of workers and ranks, and resume with another."""
    verdicts = {}
    want, _ = l.run(*before)
    for n in stops(l, want, 1):
        a, state = l.before(n, *before)
        b, _ = l.run(*after, load=state)
        verdicts[f'{before} {after}, {n}'] = judge(want, joined(a, b), exact=False)
    return verdicts


def case_workers(l):
    return {**other(l, (2, 1), (0, 1)), **other(l, (0, 1), (2, 1))}


def case_ranks(l):
    return {**other(l, (2, 2), (2, 1)), **other(l, (2, 1), (2, 2))}


def ended(run):
    """Return the number of batches of each rank, and what ended it early."""
    said = []
    for batches, error in zip(run.batches, run.errors):
        n = str(len(batches))
        said.append(n + (' then ' + error.split(':')[0] if error else ''))
    return ' / '.join(said)


def case_few(l):
    return {'': ended(l.run(world=4, data=l.data(samples=3), epochs=1, even=True)[0])}


def case_bad(l):
    return {'': ended(l.run(world=2, data=l.data(bad=BAD), epochs=1, skip=True, even=True)[0])}


def one(name, cases, lab, each, every):
    """Run the cases of one peer in this process, which forks the others, and print them as JSON."""
    peer = PEERS[name]
    for package in getattr(peer, 'imports', ()):
        __import__(package)
    folder = tempfile.mkdtemp(prefix='resume-')
    os.environ.update(HF_HOME=folder, HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', TMPDIR=folder, TORCHSTREAM_CACHE=os.path.join(folder, 'cache'))
    try:
        loader = Loader(name, lab, folder, every)
        for case in cases:
            verdicts = globals()['case_' + case](loader)
            print(json.dumps({'peer': name, 'case': case, 'verdict': summary(verdicts), 'stops': verdicts if each else None}), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-peers', default=','.join(PEERS), help='some of ' + ','.join(PEERS))
    parser.add_argument('-cases', default=','.join(CASES), help='some of ' + ','.join(CASES))
    parser.add_argument('-lab', default=os.path.join(HERE, '..', '..', 'bin', 'torchstream-lab'), help='the program torchstream-lab')
    parser.add_argument('-every', type=int, default=4, help='stop after every Nth batch, counted from the last one')
    parser.add_argument('-stops', action='store_true', help='also print the verdict on each stop')
    parser.add_argument('-one', action='store_true', help='run in this process, and print JSON')
    args = parser.parse_args()
    peers, cases, lab = args.peers.split(','), args.cases.split(','), os.path.abspath(args.lab)
    if args.one:
        return one(peers[0], cases, lab, args.stops, args.every)
    print('| | ' + ' | '.join(cases) + ' |\n|---' + '|---' * len(cases) + '|')
    for name in peers:
        line = [sys.executable, __file__, '-one', '-peers', name, '-cases', args.cases, '-lab', lab, '-every', str(args.every)]
        done = subprocess.run(line + ['-stops'] * args.stops, stdout=subprocess.PIPE, text=True)
        rows = {r['case']: r for r in map(json.loads, done.stdout.splitlines())}
        print(f'| {name} | ' + ' | '.join(rows[c]['verdict'] if c in rows else 'driver failed' for c in cases) + ' |', flush=True)
        for c in cases if args.stops else ():
            for stop, verdict in (rows[c]['stops'] if c in rows else {}).items():
                print(f'    {name} {c} {stop}: {verdict}')


if __name__ == '__main__':
    main()
