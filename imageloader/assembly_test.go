package imageloader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/epoch"
	"github.com/torchstream/torchstream/imageloader/internal/index"
)

// expectedSample is a sample of the model.
type expectedSample struct {
	name string
	bad  bool
}

// expected returns the batches that the loader must deliver.
func expected(list []expectedSample, size int, policy BadSamplePolicy, dropLast bool) (batches [][]string,
	failed bool) {
	var batch []string
	var isBad []bool
	flush := func() {
		for i := range batch { // the policy Substitute
			if isBad[i] {
				from := i - 1
				for from >= 0 && isBad[from] {
					from--
				}
				if from < 0 {
					from = slices.Index(isBad, false)
				}
				defer func(i int, name string) { batch[i] = name }(i, batch[from])
			}
		}
	}
	for _, it := range list {
		if it.bad && policy == Skip {
			continue
		}
		if it.bad && policy == Fail {
			failed = true
			break
		}
		batch, isBad = append(batch, it.name), append(isBad, it.bad)
		if len(batch) == size {
			flush()
			batches = append(batches, batch)
			batch, isBad = nil, nil
		}
	}
	if len(batch) > 0 && !dropLast {
		flush()
		batches = append(batches, batch)
	}
	return batches, failed
}

// TestPoliciesFollowTheModel compares epochs with the model above, over policies, rates of bad
// samples, workers and slots.
func TestPoliciesFollowTheModel(t *testing.T) {
	const n, size = 100, 8
	for _, policy := range []BadSamplePolicy{Fail, Skip, Substitute} {
		for name, isBad := range map[string]func(int) bool{
			"none":        nil,
			"first":       func(i int) bool { return i == 0 },
			"last":        func(i int) bool { return i == n-1 },
			"one":         func(i int) bool { return i == 77 },
			"some":        func(i int) bool { return i%13 == 5 },
			"most":        func(i int) bool { return i%8 != 3 },
			"whole batch": func(i int) bool { return i >= 20 && i < 20+3*size && policy == Skip },
		} {
			for _, format := range []string{"tar", "tgz"} {
				data := archivetest.Images(t, n, isBad)
				if format == "tgz" {
					data = archivetest.Gzip(t, data)
				}
				path := archivetest.WriteFile(t, "a."+format, data)
				content := contents(t, path)
				for _, dropLast := range []bool{false, true} {
					t.Run(fmt.Sprint(policy, "/", name, "/", format, "/", dropLast), func(t *testing.T) {
						archivetest.Within(t)
						archivetest.NoLeaks(t)
						var list []expectedSample
						for i := range n {
							list = append(list, expectedSample{fmt.Sprintf("train/class%d/%04d.png", i*7%5,
								i), isBad != nil && isBad(i)})
						}
						want, wantFailure := expected(list, size, policy, dropLast)
						for _, workers := range []int{1, 2, 16} {
							for _, slots := range []int{1, 2, 4} {
								l := openFake(t, path, Options{BatchSize: size, Transform: Train(4),
									Workers: workers, DropLast: dropLast, BadSamples: policy})
								got, err := collect(t, l, 3, slots)
								if (err != nil) != wantFailure {
									t.Fatalf("%d workers, %d slots: error %v, want one: %v", workers, slots,
										err, wantFailure)
								}
								var have [][]string
								for _, b := range got {
									have = append(have, names([]copied{b}))
									checkRows(t, l, 3, content, b)
								}
								if !slices.EqualFunc(have, want, slices.Equal) {
									t.Fatalf("%d workers, %d slots:\n got %q\nwant %q", workers, slots, have, want)
								}
							}
						}
					})
				}
			}
		}
	}
}

