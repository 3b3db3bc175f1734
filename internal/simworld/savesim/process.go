package savesim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/internal/simworld/world"
	"github.com/torchstream/torchstream/torch"
)

// process is a process of a life: a rank of a job, or alone.
type process struct {
	*life
	*world.Process
	rank int
}

func (p *process) path() string { return p.Root + folder + "/" + p.kind.name }

// run loads the checkpoint, and then saves some.
func (p *process) run() error {
	if !p.apart {
		v, err := p.load(p.Root)
		if err != nil {
			return err
		}
		all, err := p.gather(strconv.Itoa(int(v)))
		if err != nil {
			return err
		}
		if i := slices.IndexFunc(all, func(text string) bool { return text != all[0] }); i >= 0 {
			return broken{fmt.Errorf("rank %d has loaded version %s, and rank 0 %s", i, all[i], all[0])}
		}
	}
	for range p.saves {
		p.w.Wait("train")
		if err := p.save(); err != nil {
			return err
		}
	}
	return nil
}

// save saves the next version.
func (p *process) save() error {
	if p.format == ofRanks {
		return p.saveTogether()
	}
	v := p.model.Start()
	err := p.write(v)
	p.end(v, err)
	return err
}

// end notes the end of a save.
func (p *process) end(v Version, err error) {
	o := Failed
	switch {
	case p.Killed():
		o = Unknown
	case err == nil:
		o = Saved
	case errors.Is(err, checkpoint.ErrNotDurable):
		o = Unknown
	case p.unseen(err):
		o = Unknown
	}
	p.w.Say("%s has saved version %d: %v", p.Root, v, err)
	p.model.End(v, o)
}

// unseen reports whether a save ended with the error of a rename that may have happened, since the
// process could not look at the new name afterwards.
func (p *process) unseen(err error) bool {
	var failed *fs.PathError
	return errors.As(err, &failed) && failed.Op == "rename" && (p.w.Met("open", "stat") || p.w.Disk.Away)
}

// write writes a version in one process.
func (p *process) write(v Version) error {
	var tensors []torch.Named
	for i, n := range p.sizes {
		t, err := torch.FromBytes(content(v, i, 0, n), int64(n))
		if err != nil {
			return err
		}
		tensors = append(tensors, torch.Named{Name: tensorName(i), Tensor: t})
	}
	metadata := map[string]string{"step": strconv.Itoa(int(v))}
	if p.format == sharded {
		return checkpoint.SaveSharded(p.path(), tensors, metadata, 1500)
	}
	return checkpoint.Save(p.path(), tensors, metadata)
}

func tensorName(i int) string { return "t" + strconv.Itoa(i) }

// gather returns the texts of all ranks. A killed process says nothing.
func (p *process) gather(text string) ([]string, error) {
	if p.Killed() {
		return nil, errLost
	}
	return p.group.gather(p.rank, text)
}

// saying is rank 0's message before a save.
type saying struct {
	Version Version
	ID      string
	Error   string
}

// saveTogether saves a version with the other ranks, as train.Checkpoint does.
func (p *process) saveTogether() (err error) {
	var w *checkpoint.RankWriter
	var mine saying
	var failed, committed error
	if p.rank == 0 {
		mine.Version = p.model.Start()
		committed = errors.New("not committed")
		defer func() { p.end(mine.Version, committed) }()
		if w, failed = checkpoint.NewRankWriter(p.path(), p.ranks); failed == nil {
			mine.ID = w.ID()
			defer w.Abandon()
		} else {
			mine.Error = failed.Error()
		}
	}
	first, err := p.tell(mine)
	if failed != nil || err != nil {
		return errors.Join(failed, err)
	}
	if p.rank != 0 {
		w, failed = checkpoint.JoinRankWriter(p.path(), first.ID, p.ranks)
	}
	if err := p.agree(failed); err != nil {
		return err
	}
	value, divided, err := p.value(first.Version)
	if err != nil {
		return err
	}
	err = p.writeFile(w, first.Version, divided.Parts(value))
	_, lost := p.gather("")
	if err = errors.Join(err, lost); err == nil && p.rank == 0 {
		committed = w.Commit(value, divided)
		err = committed
		if err == nil && p.unwritten == first.Version && !p.w.Met("remove") && !p.w.Disk.Away {
			return broken{fmt.Errorf("version %d is committed, and a rank could not write its file", first.Version)}
		}
	}
	return p.agree(err)
}

// writeFile writes the rank's file of a version, while the ranks may part.
func (p *process) writeFile(w *checkpoint.RankWriter, v Version, parts []torch.Named) error {
	if p.disturbed && p.rank > 0 && p.w.Choose("ranks part while one writes", 8) == 7 {
		p.part(time.Duration(1+p.w.Choose("ranks part after", 300)) * time.Microsecond)
	}
	faults := p.w.Faults()
	p.writing[p.rank] = true
	err := w.Write(p.rank, p.parts(parts))
	p.writing[p.rank] = false
	if errors.Is(err, checkpoint.ErrNotDurable) {
		return broken{fmt.Errorf("before the commit, the checkpoint is said to be in place: %w", err)}
	}
	if err != nil && !p.Killed() {
		p.unwritten = v
		// The file may stay if rank 0 has given up.
		p.loose = p.loose || p.rank > 0 && p.w.Faults() > faults && p.group.lost()
	}
	return err
}

