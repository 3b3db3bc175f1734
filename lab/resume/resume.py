#!/usr/bin/env python3
"""Interrupts loaders at every batch, resumes them, and compares the samples with those of an undisturbed run.

    make lab                                          # and the peers, as lab/README.md says
    python lab/resume/resume.py -results a.jsonl      # all peers and torchstream; a row for each
    python lab/resume/resume.py -results a.jsonl -peers litdata -cases once,ranks
    python lab/resume/resume.py -table a.jsonl b.jsonl

A verdict is a line of the file of results. A run that was cut off continues where it ended: it runs only what the file lacks.
-table compares files of the same cases, and prints the rows of the table. A cell whose verdicts differ shows those of each file.

Every loader runs two shuffled epochs of 100 small images in batches of 8, through its public interface (peers.py), on a
machine without a GPU. One process saves, after each of its batches, the loader's state and the number of the epoch. For every
such state another process creates the same loader, loads the state and runs to the end of the second epoch. One model judges
all: per epoch and rank, the batches before and after the interruption must be those of the undisturbed run, which saves nothing.

    once      a stop after each batch of both epochs without workers, and of the first epoch with 2 workers, on one rank and on 2.
              The other cases too stop after each batch of the first epoch (-every N: after every Nth, counted from the last one)
    killed    2 workers; a process that saves once, and then it and its workers get SIGKILL
    twice     stop, resume, save once 3 batches later, resume
    end       the state is saved after the loop of the first epoch has ended
    left      the program leaves the loop of the first epoch after 3 batches, starts the second one, and stops there
    workers   stop with 2 workers, resume without; and the reverse
    ranks     stop on 2 ranks, resume on one; and the reverse. A loader that has a state for each rank gets that of rank 0
    few       3 samples on 4 ranks: the batches of each rank
    bad       samples 37 to 39 are damaged, on 2 ranks, and are skipped if the loader has an option for this

"exact" means equal batches. In the cases workers and ranks the order may differ: "once" means that every sample occurs
once in an epoch, and "refused" that an error names the difference. "an epoch too few" or "too many" means that the whole run
has as many samples less or more. Other verdicts say how many samples the whole run lost or doubled: the smallest and largest
numbers of all stops. An error's class means that it was raised. "no end" means no batch, no exit and next to no CPU time in
30 s. If the stops of a cell differ, a verdict names the stops that have it; "also" means some of these.
"""
import argparse
import atexit
import collections
import gc
import glob
import importlib.metadata
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

from peers import BATCH, PEERS, make_data

HERE = os.path.dirname(os.path.abspath(__file__))
SAMPLES, EPOCHS, LEAVE, LATER, BAD = 100, 2, 3, 3, (37, 38, 39)
SILENCE, IDLE, LONGEST = 30, 1, 300  # s: without a batch, the CPU time meanwhile, and without a batch at any CPU time
CASES = ['once', 'killed', 'twice', 'end', 'left', 'workers', 'ranks', 'few', 'bad']
Run = collections.namedtuple('Run', 'batches errors')  # of each rank: [(epoch, [sample])]; what ended it early, or ''
State = collections.namedtuple('State', 'base world part')  # of the names of the files of all ranks
Stop = collections.namedtuple('Stop', 'before after batch last')  # [workers, ranks] before and after; a stop at the first epoch's last batch?


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

    def save(epoch, part=''):
        with open(spec['save'] + part, 'wb') as f:
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
            if spec['each']:
                save(epoch, f'.{taken}')
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
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
        """Run all ranks of a process, from a state; return what they did, and the state that they saved."""
        self.number += 1
        base = os.path.join(self.folder, f'run{self.number}')
        specs = []
        for rank in range(world):
            specs.append({'folder': data or self.data(), 'workers': workers, 'rank': rank, 'world': world, 'epochs': EPOCHS, 'leave': 0, 'stop': 0,
                          'each': False, 'end': False, 'wait': False, 'skip': False, 'even': False, 'load': self.states(load, rank, world),
                          'save': f'{base}.state{rank}', 'out': f'{base}.out{rank}', 'store': f'{base}.store', **spec})
        pids = [start(self.name, s, self.lab) for s in specs]
        try:
            ended = wait(pids, specs)
        finally:
            for pid in pids:  # also workers that are left over
                kill(pid)
        return Run([lines(s) for s in specs], [failure(s, e) for s, e in zip(specs, ended)]), State(base, world, '')

    def states(self, load, rank, world):
        """Return the files of a state for a rank."""
        if load is None:
            return ''
        files = [f'{load.base}.state{r}{load.part}' for r in range(load.world)]
        if self.name == 'torchstream' and load.world != world:
            return ','.join(files)
        return files[rank if load.world == world else 0]

    def shared(self, how, **spec):
        """Run a process that several stops and cases use, once."""
        key = *how, *sorted(spec.items())
        if key not in self.known:
            self.known[key] = self.run(*how, **spec)
        return self.known[key]

    def undisturbed(self, how, leave=0):
        run = self.shared(how, leave=leave)[0]
        if any(run.errors):
            sys.exit(f'{self.name}: a run without interruption fails: {run.errors}')
        return run

    def before(self, how, stop, killed=False, leave=0):
        """Return the run up to a stop, and its state."""
        if self.name == 'torchstream' or killed:
            return self.shared(how, stop=stop, wait=killed, leave=leave)
        whole, state = self.shared(how, each=True, leave=leave)
        return Run([rank[:leave + stop] for rank in whole.batches], whole.errors), state._replace(part=f'.{stop}')


