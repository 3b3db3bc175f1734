package imageloader

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// planned is a consumer of FillPlans. It decodes every row that has a plan with DecodeRow.
type planned struct {
	capacity int // size of a slot's memory for plans
	slots    int
	hostRows int // Plans.HostRows
	rows     int // number of rows with a plan, over all epochs
	// plansOnly leaves the pixels of rows with plans undefined.
	plansOnly bool
	second    []byte // the second fields of all batches, if they are not labels

	// seen has the digest of each sample's plan in each epoch: a sample has one plan, whichever
	// slot and row it gets.
	seen map[[2]int][32]byte
}

// epoch returns the batches of an epoch as collect does.
func (c *planned) epoch(t *testing.T, l *Loader, epoch int) (batches []copied, err error) {
	t.Helper()
	size, batch, labelling := 3*l.o.Transform.Size*l.o.Transform.Size, l.o.BatchSize, l.labels(nil)
	type slot struct {
		fields [][]byte
		plans  decodeplan.Plans
	}
	free := make(chan *slot, c.slots)
	lent := make(chan *slot, c.slots)
	for range c.slots {
		s := &slot{fields: [][]byte{make([]byte, batch*size), make([]byte, batch*labelling.Bytes())}}
		s.plans = decodeplan.Plans{Memory: alignedBytes(c.capacity), Rows: make([]decodeplan.Row, batch),
			HostRows: c.hostRows}
		free <- s
	}
	err = l.devicePlanner().FillPlans(t.Context(), epoch,
		consumerFuncs{func(ctx context.Context) (decodeplan.Slot, error) {
			select {
			case s := <-free:
				for i := range s.fields[0] { // bytes that nobody writes must not be seen
					s.fields[0][i] = 0xEE
				}
				for i := range s.plans.Rows {
					s.plans.Rows[i] = decodeplan.Row{At: -1, Bytes: 1 << 40}
				}
				lent <- s
				return decodeplan.Slot{Images: s.fields[0], Labels: s.fields[1], Plans: &s.plans}, nil
			case <-ctx.Done():
				return decodeplan.Slot{}, context.Cause(ctx)
			}
		}, func(n int, info any) error {
			s := <-lent
			defer func() { free <- s }()
			samples := info.(Info).Samples
			for row := range n {
				if p := s.plans.Rows[row]; p.Bytes > 0 {
					c.rows++
					c.check(t, &s.plans, p, epoch, samples[row].Index)
					if c.plansOnly {
						continue
					}
					if err := l.devicePlanner().DecodeRow(t.Context(), info, row, s.fields[0][row*size:]); err != nil {
						return err
					}
				}
			}
			if rest := s.plans.Rows[n:]; slices.ContainsFunc(rest, func(p decodeplan.Row) bool { return p.Bytes > 0 }) {
				t.Errorf("rows behind the %d of a batch have plans", n)
			}
			var labels []int64
			if len(s.fields[1]) == 8*batch {
				for row := range n {
					labels = append(labels, int64(binary.LittleEndian.Uint64(s.fields[1][8*row:])))
				}
			} else {
				c.second = append(c.second, s.fields[1][:n*labelling.Bytes()]...)
			}
			batches = append(batches, copied{bytes.Clone(s.fields[0][:n*size]), labels, samples})
			return nil
		}})
	return batches, err
}

// consumerFuncs is a consumer of two functions.
type consumerFuncs struct {
	lend    func(context.Context) (decodeplan.Slot, error)
	deliver func(n int, info any) error
}

func (c consumerFuncs) Lend(ctx context.Context) (decodeplan.Slot, error) { return c.lend(ctx) }
func (c consumerFuncs) Deliver(n int, info any) error                     { return c.deliver(n, info) }

// alignedBytes returns memory that is aligned for plans.
func alignedBytes(n int) []byte {
	memory := make([]byte, n+decodeplan.Align)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % decodeplan.Align
	return memory[skip:][:n:n]
}

func (c *planned) check(t *testing.T, plans *decodeplan.Plans, p decodeplan.Row, epoch, sample int) {
	t.Helper()
	if p.At < 0 || p.At%decodeplan.Align != 0 || p.At+p.Bytes > plans.Used || plans.Used > len(plans.Memory) {
		t.Fatalf("a plan of %d bytes at %d, of %d that are used", p.Bytes, p.At, plans.Used)
	}
	plan := plans.Memory[p.At:][:p.Bytes]
	if !bytes.HasPrefix(plan, []byte("TSP6")) || int(binary.LittleEndian.Uint32(plan[4:])) != p.Bytes {
		t.Fatalf("what lies at %d is no plan of %d bytes", p.At, p.Bytes)
	}
	sum, key := sha256.Sum256(plan), [2]int{epoch, sample}
	if before, ok := c.seen[key]; ok && before != sum {
		t.Errorf("sample %d of epoch %d has another plan than before", sample, epoch)
	}
	if c.seen == nil {
		c.seen = map[[2]int][32]byte{}
	}
	c.seen[key] = sum
}

