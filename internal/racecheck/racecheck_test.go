package racecheck

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// bytesOf returns the addresses of the region's bytes.
func bytesOf(r Region) map[uintptr]bool {
	all := map[uintptr]bool{}
	for i := range max(r.Rows, 1) {
		for j := range r.Row {
			all[r.Begin+uintptr(i)*r.Pitch+j] = true
		}
	}
	return all
}

// overlaps and covers agree with sets of bytes, for dense regions and for rows of one pitch.
func TestRegions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	draw := func(pitch uintptr) Region {
		r := Region{Begin: 100 + uintptr(rng.IntN(40)), Row: uintptr(rng.IntN(6)), Rows: 1}
		if rng.IntN(3) > 0 {
			r.Rows, r.Pitch = 1+rng.Int64N(4), pitch
			if r.Rows == 1 {
				r.Pitch = 0
			}
		}
		return r
	}
	overlapping, covering := 0, 0
	for range 40_000 {
		pitch := uintptr(6 + rng.IntN(6))
		a, b := draw(pitch), draw(pitch)
		in, both, all := bytesOf(a), false, true
		for at := range bytesOf(b) {
			both = both || in[at]
			all = all && in[at]
		}
		if a.overlaps(b) != both || b.overlaps(a) != both {
			t.Fatalf("%+v and %+v: overlaps is %v and %v, want %v", a, b, a.overlaps(b), b.overlaps(a), both)
		}
		if a.covers(b) && !all {
			t.Fatalf("%+v does not cover %+v", a, b)
		}
		if both {
			overlapping++
		}
		if a.covers(b) {
			covering++
		}
	}
	if overlapping < 500 || covering < 500 {
		t.Errorf("%d regions overlap and %d cover, want at least 500 each: the comparison proves little",
			overlapping, covering)
	}
}

// The block index and a linear search find the same blocks.
func TestSpaceFindsBlocks(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 1))
	var s space
	var all []*block
	for i := range 6_000 {
		begin := uintptr(rng.IntN(1<<18)) * 8
		end := begin + 8*uintptr(1+rng.IntN(20))
		at := slices.IndexFunc(all, func(b *block) bool { return b.begin < end && begin < b.end })
		found := s.find(begin, end)
		switch {
		case (at >= 0) != (found != nil):
			t.Fatalf("round %d: find returns %v, want a block: %v", i, found, at >= 0)
		case found != nil:
			s.remove(found)
			all = slices.DeleteFunc(all, func(b *block) bool { return b == found })
		default:
			b := &block{begin: begin, end: end}
			s.add(b)
			all = append(all, b)
		}
		if s.count != len(all) {
			t.Fatalf("%d blocks, want %d", s.count, len(all))
		}
	}
	if len(s.lists) < 3 {
		t.Errorf("the blocks are in %d lists, want at least 3", len(s.lists))
	}
}

func TestEffects(t *testing.T) {
	for _, c := range []struct {
		schema, name string
		want         []Effect
	}{
		{"aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)",
			"aten::add_.Tensor", []Effect{Writes, Reads, None}},
		{"aten::narrow(Tensor(a) self, int dim, SymInt start, SymInt length) -> Tensor(a)", "aten::narrow",
			[]Effect{Views, None, None, None}},
		{"aten::split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]",
			"aten::split.Tensor", []Effect{Views, None, None}},
		{"aten::zeros_like(Tensor self, *, ScalarType? dtype=None) -> Tensor", "aten::zeros_like",
			[]Effect{Metadata, None}},
		{"aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor", "aten::index.Tensor", []Effect{Reads, Reads}},
		{"aten::_foreach_add_.List(Tensor(a!)[] self, Tensor[] other, *, Scalar alpha=1) -> ()",
			"aten::_foreach_add_.List", []Effect{Writes, Reads, None}},
		{"aten::squeeze_(Tensor(a!) self) -> Tensor(a!)", "aten::squeeze_", []Effect{Metadata}},
		{`aten::div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode="a,(b") -> Tensor`,
			"aten::div.Tensor_mode", []Effect{Reads, Reads, None}},
		{"aten::empty.memory_format(SymInt[] size, *, ScalarType? dtype=None) -> Tensor",
			"aten::empty.memory_format", []Effect{None, None}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Effects(c.schema); got.Name != c.name || !slices.Equal(got.Args, c.want) {
				t.Errorf("got %s %v, want %s %v", got.Name, got.Args, c.name, c.want)
			}
		})
	}
}

