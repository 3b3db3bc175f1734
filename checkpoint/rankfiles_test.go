//go:build linux

package checkpoint_test

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// wholeTensor is a tensor that ranks divide.
type wholeTensor struct {
	name           string
	dtype          torch.DType
	shape, strides []int64
}

// wholeTensors have several dtypes, sizes and memory orders. For small ones, some ranks have no
// elements.
var wholeTensors = []wholeTensor{
	{"plain", torch.Float32, []int64{5, 7}, []int64{7, 1}},
	{"last", torch.Float64, []int64{2, 3, 2, 2}, []int64{12, 1, 6, 3}},
	{"one", torch.BFloat16, []int64{1}, []int64{1}},
	{"mask", torch.Bool, []int64{11}, []int64{1}},
	{"scalar", torch.Float32, []int64{}, []int64{}},
	{"none", torch.Int64, []int64{0, 3}, []int64{3, 1}},
}

// first returns the start of each rank's part of n elements. The parts have unequal sizes.
func first(n int64, ranks int) []int64 {
	at := make([]int64, ranks+1)
	for r := range at {
		at[r] = min(n, int64(r)*((n+int64(ranks)-1)/int64(ranks)))
	}
	at[ranks] = n
	return at
}

// elements returns a tensor's bytes in memory order. value determines them.
func elements(w wholeTensor, value byte) []byte {
	n := torch.Spec{DType: w.dtype, Shape: w.shape}.Bytes()
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)*7 + value
		if w.dtype == torch.Bool {
			b[i] &= 1
		}
	}
	return b
}

