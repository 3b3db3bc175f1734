//go:build linux

package checkpoint_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/torch"
)

// rankFile returns the file of a rank.
func rankFile(t testing.TB, path, rank string) string {
	t.Helper()
	names, err := filepath.Glob(path + "-*-rank" + rank + "-*.safetensors")
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	return names[0]
}

// rewrite changes a file in place.
func rewrite(t testing.TB, name string, change func(data []byte)) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	change(data)
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// A flipped bit anywhere in a rank's file is an error that names the file, and the tensor if the
// bit is in its bytes.
func TestEveryFlippedBitOfARankIsFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	if err := saveDivided(t, path, 2, 1); err != nil {
		t.Fatal(err)
	}
	name := rankFile(t, path, "00001")
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	tensors := c.Tensors()
	c.Close()
	begin := 8 + int(binary.LittleEndian.Uint64(good)) // the tensors' bytes, followed by the checksums
	end := len(good) - int(tensors[len(tensors)-1].Bytes())
	if len(tensors) != 4 || end-begin < 100 {
		t.Fatalf("the file has %v, %d bytes of data, want 4 tensors, at least 100 bytes",
			tensors, end-begin)
	}
	for i := range good {
		rewrite(t, name, func(b []byte) { b[i] ^= 1 << (i % 8) })
		_, err := readAll(path)
		if err == nil || !strings.Contains(err.Error(), filepath.Base(name)) || errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("byte %d of %d: %v", i, len(good), err)
		}
		if says := err.Error(); begin <= i && i < end &&
			(!strings.Contains(says, ": tensor ") || !strings.Contains(says, "are not those that were written")) {
			t.Errorf("byte %d of %d: %v", i, len(good), err)
		}
		rewrite(t, name, func(b []byte) { copy(b, good) })
	}
	requireDivided(t, path, 1)
}

// A rank's file from another checkpoint is refused, whatever its content.
func TestSwappedFileOfARankIsFound(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "last.pt"), filepath.Join(dir, "other.pt")
	if err := errors.Join(saveDivided(t, path, 2, 1), saveDivided(t, other, 2, 2)); err != nil {
		t.Fatal(err)
	}
	name, from := rankFile(t, path, "00001"), rankFile(t, other, "00001")
	id := func(name string) []byte { return []byte(strings.Split(filepath.Base(name), "-")[1]) }
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	for says, content := range map[string][]byte{
		"is not the file of rank 1 of this checkpoint":              data,
		"shapes or checksums are not those that were written: copy": bytes.Replace(data, id(from), id(name), 1),
	} {
		if err := os.WriteFile(name, content, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := readAll(path); err == nil || !strings.Contains(err.Error(), says) ||
			!strings.Contains(err.Error(), filepath.Base(name)) || !strings.Contains(err.Error(), "state_dict.") {
			t.Errorf("%v: want %q", err, says)
		}
	}
}

// Two exchanged names in a rank's file are an error. They would give each tensor the other's bytes.
func TestExchangedNamesAreFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	s, err := checkpoint.NewRankWriter(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	d, v := checkpoint.Divided{}, map[string]any{}
	for i, name := range []string{"left", "next"} {
		part := row(t, torch.Uint8, []byte{byte(i)})
		v[name] = part
		d[part] = checkpoint.Division{Shape: []int64{1}, Strides: []int64{1}, First: []int64{0, 1}}
	}
	if err := errors.Join(s.Write(0, d.Parts(v)), s.Commit(v, d)); err != nil {
		t.Fatal(err)
	}
	name := rankFile(t, path, "00000")
	rewrite(t, name, func(b []byte) {
		copy(b, strings.NewReplacer(`"left"`, `"next"`, `"next"`, `"left"`).Replace(string(b)))
	})
	if _, err := readAll(path); err == nil || !strings.Contains(err.Error(), filepath.Base(name)) ||
		!strings.Contains(err.Error(), "names, shapes or checksums are not those") {
		t.Error(err)
	}
}