// planArchive returns an archive of photographs, and of images that only the host decodes: a PNG, a
// JPEG that is too small for entry points, and damaged files.
func planArchive(t *testing.T, name string, photos, damaged int) string {
	t.Helper()
	var members []archivetest.Member
	add := func(kind string, i int, data string) {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("train/%c/%03d%s", 'a'+i%3, i, kind),
			Data: data})
	}
	for i := range photos {
		add(".jpg", i, string(archivetest.Photo(t, uint64(i))))
		if i < damaged {
			add("bad.jpg", i, string(archivetest.Photo(t, uint64(i))[:3000]))
		}
	}
	add(".png", photos, archivetest.PNG(t, archivetest.Gradient(50, 40)))
	data := archivetest.Tar(t, members...)
	if strings.HasSuffix(name, ".tgz") {
		data = archivetest.Gzip(t, data)
	}
	return archivetest.WriteFile(t, name, data)
}

// TestHostRowsHaveNoPlans: rows that the consumer leaves to the loader have no plans. Their pixels
// equal the pixels of the plans in other rows.
func TestHostRowsHaveNoPlans(t *testing.T) {
	if d, err := (sample.Library{}).NewDecoder(0); err != nil {
		t.Skip(err)
	} else {
		d.Close()
	}
	const photos, capacity = 2 * decodeplan.Group, 12 << 20
	o := Options{BatchSize: photos + 1, Transform: Train(64), Shuffle: true, Workers: 2,
		IndexFile: filepath.Join(t.TempDir(), "index")}
	l, err := Open(planArchive(t, "t.tar", photos, 0), o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for epoch := range 2 { // the entry points become known
		if _, err := (&planned{slots: 2, capacity: capacity}).epoch(t, l, epoch); err != nil {
			t.Fatal(err)
		}
	}
	want, err := collect(t, l, 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	for _, rows := range []int{0, 1, 5, decodeplan.Group} {
		c := &planned{slots: 2, capacity: capacity, hostRows: rows}
		got, err := c.epoch(t, l, 2)
		if err != nil {
			t.Fatal(err)
		}
		if digest(got) != digest(want) {
			t.Errorf("with %d rows of the host there are other batches: %v, want %v", rows, names(got), names(want))
		}
		// There are three groups; the last one has one row. One of the samples is not a photograph.
		min, max := 2*(decodeplan.Group-rows)-1, 2*(decodeplan.Group-rows)+1
		if rows == decodeplan.Group {
			min, max = 0, 0
		}
		if c.rows < min || c.rows > max {
			t.Errorf("with %d rows of the host %d have plans, want %d to %d", rows, c.rows, min, max)
		}
	}
}

// TestPlansChangeNoBatch: if another decoder decodes the images from plans, the batches equal
// Fill's. They have the same samples in the same order, and bad samples are treated the same way.
// The test also resumes, varies the number of workers, and leaves no room for plans.
func TestPlansChangeNoBatch(t *testing.T) {
	if d, err := (sample.Library{}).NewDecoder(0); err != nil {
		t.Skip(err)
	} else {
		d.Close()
	}
	const photos, damaged = 24, 6
	augmented := Train(64)
	augmented.Ops = []transform.Op{transform.TrivialAugmentWide{}, transform.RandomErasing{P: 0.5}}
	c := &planned{slots: 3}
	for _, name := range []string{"t.tar", "t.tgz"} {
		path := planArchive(t, name, photos, damaged)
		for _, policy := range []BadSamplePolicy{Skip, Substitute} {
			for _, geometry := range []struct {
				name string
				o    Transform
			}{{"train", Train(64)}, {"eval", Eval(80, 64)}, {"operations", augmented}} {
				for _, workers := range []int{1, 4} {
					for _, capacity := range []int{1 << 20, 40 << 10} {
						t.Run(fmt.Sprintf("%s, %v, %s, %d workers, %d bytes", name, policy, geometry.name,
							workers, capacity), func(t *testing.T) {
							if testing.Short() && (workers == 1 || geometry.name == "eval") {
								t.Skip("its goroutines are those of the other rows")
							}
							o := Options{BatchSize: 8, Transform: geometry.o, Shuffle: true,
								Workers: workers, BadSamples: policy, IndexFile: filepath.Join(t.TempDir(), "index")}
							plain, err := Open(path, o)
							if err != nil {
								t.Fatal(err)
							}
							defer plain.Close()
							l, err := Open(path, o)
							if err != nil {
								t.Fatal(err)
							}
							defer l.Close()
							c.seen = nil // the other transform has other plans
							for epoch := range 4 {
								want, err := collect(t, plain, epoch, 3)
								if err != nil {
									t.Fatal(err)
								}
								c.capacity, c.rows = capacity, 0
								got, err := c.epoch(t, l, epoch)
								if err != nil {
									t.Fatal(err)
								}
								if digest(got) != digest(want) {
									t.Errorf("epoch %d has other batches: %v, want %v", epoch, names(got), names(want))
								}
								switch {
								case epoch == 0 && name == "t.tgz":
									// Its order is the order of a stream.
								case epoch == 0 && capacity == 1<<20 && c.rows < photos:
									t.Errorf("%d rows of %d photographs have plans of the whole scan", c.rows, photos)
								case epoch == 1 && capacity == 1<<20 && c.rows != 0:
									t.Errorf("%d rows have plans again that the consumer has handed back", c.rows)
								case epoch > 1 && capacity == 1<<20 && c.rows < photos:
									t.Errorf("epoch %d: %d rows of %d photographs have plans", epoch, c.rows, photos)
								// One plan fits the small memory. It is lost if its row moves to a
								// slot that already has one, so an epoch may have none.
								case capacity != 1<<20 && c.rows == photos:
									t.Errorf("all %d plans had room in %d bytes, want fewer", c.rows,
										capacity)
								}
							}
							a, b := plain.Stats(), l.Stats()
							if a.Bad != b.Bad || a.Samples != b.Samples || b.Decoded[ByPlan] == 0 ||
								a.Decoded[ByPlan] != 0 {
								t.Errorf("%+v, want %+v", b, a)
							}
						})
					}
				}
			}
		}
	}
}

// Trusted entry points make plans in the first epoch of a process.
func TestTrustedEntryPointsMakePlansAtOnce(t *testing.T) {
	const photos = 6
	o := Options{BatchSize: 4, Transform: Train(32), Workers: 2, BadSamples: Skip, TrustIndex: true,
		IndexFile: filepath.Join(t.TempDir(), "index")}
	path := planArchive(t, "t.tar", photos, 2)
	var want []copied
	for process := range 2 {
		l, err := Open(path, o)
		if err != nil {
			t.Skip(err)
		}
		defer l.Close()
		if process == 0 {
			if want, err = collect(t, l, 0, 2); err != nil {
				t.Fatal(err)
			}
			l.Close() // saves the entry points
			continue
		}
		c := planned{slots: 2, capacity: 1 << 20}
		got, err := c.epoch(t, l, 0)
		if err != nil || digest(got) != digest(want) || c.rows != photos {
			t.Errorf("%v: %v, want %v; %d plans, want %d", err, names(got), names(want), c.rows, photos)
		}
	}
}

// A resumed epoch with plans has the remaining batches of the whole epoch.
func TestPlansResume(t *testing.T) {
	path := planArchive(t, "t.tar", 24, 2)
	o := Options{BatchSize: 4, Transform: Train(32), Shuffle: true, Workers: 2, BadSamples: Skip,
		IndexFile: filepath.Join(t.TempDir(), "index")}
	l, err := Open(path, o)
	if err != nil {
		t.Skip(err)
	}
	defer l.Close()
	var state State
	for b, err := range l.Epoch(t.Context(), 0) { // makes the entry points
		if err != nil {
			t.Fatal(err)
		}
		_ = b
	}
	want, err := collect(t, l, 1, 3)
	if err != nil {
		t.Fatal(err)
	}
	for b, err := range l.Epoch(t.Context(), 1) {
		if err != nil {
			t.Fatal(err)
		}
		state = b.State
		break
	}
	if err := l.Restore(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	c := planned{slots: 2, capacity: 1 << 20}
	got, err := c.epoch(t, l, 1)
	if err != nil {
		t.Fatal(err)
	}
	if c.rows == 0 || digest(got) != digest(want[1:]) {
		t.Errorf("%v, want %v; %d plans", names(got), names(want[1:]), c.rows)
	}
}

func TestPlansAreRefused(t *testing.T) {
	path := planArchive(t, "t.tar", 1, 0)
	side := filepath.Join(t.TempDir(), "index")
	for name, o := range map[string]Options{
		"Mix": {Transform: Transform{Size: 8, Mix: []transform.BatchOp{transform.CutMix{}}},
			Classes: []string{"a", "b"}},
		"NoEntryPoints": {NoEntryPoints: true, Damaged: Refuse},
	} {
		o.IndexFile = side
		l, err := Open(path, o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.devicePlanner().PlanBytes(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if err := l.devicePlanner().FillPlans(t.Context(), 0, nil); err == nil {
			t.Errorf("%s: FillPlans has no error, want an error", name)
		}
		l.Close()
	}
	l, err := Open(path, Options{IndexFile: side})
	if err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"no info":     l.devicePlanner().DecodeRow(t.Context(), nil, 0, nil),
		"no such row": l.devicePlanner().DecodeRow(t.Context(), Info{}, 0, nil),
	} {
		if err == nil {
			t.Errorf("%s: got no error, want one", what)
		}
	}
	l.Close()
	info := Info{Samples: make([]Sample, 1), redos: make([]devplan.Redo, 1), known: l.index.Load()}
	if err := l.devicePlanner().DecodeRow(t.Context(), info, 0, make([]byte, 3*224*224)); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v, want the error %v", err, ErrClosed)
	}
	_ = os.Remove(side)
}

// TestDecodeRowAndFillAgreeOnErrors: DecodeRow gives good images the pixels of Fill, and bad ones
// the errors of Fill.
func TestDecodeRowAndFillAgreeOnErrors(t *testing.T) {
	path := planArchive(t, "t.tar", 3, 1)
	l, err := Open(path, Options{BatchSize: 2, Transform: Train(32), BadSamples: Skip,
		IndexFile: filepath.Join(t.TempDir(), "index")})
	if err != nil {
		t.Skip(err)
	}
	defer l.Close()
	want, err := collect(t, l, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	x := l.index.Load()
	good := map[int][]byte{}
	for _, b := range want {
		for row, s := range b.samples {
			good[s.Index] = b.images[row*3*32*32:][:3*32*32]
		}
	}
	if len(good) == x.Len() {
		t.Fatalf("all %d samples are good, want a bad one", x.Len())
	}
	for i := range x.Len() {
		s := x.Sample(i)
		info := Info{Samples: []Sample{{Name: s.Name, Index: i, Label: s.Label}}, known: x,
			redos: []devplan.Redo{{Size: s.Size}}}
		dst := make([]byte, 3*32*32)
		err := l.devicePlanner().DecodeRow(t.Context(), info, 0, dst)
		var bad *SampleError
		switch pixels, ok := good[i]; {
		case ok && (err != nil || !bytes.Equal(dst, pixels)):
			t.Errorf("%s: %v, or other pixels", s.Name, err)
		case !ok && (!errors.As(err, &bad) || bad.Name != s.Name):
			t.Errorf("%s: %v, want its SampleError", s.Name, err)
		}
	}
}

// DecodeRow opens the archive once for the rows of an epoch, and Close closes it.
func TestDecodeRowOpensTheArchiveOnce(t *testing.T) {
	data, err := os.ReadFile(planArchive(t, "t.tar", 3, 1))
	if err != nil {
		t.Fatal(err)
	}
	const url = "store://b/t.tar"
	s := sourcetest.New(1, map[string]sourcetest.Object{url: {Data: string(data), Version: "1"}})
	opened := 0
	l, err := Open(url, Options{BatchSize: 2, Transform: Train(32), BadSamples: Skip,
		IndexFile: filepath.Join(t.TempDir(), "index"),
		OpenSource: func(ctx context.Context, url string) (Source, error) {
			opened++
			return s.OpenSource(ctx, url)
		}})
	if err != nil {
		t.Skip(err)
	}
	defer l.Close()
	if _, err := collect(t, l, 0, 2); err != nil {
		t.Fatal(err)
	}
	x, dst := l.index.Load(), make([]byte, 3*32*32)
	decode := func(ctx context.Context, i int) error {
		s := x.Sample(i)
		return l.devicePlanner().DecodeRow(ctx,
			Info{Samples: []Sample{{Name: s.Name, Index: i, Label: s.Label}}, known: x,
				redos: []devplan.Redo{{Size: s.Size}}}, 0, dst)
	}
	good := 0 // a sample
	for decode(t.Context(), good) != nil {
		good++
	}
	for epoch := range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var after [3]int // opened, after each call
		opened = 0
		for call := range after {
			if err := decode(ctx, good); err != nil {
				t.Fatal(err)
			}
			after[call] = opened
		}
		if after[0] == 0 || after[2] != after[0] {
			t.Errorf("epoch %d: after its calls the archive was opened %v times", epoch, after)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := decode(ctx, good); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v, want the error %v", err, context.Canceled)
	}
	if err := decode(t.Context(), good); err != nil {
		t.Errorf("after an error: %v, want no error", err)
	}
	if err := l.Close(); err != nil || l.repeated.a != nil {
		t.Errorf("after Close: %v, and the archive is open: %v, want no error, l.repeated.a = nil",
			err, l.repeated.a != nil)
	}
}
