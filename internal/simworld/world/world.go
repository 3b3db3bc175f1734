// Package world simulates a machine for one run of a scenario: its disk, its processes and the time
// that each call takes. A seed decides everything that a real machine leaves open. Packages os,
// sync, system and imagecapi below internal/simworld replace the packages of the same names in the
// code that a scenario runs, and call this package.
package world

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// World is the simulated machine of one run. The code of a run has one goroutine at a time that is
// not blocked (testing/synctest with GOMAXPROCS 1). The lock is for a goroutine that is preempted.
type World struct {
	Disk    *Disk
	Network *Network
	Seed    uint64
	Trace   func(c Choice) // if not nil, it is called with each choice other than 0

	decisions
	record
	calm  int // nesting of Calm
	procs []*Process
	next  int // number of the next process, inode or temporary file
	drawn int // number of the last Number

	descriptors
}

// decisions are the choices of a run.
type decisions struct {
	replay map[string]int // if not nil, every other choice is 0
	counts map[string]int // how often each name has been asked
	made   []Choice       // choices other than 0
	mu     sync.Mutex
}

// record tells a run so far.
type record struct {
	story  []string
	start  time.Time
	calls  int
	faults int

	transient  int      // faults of servers after which the same request succeeds
	unanswered []string // calls without an answer, after a rename
}

// Choice is one decision: the value for the name's k-th question.
type Choice struct {
	Name  string
	Value int
}

// current is the world of the running seed. A program runs one world at a time.
var current atomic.Pointer[World]

// Current returns the world of the running seed.
func Current() *World { return current.Load() }

// New returns a world and makes it the current one. It must be called in the bubble of the run. If
// replay is not nil, it has the only choices that are not 0.
func New(seed uint64, replay []Choice) *World {
	w := &World{Seed: seed, decisions: decisions{counts: map[string]int{}}, record: record{start: time.Now()}}
	if replay != nil {
		w.replay = map[string]int{}
		for _, c := range replay {
			w.replay[c.Name] = c.Value
		}
	}
	w.Disk, w.Network = newDisk(w), NewNetwork(w)
	current.Store(w)
	return w
}

// Choose returns a number from 0 to n-1. Its k-th call with a name always returns the same number
// for the same seed. 0 is the choice that disturbs the run least: a failing run is shortened by
// setting choices to 0.
func (w *World) Choose(name string, n int) int {
	key := w.key(name)
	value := 0
	switch {
	case w.replay != nil:
		value = min(w.replay[key], max(n-1, 0))
	case n > 1:
		value = int(w.hash(key) % uint64(n))
	}
	if value != 0 {
		w.note(Choice{key, value})
	}
	return value
}

func (w *World) note(c Choice) {
	w.mu.Lock()
	w.made = append(w.made, c)
	w.mu.Unlock()
	if w.Trace != nil {
		w.Trace(c)
	}
}

// Chance returns 1 to kinds with a probability of one in rarity for all together, and 0 otherwise.
// During Calm it returns 0.
func (w *World) Chance(name string, rarity, kinds int) int {
	if w.calm > 0 || rarity <= 0 {
		return 0
	}
	key := w.key(name)
	value := 0
	if w.replay != nil {
		value = min(w.replay[key], kinds)
	} else if h := w.hash(key); h%uint64(rarity) == 0 {
		value = 1 + int(h/uint64(rarity)%uint64(kinds))
	}
	if value != 0 {
		w.faults++
		w.note(Choice{key, value})
		w.Say("%s: %d", key, value)
	}
	return value
}

// Faults returns the number of faults so far.
func (w *World) Faults() int { return w.faults }

// Met reports whether a call with one of these names has met a fault, or got no answer.
func (w *World) Met(calls ...string) bool {
	met := func(call string) bool { return slices.Contains(calls, call) }
	return slices.ContainsFunc(w.unanswered, met) || slices.ContainsFunc(w.made, func(c Choice) bool {
		fault, ok := strings.CutPrefix(c.Name, "fault ")
		call, _, _ := strings.Cut(fault, " ")
		return ok && met(call)
	})
}

