//go:build linux

package checkpoint_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// safetensors returns a file with the given header and number of data bytes.
func safetensors(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

var damaged = []struct {
	name string
	file []byte
	text string
}{
	{"empty", nil, "not a safetensors file, nor .pt or .pth: 0 bytes"},
	{"short", []byte{1, 2, 3}, "not a safetensors file, nor .pt or .pth: 3 bytes long: copy or save it again"},
	{"no header", safetensors("", 0), "does not start with {"},
	{"header longer than the file", binary.LittleEndian.AppendUint64(nil, 100), "should have 100 bytes"},
	{"huge header", append(binary.LittleEndian.AppendUint64(nil, 1<<62), "{}"...),
		"should have 4611686018427387904 bytes"},
	{"negative header", append(binary.LittleEndian.AppendUint64(nil, 1<<63+5), "{}"...),
		"and the file has 10: copy or save it again, or name another file"},
	{"another format", []byte("PK\x03\x04 a zip file, but cut short"),
		"that is cut short or damaged at its end: copy or save it again"},
	{"gzip", []byte("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03 compressed"), "but a gzip file (.gz, .tgz): unpack it"},
	{"gzip with a small number",
		append([]byte("\x1f\x8b\x00\x00\x00\x00\x00\x00"), make([]byte, 40_000)...),
		"but a gzip file (.gz, .tgz): unpack it"},
	{"tar", append(append([]byte("class/1.jpg"), make([]byte, 246)...), "ustar\x0000"...),
		"but a tar archive: unpack it"},
	{"CSV", []byte("name,label\n1.jpg,cat\n"), `but a text, which begins with "name,label": name the checkpoint`},
	{"text of one line", []byte("\n\nk\u00f6nnte auch ein Gewicht sein"),
		"a text, which begins with \"k\u00f6nnte auch ein Gewi\": name"},
	{"text of 8 bytes", []byte("a,b\n1,2\n"), `a text, which begins with "a,b": name`},
	{"HTML", []byte("<!DOCTYPE html><html>404"),
		"but a page of HTML or XML, which a server may have sent in place of the file: download it again"},
	{"Git LFS", []byte("version https://git-lfs.github.com/spec/v1\noid sha256:12\n"),
		"but a pointer of Git LFS: fetch"},
	{"HDF5", []byte("\x89HDF\r\n\x1a\n\x00\x00\x00"),
		"but an HDF5 file (.h5, of Keras and others): save its tensors as safetensors"},
	{"pickle", []byte("\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00}"),
		"but a pickle that torch.save did not write: save its tensors with torch.save"},
	{"JPEG", []byte("\xff\xd8\xff\xe0\x00\x10JFIF\x00"), "but a JPEG: name the checkpoint"},
	{"JSON", []byte(`{"metadata": {}, "weight_map": {}}`),
		"but JSON: the index of a sharded checkpoint ends in .safetensors.index.json"},
	{"bytes", []byte("\x01\x02\x03\xff\xfe\xfd\xfc\x7f\x01\x02"),
		"not a safetensors file, nor .pt or .pth, or cut short: the header should have"},
	{"PyTorch before 1.6", []byte("\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), "PyTorch before 1.6"},
	{"not JSON", safetensors("{nonsense}", 0), "header"},
	{"cut JSON", safetensors(`{"a":{"dtype":"F32"`, 0), "header"},
	{"an array", safetensors(`["a"]`, 0), "does not start with {"},
	{"two objects", safetensors(`{}{}`, 0), "text after the object"},
	{"not UTF-8", safetensors("{\"\xff\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0), "UTF-8"},
	{"name twice", safetensors(
		`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2), `"a" comes twice`},
	{"field twice", safetensors(`{"a":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,1]}}`, 1),
		`"dtype" comes twice`},
	{"cut unknown field", safetensors(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":[}}`, 1),
		`tensor "a": invalid character`},
	{"half a byte", safetensors(`{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}`, 1),
		`tensor "a": shape [1] of dtype F4 has 4 bits`},
	{"unknown dtype of negative size", safetensors(`{"a":{"dtype":"X9","shape":[1],"data_offsets":[1,0]}}`,
		1), `tensor "a": offsets [1 0] are exchanged`},
	{"null dtype", safetensors(`{"a":{"dtype":null,"shape":[1],"data_offsets":[0,1]}}`, 1), `tensor "a": dtype`},
	{"no dtype", safetensors(`{"a":{"shape":[1],"data_offsets":[0,1]}}`, 1), `tensor "a": needs dtype`},
	{"no shape", safetensors(`{"a":{"dtype":"U8","data_offsets":[0,1]}}`, 1), `tensor "a": needs`},
	{"no offsets", safetensors(`{"a":{"dtype":"U8","shape":[1]}}`, 1), `tensor "a": needs`},
	{"three offsets", safetensors(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}}`, 1), `tensor "a": needs`},
	{"one offset", safetensors(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}`, 1), `tensor "a": needs`},
	{"offsets exchanged", safetensors(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}`, 1),
		`tensor "a": offsets`},
	{"negative offset", safetensors(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}}`, 1), `tensor "a": -1`},
	{"negative size", safetensors(`{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}`, 1), `tensor "a": -1`},
	{"fractional size", safetensors(`{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}`, 1), `tensor "a": 1.0`},
	{"null size", safetensors(`{"a":{"dtype":"U8","shape":[null],"data_offsets":[0,1]}}`, 1), `tensor "a"`},
	{"shape a number", safetensors(`{"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}}`, 1), `tensor "a"`},
	{"size over int64", safetensors(
		`{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}}`, 1), `tensor "a"`},
	{"product overflows", safetensors(
		`{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0),
		`tensor "a": shape [4294967296 4294967296] is too large`},
	{"product wraps to fit",
		safetensors(`{"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}`, 4), `too large`},
	{"size and offsets differ", safetensors(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4),
		"are 4 bytes, F32[2] needs 8"},
	{"overlap", safetensors(
		`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3),
		`tensor "b": its bytes start at 1`},
	{"gap", safetensors(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`,
		3), `tensor "b": its bytes start at 2`},
	{"gap at the start", safetensors(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2),
		`tensor "a": its bytes start at 1`},
	{"data cut short", safetensors(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 7),
		"need 8 bytes and the file has 7 for them: copy or save it again"},
	{"data too long", safetensors(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 9),
		"need 8 bytes and the file has 9"},
	{"metadata a string", safetensors(`{"__metadata__":"x"}`, 0), "header"},
	{"metadata of numbers", safetensors(`{"__metadata__":{"x":1}}`, 0), `__metadata__ "x" is not a string`},
	{"metadata twice", safetensors(`{"__metadata__":{},"__metadata__":{}}`, 0), "comes twice"},
	{"deep", safetensors(`{"a":`+strings.Repeat("[", 100_000)+strings.Repeat("]", 100_000)+`}`, 0), `tensor "a"`},
}

func write(t testing.TB, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.safetensors")
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDamagedCheckpoints(t *testing.T) {
	for _, c := range damaged {
		t.Run(c.name, func(t *testing.T) {
			path := write(t, c.file)
			file, err := checkpoint.Open(path)
			if err == nil {
				file.Close()
				t.Fatalf("Open of a damaged file: got no error, want one with %q", c.text)
			}
			if !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v does not say %s and %q", err, path, c.text)
			}
		})
	}
}

// TestMemoryOfHeadersIsBounded opens headers and indexes of many small parts, sound and damaged,
// and compares what they allocate with their sizes.
func TestMemoryOfHeadersIsBounded(t *testing.T) {
	const perByte = 100 // bytes of all allocations; most are garbage at the end
	each := func(n int, entry func(i int) string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(entry(i) + ",")
		}
		return "{" + strings.TrimSuffix(b.String(), ",") + "}"
	}
	empty := func(i int) string { return fmt.Sprintf(`"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`, i) }
	for name, header := range map[string]string{
		"tensors":           each(50_000, empty),
		"tensors, then two": each(50_000, empty) + "{}",
		"dimensions": each(500, func(i int) string {
			return fmt.Sprintf(`"%x":{"dtype":"U8","shape":[%s0],"data_offsets":[0,0]}`, i, strings.Repeat("1,", 63))
		}),
		"many dimensions": each(20, func(i int) string {
			return fmt.Sprintf(`"%x":{"dtype":"U8","shape":[%s0],"data_offsets":[0,0]}`, i, strings.Repeat("1,", 9999))
		}),
		"metadata": `{"__metadata__":` + each(50_000,
			func(i int) string { return fmt.Sprintf(`"%x":""`, i) }) + "}",
		"a long string": `{"__metadata__":{"a":"` + strings.Repeat("x", 1<<20) + `"}}`,
		"escapes":       `{"__metadata__":{"a":"` + strings.Repeat(`\u00e4`, 100_000) + `"}}`,
		"a long name":   `{"` + strings.Repeat("x", 1<<20) + `":1}`,
		"spaces":        "{" + strings.Repeat(" ", 1<<20) + "}",
		"objects":       strings.Repeat(`{"a":`, 100_000),
		"arrays":        `{"a":{"shape":` + strings.Repeat("[", 100_000),
		"numbers":       `{"a":{"shape":[` + strings.Repeat("1,", 500_000) + "1]}}",
		"a number":      `{"a":{"shape":[` + strings.Repeat("1", 1<<20) + "]}}",
	} {
		checkMemory(t, name, "x.safetensors", safetensors(header, 0), perByte)
		checkMemory(t, name, "x.safetensors.index.json", []byte(header), perByte)
	}
	shards := `{"weight_map":` + each(20_000,
		func(i int) string { return fmt.Sprintf(`"%x":"%x.safetensors"`, i, i) }) + "}"
	checkMemory(t, "shards", "x.safetensors.index.json", []byte(shards), perByte)
}

// checkMemory opens a file and checks that it allocates at most perByte bytes for each byte of the
// file.
func checkMemory(t *testing.T, name, base string, file []byte, perByte uint64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), base)
	if err := os.WriteFile(path, file, 0o644); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	c, err := checkpoint.Open(path)
	runtime.ReadMemStats(&after)
	if err == nil {
		c.Close()
	} else if len(err.Error()) > 4096 {
		t.Errorf("%s in %s: an error of %d bytes: %.100s", name, base, len(err.Error()), err)
	}
	took := after.TotalAlloc - before.TotalAlloc
	if limit := uint64(len(file))*perByte + 1<<20; took > limit {
		t.Errorf("%s in %s: a file of %d bytes takes %d, more than %d: %.200v", name, base, len(file), took, limit, err)
	}
}