// row returns elements of a dtype as a tensor.
func row(t testing.TB, dtype torch.DType, b []byte) *torch.Tensor {
	t.Helper()
	x, err := torch.Empty(cuda.CPU, dtype, int64(len(b)/dtype.Size()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	if len(b) > 0 {
		own, err := x.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		copy(own, b)
	}
	return x
}

// dividedValue returns a rank's value for a checkpoint.
func dividedValue(t testing.TB, rank, ranks int, value byte) (map[string]any, checkpoint.Divided) {
	t.Helper()
	divided := checkpoint.Divided{}
	var state []torch.Named
	for _, w := range wholeTensors {
		b, size := elements(w, value), int64(w.dtype.Size())
		at := first(int64(len(b))/size, ranks)
		part := row(t, w.dtype, b[at[rank]*size:at[rank+1]*size])
		divided[part] = checkpoint.Division{Shape: w.shape, Strides: w.strides, First: at}
		state = append(state, torch.Named{Name: w.name, Tensor: part})
	}
	state = append(state, torch.Named{Name: "tied", Tensor: state[0].Tensor},
		torch.Named{Name: "buffer", Tensor: row(t, torch.Uint8, []byte{value, byte(rank)})})
	return map[string]any{"state_dict": state,
		"optimizer": map[any]any{int64(0): map[string]any{"exp_avg": state[1].Tensor}}, "value": int(value)}, divided
}

// saveDivided writes a checkpoint as the ranks of a job.
func saveDivided(t testing.TB, path string, ranks int, value byte) error {
	t.Helper()
	s, err := checkpoint.NewRankWriter(path, ranks)
	if err != nil {
		return err
	}
	errs := make([]error, ranks)
	var all sync.WaitGroup
	for rank := range ranks {
		all.Go(func() {
			joined, err := checkpoint.JoinRankWriter(path, s.ID(), ranks)
			if err == nil {
				v, d := dividedValue(t, rank, ranks, value)
				err = joined.Write(rank, d.Parts(v))
			}
			errs[rank] = err
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		s.Abandon()
		return err
	}
	v, d := dividedValue(t, 0, ranks, value)
	return s.Commit(v, d)
}

// requireDivided reads a checkpoint as a single process, and as the ranks of several jobs.
func requireDivided(t testing.TB, path string, value byte) {
	t.Helper()
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, w := range wholeTensors {
		want := elements(w, value)
		x, err := c.Read(w.name)
		if err != nil {
			t.Fatal(err)
		}
		whole := row(t, w.dtype, want)
		logical := whole.AsStrided(w.shape, w.strides, torch.AsStridedOptions{})
		got, wanted := make([]byte, len(want)), make([]byte, len(want))
		if err := errors.Join(x.ReadBytes(got), logical.ReadBytes(wanted), x.Close(),
			logical.Close()); err != nil || !bytes.Equal(got, wanted) {
			t.Errorf("%s: %v, %v, want %v, nil", w.name, got, err, wanted)
		}
		stored, err := c.Tensor(w.name)
		if err != nil {
			t.Fatal(err)
		}
		size := int64(w.dtype.Size())
		for ranks := 1; ranks <= 4; ranks++ {
			at := first(int64(len(want))/size, ranks)
			for r := range ranks {
				part, err := stored.ReadPart(w.strides, at[r], at[r+1]-at[r])
				if err != nil {
					t.Fatal(err)
				}
				got := make([]byte, (at[r+1]-at[r])*size)
				if err := errors.Join(part.ReadBytes(got), part.Close()); err != nil ||
					!bytes.Equal(got, want[at[r]*size:at[r+1]*size]) {
					t.Errorf("%s of rank %d of %d: %v, %v", w.name, r, ranks, got, err)
				}
			}
		}
	}
	if v, err := c.Value("value"); err != nil || v != int64(value) {
		t.Errorf("the value %v, want %d: %v", v, value, err)
	}
	if v, err := c.Value("optimizer", 0, "exp_avg"); err != nil ||
		!slices.Equal(v.(*checkpoint.StoredTensor).Spec().Shape, wholeTensors[1].shape) {
		t.Errorf("got %v, %v, want the shape %v, nil", v, err, wholeTensors[1].shape)
	}
}

// A checkpoint written by several ranks is read bit for bit by any number of ranks and by a single
// process. The next checkpoint replaces it and removes all its files.
func TestDividedCheckpoint(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	for i, ranks := range []int{1, 2, 3, 4, 1} {
		if err := saveDivided(t, path, ranks, byte(i)); err != nil {
			t.Fatal(err)
		}
		requireDivided(t, path, byte(i))
		if names := files(t, dir); len(names) != ranks+1 {
			t.Errorf("%d ranks: %v, want length %v", ranks, names, ranks+1)
		}
	}
	// A copy written by one process is whole, and replacing it leaves no files.
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	value, err := c.Value()
	if err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.SavePyTorch(filepath.Join(dir, "whole.pt"), value); err != nil {
		t.Fatal(err)
	}
	requireDivided(t, filepath.Join(dir, "whole.pt"), 4)
	if err := checkpoint.SavePyTorch(path, value); err != nil {
		t.Fatal(err)
	}
	requireDivided(t, path, 4)
	if names := files(t, dir); !slices.Equal(names, []string{"last.pt", "whole.pt"}) {
		t.Errorf("got %v, want [last.pt whole.pt]", names)
	}
}

func TestAbandonAfterCommitKeepsTheCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	s, err := checkpoint.NewRankWriter(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Abandon()
	joined, err := checkpoint.JoinRankWriter(path, s.ID(), 1)
	if err != nil {
		t.Fatal(err)
	}
	v, d := dividedValue(t, 0, 1, 5)
	if err := joined.Write(0, d.Parts(v)); err != nil {
		t.Fatal(err)
	}
	joined.Abandon() // does nothing: only rank 0 abandons a checkpoint
	if err := joined.Commit(v, d); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("Commit of a joined writer: got %v, want ErrInvalidArgument", err)
	}
	if err := s.Commit(v, d); err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	if err := s.Commit(v, d); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("second Commit: got %v, want ErrInvalidArgument", err)
	}
	requireDivided(t, path, 5)
}

// A checkpoint of more ranks than readers accept is an error, and does not replace a good one.
func TestImpossibleNumberOfRanksIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	for _, ranks := range []int{-1, 0, 1<<16 + 1} {
		if _, err := checkpoint.NewRankWriter(path, ranks); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("NewRankWriter of %d ranks: got %v, want ErrInvalidArgument", ranks, err)
		}
		if _, err := checkpoint.JoinRankWriter(path, "0123456789ab", ranks); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("JoinRankWriter of %d ranks: got %v, want ErrInvalidArgument", ranks, err)
		}
	}
	if names := files(t, filepath.Dir(path)); len(names) > 0 {
		t.Errorf("got the files %v, want none", names)
	}
}