// contents returns the data of an archive's members by name.
func contents(t *testing.T, path string) map[string][]byte {
	t.Helper()
	a, err := archive.Open(t.Context(), path, archive.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	all := map[string][]byte{}
	for m, err := range a.Members() {
		if err != nil {
			t.Fatal(err)
		}
		all[m.Name] = make([]byte, m.Size)
		if err := a.Content(all[m.Name]); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// checkRows verifies that every row has the pixels and the label of its Sample.
func checkRows(t *testing.T, l *Loader, number int, content map[string][]byte, b copied) {
	t.Helper()
	row := len(b.images) / len(b.samples)
	want := make([]byte, row)
	config, err := l.epochConfig(nil, l.opened)
	if err != nil {
		t.Fatal(err)
	}
	d, err := epoch.NewDecoder(config, l.env(), nil, epoch.Plans{}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for i, s := range b.samples {
		it := epoch.Item{Sample: s, Data: content[s.Name], Draw: devplan.Draw{Epoch: number}}
		if outcome, err := d.Decode(&it, index.Inflated{}, epoch.Row{Pixels: want}); outcome != epoch.Good {
			t.Fatal(err)
		}
		if !bytes.Equal(want, b.images[i*row:(i+1)*row]) {
			t.Fatalf("row %d lacks the pixels of %v", i, s)
		}
		if want := int64(s.Name[len("train/class")] - '0'); b.labels[i] != want || s.Label != int(want) {
			t.Fatalf("row %d, %q, has the label %d and %d in Sample, want b.labels[i] = %v, s.Label = %v",
				i, s.Name, b.labels[i], s.Label, want, int(want))
		}
	}
}

// TestSkipPassesManyBadSamples: Skip passes over any number of bad samples within one batch.
func TestSkipPassesManyBadSamples(t *testing.T) {
	const n, size, rounds = 1000, 8, 10
	isGood := func(i int) bool { return i == 0 || i == 500 || i == n-1 }
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, n, func(i int) bool { return !isGood(i) }))
	content := contents(t, path)
	var want []string
	for i := range n * rounds {
		if isGood(i % n) {
			want = append(want, fmt.Sprintf("train/class%d/%04d.png", i%n*7%5, i%n))
		}
	}
	for _, workers := range []int{1, 8} {
		for _, slots := range []int{1, 3} {
			l := openFake(t, path, Options{BatchSize: size, Transform: Eval(4, 4), Workers: workers,
				BadSamples: Skip, Repeat: rounds})
			got, err := collect(t, l, 0, slots)
			if err != nil || !slices.Equal(names(got), want) {
				t.Errorf("%d workers, %d slots: %q, error %v", workers, slots, names(got), err)
			}
			for _, b := range got {
				checkRows(t, l, 0, content, b)
			}
			if s := l.Stats(); s.Bad != (n-3)*rounds || s.BadBy[Damaged] != s.Bad || len(s.BadNamed) != 100 {
				t.Errorf("%d workers, %d slots: %d bad, by reason %v, %d named", workers, slots, s.Bad,
					s.BadBy, len(s.BadNamed))
			}
		}
	}
}

// heapLog is a slog.Handler that measures the live heap at regular numbers of records.
type heapLog struct {
	slog.Handler
	records, every int
	most           uint64
}

func (h *heapLog) Enabled(context.Context, slog.Level) bool { return true }

func (h *heapLog) Handle(context.Context, slog.Record) error {
	if h.records++; h.records%h.every == 0 {
		h.most = max(h.most, liveHeap())
	}
	return nil
}

// liveHeap returns the number of bytes of the heap that are in use.
func liveHeap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestBadSamplesTakeNoMemory: bad samples take no memory once they are counted, even while a batch
// waits for good samples.
func TestBadSamplesTakeNoMemory(t *testing.T) {
	if underRace {
		t.Skip("with the race detector compressed images lie in Go's heap")
	}
	const n, rounds = 1000, 200
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, n, func(i int) bool { return i > 0 }))
	h := &heapLog{Handler: slog.DiscardHandler, every: 10_000}
	l := openFake(t, path, Options{BatchSize: 2 * rounds, Transform: Eval(4, 4), BadSamples: Skip,
		Repeat: rounds, Logger: slog.New(h)})
	before := liveHeap()
	got, err := collect(t, l, 0, 1)
	if err != nil || len(names(got)) != rounds {
		t.Fatalf("%d samples, error %v, want no error, %v samples", len(names(got)), err, rounds)
	}
	if bytes := (float64(h.most) - float64(before)) / ((n - 1) * rounds); h.records < (n-1)*rounds || bytes > 16 {
		t.Errorf("%.0f bytes for each of %d bad samples, want h.records at least %v, bytes at most 16",
			bytes, h.records, (n-1)*rounds)
	}
}

// TestBatchWithoutGoodSampleIsAnError: a batch without a good sample has no substitutes, and is an
// error.
func TestBatchWithoutGoodSampleIsAnError(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 40, func(i int) bool { return i >= 8 && i < 16 }))
	l := openFake(t, path, Options{BatchSize: 8, Transform: Eval(4, 4), BadSamples: Substitute})
	got, err := collect(t, l, 0, 2)
	var bad *SampleError
	if len(got) != 1 || !errors.As(err, &bad) || bad.Index != 15 {
		t.Fatalf("%d batches, error %v, want len(got) = 1, an error of type *SampleError, bad.Index = 15",
			len(got), err)
	}
}

// TestMachineFailureEndsTheEpoch: a decoder's failure that is not the image's fault ends the epoch
// under every policy.
func TestMachineFailureEndsTheEpoch(t *testing.T) {
	for _, policy := range []BadSamplePolicy{Fail, Skip, Substitute} {
		members := []archivetest.Member{}
		for i := range 20 {
			content := fmt.Sprint(i)
			if i == 13 {
				content = "BROKEN MACHINE"
			}
			members = append(members,
				archivetest.Member{Name: fmt.Sprintf("c/%02d.png", i), Data: archivetest.Image(content)})
		}
		path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
		l := openFake(t, path, Options{BatchSize: 5, Transform: Eval(4, 4), BadSamples: policy})
		got, err := collect(t, l, 0, 2)
		if len(names(got)) != 13 || err == nil || errors.As(err, new(*SampleError)) {
			t.Errorf("%v: %d samples, error %v", policy, len(names(got)), err)
		}
	}
}