// racing returns a checker in which stream 2 reads memory that stream 1 writes, without an edge.
func racing(o Options) *Checker {
	c := New(o)
	writer, reader := c.NewQueue("cuda:0 default stream", 0), c.NewQueue("cuda:0 stream 35", 0)
	m := Memory{Device: 0, Storage: 4096, StorageBytes: 64, Region: Bytes(4096, 64),
		Shape: Shape{DType: 6, NDim: 2, Sizes: [6]int64{4, 4}}}
	c.Allocate(0, 4096, 64, writer, c.Here("aten::empty", 0))
	c.Do(Launch{At: c.Here("aten::fill_.Scalar", 0),
		Accesses: []Access{{Memory: m, Queue: writer, Write: true, Fresh: true}}})
	for range 3 {
		c.Do(Launch{At: c.Here("aten::add.Tensor", 0), Accesses: []Access{{Memory: m, Queue: reader}}})
	}
	return c
}

// A finding names both lines, both streams, the tensor and the missing line, once for each pair of
// places.
func TestFindingSaysWhatToAdd(t *testing.T) {
	found := racing(Options{}).Findings()
	if len(found) != 1 {
		t.Fatalf("%d findings, want 1: %v", len(found), found)
	}
	f := found[0]
	if f.Count != 3 {
		t.Errorf("found %d times, want 3", f.Count)
	}
	text := f.String()
	for _, want := range []string{
		"race: no edge orders a read on cuda:0 stream 35 after a write on cuda:0 default stream",
		"first   aten::fill_.Scalar writes on cuda:0 default stream",
		"then    aten::add.Tensor reads on cuda:0 stream 35",
		"racecheck_test.go:", "memory  float32[4 4] on cuda:0, 64 bytes, made by aten::fill_.Scalar at",
		"missing stream35.Wait(cuda.DefaultStream(0))\n          before ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the text lacks %q:\n%s", want, text)
		}
	}
	data, err := json.Marshal(f)
	var back Finding
	if err = errors.Join(err, json.Unmarshal(data, &back)); err != nil || back.String() != text {
		t.Errorf("JSON: %v\n%s\nwant\n%s", err, data, text)
	}
}

// The picture has both streams and the missing edge, and is an XML document.
func TestPictureOfAFinding(t *testing.T) {
	f := racing(Options{}).Findings()[0]
	f.Second.What = "aten::<&>"
	var b bytes.Buffer
	if err := f.WriteSVG(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"cuda:0 stream 35", "aten::fill_.Scalar writes",
		"missing: stream35.Wait(cuda.DefaultStream(0))", "aten::&lt;&amp;&gt; reads"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the picture lacks %q", want)
		}
	}
	for d := xml.NewDecoder(&b); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

var update = flag.Bool("update", false, "write the picture of docs/sanitizer.md")