// If a part is requested in a memory order that differs from the file's, it is cut from the whole
// tensor.
func TestReadPartInAnotherOrder(t *testing.T) {
	dir := t.TempDir()
	x, err := torch.FromInt64s([]int64{0, 1, 2, 3, 4, 5}, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for _, name := range []string{"a.pt", "a.safetensors"} {
		path := filepath.Join(dir, name)
		if err := checkpoint.Save(path, []torch.Named{{Name: "x", Tensor: x}}, nil); err != nil {
			t.Fatal(err)
		}
		c, err := checkpoint.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		stored, err := c.Tensor("x")
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range []struct {
			strides []int64
			first   int64
			want    []int64
		}{{[]int64{3, 1}, 1, []int64{1, 2, 3, 4}}, {[]int64{1, 2}, 1, []int64{3, 1, 4, 2}},
			{[]int64{1, 2}, 0, []int64{0, 3, 1, 4, 2, 5}}} {
			part, err := stored.ReadPart(of.strides, of.first, int64(len(of.want)))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := part.Int64s(); err != nil || !slices.Equal(got, of.want) {
				t.Errorf("%s, %v: %v, want %v, %v", name, of.strides, got, of.want, err)
			}
			part.Close()
		}
		for _, bad := range []struct {
			strides  []int64
			first, n int64
		}{{[]int64{3, 1}, 5, 2}, {[]int64{3, 1}, -1, 2}, {[]int64{3, 1}, 0, -1}, {[]int64{4, 1}, 0, 1},
			{[]int64{1}, 0, 1}, {[]int64{3, 1}, 1, 1<<63 - 1}} {
			if part, err := stored.ReadPart(bad.strides, bad.first, bad.n); !errors.Is(err, cuda.ErrInvalidArgument) {
				t.Errorf("%s, %+v: %v, %v, want cuda.ErrInvalidArgument", name, bad, part, err)
			}
		}
		if err := checkpoint.SavePyTorch(filepath.Join(dir, "again.pt"), map[string]any{"x": stored}); err != nil {
			t.Error(err)
		}
	}
}

// An unfinished checkpoint leaves the old one in place: a rank's file may be missing, or belong to
// another checkpoint. The error names the rank, the file and the tensor. The next checkpoint
// removes the leftovers of dead processes.
func TestUnfinishedDividedCheckpointLeavesTheOldOne(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	if err := saveDivided(t, path, 2, 1); err != nil {
		t.Fatal(err)
	}
	write := func(s *checkpoint.RankWriter, rank, ranks int, value byte, change func([]torch.Named) []torch.Named) {
		t.Helper()
		v, d := dividedValue(t, rank, ranks, value)
		parts := d.Parts(v)
		if change != nil {
			parts = change(parts)
		}
		if err := s.Write(rank, parts); err != nil {
			t.Fatal(err)
		}
	}
	for says, last := range map[string]func(s *checkpoint.RankWriter){
		"rank 2 has not written its file": func(*checkpoint.RankWriter) {},
		"tensor state_dict.plain: last.pt-": func(s *checkpoint.RankWriter) {
			write(s, 2, 3, 9, func(p []torch.Named) []torch.Named { return p[:1] })
		},
		"of rank 2, does not have it": func(s *checkpoint.RankWriter) {
			write(s, 2, 3, 9, func(p []torch.Named) []torch.Named { return p[:1] })
		},
		"of rank 2, has float32[17] of it": func(s *checkpoint.RankWriter) {
			write(s, 2, 2+1, 9, func(p []torch.Named) []torch.Named { return otherSizes(t, p) })
		},
		`is not the file of rank 2 of this checkpoint`: func(s *checkpoint.RankWriter) {
			names, err := filepath.Glob(path + "-" + s.ID() + "-rank00001-*")
			if err != nil || len(names) != 1 {
				t.Fatal(names, err)
			}
			if err := os.Rename(names[0], strings.Replace(names[0], "rank00001", "rank00002", 1)); err != nil {
				t.Fatal(err)
			}
			write(s, 1, 3, 9, nil)
		},
	} {
		s, err := checkpoint.NewRankWriter(path, 3)
		if err != nil {
			t.Fatal(err)
		}
		write(s, 0, 3, 9, nil)
		write(s, 1, 3, 9, nil)
		last(s)
		v, d := dividedValue(t, 0, 3, 9)
		if err := s.Commit(v, d); err == nil || !strings.Contains(err.Error(), says) ||
			!strings.Contains(err.Error(), path) || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v: want %q", err, says)
		}
		requireDivided(t, path, 1)
		if names := files(t, dir); len(names) != 3 {
			t.Errorf("got %v, want 3 files", names)
		}
	}

	// The ranks die: nobody abandons the checkpoint, and rank 0's lock is released.
	left := filepath.Join(dir, "last.pt.tmp-0123456789ab")
	others := []string{"last.pt-0123456789ac-rank00000-of-00002.safetensors",
		"other.pt-0123456789ab-rank00000-of-00002.safetensors"}
	for _, name := range append([]string{left, path + "-0123456789ab-rank00000-of-00002.safetensors",
		path + "-0123456789ab-rank00001-of-00002.safetensors.tmp-0123456789ab"},
		filepath.Join(dir, others[0]), filepath.Join(dir, others[1])) {
		if err := os.WriteFile(name, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := saveDivided(t, path, 1, 3); err != nil {
		t.Fatal(err)
	}
	requireDivided(t, path, 3)
	if names := files(t, dir); len(names) != 4 || !slices.Contains(names, others[0]) ||
		!slices.Contains(names, others[1]) {
		t.Errorf("%v", names)
	}
}

func otherSizes(t *testing.T, parts []torch.Named) []torch.Named {
	parts = slices.Clone(parts)
	for i := range parts {
		parts[i].Tensor = row(t, torch.Float32, make([]byte, 4*17))
	}
	return parts
}

// saveLone writes a checkpoint as a single process.
func saveLone(t testing.TB, path string, value byte) error {
	t.Helper()
	var state []torch.Named
	for _, w := range wholeTensors {
		state = append(state, torch.Named{Name: w.name,
			Tensor: row(t, w.dtype, elements(w, value)).AsStrided(w.shape, w.strides, torch.AsStridedOptions{})})
	}
	return checkpoint.SavePyTorch(path,
		map[string]any{"state_dict": state,
			"optimizer": map[any]any{int64(0): map[string]any{"exp_avg": state[1].Tensor}}, "value": int(value)})
}

// If a process dies between the rename and the removal of the old files, the next checkpoint
// removes them, whether one process or several ranks write the old one and the next one. Before the
// rename nobody removes them.
func TestFilesOfAReplacedCheckpointAreRemoved(t *testing.T) {
	ranks := func(t *testing.T, path string, value byte) error { return saveDivided(t, path, 2, value) }
	alone := func(t *testing.T, path string, value byte) error { return saveLone(t, path, value) }
	begun := func(t *testing.T, path string, _ byte) error {
		s, err := checkpoint.NewRankWriter(path, 2)
		if err == nil {
			s.Abandon()
		}
		return err
	}
	for name, of := range map[string]struct {
		second, third func(t *testing.T, path string, value byte) error
		value         byte // of the checkpoint that remains
		files         int
	}{
		"ranks, begun": {ranks, begun, 2, 3},
		"ranks, ranks": {ranks, ranks, 3, 3},
		"ranks, alone": {ranks, alone, 3, 1},
		"alone, begun": {alone, begun, 2, 1},
		"alone, ranks": {alone, ranks, 3, 3},
		"alone, alone": {alone, alone, 3, 1},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "last.pt")
			if err := saveDivided(t, path, 2, 1); err != nil {
				t.Fatal(err)
			}
			old := keep(t, dir)
			delete(old, path)
			if err := of.second(t, path, 2); err != nil {
				t.Fatal(err)
			}
			old.restore(t)
			if err := of.third(t, path, 3); err != nil {
				t.Fatal(err)
			}
			requireDivided(t, path, of.value)
			if names := files(t, dir); len(names) != of.files {
				t.Errorf("got %v, want %d files", names, of.files)
			}
		})
	}
}