func TestOpenNeedsARegularFile(t *testing.T) {
	if _, err := checkpoint.Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v, want fs.ErrNotExist", err)
	}
	if _, err := checkpoint.Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder: %v, want an error with \"not a regular file\"", err)
	}
}

// LibTorch's boolean kernels require bytes that are 0 or 1.
func TestReadRejectsBooleansOtherThan0And1(t *testing.T) {
	file := safetensors(`{"a":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}`, 3)
	copy(file[len(file)-3:], []byte{1, 0, 2})
	c, err := checkpoint.Open(write(t, file))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Read("a"); err == nil || !strings.Contains(err.Error(), "element 2 is the byte 2") {
		t.Errorf("got %v, want an error with \"element 2 is the byte 2\"", err)
	}
}

func FuzzCheckpoint(f *testing.F) {
	for _, c := range damaged {
		if len(c.file) < 4096 {
			f.Add(c.file)
		}
	}
	f.Add(safetensors(`{"__metadata__":{"a":"b"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},`+
		`"e":{"dtype":"BOOL","shape":[0],"data_offsets":[8,8]}}  `, 8))
	for _, c := range safetensorsCases(f) {
		f.Add(c.File)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := checkpoint.Open(write(t, data))
		if err != nil {
			return
		}
		defer c.Close()
		if c.IsPyTorch() {
			return // FuzzReader of internal/ptfile covers it
		}
		// A file that Open accepts is consistent: every tensor can be read, and writing
		// the tensors again gives the same file.
		var named []torch.Named
		for _, s := range c.Tensors() {
			x, err := c.Read(s.Name)
			if !s.DType.Known() || len(s.Shape) > 64 {
				if err == nil {
					t.Fatalf("%v was read, want an error", s)
				}
				continue
			}
			if err != nil && s.DType == torch.Bool && strings.Contains(err.Error(), "a BOOL is 0 or 1") {
				continue // only the data shows this defect
			}
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			if x.DType() != s.DType || x.Elements() != s.Elements() {
				t.Fatalf("%v was read as %v, want its dtype and number of elements", s, x)
			}
			m, err := c.Map(s.Name)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if a, b := x.String(), m.String(); a != b {
				t.Fatalf("%s was mapped as %s", a, b)
			}
			named = append(named, torch.Named{Name: s.Name, Tensor: x})
		}
		path := filepath.Join(t.TempDir(), "again")
		if err := checkpoint.Save(path, named, c.Metadata()); err != nil {
			t.Fatal(err)
		}
		again, err := checkpoint.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		if len(again.Tensors()) != len(named) || !maps.Equal(again.Metadata(), c.Metadata()) {
			t.Fatalf("%v became %v, want the same tensors and metadata", c.Tensors(), again.Tensors())
		}
	})
}