// docs/sanitizer.md shows this finding's picture and text.
func TestPictureOfTheDocument(t *testing.T) {
	f := Finding{
		Kind: KindRace,
		First: Use{
			What: "aten::mul.Tensor", Write: true, Stream: "cuda:0 default stream", Variable: "cuda.DefaultStream(0)",
			At: Frame{"main.step", "train.go", 31},
		},
		Second: Use{
			What: "aten::sum", Stream: "cuda:0 stream 35", Variable: "side", Made: "train.go:24",
			At: Frame{"main.step.func1", "train.go", 33},
		},
		Tensor: "float32[256 1024] on cuda:0", Bytes: 1 << 20, MadeBy: "aten::mul.Tensor",
		MadeAt:  Frame{"main.step", "train.go", 31},
		Missing: "side.Wait(cuda.DefaultStream(0))", Where: Frame{"main.step.func1", "train.go", 33},
		Advice: adviceRace,
	}
	var b bytes.Buffer
	if err := f.WriteSVG(&b); err != nil {
		t.Fatal(err)
	}
	const picture, page = "../../docs/pictures/sanitizer.svg", "../../docs/sanitizer.md"
	if *update {
		if err := os.WriteFile(picture, b.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(picture); err != nil || !bytes.Equal(want, b.Bytes()) {
		t.Errorf("%s is not the picture of the finding (%v): write it with -update", picture, err)
	}
	indented := "    " + strings.ReplaceAll(strings.TrimSuffix(f.String(), "\n"), "\n", "\n    ")
	if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), indented) {
		t.Errorf("%s (%v) lacks this text:\n%s", page, err, indented)
	}
}

func TestIgnoredFunctionsAreNotReported(t *testing.T) {
	if found := racing(Options{Ignore: regexp.MustCompile("TestIgnoredFunctions")}).Findings(); len(found) != 0 {
		t.Errorf("got %v, want nothing", found)
	}
	if found := racing(Options{Ignore: regexp.MustCompile("TestAnother")}).Findings(); len(found) != 1 {
		t.Errorf("got %d findings, want 1", len(found))
	}
}

func TestFindingsAreBounded(t *testing.T) {
	reported := 0
	c := New(Options{MaxFindings: 2, Report: func(*Finding) { reported++ }})
	for _, what := range []string{"a", "b", "c"} {
		c.Note(KindPageable, nil, c.Here(what, 0))
	}
	if reported != 2 || len(c.Findings()) != 2 || c.Stats().Findings != 3 {
		t.Errorf("%d reported, %d kept, %d counted, want 2, 2 and 3", reported, len(c.Findings()), c.Stats().Findings)
	}
}

// The environment starts a checker that writes findings as files and text. By default it writes no
// notes.
func TestFromEnvironment(t *testing.T) {
	for _, off := range []string{"", "0"} {
		t.Setenv(EnvSanitize, off)
		if c, err := FromEnvironment(nil); c != nil || err != nil {
			t.Errorf("%q: got %v, %v, want none", off, c, err)
		}
	}
	t.Setenv(EnvSanitize, "yes")
	if _, err := FromEnvironment(nil); err == nil || !strings.Contains(err.Error(), "set it to 1") {
		t.Errorf("yes: got %v, want an error with \"set it to 1\"", err)
	}
	t.Setenv(EnvSanitize, "1")
	t.Setenv(EnvSanitizeIgnore, "(")
	if _, err := FromEnvironment(nil); err == nil || !strings.Contains(err.Error(), EnvSanitizeIgnore) {
		t.Errorf("a broken expression: got %v, want an error with %q", err, EnvSanitizeIgnore)
	}
	t.Setenv(EnvSanitizeIgnore, "")
	dir := filepath.Join(t.TempDir(), "new", "folder")
	t.Setenv(EnvSanitizeDir, dir)
	if c, err := FromEnvironment(nil); c == nil || err != nil {
		t.Fatalf("got %v, %v", c, err)
	}
	var text bytes.Buffer
	out := &Output{Text: &text, Dir: dir}
	c := racing(Options{Report: out.Write})
	c.Note(KindPageable, nil, c.Here("a note", 0))
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 3 {
		t.Errorf("%v: %d files, want a text, a JSON file and a picture", err, len(files))
	}
	if !strings.Contains(text.String(), "stream35.Wait") || strings.Contains(text.String(), "a note") {
		t.Errorf("the text is %s", text.String())
	}
}