// A file that claims to have replaced itself loses none of its files.
func TestCheckpointThatReplacesItself(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	if err := saveDivided(t, path, 1, 1); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	shards, err := filepath.Glob(path + "-*")
	if err != nil || len(shards) != 1 {
		t.Fatal(shards, err)
	}
	id := strings.TrimPrefix(shards[0], path+"-")[:12]
	comment := "replaces " + id // at the end of the archive, after the comment's length
	data = append(append(data[:len(data)-2], byte(len(comment)), 0), comment...)
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := checkpoint.NewRankWriter(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	requireDivided(t, path, 1)
	s.Abandon()
}

// modes returns the modes of the files of a folder.
func modes(t *testing.T, dir string) []fs.FileMode {
	t.Helper()
	var all []fs.FileMode
	for _, name := range files(t, dir) {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, info.Mode())
	}
	return all
}

// The ranks' files have the mode of rank 0's file, which keeps the mode of the checkpoint that it
// replaces.
func TestFilesOfACheckpointHaveOneMode(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	for _, mode := range []fs.FileMode{0, 0o600, 0o646} { // 0: a first checkpoint has the umask's mode
		if mode != 0 {
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
		}
		if err := saveDivided(t, path, 3, 1); err != nil {
			t.Fatal(err)
		}
		got := modes(t, dir)
		want := cmp.Or(mode, got[0])
		if len(got) != 4 || !slices.Equal(got, slices.Repeat([]fs.FileMode{want}, 4)) {
			t.Errorf("the modes %v, want %v", got, want)
		}
	}

	// This rank's umask differs from rank 0's.
	first := filepath.Join(t.TempDir(), "first.pt")
	s, err := checkpoint.NewRankWriter(first, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(first+".tmp-"+s.ID(), 0o640); err != nil {
		t.Fatal(err)
	}
	v, d := dividedValue(t, 0, 1, 1)
	if err := errors.Join(s.Write(0, d.Parts(v)), s.Commit(v, d)); err != nil {
		t.Fatal(err)
	}
	if got := modes(t, filepath.Dir(first)); !slices.Equal(got, []fs.FileMode{0o640, 0o640}) {
		t.Errorf("got the modes %v, want 0640 for both", got)
	}

	// The index of a sharded checkpoint and its files have one mode too.
	dir = t.TempDir()
	index := filepath.Join(dir, "m.safetensors.index.json")
	if err := os.WriteFile(index, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.SaveSharded(index,
		[]torch.Named{{Name: "a", Tensor: row(t, torch.Uint8, []byte{1})},
			{Name: "b", Tensor: row(t, torch.Uint8, []byte{2})}}, nil, 1); err != nil {
		t.Fatal(err)
	}
	if got := modes(t, dir); !slices.Equal(got, slices.Repeat([]fs.FileMode{0o600}, 3)) {
		t.Errorf("the modes of a sharded checkpoint: %v, want 0600 for all 3", got)
	}
}

// A late rank leaves no file after rank 0 has abandoned the checkpoint.
func TestLateRankLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	s, err := checkpoint.NewRankWriter(path, 2)
	if err != nil {
		t.Fatal(err)
	}
	late, err := checkpoint.JoinRankWriter(path, s.ID(), 2)
	if err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	v, d := dividedValue(t, 1, 2, 7)
	if err := late.Write(1, d.Parts(v)); err == nil || !strings.Contains(err.Error(), path) ||
		!strings.Contains(err.Error(), "rank 0 has given the checkpoint up") {
		t.Error(err)
	}
	if names := files(t, dir); len(names) != 0 {
		t.Errorf("files are left: %v, want none", names)
	}
}

// A checkpoint that could not be read replaces no other.
func TestCommitRefusesUnreadableFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	if err := saveDivided(t, path, 2, 1); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(v map[string]any, d *checkpoint.Division){
		"key": func(v map[string]any, d *checkpoint.Division) { v["shards"] = "mine" },
		"a part that nobody has": func(v map[string]any, d *checkpoint.Division) {
			d.Shape, d.Strides = []int64{6, 7}, []int64{7, 1}
		},
		"no first element": func(v map[string]any, d *checkpoint.Division) {
			d.Shape,
				d.Strides = []int64{4, 7}, []int64{7, 1}
		},
		"strides":            func(v map[string]any, d *checkpoint.Division) { d.Strides = []int64{1} },
		"a negative shape":   func(v map[string]any, d *checkpoint.Division) { d.Shape = []int64{-5, -7} },
		"a part before zero": func(v map[string]any, d *checkpoint.Division) { d.First = []int64{-1, 17, 34} },
	} {
		s, err := checkpoint.NewRankWriter(path, 2)
		if err != nil {
			t.Fatal(err)
		}
		var v map[string]any
		var d checkpoint.Divided
		for rank := 1; rank >= 0; rank-- {
			v, d = dividedValue(t, rank, 2, 9)
			if err := s.Write(rank, d.Parts(v)); err != nil {
				t.Fatal(err)
			}
		}
		plain := v["state_dict"].([]torch.Named)[0].Tensor
		division := d[plain]
		change(v, &division)
		d[plain] = division
		if err := s.Commit(v, d); !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want cuda.ErrInvalidArgument with %q", name, err, path)
		}
		requireDivided(t, path, 1)
		if names := files(t, dir); len(names) != 3 {
			t.Errorf("%s: %v, want length 3", name, names)
		}
	}
}