// No index of a sharded checkpoint harms the program, and an accepted one has readable tensors.
func FuzzIndex(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":8},"weight_map":{"a":"a.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":"../a.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":null}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		shard := safetensors(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  `, 8)
		path := filepath.Join(dir, "i.safetensors.index.json")
		for name, content := range map[string][]byte{"a.safetensors": shard, "i.safetensors.index.json": data} {
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		c, err := checkpoint.Open(path)
		if err != nil {
			return
		}
		defer c.Close()
		for _, s := range c.Tensors() {
			x, err := c.Read(s.Name)
			if err != nil {
				t.Fatal(err)
			}
			x.Close()
		}
	})
}

// Open and Save reject a pipe without a writer at once: opening the pipe would block.
func TestCheckpointRejectsPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "net.safetensors")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	net := nn.NewSequential(nn.NewLinear(3, 2, nn.LinearOptions{}))
	done := make(chan error, 2)
	go func() {
		_, err := checkpoint.Open(pipe)
		done <- err
		done <- nn.Save(pipe, net, nil)
	}()
	for range 2 {
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), pipe) || !strings.Contains(err.Error(), "a pipe") {
				t.Error(err)
			}
		case <-ctx.Done():
			t.Fatal("Open or Save of a pipe blocks, want an error")
		}
	}
}