// Memory in use by a stream may be freed after its owner's stream or the host has waited for that
// stream, or if the use is recorded.
func TestFree(t *testing.T) {
	for name, c := range map[string]struct {
		edge func(c *Checker, owner, user Queue)
		want int
	}{
		"no edge":             {func(*Checker, Queue, Queue) {}, 1},
		"the wrong direction": {func(c *Checker, owner, user Queue) { c.Wait(user, owner) }, 1},
		"the owner waits":     {func(c *Checker, owner, user Queue) { c.Wait(owner, user) }, 0},
		"the host waits":      {func(c *Checker, owner, user Queue) { c.Wait(Host, user) }, 0},
		"the use is recorded": {func(c *Checker, owner, user Queue) { c.Use(0, 4096, user) }, 0},
		"another stream's use is": {func(c *Checker, owner,
			user Queue) {
			c.Use(0, 4096, c.NewQueue("other", 0))
		}, 1},
		"the host's snapshot is old": {func(c *Checker, owner, user Queue) { c.WaitSnapshot(make([]uint64, 3)) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			k := New(Options{})
			owner, user := k.NewQueue("owner", 0), k.NewQueue("user", 0)
			m := Memory{Storage: 4096, StorageBytes: 64, Region: Bytes(4096, 64)}
			k.Allocate(0, 4096, 64, owner, nil)
			k.Wait(user, owner)
			k.Do(Launch{Accesses: []Access{{Memory: m, Queue: user}}})
			c.edge(k, owner, user)
			k.Free(0, 4096, k.Here("Tensor.Close", 0))
			if found := k.Findings(); len(found) != c.want {
				t.Errorf("%d findings, want %d: %v", len(found), c.want, found)
			}
		})
	}
}

// The program must not change pinned memory until the host has waited for the copy from it.
func TestPinnedMemoryIsWatched(t *testing.T) {
	for name, c := range map[string]struct {
		waits, changes bool // in this order
		want           int
	}{
		"changed":             {false, true, 1},
		"waited, changed":     {true, true, 0},
		"waited, not changed": {true, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			contents := map[uintptr]uint64{4096: 7}
			k := New(Options{Fingerprint: func(begin, _ uintptr) uint64 { return contents[begin] }})
			q := k.NewQueue("cuda:0 stream 3", 0)
			k.Allocate(hostDevice, 4096, 64, Host, nil)
			m := Memory{Device: hostDevice, Storage: 4096, StorageBytes: 64, Region: Bytes(4096, 64), Track: true}
			k.Do(Launch{At: k.Here("torch.CopyBatch", 0), Accesses: []Access{{Memory: m, Queue: q}}})
			if c.waits {
				k.Wait(Host, q)
			}
			if c.changes {
				contents[4096] = 8
			}
			k.Wait(Host, q)
			k.Wait(Host, q)
			found := k.Findings()
			if len(found) != c.want {
				t.Fatalf("%d findings, want %d: %v", len(found), c.want, found)
			}
			if c.want > 0 && (found[0].Missing != "stream3.Synchronize()" || found[0].First.What != "torch.CopyBatch") {
				t.Errorf("the finding is\n%v", &found[0])
			}
		})
	}
}

// If a copy to pinned memory changes it, the program has not written to it. Such a copy may have
// been queued before a copy from the memory and be unfinished, or be queued afterwards.
func TestCopiesToPinnedMemoryAreNoWritesOfTheProgram(t *testing.T) {
	for _, order := range []string{"to, from", "from, to", "to, waited, from"} {
		t.Run(order, func(t *testing.T) {
			contents := map[uintptr]uint64{4096: 7}
			k := New(Options{Fingerprint: func(begin, _ uintptr) uint64 { return contents[begin] }})
			q := k.NewQueue("cuda:0 stream 3", 0)
			k.Allocate(hostDevice, 4096, 64, Host, nil)
			m := Memory{Device: hostDevice, Storage: 4096, StorageBytes: 64, Region: Bytes(4096, 64), Track: true}
			for _, step := range strings.Split(order, ", ") {
				if step == "waited" {
					contents[4096] = 8 // the device has written
					k.Wait(Host, q)
					continue
				}
				k.Do(Launch{At: k.Here("torch.CopyBatch", 0),
					Accesses: []Access{{Memory: m, Queue: q, Write: step == "to"}}})
			}
			want := 0
			if order == "to, waited, from" { // then the change is the program's
				want = 1
			}
			contents[4096] = 9
			k.Wait(Host, q)
			if found := k.Findings(); len(found) != want {
				t.Errorf("%d findings, want %d: %v", len(found), want, found)
			}
		})
	}
}

