package checkpoint_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// convNet returns a network with 10 tensors of 1,532 bytes.
func convNet(t *testing.T) nn.Module {
	t.Helper()
	net := nn.NewSequential(
		nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{NoBias: true}),
		nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}),
		nn.NewConv2d(4, 6, 3, nn.Conv2dOptions{}),
		nn.NewLinear(6, 5, nn.LinearOptions{}),
	)
	if err := nn.Err(net); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nn.Close(net) })
	return net
}

// A sharded checkpoint has the module's tensors, in files of the given size. A second one replaces
// it and removes all its files.
func TestSaveSharded(t *testing.T) {
	net := convNet(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors.index.json")
	for _, c := range []struct {
		bytes int64
		files int
	}{{1, 10}, {600, 3}, {1 << 20, 1}} {
		if err := checkpoint.SaveSharded(path, nn.State(net),
			map[string]string{"made": "here", "total_size": "0"}, c.bytes); err != nil {
			t.Fatal(err)
		}
		names := files(t, dir)
		if len(names) != c.files+1 || !slices.Contains(names, filepath.Base(path)) {
			t.Errorf("shards of %d bytes: %v", c.bytes, names)
		}
		other := convNet(t)
		for _, p := range nn.Parameters(other) {
			if err := p.NoGrad().Fill_(7).Err(); err != nil {
				t.Fatal(err)
			}
		}
		metadata, err := nn.Load(path, other)
		if err != nil {
			t.Fatal(err)
		}
		if metadata["made"] != "here" || metadata["total_size"] != "1532" {
			t.Errorf("metadata %v, want made \"here\", total_size \"1532\"", metadata)
		}
		for i, n := range nn.State(net) {
			want, err1 := n.Tensor.Float64s()
			got, err2 := nn.State(other)[i].Tensor.Float64s()
			if err := errors.Join(err1, err2); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v, %v", n.Name, got, want, err)
			}
		}
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if len(c.Tensors()) != len(nn.State(net)) {
		t.Errorf("%d tensors, want %v", len(c.Tensors()), len(nn.State(net)))
	}
	x, err := c.Map("0.weight")
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if got := x.Shape(); !slices.Equal(got, []int64{4, 3, 3, 3}) {
		t.Errorf("mapped shape %v, want [4 3 3 3]", got)
	}
}

// SaveSharded removes files of an index that was replaced before, which a loss of power has brought
// back. The program's metadata cannot name such files, and readers do not see the record of them.
func TestFilesOfAReplacedIndexAreRemoved(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors.index.json")
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	const other, record = "m-0123456789ab-00001-of-00001.safetensors", "torchstream.replaced"
	save := func() {
		t.Helper()
		metadata := map[string]string{"made": "here", record: "0123456789ab"}
		if err := checkpoint.SaveSharded(path, one, metadata, 8); err != nil {
			t.Fatal(err)
		}
	}
	save()
	old := keep(t, dir)
	delete(old, path)
	if err := os.WriteFile(filepath.Join(dir, other), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	save()
	old.restore(t)
	save()
	names := files(t, dir)
	for name := range old {
		if slices.Contains(names, filepath.Base(name)) {
			t.Errorf("%s is left, want it removed", name)
		}
	}
	if len(names) != 3 || !slices.Contains(names, other) {
		t.Errorf("the folder has %v, want an index, its file and %s", names, other)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if m := c.Metadata(); len(m) != 2 || m["made"] != "here" || m["total_size"] != "8" {
		t.Errorf("the metadata is %v, want made \"here\" and total_size \"8\"", m)
	}
}

// After a loss of power an index may have its final name and its temporary one. A save that fails
// then keeps the files of the index.
func TestIndexUnderBothNamesKeepsItsFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors.index.json")
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	if err := checkpoint.SaveSharded(path, one, nil, 8); err != nil {
		t.Fatal(err)
	}
	shards, err := filepath.Glob(filepath.Join(dir, "m-*-00001-of-00001.safetensors"))
	if err != nil || len(shards) != 1 {
		t.Fatalf("the files are %v, %v, want one", shards, err)
	}
	id, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(shards[0]), "m-"), "-")
	if err := os.Link(path, path+".tmp-"+id); err != nil {
		t.Fatal(err)
	}
	x, err := torch.Zeros(cuda.CPU, torch.Complex128, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if err := checkpoint.SaveSharded(path, []torch.Named{{Name: "z", Tensor: x}}, nil, 8); err == nil {
		t.Error("saving complex128: got no error, want one")
	}
	if names := files(t, dir); len(names) != 2 || !slices.Contains(names, filepath.Base(shards[0])) {
		t.Errorf("the folder has %v, want the index and %s", names, shards[0])
	}
}

// SaveSharded keeps files of the old index whose names it could not have chosen.
func TestSaveShardedKeepsOtherFiles(t *testing.T) {
	dir := t.TempDir()
	const kept = "model-multilingual-00001-of-00001.safetensors" // as long as a name of SaveSharded
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	path := filepath.Join(dir, "model.safetensors.index.json")
	err := errors.Join(
		checkpoint.Save(filepath.Join(dir, kept), one, nil),
		os.WriteFile(path, []byte(`{"weight_map":{"w":"`+kept+`"}}`), 0o644),
		checkpoint.SaveSharded(path, one, nil, 1),
	)
	if names := files(t, dir); err != nil || !slices.Contains(names, kept) || len(names) != 3 {
		t.Errorf("%v, %v", names, err)
	}
}

// SaveSharded refuses more files than Open opens, and keeps the old checkpoint.
func TestSaveShardedRefusesTooManyFiles(t *testing.T) {
	w := nn.NewParameter(nn.Constant(1), 2)
	defer w.Close()
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors.index.json")
	if err := checkpoint.SaveSharded(path, []torch.Named{{Name: "w", Tensor: w}}, nil, 1); err != nil {
		t.Fatal(err)
	}
	before, many := files(t, dir), make([]torch.Named, 1025)
	for i := range many {
		many[i] = torch.Named{Name: strconv.Itoa(i), Tensor: w}
	}
	if err := checkpoint.SaveSharded(path, many, nil, 1); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "1025 files") {
		t.Error(err)
	}
	if after := files(t, dir); !slices.Equal(after, before) {
		t.Errorf("%d files, want %v", len(after), before)
	}
	if c, err := checkpoint.Open(path); err != nil {
		t.Error(err)
	} else if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// A dtype that safetensors lacks is refused, and the old file stays.
func TestSaveRefusesOtherDTypes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.safetensors")
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	if err := checkpoint.Save(path, one, nil); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	x, err := torch.Zeros(cuda.CPU, torch.Complex128, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if err := checkpoint.Save(path, []torch.Named{{Name: "z", Tensor: x}}, nil); err == nil ||
		!strings.Contains(err.Error(), "complex128") {
		t.Errorf("saving complex128: %v, want an error with \"complex128\"", err)
	}
	if after, err := os.ReadFile(path); err != nil || !slices.Equal(after, before) {
		t.Errorf("the file before is lost: %v", err)
	}
}

func TestSaveShardedRefuses(t *testing.T) {
	net := convNet(t)
	state := nn.State(net)
	good := filepath.Join(t.TempDir(), "m.safetensors.index.json")
	taken := filepath.Join(t.TempDir(), "m.safetensors.index.json")
	if err := os.WriteFile(taken, []byte("my notes"), 0o644); err != nil {
		t.Fatal(err)
	}
	closed := torch.Named{Name: "closed", Tensor: nn.NewParameter(nn.Constant(1), 1)}
	closed.Tensor.Close()
	for says, err := range map[string]error{
		"ends in .safetensors.index.json": checkpoint.SaveSharded("m.safetensors", state, nil, 1),
		"maxBytes is 0":                   checkpoint.SaveSharded(good, state, nil, 0),
		"no tensors":                      checkpoint.SaveSharded(good, nil, nil, 1),
		"comes twice":                     checkpoint.SaveSharded(good, []torch.Named{state[0], state[0]}, nil, 1),
		"closed":                          checkpoint.SaveSharded(good, []torch.Named{closed}, nil, 1),
		"another kind":                    checkpoint.SaveSharded(taken, state, nil, 1),
	} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	for _, path := range []string{good, taken} {
		left := slices.DeleteFunc(files(t, filepath.Dir(path)),
			func(name string) bool { return path == taken && name == filepath.Base(taken) })
		if len(left) != 0 {
			t.Errorf("files are left: %v, want none", left)
		}
	}
}

// An invalid index is refused with the reason, and opens no file outside the folder.
func TestHostileIndex(t *testing.T) {
	dir := t.TempDir()
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	if err := checkpoint.Save(filepath.Join(dir, "a.safetensors"), one, nil); err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.Save(filepath.Join(dir, "b.pt"), one, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "b.pt"), filepath.Join(dir, "b.safetensors")); err != nil {
		t.Fatal(err)
	}
	var many strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&many, "%q:%q,", fmt.Sprint("t", i), fmt.Sprint(i, ".safetensors"))
	}
	for text, says := range map[string]string{
		"": "the index", "{}": "no \"weight_map\"", "[1]": "the index", `{"weight_map":{"w":7}}`: "the index",
		`{"weight_map":{"w":"../a.safetensors"}}`:                   "in the folder of the index",
		`{"weight_map":{"w":"/etc/passwd"}}`:                        "in the folder of the index",
		`{"weight_map":{"w":"a.safetensors.index.json"}}`:           "in the folder of the index",
		`{"weight_map":{"w":""}}`:                                   "in the folder of the index",
		`{"weight_map":{"w":"none.safetensors"}}`:                   "none.safetensors",
		`{"weight_map":{"v":"a.safetensors"}}`:                      "does not have it",
		`{"weight_map":{"w":"b.safetensors"}}`:                      "is not a safetensors file",
		`{"weight_map":{` + many.String() + `"w":"a.safetensors"}}`: "the maximum is 1024",
	} {
		path := filepath.Join(dir, "i.safetensors.index.json")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if c, err := checkpoint.Open(path); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%.60s: %v, %v, want an error with %q", text, c, err, says)
		}
	}
}

