// Package savesim saves and loads checkpoints on a simulated machine, and compares what package
// checkpoint leaves with a model. Single processes and jobs of ranks save, are killed, meet faults
// of the disk, and load what is there.
package savesim

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/simworld/world"
)

const folder = "/ckpt"

// kind is a kind of checkpoint.
type kind struct {
	name   string // of its file
	format format
}

type format int

const (
	pytorch format = iota
	safetensors
	sharded
	ofRanks // a PyTorch file and a file of each rank
)

var kinds = []kind{{"last.pt", ofRanks}, {"last.pt", pytorch}, {"last.safetensors", safetensors},
	{"last.safetensors.index.json", sharded}}

// job is a training that saves checkpoints to one path.
type job struct {
	w     *world.World
	kind  kind
	model *Model
	sizes []int // of the tensors, in bytes
	saves int   // in a life
	calls int   // of an undisturbed process
	last  int   // number of ranks of the last checkpoint; 0: it is one file
	mode  fs.FileMode
	loose bool // parts may stay: see mayLeave

	killed    bool    // some process was killed
	unwritten Version // the last version of which a rank could not write its file
}

// Run draws a training and runs it.
func Run(w *world.World) error {
	j := &job{w: w, kind: kinds[w.Choose("kind", len(kinds))], model: NewModel(), saves: 1 + w.Choose("saves", 3)}
	for range 1 + w.Choose("tensors", 4) {
		j.sizes = append(j.sizes, []int{700, 0, 1, 3, 64, 1200, 5000}[w.Choose("size", 7)])
	}
	w.Disk.Mkdir(folder)
	if err := w.Calm(j.start); err != nil {
		return fmt.Errorf("undisturbed: %w", err)
	}
	rare := func(name string) int { return []int{0, 200, 40, 12, 0, 0}[w.Choose(name, 6)] }
	f := world.Faults{Read: rare("rare reads"), Write: rare("rare writes"), Name: rare("rare names"),
		Move: rare("rare moves"), Sync: rare("rare syncs"), Lock: rare("rare locks")}
	w.Disk.Network = w.Choose("network disk", 3) == 2
	w.Say("%s, sizes %v, %d saves, faults %+v", j.kind.name, j.sizes, j.saves, f)
	for range 1 + w.Choose("lives", 5) {
		w.Disk.Faults = f
		if err := j.live(1+w.Choose("ranks", 4), true); err != nil {
			return err
		}
		w.Disk.Faults = world.Faults{}
		if err := w.Calm(j.between); err != nil {
			return err
		}
	}
	return w.Calm(j.after)
}

// between checks the checkpoint and the folder after a life, and may take the power.
func (j *job) between() error {
	if err := j.check(); err != nil {
		return err
	}
	if err := j.checkUnfinished(); err != nil {
		return err
	}
	if j.w.Choose("power fails after a life", 3) == 0 {
		return nil
	}
	return j.powerFails()
}

// powerFails takes the power, and checks the checkpoint.
func (j *job) powerFails() error {
	j.killed = true
	j.w.Crash()
	j.model.PowerFails()
	return j.check()
}

// checkUnfinished checks that processes that could remove their unfinished files have done so.
func (j *job) checkUnfinished() error {
	if j.killed || j.w.Met("remove", "rename", "readdir", "sync", "open", "stat", "read", "readat") {
		return nil
	}
	for _, name := range j.w.Disk.Files() {
		if strings.Contains(name, ".tmp-") {
			return fmt.Errorf("the unfinished file %s is left, and no process was killed", name)
		}
	}
	return nil
}

// start runs an undisturbed life, and keeps its checkpoint or removes it.
func (j *job) start() error {
	if err := j.live(2, false); err != nil {
		return err
	}
	if err := j.check(); err != nil {
		return err
	}
	if j.w.Choose("starts without a checkpoint", 2) == 0 {
		j.mode = 0o640
		return j.each(j.w.Disk.Files(), func(name string) error {
			f, err := j.w.Open(name, world.ReadOnly, 0)
			if err != nil {
				return err
			}
			return errors.Join(f.Chmod(j.mode), f.Close())
		})
	}
	j.model = NewModel()
	j.w.Disk.Clear()
	return nil
}

// each calls do with the paths of files in a process.
func (j *job) each(files []string, do func(path string) error) error {
	p := j.w.Start(0, false, nil)
	for _, name := range files {
		if err := do(p.Root + name); err != nil {
			return err
		}
	}
	return p.End()
}

// check loads the checkpoint in a process that nothing disturbs.
func (j *job) check() error {
	p := j.w.Start(0, false, nil)
	v, err := j.load(p.Root)
	if err != nil {
		return fmt.Errorf("want a checkpoint of the versions %v: %w", j.model.Possible(), err)
	}
	j.model.See(v)
	return p.End()
}