// A program's dict of strings is not a tensor, whatever its keys are.
func TestDictsOfAProgramInADividedCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	s, err := checkpoint.NewRankWriter(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	v, d := dividedValue(t, 0, 1, 3)
	v["metadata"] = map[string]any{"divided": "by 2", "shards": "7"}
	if err := errors.Join(s.Write(0, d.Parts(v)), s.Commit(v, d)); err != nil {
		t.Fatal(err)
	}
	requireDivided(t, path, 3)
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := c.Metadata(); got["divided"] != "by 2" || got["shards"] != "7" {
		t.Errorf("got %v, want divided \"by 2\", shards \"7\"", got)
	}
}

// The rank files are in the folder of the link's target.
func TestLinkToADividedCheckpoint(t *testing.T) {
	dir, link := t.TempDir(), filepath.Join(t.TempDir(), "best.pt")
	path := filepath.Join(dir, "last.pt")
	if err := errors.Join(saveDivided(t, path, 2, 1), os.Symlink(path, link)); err != nil {
		t.Fatal(err)
	}
	requireDivided(t, link, 1)
	// A new checkpoint replaces the link, not the link's target.
	if err := saveDivided(t, link, 2, 2); err != nil {
		t.Fatal(err)
	}
	requireDivided(t, link, 2)
	requireDivided(t, path, 1)
}

// A file that names a large tensor is refused before any memory is allocated for it.
func TestMemoryOfDividedFilesIsBounded(t *testing.T) {
	dir := t.TempDir()
	shard := safetensors(`{"__metadata__":{"checkpoint":"0123456789ab","rank":"0"},`+
		`"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  `, 8)
	if err := os.WriteFile(filepath.Join(dir, "m.pt-0123456789ab-rank00000-of-00001.safetensors"), shard,
		0o644); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "m.pt")
	text := strings.ReplaceAll(strings.Replace(strings.Replace(goodDivided, "[2,1]", "[8589934592,1]", 1),
		"[0,0,2]", "[0,0,8589934592]", 1), "SIZE", strconv.Itoa(len(shard)))
	var v map[string]any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.SavePyTorch(path, integers(v)); err != nil {
		t.Fatal(err)
	}
	if c, err := checkpoint.Open(path); err == nil || !strings.Contains(err.Error(), "rank 0") {
		t.Errorf("got %v, %v, want an error with \"rank 0\"", c, err)
	}
}