def kill(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait(pids, specs):
    """Wait for all processes. Return the status of each, or None if it had to be killed."""
    ended, seen, since, used = {}, {}, time.monotonic(), None
    while len(ended) < len(pids):
        for pid in pids:
            if pid not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid], seen = status, {}
        sizes = [os.path.exists(s['out']) and os.path.getsize(s['out']) for s in specs]
        if sizes != seen:
            seen, since, used = sizes, time.monotonic(), None
        silent = time.monotonic() - since
        if silent > 1 and used is None:
            used = cpu_time(pids)
        if silent > LONGEST or silent > SILENCE and cpu_time(pids) - used < IDLE or all(s['wait'] and saved(s) for s in specs):
            for pid in pids:
                if pid not in ended:
                    kill(pid)
                    os.waitpid(pid, 0)
                    ended[pid] = 0 if saved(specs[pids.index(pid)]) else None
        elif silent > SILENCE:
            time.sleep(1)
        time.sleep(0.005)
    return [ended[pid] for pid in pids]


def cpu_time(groups):
    """Return the CPU time in seconds of all processes of these groups."""
    ticks = 0
    for path in glob.glob('/proc/[0-9]*/stat'):
        fields = text(path).rpartition(')')[2].split()
        if fields and int(fields[2]) in groups:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf('SC_CLK_TCK')


def text(path):
    try:
        with open(path) as f:
            return f.read()
    except (FileNotFoundError, ProcessLookupError):
        return ''


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
    named = [i for i, line in enumerate(log) if re.match(r'[\w.]*(Error|Exception|StopIteration)(:|$)', line)]
    return '\n'.join(log[(named or [-1])[-1]:]) or f'status {status}'


# ---- the model

def judge(want, got, exact=True):
    """Return what a run did with the samples of each epoch, compared with the undisturbed one."""
    for error in got.errors:
        if error:
            return kind(error)
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
    if abs(lost - doubled) == whole:
        return 'an epoch too few' if lost > doubled else 'an epoch too many'
    said = [f'{what} {n}' for what, n in (('lost', lost), ('doubled', doubled)) if n]
    if said:
        return ', '.join(said)
    return 'once' if not exact else 'reordered' if order else 'other batches'


def kind(error):
    """Return an error's class, or "refused" if its message names the difference."""
    return 'refused' if re.search('num_workers|process dataloader|number of shards', error) else error.split(':')[0]


def joined(first, *more):
    """Return the runs one after the other, rank by rank."""
    batches, errors = [list(b) for b in first.batches], list(first.errors)
    for run in more:
        batches = [a + b for a, b in itertools.zip_longest(batches, run.batches, fillvalue=[])]
        errors = [a or b for a, b in itertools.zip_longest(errors, run.errors, fillvalue='')]
    return Run(batches, errors)


# ---- the cases: generators of stops, and functions that return the verdict on them

def last_batch(run, epochs):
    """Return the number of batches that every rank has in these epochs."""
    return min(len([b for b in rank if b[0] < epochs]) for rank in run.batches)


def resume(l, how, state):
    return [l.run(*how, load=state)[0]]


def resume_twice(l, how, state):
    run, state = l.run(*how, load=state, stop=LATER)
    return [run] if any(run.errors) else [run, *resume(l, how, state)]


def interrupt(l, before, after, epochs=1, resume=resume, exact=True, **spec):
    """Stop after every batch of these epochs, except the last one of the training."""
    want = l.undisturbed(before)
    first = last_batch(want, 1)
    lasts = first, first - LATER if resume is resume_twice else first
    for n in range(last_batch(want, epochs) - (epochs == EPOCHS), 0, -l.every):
        def verdict():
            run, state = l.before(before, n, **spec)
            return judge(want, joined(run, *resume(l, after, state)), exact)
        yield Stop(before, after, n, n in lasts), verdict