// load reads the checkpoint, and checks that it is whole and one that may be there.
func (j *job) load(root string) (Version, error) {
	v, err := j.read(root + folder + "/" + j.kind.name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	if possible := j.model.Possible(); !slices.Contains(possible, v) {
		return 0, broken{fmt.Errorf("the checkpoint is of version %d, want one of %v (%v)", v, possible, err)}
	}
	return v, nil
}

// broken is a broken promise, in contrast to the error of a disturbed process.
type broken struct{ error }

// after saves once more, undisturbed, and checks what is left.
func (j *job) after() error {
	j.saves = 1
	if err := j.live(1+j.w.Choose("ranks", 4), false); err != nil {
		return err
	}
	if err := j.check(); err != nil {
		return err
	}
	want, err := j.files()
	if err != nil {
		return err
	}
	got, main := j.w.Disk.Files(), want
	if j.mayLeave() {
		other := func(name string) bool {
			return strings.HasPrefix(name, folder+"/last-") || strings.HasPrefix(name, folder+"/last.pt-")
		}
		got, main = slices.DeleteFunc(got, other), slices.DeleteFunc(slices.Clone(want), other)
	}
	if !slices.Equal(got, main) {
		return fmt.Errorf("the files %q are left, want %q", got, main)
	}
	if err := errors.Join(j.checkModes(want), j.checkRecord()); err != nil {
		return err
	}
	return j.powerFails()
}

// checkModes checks that the checkpoint's files have the mode of the first checkpoint.
func (j *job) checkModes(files []string) error {
	if j.mode == 0 {
		return nil
	}
	return j.each(files, func(name string) error {
		info, err := j.w.Stat(name)
		if err == nil && info.Mode().Perm() != j.mode {
			err = fmt.Errorf("%s has the mode %v, want %v, which the first checkpoint had", name, info.Mode(), j.mode)
		}
		return err
	})
}

// mayLeave reports whether parts of a checkpoint may stay that no file names: two processes saved
// at once; a rank was killed while it wrote, or could not remove its file durably, after rank 0 had
// given up; or a loss of power tore a rename.
func (j *job) mayLeave() bool {
	return j.loose || j.w.Disk.Torn
}

// live runs processes that save, at the same time: the ranks of a job, or one process or two that
// know nothing of each other. A checkpoint in one file may replace one of ranks.
func (j *job) live(ranks int, disturbed bool) error {
	l := &life{job: j, format: j.kind.format, ranks: ranks, disturbed: disturbed, faults: j.w.Faults()}
	if l.format == ofRanks && j.calls > 0 && j.w.Choose("one file", 3) == 2 {
		l.format = pytorch
	}
	if l.format != ofRanks {
		l.ranks = 1
		if disturbed && ranks == 4 {
			l.ranks, l.apart, j.loose = 2, true, true
		}
	}
	l.group, l.writing = newGroup(l.ranks), make([]bool, l.ranks)
	if disturbed && j.w.Choose("ranks part", 6) == 5 {
		l.part(time.Duration(1+j.w.Choose("ranks part at", 4000)) * time.Microsecond)
	}
	done := make(chan error, l.ranks)
	processes := make([]*world.Process, l.ranks)
	for rank := range processes {
		processes[rank] = l.start(rank)
	}
	for rank, p := range processes {
		go func() { done <- l.end(p, (&process{life: l, Process: p, rank: rank}).run()) }()
	}
	var errs []error
	for range processes {
		errs = append(errs, <-done)
	}
	if !disturbed {
		j.calls = max(j.calls, processes[0].Calls())
	}
	j.last = 0
	if l.format == ofRanks {
		j.last = l.ranks
	}
	return errors.Join(errs...)
}

// life is the time from a start of the job to its end.
type life struct {
	*job
	format    format
	ranks     int
	apart     bool // the processes know nothing of each other
	disturbed bool
	split     bool   // the ranks have parted
	short     bool   // a rank has left a part out
	dead      bool   // some process was killed
	writing   []bool // by rank, whether it writes its file
	faults    int    // of the world before
	group     *group
}

// part lets the collectives fail after a time, as if a rank were lost that continues.
func (l *life) part(after time.Duration) {
	l.split = true
	time.AfterFunc(after, func() { l.w.Say("the ranks part"); l.group.fail() })
}

func (l *life) start(rank int) *world.Process {
	kill, crash := 0, false
	name := fmt.Sprintf("rank %d", rank)
	if l.disturbed && l.w.Choose(name+" killed", 2) == 1 {
		kill = 1 + l.w.Choose(name+" call", l.calls+l.calls/2)
		crash = l.w.Choose(name+" loses power", 3) == 2
	}
	p := l.w.Start(kill, crash, func() {
		l.killed, l.dead = true, true
		l.loose = l.loose || rank > 0 && l.writing[rank] && l.group.lost()
		if crash {
			l.model.PowerFails()
		}
		l.group.fail()
	})
	if kill > 0 && l.w.Choose(name+" is killed after a rename", 3) != 0 {
		p.KillAfterRename([]int{1, 2, 1, 3, 1, 5}[l.w.Choose(name+" rename", 6)])
	}
	l.w.Say("%s starts as %s", name, p.Root)
	return p
}

// end judges the end of a process.
func (l *life) end(p *world.Process, failed error) error {
	l.group.fail() // the others wait for it no longer
	if failed != nil {
		l.w.Say("%s ends: %v", p.Root, failed)
	}
	if err := p.End(); err != nil {
		return err
	}
	disturbed := l.dead || l.split || l.short || l.w.Faults() > l.faults
	switch {
	case errors.As(failed, &broken{}):
		return failed
	case failed == nil || p.Killed() || disturbed && strings.Contains(failed.Error(), errLost.Error()):
		return nil
	case !disturbed:
		return fmt.Errorf("nothing disturbed the process: %w", failed)
	case !strings.Contains(failed.Error(), strings.TrimSuffix(l.kind.name, ".safetensors.index.json")):
		return fmt.Errorf("the error does not name the file: %w", failed)
	}
	return nil
}