// Rank 0 and the other ranks have different folders.
func TestJoinRankWriterNeedsASharedFolder(t *testing.T) {
	s, err := checkpoint.NewRankWriter(filepath.Join(t.TempDir(), "last.pt"), 2)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Abandon()
	path := filepath.Join(t.TempDir(), "last.pt")
	if _, err := checkpoint.JoinRankWriter(path, s.ID(), 2); err == nil ||
		!strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "a folder that all hosts share") {
		t.Error(err)
	}
	if _, err := checkpoint.JoinRankWriter(path, "../a", 2); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Error(err)
	}
}

// A checkpoint with missing or damaged files is an error that names the file and the rank. It is
// not the error of a first run without a checkpoint.
func TestDamagedDividedCheckpoint(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	if err := saveDivided(t, path, 2, 1); err != nil {
		t.Fatal(err)
	}
	shards, err := filepath.Glob(path + "-*-rank00001-*")
	if err != nil || len(shards) != 1 {
		t.Fatal(shards, err)
	}
	data, err := os.ReadFile(shards[0])
	if err != nil {
		t.Fatal(err)
	}
	other := bytes.Replace(data, []byte(`"rank":"1"`), []byte(`"rank":"0"`), 1)
	for says, content := range map[string][]byte{
		"the file of rank 1 is missing":                         nil,
		"the file of rank 1, has 40 bytes, and had":             data[:40],
		"is not the file of rank 1 of this checkpoint: it says": other,
		"the file of rank 1: checkpoint: ":                      make([]byte, len(data)),
	} {
		if err := os.Remove(shards[0]); err != nil {
			t.Fatal(err)
		}
		if content != nil {
			if err := os.WriteFile(shards[0], content, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		_, err := readAll(path)
		if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), path) ||
			errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v: want %q", err, says)
		}
		if err := os.WriteFile(shards[0], data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	requireDivided(t, path, 1)
}

// readAll reads all tensors of a file.
func readAll(path string) (bytes int64, err error) {
	c, err := checkpoint.Open(path)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	for _, s := range c.Tensors() {
		x, err := c.Read(s.Name)
		if err != nil {
			return 0, err
		}
		bytes += s.Bytes()
		if err := x.Close(); err != nil {
			return 0, err
		}
	}
	return bytes, nil
}

// integers converts JSON numbers to types that SavePyTorch accepts.
func integers(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = integers(v[i])
		}
	case map[string]any:
		for key := range v {
			v[key] = integers(v[key])
		}
	case float64:
		return int64(v)
	}
	return v
}

// hostileDivided writes a file with the value of a JSON text and, in the same folder, a rank file
// with a "w" of two elements. Then it reads the checkpoint.
func hostileDivided(t *testing.T, text string) error {
	t.Helper()
	return divided(t, text, rankOfTwo(`{"dtype":"U8","shape":[4],"data_offsets":[8,12]}`))
}

// rankOfTwo returns a rank file with a "w" of two elements and the given checksums.
func rankOfTwo(sums string) []byte {
	shard := safetensors(`{"__metadata__":{"checkpoint":"0123456789ab","rank":"0"},`+
		`"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"checksums":`+sums+`}  `, 8)
	return binary.LittleEndian.AppendUint32(shard, crc32.ChecksumIEEE(shard[len(shard)-8:]))
}

// divided reads a checkpoint with the value of a JSON text. SIZE and SEAL in the text are replaced
// by the size and checksum of the rank file.
func divided(t *testing.T, text string, shard []byte) error {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "m.pt-0123456789ab-rank00000-of-00001.safetensors"), shard,
		0o644); err != nil {
		t.Fatal(err)
	}
	header := 8 + binary.LittleEndian.Uint64(shard)
	seal := crc32.ChecksumIEEE(slices.Concat(shard[:header], shard[header+8:]))
	text = strings.NewReplacer("SIZE", strconv.Itoa(len(shard)), "SEAL", strconv.Itoa(int(seal))).Replace(text)
	var v map[string]any
	if json.Unmarshal([]byte(text), &v) != nil || v == nil {
		return nil
	}
	path := filepath.Join(dir, "m.pt")
	if err := checkpoint.SavePyTorch(path, integers(v)); err != nil {
		return nil // the text has a value that no file can have
	}
	n, err := readAll(path)
	if n > 1<<20 {
		t.Errorf("%d bytes, want at most %v", n, 1<<20)
	}
	return err
}

const goodDivided = `{"shards":{"id":"0123456789ab","base":"m.pt","bytes":[SIZE]},` +
	`"state_dict":{"w":{"divided":"w","dtype":"F32","shape":[2,1],"strides":[1,1],"parts":[0,0,2]}}}`