def case_once(l):
    yield from interrupt(l, (0, 1), (0, 1), EPOCHS)
    yield from interrupt(l, (2, 1), (2, 1))
    yield from interrupt(l, (2, 2), (2, 2))


def case_killed(l):
    yield from interrupt(l, (2, 1), (2, 1), killed=True)


def case_twice(l):
    for workers in (0, 2):
        yield from interrupt(l, (workers, 1), (workers, 1), resume=resume_twice)


def case_end(l):
    for workers in (0, 2):
        def verdict():
            want = l.undisturbed(how)
            last = {'stop': last_batch(want, 1)} if l.name == 'torchstream' else {'end': True}  # torchstream's state is of a batch
            run, state = l.run(*how, **last)
            return judge(want, joined(run, *resume(l, how, state)))
        how = workers, 1
        yield Stop(how, how, None, False), verdict


def case_left(l):
    for workers in (0, 2):
        def verdict():
            run, state = l.before(how, n, leave=LEAVE)
            return judge(want, joined(run, *resume(l, how, state)))
        how = workers, 1
        want = l.undisturbed(how, LEAVE)
        for n in range(last_batch(want, EPOCHS) - LEAVE - 1, 0, -l.every):
            yield Stop(how, how, n, False), verdict


def case_workers(l):
    yield from interrupt(l, (2, 1), (0, 1), exact=False)
    yield from interrupt(l, (0, 1), (2, 1), exact=False)


def case_ranks(l):
    yield from interrupt(l, (2, 2), (2, 1), exact=False)
    yield from interrupt(l, (2, 1), (2, 2), exact=False)


def ended(run):
    """Return the number of batches of each rank, or what ended a rank early."""
    said = [kind(error) if error else str(len(batches)) for batches, error in zip(run.batches, run.errors)]
    return said[0] if all(run.errors) and len(set(said)) == 1 else ' '.join(said)


def case_few(l):
    yield Stop((0, 4), (0, 4), None, False), lambda: ended(l.run(0, 4, data=l.data(samples=3), epochs=1, even=True)[0])


def case_bad(l):
    yield Stop((0, 2), (0, 2), None, False), lambda: ended(l.run(0, 2, data=l.data(bad=BAD), epochs=1, skip=True, even=True)[0])