// TestSaveReplacesOnlyCheckpoints passes an archive as the checkpoint by mistake: it must survive.
func TestSaveReplacesOnlyCheckpoints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "train.tgz")
	const text = "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03 an archive"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	net := nn.NewSequential(nn.NewLinear(3, 2, nn.LinearOptions{}))
	if err := nn.Save(path, net, nil); err == nil || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
	if now, err := os.ReadFile(path); err != nil || string(now) != text {
		t.Errorf("the file holds %q, %v, want %q, nil", now, err, text)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := nn.Save(path, net, nil); err != nil {
			t.Error(err)
		}
	}
}

func TestFailedSaveLeavesTheOldFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "net.safetensors")
	net := nn.NewSequential(nn.NewLinear(3, 2, nn.LinearOptions{}))
	if err := nn.Save(path, net, nil); err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	closed, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for name, tensors := range map[string][]torch.Named{
		"closed":    {{Name: "a", Tensor: closed}},
		"failed":    {{Name: "a", Tensor: torch.Fail("x", errors.ErrUnsupported)}},
		"nil":       {{Name: "a"}},
		"twice":     {{Name: "a", Tensor: nn.Parameters(net)[0]}, {Name: "a", Tensor: nn.Parameters(net)[0]}},
		"reserved":  {{Name: "__metadata__", Tensor: nn.Parameters(net)[0]}},
		"not UTF-8": {{Name: "\xff", Tensor: nn.Parameters(net)[0]}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := checkpoint.Save(path, tensors, nil); err == nil || !strings.Contains(err.Error(), path) {
				t.Error(err)
			}
		})
	}
	if err := checkpoint.Save(path, nil, map[string]string{"a": "\xff"}); err == nil {
		t.Error("Save of metadata that is not UTF-8: got no error, want one")
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(old, now) {
		t.Errorf("the old file changed, %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("files left: %v, %v, want length 1, nil", left, err)
	}
	if err := nn.Save(filepath.Join(dir, "none", "x"), net, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing folder: %v, want fs.ErrNotExist", err)
	}
}

func TestAllTypesRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	var named []torch.Named
	for _, d := range []torch.DType{torch.Bool, torch.Uint8, torch.Int8, torch.Int16, torch.Int32,
		torch.Int64, torch.Float16, torch.BFloat16, torch.Float32, torch.Float64,
		torch.Complex64, torch.Float8E4M3FN, torch.Float8E5M2} {
		for name, shape := range map[string][]int64{"/scalar": {}, "/odd": {3, 1}, "/empty": {0, 2}} {
			x, err := torch.Ones(cuda.CPU, d, shape...)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			named = append(named, torch.Named{Name: d.String() + name, Tensor: x})
		}
	}
	// Save writes a transposed tensor in logical order.
	m, err := torch.FromFloat32s([]float32{1, 2, 3, 4, 5, 6}, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	named = append(named, torch.Named{Name: "transposed", Tensor: m.T()})
	if err := checkpoint.Save(path, named, nil); err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, n := range named {
		x, err := c.Read(n.Name)
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		a, _ := x.Complex128s()
		b, err := n.Tensor.Complex128s()
		if err != nil || x.DType() != n.Tensor.DType() || !reflect.DeepEqual(x.Shape(), n.Tensor.Shape()) ||
			!reflect.DeepEqual(a, b) {
			t.Errorf("%s: %v became %v, %v", n.Name, n.Tensor, x, err)
		}
	}
	if _, err := c.Read("none"); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("an unknown name: %v, want an error with %q", err, path)
	}
}