var hostileDividedFiles = map[string][2]string{ // old text, new text: the error
	"a path":                {`"base":"m.pt"`, `"base":"../m.pt"`},
	"no base":               {`"base":"m.pt"`, `"base":""`},
	"another base":          {`"base":"m.pt"`, `"base":"n.pt"`},
	"no ranks":              {`[SIZE]`, `[]`},
	"more ranks":            {`[SIZE]`, `[SIZE,SIZE]`},
	"another size":          {`[SIZE]`, `[7]`},
	"no file's checksums":   {`[SIZE]`, `[SIZE],"crc32":[]`},
	"two files' checksums":  {`[SIZE]`, `[SIZE],"crc32":[SEAL,SEAL]`},
	"another checksum":      {`[SIZE]`, `[SIZE],"crc32":[1]`},
	"checksums as a text":   {`[SIZE]`, `[SIZE],"crc32":"1"`},
	"negative checksums":    {`[SIZE]`, `[SIZE],"crc32":[-1]`},
	"another tensor":        {`"divided":"w"`, `"divided":"v"`},
	"no name":               {`"divided":"w"`, `"divided":[]`},
	"a dtype":               {`F32`, `F64`},
	"no dtype":              {`F32`, `F7`},
	"no shape":              {`[2,1]`, `7`},
	"a negative shape":      {`[2,1]`, `[-2,-1]`},
	"a large shape":         {`[2,1]`, `[4611686018427387904,4]`},
	"too many elements":     {`[2,1]`, `[3,1]`},
	"too few elements":      {`[2,1]`, `[1,1]`},
	"repeated elements":     {`[1,1],"parts"`, `[0,0],"parts"`},
	"gaps":                  {`[1,1],"parts"`, `[2,1],"parts"`},
	"strides of more":       {`[1,1],"parts"`, `[1,1,1],"parts"`},
	"half a part":           {`[0,0,2]`, `[0,0]`},
	"a part of nobody":      {`[0,0,2]`, `[1,0,2]`},
	"a part from another":   {`[0,0,2]`, `[0,1,2]`},
	"a part twice":          {`[0,0,2]`, `[0,0,2,0,0,2]`},
	"an empty part":         {`[0,0,2]`, `[0,0,0,0,0,2]`},
	"a part of the part":    {`[0,0,2]`, `[0,0,1,0,1,1]`},
	"an overflow":           {`[0,0,2]`, `[0,0,9223372036854775807,0,9223372036854775807,1]`},
	"a negative part":       {`[0,0,2]`, `[0,0,-2]`},
	"a part that is a text": {`[0,0,2]`, `[0,0,"2"]`},
}

func TestHostileDivided(t *testing.T) {
	sealed := strings.Replace(goodDivided, `[SIZE]`, `[SIZE],"crc32":[SEAL]`, 1)
	for _, text := range []string{goodDivided, sealed} { // without checksums, as in files of an earlier version, and with checksums
		if err := hostileDivided(t, text); err != nil {
			t.Fatal(err)
		}
	}
	for _, sums := range []string{`{"dtype":"I8","shape":[4],"data_offsets":[8,12]}`,
		`{"dtype":"U8","shape":[2,2],"data_offsets":[8,12]}`,
		`{"dtype":"U8","shape":[0],"data_offsets":[8,8]},"v":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}`} {
		if err := divided(t, sealed, rankOfTwo(sums)); err == nil ||
			!strings.Contains(err.Error(), "bytes of checksums") {
			t.Errorf("checksums as %s: %v, want an error with \"bytes of checksums\"", sums, err)
		}
	}
	for name, change := range hostileDividedFiles {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(goodDivided, change[0], change[1], 1)
			if err := hostileDivided(t, text); text == goodDivided || err == nil {
				t.Errorf("%s is read", text)
			}
		})
	}
}

// No value of a file harms the program.
func FuzzDivided(f *testing.F) {
	f.Add(goodDivided)
	f.Add(strings.Replace(goodDivided, `[SIZE]`, `[SIZE],"crc32":[SEAL]`, 1))
	for _, change := range hostileDividedFiles {
		f.Add(strings.Replace(goodDivided, change[0], change[1], 1))
	}
	f.Fuzz(func(t *testing.T, text string) { hostileDivided(t, text) })
}

const (
	dividedPath  = "TORCHSTREAM_TEST_DIVIDED_PATH"
	dividedRanks = "TORCHSTREAM_TEST_DIVIDED_RANKS"
	dividedFirst = "TORCHSTREAM_TEST_DIVIDED_FIRST"
)

// TestDividedProcess is the process that TestDividedCheckpointSurvivesKills kills.
func TestDividedProcess(t *testing.T) {
	path := os.Getenv(dividedPath)
	if path == "" {
		t.Skip("another test runs it")
	}
	ranks, _ := strconv.Atoi(os.Getenv(dividedRanks))
	value, _ := strconv.Atoi(os.Getenv(dividedFirst))
	for ; ; value++ {
		fmt.Println("begins", value)
		save := func() error { return saveDivided(t, path, ranks, byte(value)) }
		if value%3 == 0 {
			save = func() error { return saveLone(t, path, byte(value)) }
		}
		if err := save(); err != nil {
			t.Fatal(err)
		}
		fmt.Println("saved", value)
	}
}