// parts returns the parts that a rank writes. A program with a fault may leave the last one out.
func (p *process) parts(all []torch.Named) []torch.Named {
	last := len(all) - 1
	if last < 0 || all[last].Tensor.Elements() == 0 || !p.disturbed || p.w.Choose("a part is left out", 40) != 39 {
		return all
	}
	p.w.Say("%s leaves a part out", p.Root)
	p.short = true
	return all[:last]
}

// tell returns rank 0's message, or its error.
func (p *process) tell(mine saying) (first saying, err error) {
	text, err := json.Marshal(mine)
	if err != nil {
		return first, err
	}
	all, err := p.gather(string(text))
	if err != nil {
		return first, err
	}
	err = json.Unmarshal([]byte(all[0]), &first)
	if err == nil && first.Error != "" {
		err = errors.New(first.Error)
	}
	return first, err
}

// agree returns the errors of all ranks.
func (p *process) agree(failed error) error {
	text := ""
	if failed != nil {
		text = failed.Error()
	}
	all, err := p.gather(text)
	errs := []error{failed, err}
	for rank, said := range all {
		if rank != p.rank && said != "" {
			errs = append(errs, fmt.Errorf("rank %d: %s", rank, said))
		}
	}
	return errors.Join(errs...)
}

// value returns the rank's value of a version, in which all tensors but every third are divided.
func (p *process) value(v Version) (map[string]any, checkpoint.Divided, error) {
	divided := checkpoint.Divided{}
	var state []torch.Named
	for i, n := range p.sizes {
		first := divide(n, p.ranks)
		begin, end := int(first[p.rank]), int(first[p.rank+1])
		if i%3 == 2 {
			begin, end = 0, n
		}
		t, err := torch.FromBytes(content(v, i, begin, end-begin), int64(end-begin))
		if err != nil {
			return nil, nil, err
		}
		if i%3 != 2 {
			divided[t] = checkpoint.Division{Shape: []int64{int64(n)}, Strides: []int64{1}, First: first}
		}
		state = append(state, torch.Named{Name: tensorName(i), Tensor: t})
	}
	return map[string]any{"state_dict": state, "metadata": map[string]any{"step": strconv.Itoa(int(v))}}, divided, nil
}

// read reads the whole checkpoint at a path, and checks its bytes. It returns the version.
func (j *job) read(path string) (v Version, err error) {
	f, err := checkpoint.Open(path)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	step, err := strconv.Atoi(f.Metadata()["step"])
	if err != nil {
		return 0, broken{fmt.Errorf("%s has the metadata %v", path, f.Metadata())}
	}
	if got, want := len(f.Tensors()), len(j.sizes); got != want {
		return 0, broken{fmt.Errorf("%s has %d tensors, want %d", path, got, want)}
	}
	for i, n := range j.sizes {
		if err := j.readTensor(f, Version(step), i, n); err != nil {
			return 0, err
		}
	}
	return Version(step), nil
}

// readTensor checks the whole tensor, and the part that a rank reads.
func (j *job) readTensor(f *checkpoint.File, v Version, i, n int) error {
	t, err := f.Tensor(tensorName(i))
	if err != nil {
		return broken{err}
	}
	first := divide(n, 3)
	for _, part := range [][2]int64{{0, int64(n)}, {first[1], first[2] - first[1]}} {
		read, err := t.ReadPart([]int64{1}, part[0], part[1])
		if err != nil {
			return err
		}
		got, err := read.Bytes()
		if want := content(v, i, int(part[0]), int(part[1])); err != nil || !bytes.Equal(got, want) {
			return broken{fmt.Errorf("the elements %v of tensor %d of version %d are %x, want %x (%v)", part, i, v, got, want, err)}
		}
	}
	return nil
}

// checkRecord checks that the checkpoint of an undisturbed save names no replaced one but the last:
// the save could remove the files of all others.
func (j *job) checkRecord() error {
	text, _ := j.w.Disk.Read(folder + "/" + j.kind.name)
	_, record, _ := bytes.Cut(text, []byte("replaces "))
	if j.kind.format == sharded {
		var index struct {
			Metadata map[string]any `json:"metadata"`
		}
		if err := json.Unmarshal(text, &index); err != nil {
			return fmt.Errorf("%s: %w", j.kind.name, err)
		}
		record = fmt.Append(nil, index.Metadata["torchstream.replaced"])
	}
	if ids := bytes.Fields(record); len(ids) > 1 {
		return fmt.Errorf("%s names the replaced checkpoints %s, want only the last", j.kind.name, ids)
	}
	return nil
}

// files returns the files that a checkpoint has, in order.
func (j *job) files() ([]string, error) {
	main := folder + "/" + j.kind.name
	list := []string{main}
	switch j.kind.format {
	case ofRanks:
		id := ""
		for _, name := range j.w.Disk.Files() {
			if rest, ok := strings.CutPrefix(name, main+"-"); ok {
				id, _, _ = strings.Cut(rest, "-rank")
			}
		}
		for rank := range j.last {
			list = append(list, fmt.Sprintf("%s-%s-rank%05d-of-%05d.safetensors", main, id, rank, j.last))
		}
	case sharded:
		text, _ := j.w.Disk.Read(main)
		var index struct {
			Files map[string]string `json:"weight_map"`
		}
		if err := json.Unmarshal(text, &index); err != nil {
			return nil, fmt.Errorf("%s: %w", main, err)
		}
		for _, name := range index.Files {
			list = append(list, path.Join(folder, name))
		}
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}