// key numbers the questions with one name.
func (w *World) key(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := w.counts[name]
	w.counts[name] = k + 1
	return name + "#" + strconv.Itoa(k)
}

// hash is a hash of the seed and a text: FNV-1a, then the finaliser of splitmix64.
func (w *World) hash(text string) uint64 {
	h := uint64(14695981039346656037) ^ w.Seed*0x9e3779b97f4a7c15
	for i := range len(text) {
		h = (h ^ uint64(text[i])) * 1099511628211
	}
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// Number returns 1, 2, 3 and so on.
func (w *World) Number() int {
	w.drawn++
	return w.drawn
}

// Calm runs f without faults, as on a machine that nothing disturbs.
func (w *World) Calm(f func() error) error {
	w.calm++
	defer func() { w.calm-- }()
	return f()
}

// Say adds a line to the story.
func (w *World) Say(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.story = append(w.story, fmt.Sprintf("%12v ", time.Since(w.start))+fmt.Sprintf(format, args...))
}

// delay lets simulated time pass, and so decides which goroutine continues: the one whose call ends
// first. Most calls take microseconds, a few take milliseconds or seconds.
func (w *World) delay(name string) {
	w.calls++
	h := w.hash(w.key(name))
	d := time.Duration(1 + h%20_000) // nanoseconds
	switch h >> 32 % 64 {
	case 0:
		d *= 100
	case 1:
		d *= 10_000
	}
	time.Sleep(d)
}

// small returns a number from 0 to n-1 that is no choice of the story, as the time of a call.
func (w *World) small(name string, n int) int { return int(w.hash(w.key(name)) % uint64(n)) }

// Wait lets the time of one call pass.
func (w *World) Wait(name string) { w.delay(name) }

// Story describes a run.
type Story struct {
	Seed      uint64
	Choices   []Choice      // those that are not 0
	Lines     []string      // what happened, with times
	Calls     int           // of the simulated machine
	Simulated time.Duration // length of the run
}

// Story returns the story so far.
func (w *World) Story() Story {
	return Story{w.Seed, w.made, w.story, w.calls, time.Since(w.start)}
}

// String returns the choices and the lines.
func (s Story) String() string {
	b := &strings.Builder{}
	fmt.Fprintf(b, "seed %d, %d calls, %v simulated\nchoices: %s\n", s.Seed, s.Calls, s.Simulated, Format(s.Choices))
	for _, l := range s.Lines {
		b.WriteString(l + "\n")
	}
	return b.String()
}

// Format writes choices as Parse reads them.
func Format(choices []Choice) string {
	parts := make([]string, len(choices))
	for i, c := range choices {
		parts[i] = c.Name + "=" + strconv.Itoa(c.Value)
	}
	return strings.Join(parts, ";")
}

// Parse reads what Format has written.
func Parse(text string) ([]Choice, error) {
	list := []Choice{}
	for part := range strings.SplitSeq(text, ";") {
		if part == "" {
			continue
		}
		at := strings.LastIndexByte(part, '=')
		if at < 0 {
			return nil, fmt.Errorf("choice %q has no =", part)
		}
		value, err := strconv.Atoi(part[at+1:])
		if err != nil {
			return nil, fmt.Errorf("choice %q: %w", part, err)
		}
		list = append(list, Choice{part[:at], value})
	}
	return list, nil
}

// ErrKilled is the error of every call of a killed process.
var ErrKilled = errors.New("the simulated process is killed")

// Process is a simulated process. It sees the disk below a separate folder, so that the path of
// each call shows which process made it.
type Process struct {
	Root string // for example "/p3": the process sees the file /data/a.tar as /p3/data/a.tar

	world *World
	calls int
	fate
	away       int // number of the next calls that name a file and get no answer
	renames    int // number of files that it has renamed
	calm       bool
	dead       bool
	asleep     time.Time // until then the process is stopped, as by SIGSTOP
	open       map[*File]bool
	attributes map[string]remembered // attributes that a network disk may return again
}

// fate says how a process is killed.
type fate struct {
	killAt    int    // the call that kills the process; 0: none
	killAfter int    // the rename after whose call the process is killed; 0: none
	onKill    func() // called once, when the process is killed
	crash     bool   // the whole machine loses power
}

// Start starts a process. If killAt is not 0, the process is killed at its call with that number,
// from 1: onKill is called, and every call fails from then on and changes nothing. With crash the
// machine loses power instead: all its processes are killed, and the disk loses what was not
// synced.
func (w *World) Start(killAt int, crash bool, onKill func()) *Process {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next++
	p := &Process{Root: fmt.Sprintf("/p%d", w.next), world: w, fate: fate{killAt: killAt, crash: crash, onKill: onKill},
		open: map[*File]bool{}, attributes: map[string]remembered{}}
	w.procs = append(w.procs, p)
	return p
}

// KillAfterRename kills the process at its first call after it has renamed n files.
func (p *Process) KillAfterRename(n int) { p.killAfter = n }

// Calm lets the process meet no faults. Other processes meet theirs.
func (p *Process) Calm() { p.calm = true }

// undisturbed reports whether the process meets no faults.
func (p *Process) undisturbed() bool { return p.calm || p.world.calm > 0 }

// chance is World.Chance for a call of the process.
func (p *Process) chance(name string, rarity, kinds int) int {
	if p.calm {
		return 0
	}
	return p.world.Chance(name, rarity, kinds)
}

// Calls returns the number of calls that the process has made.
func (p *Process) Calls() int { return p.calls }

// Killed reports whether the process was killed.
func (p *Process) Killed() bool { return p.dead }

// End ends a process that has finished. It returns an error that names the files that the process
// has left open.
func (p *Process) End() error {
	p.world.mu.Lock()
	p.world.procs = slices.DeleteFunc(p.world.procs, func(q *Process) bool { return q == p })
	p.world.mu.Unlock()
	var left []string
	for f := range p.open {
		left = append(left, f.name)
		f.inode.unlock(f)
	}
	clear(p.open)
	if len(left) > 0 && !p.dead {
		return fmt.Errorf("%s left open: %v", p.Root, slices.Sorted(slices.Values(left)))
	}
	return nil
}

// kill ends a process in the middle of a call.
func (p *Process) kill() {
	if p.dead {
		return
	}
	p.dead = true
	for f := range p.open {
		f.inode.unlock(f)
	}
	p.world.Say("%s is killed at its call %d", p.Root, p.calls)
	if p.onKill != nil {
		p.onKill()
	}
}

// Crash takes the power from the machine: it kills all processes, and the disk keeps what was
// synced and any part of the rest.
func (w *World) Crash() {
	w.Say("the machine loses power")
	w.mu.Lock()
	procs := slices.Clone(w.procs)
	w.mu.Unlock()
	for _, p := range procs {
		p.kill()
	}
	w.Disk.crash()
}

// enter counts a call of a process, lets it take its time, and returns an error if the process is
// dead.
func (p *Process) enter(name string) error {
	w := p.world
	if p.dead {
		return ErrKilled
	}
	p.calls++
	if p.calls == p.killAt {
		if p.crash {
			w.Crash()
		} else {
			p.kill()
		}
		return ErrKilled
	}
	if p.chance("stop "+p.Root, w.Disk.Faults.Stop, 1) != 0 {
		p.asleep = time.Now().Add(time.Duration(1+w.Choose("stopped for", 100)) * time.Second)
	}
	w.delay(name)
	for !p.dead && time.Now().Before(p.asleep) {
		time.Sleep(time.Until(p.asleep))
	}
	if p.dead { // killed while the call waited
		return ErrKilled
	}
	return nil
}

// process returns the process of a path, and the path on the disk.
func (w *World) process(path string) (*Process, string, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.procs {
		if path == p.Root {
			return p, "/", true
		}
		if rest, ok := strings.CutPrefix(path, p.Root); ok && rest[0] == '/' {
			return p, rest, true
		}
	}
	return nil, path, false
}