// TestReplacedStreamEndsTheEpochOnlyIfSamplesLack: under Skip, an archive is replaced during an
// epoch whose samples have been read in one pass. It is an error only if a bad sample makes a
// second pass necessary.
func TestReplacedStreamEndsTheEpochOnlyIfSamplesLack(t *testing.T) {
	const n, size = 200, 4
	for name, c := range map[string]struct {
		o    Options
		bad  bool
		want error
	}{
		"two ranks":                {o: Options{World: 2}},
		"padded":                   {o: Options{PadLast: true}},
		"two ranks, a bad sample":  {Options{World: 2}, true, ErrSourceChanged},
		"padded, and a bad sample": {Options{PadLast: true}, true, ErrSourceChanged},
	} {
		t.Run(name, func(t *testing.T) {
			archivetest.Within(t)
			gzip := func(n int) string {
				data := archivetest.Images(t, n, func(i int) bool { return c.bad && i == 100 })
				return archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data))
			}
			path, other := gzip(n), gzip(n+10)
			c.o.BatchSize, c.o.Workers, c.o.BadSamples, c.o.Transform = size, 1, Skip, Eval(4, 4)
			c.o.ShuffleBytes = 1000 // so that the samples do not stay in memory
			l := openFake(t, path, c.o)
			samples, first := 0, true
			var failed error
			for b, err := range l.epoch(t.Context(), 0, 1) {
				if err != nil {
					failed = err
					continue
				}
				samples += b.N
				if first { // one slot keeps the rest of the archive unread
					first = false
					if err := os.Rename(other, path); err != nil {
						t.Fatal(err)
					}
				}
			}
			want := n / max(1, c.o.World)
			if c.bad {
				want--
			}
			if samples != want || !errors.Is(failed, c.want) {
				t.Errorf("got %d samples and error %v, want %d samples and error %v", samples, failed, want, c.want)
			}
		})
	}
}

// TestReplacedStreamIsNoticedAfterAnEpochThatEndedEarly: a loader has opened a stream without
// reading it, and its first epoch ends at a bad sample. Another archive then replaces the stream.
func TestReplacedStreamIsNoticedAfterAnEpochThatEndedEarly(t *testing.T) {
	archivetest.Within(t)
	stream := func(n int) string {
		data := archivetest.Images(t, n, func(i int) bool { return i == 10 })
		return archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data))
	}
	path, other := stream(50), stream(60)
	l := openFake(t, path, Options{BatchSize: 4, Transform: Eval(4, 4), ShuffleBytes: 1000,
		Classes: []string{"class0", "class1", "class2", "class3", "class4"}})
	var state State
	var err error
	for b, e := range l.epoch(t.Context(), 0, 1) {
		if err = e; err == nil {
			state = b.State
		}
	}
	if !errors.As(err, new(*SampleError)) || state.Batches() != 2 {
		t.Fatalf("got %d batches and the error %v, want 2 and a *SampleError", state.Batches(), err)
	}
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	if batches, err := collect(t, l, 1, 1); !errors.Is(err, ErrSourceChanged) || len(batches) != 0 {
		t.Errorf("epoch 1 of another archive: got %d batches and the error %v, want none and %v",
			len(batches), err, ErrSourceChanged)
	}
	if err := l.Restore(t.Context(), state); !errors.Is(err, ErrSourceChanged) {
		t.Errorf("Restore from another archive: got the error %v, want %v", err, ErrSourceChanged)
	}
}

// TestFillRefusesMisuse: Fill returns an error when the consumer misbehaves.
func TestFillRefusesMisuse(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 40, nil))
	broken := errors.New("broken")
	slot := func() [][]byte { return [][]byte{make([]byte, 8*4*4*3), make([]byte, 8*8)} }
	for name, c := range map[string]struct {
		lend    func(context.Context) ([][]byte, error)
		deliver error
		want    error
	}{
		"lend fails": {lend: func(context.Context) ([][]byte, error) { return nil, broken }, want: broken},
		"deliver fails": {lend: func(context.Context) ([][]byte, error) { return slot(), nil },
			deliver: broken, want: broken},
		"one field": {lend: func(context.Context) ([][]byte, error) { return slot()[:1], nil }},
		"too small": {lend: func(context.Context) ([][]byte, error) {
			s := slot()
			return [][]byte{s[0][:100], s[1]}, nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			archivetest.Within(t)
			archivetest.NoLeaks(t)
			l := openFake(t, path, Options{BatchSize: 8, Transform: Eval(4, 4)})
			err := l.Fill(t.Context(), 0, c.lend, func(int, any) error { return c.deliver })
			if err == nil || c.want != nil && !errors.Is(err, c.want) {
				t.Fatalf("error %v", err)
			}
		})
	}
}