// A mapped tensor has the file's values, keeps them after the Checkpoint is closed, and never
// changes a file.
func TestMap(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.safetensors")
	flags, err := torch.Ones(cuda.CPU, torch.Bool, 3)
	if err != nil {
		t.Fatal(err)
	}
	empty, err := torch.Zeros(cuda.CPU, torch.Float32, 0, 4)
	if err != nil {
		t.Fatal(err)
	}
	tensors := []torch.Named{
		{Name: "w", Tensor: nn.NewParameter(nn.Constant(2.5), 3, 2)}, {Name: "flags", Tensor: flags},
		{Name: "empty", Tensor: empty},
		{Name: "steps", Tensor: nn.NewParameter(nn.Constant(9), 1).ToDType(torch.Int64)},
	}
	if err := checkpoint.Save(path, tensors, nil); err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	mapped := map[string]*torch.Tensor{}
	live := torch.LiveTensors()
	for _, n := range tensors {
		m, err := c.Map(n.Name)
		if err != nil {
			t.Fatalf("%s: %v, want no error", n.Name, err)
		}
		defer m.Close()
		mapped[n.Name] = m
	}
	if n := torch.LiveTensors(); n > live+int64(len(tensors))+1 {
		t.Errorf("%d more handles of %d tensors and the file, want at most one each", n-live, len(tensors))
	}
	if _, err := c.Map("none"); err == nil {
		t.Error("Map of an unknown name: got no error, want one")
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Map("w"); err == nil {
		t.Error("Map of a closed Checkpoint: got no error, want one")
	}
	for _, n := range tensors {
		m := mapped[n.Name]
		want, err1 := n.Tensor.NoGrad().ToDType(torch.Float64).Float64s()
		got, err2 := m.ToDType(torch.Float64).Float64s()
		if err := errors.Join(err1, err2); err != nil || !slices.Equal(got, want) ||
			!slices.Equal(m.Shape(), n.Tensor.Shape()) || m.DType() != n.Tensor.DType() {
			t.Errorf("%s: %v, want %v, %v", n.Name, m, n.Tensor, err)
		}
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := mapped["w"].Fill_(1).Err(); err != nil {
		t.Fatal(err)
	}
	if v, err := mapped["w"].Float64s(); err != nil || v[5] != 1 {
		t.Errorf("after Fill_: %v, %v, want 1, nil", v, err)
	}
	if after, err := os.ReadFile(path); err != nil || !slices.Equal(after, before) {
		t.Errorf("the file changed, %v", err)
	}
}

// The size in the index is a number without an exponent, however large.
func TestShardedTotalSize(t *testing.T) {
	x, err := torch.Zeros(cuda.CPU, torch.Float32, 600_000)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	path := filepath.Join(t.TempDir(), "m.safetensors.index.json")
	if err := checkpoint.SaveSharded(path, []torch.Named{{Name: "x", Tensor: x}}, nil, 1<<30); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(text), `"total_size": 2400000`) {
		t.Errorf("%s, %v, want it to contain %q, nil", text, err, `"total_size": 2400000`)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if size := c.Metadata()["total_size"]; size != "2400000" {
		t.Errorf("total_size is %s, want \"2400000\"", size)
	}
}

// kept holds the contents of a folder's files, by path.
type kept map[string][]byte

func keep(t *testing.T, dir string) kept {
	t.Helper()
	k := kept{}
	for _, name := range files(t, dir) {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		k[filepath.Join(dir, name)] = data
	}
	return k
}

func (k kept) restore(t *testing.T) {
	t.Helper()
	for name, data := range k {
		if err := os.WriteFile(name, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