// saveLarge writes a checkpoint of ranks that divide one tensor of bytes.
func saveLarge(t testing.TB, path string, ranks int, whole []byte) {
	t.Helper()
	s, err := checkpoint.NewRankWriter(path, ranks)
	if err != nil {
		t.Fatal(err)
	}
	at := first(int64(len(whole)), ranks)
	for rank := ranks - 1; rank >= 0; rank-- {
		part := row(t, torch.Uint8, whole[at[rank]:at[rank+1]])
		v := map[string]any{"state_dict": []torch.Named{{Name: "large", Tensor: part}}}
		d := checkpoint.Divided{part: {Shape: []int64{int64(len(whole))}, Strides: []int64{1}, First: at}}
		if err := s.Write(rank, d.Parts(v)); err != nil {
			t.Fatal(err)
		}
		if rank == 0 {
			if err := s.Commit(v, d); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Reading a part of a tensor verifies only the part's blocks; other blocks may be damaged.
func TestPartsAreCheckedByBlocks(t *testing.T) {
	const block, size = 1 << 20, 5<<20 + 12345
	path := filepath.Join(t.TempDir(), "last.pt")
	whole := make([]byte, size)
	for i := range whole {
		whole[i] = byte(i * i >> 7)
	}
	saveLarge(t, path, 2, whole)
	half := first(size, 2)[1]
	flipped := half + 2*block - 1 // in the second block of rank 1
	name := rankFile(t, path, "00001")
	for _, damaged := range []bool{false, true} {
		if damaged {
			rewrite(t, name, func(b []byte) {
				at := bytes.Index(b, whole[half:half+4096])
				b[int64(at)+flipped-half] ^= 4
			})
		}
		c, err := checkpoint.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		stored, err := c.Tensor("large")
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range []struct {
			first, n int64
			bad      bool // reads the damaged block
		}{
			{0, size, true}, {0, half, false}, {half - 1, 2, false}, {half, block, false},
			{half, block + 1, true}, {half + block, block, true},
			{half + 2*block - 1, 1, true}, {half + 2*block, size - half - 2*block, false},
			{block - 3, 2*block + 6, false}, {size - 1, 1, false}, {7, 0, false},
		} {
			part, err := stored.ReadPart([]int64{1}, of.first, of.n)
			if damaged && of.bad {
				if err == nil || !strings.Contains(err.Error(), filepath.Base(name)) ||
					!strings.Contains(err.Error(), "state_dict.large") ||
					!strings.Contains(err.Error(), "its bytes 1048576 to 2097151 are not") {
					t.Errorf("%d bytes from %d: %v, %v", of.n, of.first, part, err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%d bytes from %d: %v, want no error", of.n, of.first, err)
			}
			got := make([]byte, of.n)
			if err := errors.Join(part.ReadBytes(got), part.Close()); err != nil ||
				!bytes.Equal(got, whole[of.first:of.first+of.n]) {
				t.Errorf("%d bytes from %d differ: %v", of.n, of.first, err)
			}
		}
	}
}

// Commit refuses a rank's file without checksums, such as an earlier version of this package
// writes.
func TestCommitNeedsChecksums(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	s, err := checkpoint.NewRankWriter(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	v, d := dividedValue(t, 0, 1, 1)
	if err := s.Write(0, d.Parts(v)); err != nil {
		t.Fatal(err)
	}
	name := rankFile(t, path, "00000")
	if err := checkpoint.Save(name, d.Parts(v), map[string]string{"checkpoint": s.ID(), "rank": "0"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(v, d); err == nil || !strings.Contains(err.Error(), "bytes of checksums") ||
		!strings.Contains(err.Error(), "rank 0") {
		t.Error(err)
	}
	if names := files(t, filepath.Dir(path)); len(names) != 0 {
		t.Errorf("files are left: %v, want none", names)
	}
}

// BenchmarkDividedCheckpoint measures the cost of the checksums relative to writing and reading.
func BenchmarkDividedCheckpoint(b *testing.B) {
	whole := make([]byte, 256<<20)
	for i := range whole {
		whole[i] = byte(i * i >> 7)
	}
	path := filepath.Join(b.TempDir(), "last.pt")
	b.Run("save", func(b *testing.B) {
		b.SetBytes(int64(len(whole)))
		for b.Loop() {
			saveLarge(b, path, 1, whole)
		}
	})
	b.Run("load", func(b *testing.B) {
		b.SetBytes(int64(len(whole)))
		for b.Loop() {
			if _, err := readAll(path); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// checkpointValues reads a whole checkpoint: the tensors' bytes by name, and the rest.
func checkpointValues(path string) (map[string]any, error) {
	c, err := checkpoint.Open(path)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	values := map[string]any{"metadata of the file": c.Metadata()}
	if c.IsPyTorch() {
		if values["epoch"], err = c.Value("epoch"); err != nil {
			return nil, err
		}
	}
	for _, s := range c.Tensors() {
		x, err := c.Read(s.Name)
		if err != nil {
			return nil, err
		}
		b, err := x.Bytes()
		if err != nil {
			return nil, err
		}
		values[s.Name] = fmt.Sprintf("%v%v%x", s.DType, s.Shape, b)
		x.Close()
	}
	return values, nil
}

// smallCheckpoint writes three tensors and metadata.
func smallCheckpoint(t testing.TB, path string) {
	t.Helper()
	tensors := []torch.Named{
		{Name: "weight", Tensor: row(t, torch.Uint8, bytes.Repeat([]byte{1, 2, 3}, 20))},
		{Name: "bias", Tensor: row(t, torch.Float32, make([]byte, 8))},
		{Name: "empty", Tensor: row(t, torch.Float32, nil)},
	}
	metadata := map[string]string{"model": "resnet18", "classes": `["cat","dog"]`}
	err := checkpoint.Save(path, tensors, metadata)
	if checkpoint.IsPyTorchPath(path) {
		err = checkpoint.SavePyTorch(path,
			map[string]any{"state_dict": tensors, "metadata": map[string]any{"model": "resnet18"}, "epoch": 3})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A flipped bit anywhere in a checkpoint is an error that names the file, and the tensor if the bit
// is in its bytes. Bits that are not read, such as the dates of a zip archive, may flip.
func TestEveryFlippedBitOfACheckpointIsFound(t *testing.T) {
	for _, name := range []string{"net.safetensors", "net.pt"} {
		path := filepath.Join(t.TempDir(), name)
		smallCheckpoint(t, path)
		want, err := checkpointValues(path)
		if err != nil || len(want) < 4 {
			t.Fatalf("%v, %v", want, err)
		}
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		weight := bytes.Index(good, bytes.Repeat([]byte{1, 2, 3}, 20))
		harmless := 0
		for i := range good {
			rewrite(t, path, func(b []byte) { b[i] ^= 1 << (i % 8) })
			got, err := checkpointValues(path)
			switch {
			case err == nil && !reflect.DeepEqual(got, want):
				t.Errorf("%s, byte %d of %d: it was read as %v, want %v or an error", name, i, len(good), got, want)
			case err == nil:
				harmless++
			case !strings.Contains(err.Error(), path):
				t.Errorf("byte %d of %d: %v does not name %s", i, len(good), err, path)
			}
			if weight <= i && i < weight+60 &&
				(err == nil || !strings.Contains(err.Error(),
					"tensor weight: its bytes 0 to 59 are not those that were written: copy the file again")) {
				t.Errorf("%s, byte %d of the tensor weight: %v", name, i-weight, err)
			}
			rewrite(t, path, func(b []byte) { copy(b, good) })
		}
		if !checkpoint.IsPyTorchPath(path) && harmless > 0 {
			t.Errorf("%d flipped bits of %s were not found", harmless, name)
		}
	}
}

// Checksums are per block: reading a part finds damage in the part's blocks only.
func TestPartsOfACheckpointAreChecked(t *testing.T) {
	const size = 3<<20 + 100
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i * 7)
	}
	for _, name := range []string{"net.safetensors", "net.pt"} {
		path := filepath.Join(t.TempDir(), name)
		if err := checkpoint.Save(path, []torch.Named{{Name: "w", Tensor: row(t, torch.Uint8, data)}},
			nil); err != nil {
			t.Fatal(err)
		}
		file, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(file, data[:1000])
		rewrite(t, path, func(b []byte) { b[at+2<<20+5] ^= 1 }) // in the third block
		c := openCheckpoint(t, path)
		stored, err := c.Tensor("w")
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range []struct {
			first, n int64
			bad      bool
		}{{0, 2 << 20, false}, {5, 100, false}, {1<<20 - 1, 2, false}, {3 << 20, 100, false},
			{3<<20 + 1, 99, false}, {2 << 20, 1, true}, {3<<20 - 1, 2, true}, {1, size - 1, true}, {0, size, true}} {
			x, err := stored.ReadPart([]int64{1}, part.first, part.n)
			if (err != nil) != part.bad || err != nil &&
				!strings.Contains(err.Error(), "tensor w: its bytes 2097152 to 3145727 are not those") {
				t.Errorf("%s: %d bytes from %d: %v, want an error: %v", name, part.n, part.first, err, part.bad)
			}
			if err == nil {
				b, err := x.Bytes()
				if err != nil || !bytes.Equal(b, data[part.first:part.first+part.n]) {
					t.Errorf("%s: %d bytes from %d are others, %v", name, part.n, part.first, err)
				}
				x.Close()
			}
		}
	}
}

// If a tensor of an optimizer is damaged, the error names the tensor's path.
func TestDamagedTensorOfAValueIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	data := []byte("the momentum of a weight")
	value := map[string]any{"optimizer": map[string]any{"state": map[any]any{int64(
		0): map[string]any{"momentum": row(t, torch.Uint8, data)}}}}
	if err := checkpoint.SavePyTorch(path, value); err != nil {
		t.Fatal(err)
	}
	rewrite(t, path, func(b []byte) { b[bytes.Index(b, data)+3] ^= 8 })
	v, err := openCheckpoint(t, path).Value("optimizer", "state", 0, "momentum")
	if err != nil {
		t.Fatal(err)
	}
	want := path + ": tensor optimizer.state.0.momentum: its bytes 0 to 23 are not those that were written"
	if _, err := v.(*checkpoint.StoredTensor).Read(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

// If another program saves a file with copied metadata, reading reports an error: the checksums
// belong to the original file.
func TestCopiedChecksumsAreAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "net.safetensors")
	smallCheckpoint(t, path)
	rewrite(t, path, func(b []byte) { copy(b, bytes.Replace(b, []byte(`"bias"`), []byte(`"bibs"`), 1)) })
	if _, err := checkpoint.Open(path); err == nil ||
		!strings.Contains(err.Error(), `must leave out "torchstream.crc32"`) {
		t.Errorf("got %v, want an error with %q", err, `must leave out "torchstream.crc32"`)
	}
	if err := checkpoint.Save(path, nil, map[string]string{"torchstream.crc32": ""}); err == nil ||
		!strings.Contains(err.Error(), "reserved") {
		t.Errorf("metadata with the key of the checksums: %v, want an error with \"reserved\"", err)
	}
}

// PyTorch and safetensors read files with checksums, and see only what was saved.
func TestPythonReadsFilesWithChecksums(t *testing.T) {
	program := os.Getenv("TORCHSTREAM_PYTHON")
	if program == "" {
		program = "python3"
	}
	if out, err := exec.Command(program, "-c", "import torch, safetensors").CombinedOutput(); err != nil {
		t.Skipf("%s cannot import torch and safetensors: set TORCHSTREAM_PYTHON to a Python that can: %v %.200s", program, err, out)
	}
	dir := t.TempDir()
	for _, name := range []string{"net.safetensors", "net.pt"} {
		smallCheckpoint(t, filepath.Join(dir, name))
	}
	const script = `
import sys, torch, zipfile
from safetensors import safe_open
from safetensors.torch import load_file
path = sys.argv[1] + "/net"
print(sorted((k, str(v.dtype), list(v.shape), v.sum().item()) for k, v in load_file(path + ".safetensors").items()))
with safe_open(path + ".safetensors", "pt") as f:
    print(f.metadata()["classes"], f.metadata()["format"])
for mapped in (False, True):
    c = torch.load(path + ".pt", weights_only=True, mmap=mapped)
    print(list(c), sorted((k, str(v.dtype), list(v.shape), v.sum().item()) for k, v in c["state_dict"].items()))
print(zipfile.ZipFile(path + ".pt").testzip())
`
	out, err := exec.Command(program, "-c", script, dir).Output()
	const tensors = "[('bias', 'torch.float32', [2], 0.0), ('empty', 'torch.float32', [0], 0.0), " +
		"('weight', 'torch.uint8', [60], 120)]\n"
	const loaded = "['epoch', 'metadata', 'state_dict'] " + tensors
	if want := tensors + "[\"cat\",\"dog\"] pt\n" + loaded + loaded + "None\n"; err != nil || string(out) != want {
		t.Errorf("%v\n%s\nwant\n%s", err, out, want)
	}
}