def one(name, cases, lab, every, results):
    """Run what the results lack of one peer in this process, which forks the others."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    peer = PEERS[name]
    for package in getattr(peer, 'imports', ()):
        __import__(package)
    gc.collect()
    gc.freeze()  # forked processes share the memory of all imported objects
    folder = tempfile.mkdtemp(prefix='resume-')
    os.environ.update(HF_HOME=folder, HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', TMPDIR=folder, TORCHSTREAM_CACHE=os.path.join(folder, 'cache'))
    had = read(results)
    try:
        loader = Loader(name, lab, folder, every)
        with open(results, 'a') as out:
            for case in cases:
                if (name, case) not in had:
                    run_case(loader, case, had, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_case(loader, case, had, out):
    for stop, verdict in globals()['case_' + case](loader):
        if (loader.name, case, *stop) not in had:
            record = {'peer': loader.name, 'case': case, **stop._asdict(), 'verdict': verdict()}
            print(json.dumps(record), file=out, flush=True)
    package = getattr(PEERS[loader.name], 'package', '')
    record = {'peer': loader.name, 'case': case, 'every': loader.every, 'version': importlib.metadata.version(package) if package else ''}
    print(json.dumps(record), file=out, flush=True)


# ---- the table

def read(path):
    """Return the records of a file of results, by stop and, of those that are complete, by case."""
    records = {}
    for line in text(path).splitlines():
        r = json.loads(line)
        key = r['peer'], r['case']
        if 'verdict' in r:
            r.update(before=tuple(r['before']), after=tuple(r['after']))
            key += r['before'], r['after'], r['batch'], r['last']
        records[key] = r
    return records


SAME = 'once', 'twice', 'killed'
COLUMNS = {
    'once, twice, killed': lambda r: r['case'] in SAME and not r['last'],
    "an epoch's last batch": lambda r: r['case'] in SAME and r['last'],
    'after its loop': lambda r: r['case'] == 'end',
    'another epoch left early': lambda r: r['case'] == 'left',
    'other workers': lambda r: r['case'] == 'workers',
    'other ranks': lambda r: r['case'] == 'ranks',
    'few': lambda r: r['case'] == 'few',
    'bad': lambda r: r['case'] == 'bad',
}
QUALIFIERS = {
    'fewer ranks': lambda r: r['before'][1] > r['after'][1],
    'more ranks': lambda r: r['before'][1] < r['after'][1],
    'without workers': lambda r: r['before'][0] == 0,
    '2 workers': lambda r: r['before'][0] == 2,
    '2 ranks': lambda r: r['before'][1] == 2,
    'first epoch': lambda r: not in_second_epoch(r),
    'second epoch': lambda r: in_second_epoch(r),
    'last batch': lambda r: r['last'],
    'stopped twice': lambda r: r['case'] == 'twice',
    'killed': lambda r: r['case'] == 'killed',
}


def in_second_epoch(r):
    return r['case'] == 'once' and r['before'] == (0, 1) and r['batch'] * BATCH > SAMPLES + BATCH


def cell(records):
    """Return the verdicts of a cell in words: the most frequent one, and which stops have others."""
    kinds = collections.defaultdict(list)
    for r in records:
        kinds['' if r['verdict'].startswith(('lost', 'doubled')) else r['verdict']].append(r)
    first, *others = sorted(kinds.items(), key=lambda of: -len(of[1]))
    among = collections.defaultdict(list)
    for verdict, rs in others:
        name, size = smallest_group(rs, records)
        among[name, 'also ' * (size > len(rs))].append(words(verdict, rs))
    return '; '.join([words(*first)] + [f'{name}: ' * bool(name) + also + ', '.join(said) for (name, also), said in among.items()])


def smallest_group(some, records):
    """Return the name and size of the smallest group of records that has all of some: those of one qualifier, two or none."""
    groups = [('', records)]
    for names in itertools.chain(((name,) for name in QUALIFIERS), itertools.combinations(QUALIFIERS, 2)):
        groups.append((', '.join(names), [r for r in records if all(QUALIFIERS[name](r) for name in names)]))
    return min(((name, len(group)) for name, group in groups if all(r in group for r in some)), key=lambda group: group[1])


def words(kind, records):
    return kind or ranges([r['verdict'] for r in records])


def ranges(verdicts):
    """Return the smallest and largest numbers of verdicts such as "lost 4, doubled 8"."""
    numbers = collections.defaultdict(list)
    for what, n in (part.split(' ') for v in verdicts for part in v.split(', ')):
        numbers[what].append(int(n))
    return ', '.join(f'{what} {min(n)}' + f' to {max(n)}' * (max(n) > min(n)) for what, n in sorted(numbers.items(), reverse=True))


def table(files, peers):
    """Print the rows of the peers in these files, and on the standard error where the files differ."""
    runs = [read(f) for f in files]
    print('| | ' + ' | '.join(COLUMNS) + ' |\n|---' + '|---' * len(COLUMNS) + '|')
    for name in peers:
        missing = [f'{f} {case}' for f, run in zip(files, runs) for case in CASES if (name, case) not in run]
        if missing:
            print(f'{name}: no whole results: {", ".join(missing)}; run resume.py -results FILE -peers {name}', file=sys.stderr)
            continue
        cells = []
        for of in COLUMNS.values():
            said = [cell([r for r in run.values() if r['peer'] == name and 'verdict' in r and of(r)]) for run in runs]
            cells.append(said[0] if len(set(said)) == 1 else ' / '.join(said))
        print(f'| `{name}` {runs[0][name, CASES[0]]["version"]} | '.replace('  ', ' ') + ' | '.join(cells) + ' |')
        for key in sorted({k for run in runs for k in run if k[0] == name and len(k) > 2}, key=repr):
            verdicts = [run[key]['verdict'] if key in run else 'no such stop' for run in runs]
            if len(set(verdicts)) > 1:
                print(f'{key}: {" / ".join(verdicts)}', file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-peers', default=','.join(PEERS), help='some of ' + ','.join(PEERS))
    parser.add_argument('-cases', default=','.join(CASES), help='some of ' + ','.join(CASES))
    parser.add_argument('-lab', default=os.path.join(HERE, '..', '..', 'bin', 'torchstream-lab'), help='the program torchstream-lab')
    parser.add_argument('-every', type=int, default=1, help='stop after every Nth batch, counted from the last one')
    parser.add_argument('-results', help='run what this file lacks, and append it')
    parser.add_argument('-table', nargs='+', metavar='FILE', help='print a table of files of results, and run nothing')
    parser.add_argument('-one', action='store_true', help=argparse.SUPPRESS)  # the process of one peer, which imports its library
    args = parser.parse_args()
    peers, cases, lab = args.peers.split(','), args.cases.split(','), os.path.abspath(args.lab)
    if args.one:
        return one(peers[0], cases, lab, args.every, args.results)
    if not args.table and not args.results:
        parser.error('give -results FILE or -table FILES')
    for name in () if args.table else peers:
        line = [sys.executable, __file__, '-one', '-peers', name, '-cases', args.cases, '-lab', lab, '-every', str(args.every), '-results', args.results]
        subprocess.run(line, check=True)
    table(args.table or [args.results], peers)


if __name__ == '__main__':
    main()