// A process that writes checkpoints in a row, usually as several ranks and sometimes as one
// process, is killed at random moments. Each time the path holds a whole checkpoint: the last
// finished one, or the next one.
func TestDividedCheckpointSurvivesKills(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for ranks := 1; ranks <= 3; ranks++ {
		dir := t.TempDir()
		path := filepath.Join(dir, "last.pt")
		saved := 0
		for range 3 {
			command := exec.Command(os.Args[0], "-test.run=^TestDividedProcess$", "-test.count=1")
			command.Env = append(os.Environ(), dividedPath+"="+path, dividedRanks+"="+strconv.Itoa(ranks),
				dividedFirst+"="+strconv.Itoa(saved+1))
			output := killedAfter(t, command, fmt.Sprintf("saved %d\n", saved+1+random.IntN(4)),
				time.Duration(random.IntN(int(20*time.Millisecond))))
			last := saved
			for line := range strings.Lines(output) {
				if n, ok := strings.CutPrefix(strings.TrimSpace(line), "saved "); ok {
					last, _ = strconv.Atoi(n)
				}
			}
			c, err := checkpoint.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			v, err := c.Value("value")
			c.Close()
			if n := v.(int64); err != nil || n != int64(last) && n != int64(last+1) {
				t.Fatalf("the checkpoint is %d, and %d was saved: %v", n, last, err)
			}
			saved = int(v.(int64))
			requireDivided(t, path, byte(saved))
		}
		if err := saveDivided(t, path, ranks, byte(saved)); err != nil {
			t.Fatal(err)
		}
		if names := files(t, dir); len(names) != ranks+1 {
			t.Errorf("files are left: %v, want length %v", names, ranks+1)
		}
	}
}

// killedAfter kills a process a given time after it has printed a line, and returns the output.
func killedAfter(t *testing.T, command *exec.Cmd, line string, after time.Duration) string {
	t.Helper()
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(time.Minute, func() { command.Process.Kill() })
	defer timer.Stop()
	var said bytes.Buffer
	chunk := make([]byte, 1024)
	for found := false; ; {
		n, err := out.Read(chunk)
		said.Write(chunk[:n])
		if !found && strings.Contains(said.String(), line) {
			found = true
			timer.Reset(after)
		}
		if err != nil {
			break
		}
	}
	if err := command.Wait(); err == nil || strings.Contains(said.String(), "FAIL") {
		t.Fatalf("%v\n%s", err, said.String())
	}
	return said.String()
}

// TestPyTorchReadsDividedCheckpoints runs the function that docs/distributed.md refers to.
func TestPyTorchReadsDividedCheckpoints(t *testing.T) {
	program := os.Getenv("TORCHSTREAM_PYTHON")
	if program == "" {
		program = "python3"
	}
	if out, err := exec.Command(program, "-c", "import torch; torch.load").CombinedOutput(); err != nil {
		t.Skipf("%s cannot import torch: set TORCHSTREAM_PYTHON to a Python that can: %v %.200s", program, err, out)
	}
	code, err := os.ReadFile("testdata/load_divided.py")
	if err != nil {
		t.Fatal(err)
	}
	// Stands in for the safetensors reader if Python has none.
	const script = `
import sys, types, json, struct
def load_plain(path):
    b = open(path, "rb").read()
    n = struct.unpack("<Q", b[:8])[0]
    types = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "BOOL": torch.bool, "I64": torch.int64}
    out = {}
    for k, e in json.loads(b[8:8+n]).items():
        if k != "__metadata__":
            lo, hi = e["data_offsets"]
            out[k] = torch.frombuffer(bytearray(b[8+n+lo:8+n+hi]), dtype=types[e["dtype"]]).view(e["shape"])
    return out
try:
    import safetensors.torch
except ImportError:
    m = types.ModuleType("safetensors.torch"); m.load_file = load_plain
    sys.modules["safetensors"] = types.ModuleType("safetensors"); sys.modules["safetensors.torch"] = m; sys.modules["safetensors"].torch = m
`
	path := filepath.Join(t.TempDir(), "last.pt")
	if err := saveDivided(t, path, 3, 5); err != nil {
		t.Fatal(err)
	}
	const show = `
c = load_divided(sys.argv[1])
for name in ["plain", "last", "one", "mask"]:
    x = c["state_dict"][name]
    print(name, tuple(x.shape), x.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex())
`
	out, err := exec.Command(program, "-c", script+string(code)+show, path).CombinedOutput()
	if err != nil {
		t.Fatalf("%v, want no error\n%s", err, out)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, w := range wholeTensors[:4] {
		x, err := c.Read(w.name)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, torch.Spec{DType: w.dtype, Shape: w.shape}.Bytes())
		if err := errors.Join(x.ReadBytes(b), x.Close()); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%x\n", b); !strings.Contains(string(out), want) {
			t.Errorf("%s: %s\nwant %s", w.name, out, want)
		}
	}
}