// Memory from before a capture may be freed during the capture of its owner's stream.
func TestFreeDuringACapture(t *testing.T) {
	c := New(Options{})
	owner, user := c.NewQueue("owner", 0), c.NewQueue("user", 0)
	m := Memory{Storage: 4096, StorageBytes: 64, Region: Bytes(4096, 64)}
	c.Allocate(0, 4096, 64, owner, nil)
	c.Wait(user, owner)
	c.Do(Launch{Accesses: []Access{{Memory: m, Queue: user}}})
	c.Wait(owner, user)
	c.Begin(owner)
	c.Free(0, 4096, c.Here("Tensor.Close", 0))
	c.End(1, 0)
	if found := c.Findings(); len(found) != 0 {
		t.Errorf("found %v, want none", found)
	}
}

// An event that was recorded and closed without a wait is a note.
func TestEventNotAwaited(t *testing.T) {
	for _, awaited := range []bool{false, true} {
		c := New(Options{})
		q := c.NewQueue("stream", 0)
		c.Record(1, q, c.Here("Event.Record", 0))
		want := 1
		if awaited {
			c.WaitEvent(Host, 1)
			want = 0
		}
		c.Drop(1, c.Here("Event.Close", 0))
		if found := c.Findings(); len(found) != want || want == 1 && !found[0].Kind.Note() {
			t.Errorf("awaited %v: %v", awaited, found)
		}
	}
}

// A long-running program uses checker memory only for live blocks, and the accesses of a block are
// bounded.
func TestMemoryIsBounded(t *testing.T) {
	c := New(Options{})
	writer := c.NewQueue("writer", 0)
	var readers []Queue
	for range 8 {
		readers = append(readers, c.NewQueue("reader", 0))
	}
	at := c.Here("a read", 0)
	c.Allocate(0, 4096, 1<<20, writer, nil)
	for i := range 10_000 {
		q := readers[i%len(readers)]
		c.Wait(q, writer)
		begin := uintptr(4096 + 16*(i%5000))
		c.Do(Launch{At: at, Accesses: []Access{{Memory: Memory{Storage: 4096, StorageBytes: 1 << 20,
			Region: Bytes(begin, 16)}, Queue: q}}})
	}
	if n := len(c.space(0).exact[4096].accesses); n > maxAccesses {
		t.Errorf("%d accesses are kept, want at most %d", n, maxAccesses)
	}
	if c.Stats().Forgotten == 0 {
		t.Error("0 accesses were forgotten, want some: the bound was not reached")
	}
}

// BenchmarkOperator measures the checker's overhead for an operator with two operands and a result
// that is allocated and freed.
func BenchmarkOperator(b *testing.B) {
	c := New(Options{})
	q := c.NewQueue("stream", 0)
	memory := func(at uintptr) Memory {
		return Memory{Storage: at, StorageBytes: 64, Region: Bytes(at, 64)}
	}
	c.Allocate(0, 1<<20, 64, q, nil)
	c.Allocate(0, 1<<21, 64, q, nil)
	for b.Loop() {
		at := c.Here("aten::add.Tensor", 0)
		c.Allocate(0, 1<<22, 64, q, at)
		c.Do(Launch{At: at, Accesses: []Access{{Memory: memory(1 << 20), Queue: q},
			{Memory: memory(1 << 21), Queue: q}, {Memory: memory(1 << 22), Queue: q, Write: true, Fresh: true}}})
		c.Free(0, 1<<22, at)
	}
}
