package imageloader

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/internal/parquettest"
	"github.com/torchstream/torchstream/tensor"
)

// throughJSON returns a state as another process reads it.
func throughJSON(t testing.TB, s State) (back State) {
	t.Helper()
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatalf("%v in %s, want no error", err, data)
	}
	return back
}

// states runs an epoch and returns its batches with the state after each.
func states(t testing.TB, l *Loader, epoch, slots int) (batches []copied, after []State) {
	t.Helper()
	for b, err := range l.epoch(t.Context(), epoch, slots) {
		if err != nil {
			t.Fatal(err)
		}
		batches = append(batches, copied{slices.Clone(b.Images), slices.Clone(b.Labels), b.Samples})
		after = append(after, b.State)
	}
	return batches, after
}

// archives returns archives for each way to access samples.
func archives(t testing.TB, data []byte) map[string]struct {
	path         string
	shuffleBytes int64
	classes      []string
} {
	packed := archivetest.Gzip(t, data)
	rows, classNames := rowsOf(t, data)
	table := func(l parquettest.Layout) string {
		l.Classes = classNames
		return archivetest.WriteFile(t, "a.parquet", parquettest.File(t, rows, l))
	}
	tgz := archivetest.WriteFile(t, "a.tgz", packed)
	classes := []string{"class0", "class1", "class2", "class3", "class4"}
	return map[string]struct {
		path         string
		shuffleBytes int64
		classes      []string
	}{
		"tar":                  {archivetest.WriteFile(t, "a.tar", data), 0, nil},
		"memory":               {tgz, 0, nil},
		"memory, not at first": {tgz, 0, classes},
		"stream":               {tgz, int64(len(packed)), nil},
		"stream, not scanned":  {tgz, int64(len(packed)) / 2, classes},
		"zip":                  {archivetest.WriteFile(t, "a.zip", zipped(t, data, zip.Deflate)), 0, nil},
		"Parquet":              {table(parquettest.Layout{Group: 50, Page: 9}), 0, nil},
		"stream of Parquet":    {table(parquettest.Layout{Snappy: true}), 100, nil},
	}
}

// TestResumeGivesTheSameBytes: after Restore at any batch, with another number of workers and
// slots, the batches and their states have the same bytes as without the interruption.
func TestResumeGivesTheSameBytes(t *testing.T) {
	const n = 130
	data := archivetest.Images(t, n, func(i int) bool { return i%17 == 3 || i > 60 && i < 70 })
	rng := rand.New(rand.NewPCG(5, 6))
	for format, archive := range archives(t, data) {
		for _, policy := range []BadSamplePolicy{Skip, Substitute} {
			for name, change := range map[string]func(*Options){
				"in order": func(o *Options) { o.Shuffle = false },
				"shuffled": func(*Options) {},
				"drop":     func(o *Options) { o.DropLast = true },
				"pad":      func(o *Options) { o.PadLast = true },
				"repeat":   func(o *Options) { o.Repeat = 2 },
				"rank":     func(o *Options) { o.Rank, o.World = 1, 3 },
				"balanced": func(o *Options) { o.Balanced, o.Draws = true, 150 },
			} {
				if name == "balanced" && strings.HasPrefix(format, "stream") {
					continue
				}
				t.Run(fmt.Sprint(format, "/", policy, "/", name), func(t *testing.T) {
					archivetest.Within(t)
					o := Options{BatchSize: 16, Transform: Train(4), Shuffle: true, ShuffleBuffer: 40,
						ShuffleBytes: archive.shuffleBytes, Seed: 7, BadSamples: policy,
						Classes: archive.classes, Workers: 3}
					change(&o)
					l := openFake(t, archive.path, o)
					whole, after := states(t, l, 2, 2)
					next, _ := collect(t, l, 3, 2)
					for _, o.Workers = range []int{1, 2, 5, 16} {
						at := rng.IntN(len(whole))
						l := openFake(t, archive.path, o)
						s := throughJSON(t, after[at])
						if s.Epoch() != 2 || s.Batches() != at+1 {
							t.Fatalf("epoch %d, %d batches, but the state was made after batch %d",
								s.Epoch(), s.Batches(), at)
						}
						if err := l.Restore(t.Context(), s); err != nil {
							t.Fatal(err)
						}
						for range 2 { // every run of the epoch
							rest, then := states(t, l, s.Epoch(), 1+rng.IntN(4))
							if digest(rest) != digest(whole[at+1:]) {
								t.Fatalf("after batch %d of %d the rest differs:\n got %q\nwant %q", at,
									len(whole), names(rest), names(whole[at+1:]))
							}
							for i := range then {
								got, _ := json.Marshal(then[i])
								want, _ := json.Marshal(after[at+1+i])
								if !slices.Equal(withoutArchive(t, got), withoutArchive(t, want)) {
									t.Fatalf("batch %d:\n got %s\nwant %s", at+1+i, got, want)
								}
							}
						}
						if got, _ := collect(t, l, 3, 2); digest(got) != digest(next) {
							t.Errorf("after a resumed epoch the next is\n%q, want\n%q with the same pixels",
								names(got), names(next))
						}
						if err := l.Restore(t.Context()); err != nil {
							t.Fatal(err)
						}
						if got, _ := collect(t, l, 2, 2); format != "memory, not at first" &&
							digest(got) != digest(whole) {
							t.Errorf("after Restore without a state\n%q, want\n%q with the same pixels",
								names(got), names(whole))
						}
					}
				})
			}
		}
	}
}

// withoutArchive drops the fields of a state that are unknown until the archive has been read.
func withoutArchive(t *testing.T, state []byte) []byte {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal(state, &fields); err != nil {
		t.Fatal(err)
	}
	delete(fields, "archive")
	out, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestResumeInAnotherWorldLosesNoSample: an epoch that is stopped and resumed with another number
// of ranks, several times, gives every good sample once and no bad sample, under each policy.
func TestResumeInAnotherWorldLosesNoSample(t *testing.T) {
	const n = 240
	rng := rand.New(rand.NewPCG(7, 8))
	for _, policy := range []BadSamplePolicy{Skip, Substitute} {
		// a batch with only bad samples has no substitutes
		isBad := func(i int) bool { return i%11 == 3 || policy == Skip && i > 60 && i < 66 }
		for format, archive := range archives(t, archivetest.Images(t, n, isBad)) {
			t.Run(fmt.Sprint(format, "/", policy), func(t *testing.T) {
				archivetest.Within(t)
				for round := range 6 {
					o := Options{BatchSize: 4, Transform: Train(4), Shuffle: round%2 == 0,
						ShuffleBuffer: 40, ShuffleBytes: archive.shuffleBytes, Seed: uint64(round),
						BadSamples: policy, Classes: archive.classes,
						PadLast: policy == Substitute}
					count := map[string]int{}
					var last []State
					for part := range 4 {
						o.World = 1 + rng.IntN(5)
						var ranks []*Loader
						left := 0
						for o.Rank = range o.World {
							o.Workers = 1 + rng.IntN(5)
							l := openFake(t, archive.path, o)
							if part > 0 {
								give := last
								if policy == Substitute {
									give = last[rng.IntN(len(last)):][:1]
								}
								if err := l.Restore(t.Context(), give...); err != nil {
									t.Fatal(err)
								}
							}
							ranks = append(ranks, l)
						}
						stop := 1 + rng.IntN(6)
						given := last
						last = nil
						for rank, l := range ranks {
							got, after := states(t, l, 1, 2)
							if rank == 0 {
								left = len(got)
							}
							if len(got) != left {
								t.Fatalf("rank %d of %d gets %d batches, rank 0 gets %d", rank, o.World, len(got), left)
							}
							if part == 3 {
								stop = left
							}
							stop = min(stop, left)
							if stop == 0 {
								last = given
								break
							}
							seen := map[string]bool{}
							for _, name := range names(got[:stop]) {
								if !seen[name] { // not a substitute, which is a copy
									count[name]++
								}
								seen[name] = true
							}
							last = append(last, throughJSON(t, after[stop-1]))
						}
					}
					again := 0
					for i := range n {
						c := count[fmt.Sprintf("train/class%d/%04d.png", i*7%5, i)]
						switch {
						case isBad(i) && c > 0:
							t.Fatalf("bad sample %d came", i)
						case !isBad(i) && c == 0:
							t.Fatalf("sample %d was lost", i)
						case c > 1:
							again += c - 1
						}
					}
					// Padding is up to a batch for each of five ranks, and under Skip one sample
					// for each bad sample.
					if most := 5 * 4; again > most && policy == Substitute || again > most+27 {
						t.Errorf("%d samples came again", again)
					}
				}
			})
		}
	}
}

// TestRestoreRefusesOtherStates: a state of another archive or other options is refused, and the
// error names the difference.
func TestRestoreRefusesOtherStates(t *testing.T) {
	data := archivetest.Images(t, 60, nil)
	path := archivetest.WriteFile(t, "a.tar", data)
	base := Options{BatchSize: 8, Transform: Train(4), Shuffle: true, Seed: 1}
	_, after := states(t, openFake(t, path, base), 0, 2)
	state := after[2]
	for name, c := range map[string]struct {
		path   string
		change func(*Options)
		want   string
	}{
		"seed":      {path, func(o *Options) { o.Seed = 2 }, "Options.Seed is 2, and the state was made with 1"},
		"batch":     {path, func(o *Options) { o.BatchSize = 4 }, "Options.BatchSize is 4, and the state was made with 8"},
		"transform": {path, func(o *Options) { o.Transform = Eval(6, 4) }, "Options.Transform is"},
		"order":     {path, func(o *Options) { o.Shuffle = false }, "Options.Shuffle"},
		"policy":    {path, func(o *Options) { o.BadSamples = Skip }, "Options.BadSamples"},
		"weights":   {path, func(o *Options) { o.Weights = func(Sample) float64 { return 1 } }, "Options.Weights"},
		"classes": {path, func(o *Options) {
			o.Classes = []string{"class4", "class3", "class2", "class1",
				"class0"}
		}, "other classes"},
		"size": {archivetest.WriteFile(t, "b.tar", archivetest.Images(t, 61, nil)), func(*Options) {},
			"another archive"},
		"content": {archivetest.WriteFile(t, "b.tar", fakeArchiveRenamed(t, 60)), func(*Options) {}, "other names"},
		"workers": {path, func(o *Options) { o.Workers = 9 }, ""},
		"entries": {path, func(o *Options) { o.NoEntryPoints, o.TrustIndex = true, true }, ""},
		"copies":  {path, func(o *Options) { o.MaxTranscodedBytes = 1 }, ""},
	} {
		o := base
		c.change(&o)
		l := openFake(t, c.path, o)
		err := l.Restore(t.Context(), throughJSON(t, state))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: error %v", name, err)
		}
		if err == nil {
			continue
		}
		if _, err := collect(t, l, 0, 1); err != nil {
			t.Errorf("%s: after the refusal: %v, want no error", name, err)
		}
	}

	l := openFake(t, path, base)
	if err := l.Restore(t.Context(), State{}); err == nil {
		t.Error("Restore(State{}) = nil, want an error")
	}
	if _, err := json.Marshal(State{}); err == nil {
		t.Error("json.Marshal(State{}): got no error, want one")
	}
	if err := l.Restore(t.Context(), after[1], after[2]); err == nil || !strings.Contains(err.Error(), "same time") {
		t.Errorf("two states of different batches: %v, want an error with %q", err, "same time")
	}
	far := state
	far.turns = 1000
	if err := l.Restore(t.Context(), far); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a state behind the end: %v, want an error with %q", err, "damaged")
	}

	o := base
	o.BadSamples, o.World = Skip, 2
	_, after = states(t, openFake(t, path, o), 0, 2)
	o.World = 3
	if err := openFake(t, path, o).Restore(t.Context(), after[1]); err == nil ||
		!strings.Contains(err.Error(), "1 of 2 ranks") {
		t.Errorf("one rank's state under Skip: %v, want an error with %q", err, "1 of 2 ranks")
	}

	// A stream can't resume a permutation.
	tgz := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data))
	_, after = states(t, openFake(t, tgz, base), 0, 2)
	o = base
	o.ShuffleBytes = 1000
	if err := openFake(t, tgz, o).Restore(t.Context(), after[1]); err == nil ||
		!strings.Contains(err.Error(), "random access") {
		t.Errorf("a permutation on a stream: %v, want an error with %q", err, "random access")
	}
}

// fakeArchiveRenamed is archivetest.Images with the name of one member changed.
func fakeArchiveRenamed(t *testing.T, n int) []byte {
	members := []archivetest.Member{{Name: "train/", Kind: '5'}, {Name: "README", Data: "no image"}}
	for i := range n {
		name := fmt.Sprintf("train/class%d/%04d.png", i*7%5, i)
		if i == 31 {
			name = strings.Replace(name, "0031", "0O31", 1)
		}
		members = append(members,
			archivetest.Member{Name: name,
				Data: archivetest.Image(fmt.Sprintf("image %d %s", i, strings.Repeat("x", i*37%900)))})
	}
	return archivetest.Tar(t, members...)
}

// TestDamagedStatesAreRefused: reading a state refuses bytes that are not a state.
func TestDamagedStatesAreRefused(t *testing.T) {
	l := openFake(t, archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 60, nil)),
		Options{BatchSize: 8, Transform: Train(4), Shuffle: true})
	_, after := states(t, l, 0, 2)
	good, err := json.Marshal(after[1])
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]string{
		{`"version":1`, `"version":2`}, {`"epoch":0`, `"epoch":-1`}, {`"world":1`, `"world":0`},
		{`"rank":0`, `"rank":1`}, {`"order":"permutation"`, `"order":"dice"`},
		{`"ahead":[]`, `"ahead":[0]`}, {`"ahead":[]`, `"ahead":[5,4]`}, {`"turns":16`, `"turns":-16`},
		{`"turns":16`, `"turns":1e300`}, {`"next":0`, `"nest":0`},
		{`"before":0`, `"before":9223372036854775807`}, {`}}`, `}} more`}, {`{`, ``}, {`"samples":60`, `"samples":-60`},
	} {
		bad := strings.Replace(string(good), c[0], c[1], 1)
		if bad == string(good) {
			t.Fatalf("the state is %s, want it to contain %s", good, c[0])
		}
		var s State
		if err := s.UnmarshalJSON([]byte(bad)); err == nil {
			t.Errorf("%s is accepted, want an error", bad)
		}
	}
	if len(good) > 2000 {
		t.Errorf("a state has %d bytes: %s, want at most 2000", len(good), good)
	}
}

// FuzzState: no bytes cause a hang or a crash. Restore accepts or refuses a state that was read,
// and an epoch ends after either.
func FuzzState(f *testing.F) {
	data := archivetest.Images(f, 30, func(i int) bool { return i == 7 })
	path := archivetest.WriteFile(f, "a.tar", data)
	o := Options{BatchSize: 4, Transform: Eval(2, 2), Shuffle: true, BadSamples: Skip, World: 2, Rank: 1, Workers: 2}
	l := openFake(f, path, o)
	_, after := states(f, l, 0, 2)
	for _, s := range after {
		good, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(good)
		f.Add([]byte(strings.Replace(string(good), `"ahead":[]`, `"ahead":[3,7,8,29]`, 1)))
		f.Add([]byte(strings.Replace(string(good), `"world":2`, `"world":3`, 1)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var s State
		if s.UnmarshalJSON(data) != nil {
			return
		}
		throughJSON(t, s)
		if l.Restore(t.Context(), s) != nil {
			return
		}
		got, err := collect(t, l, s.Epoch(), 2)
		if len(names(got)) > 30 {
			t.Errorf("%d samples, error %v, want at most 30 samples", len(names(got)), err)
		}
	})
}

// earlierOptions are the options of the states in testdata/states.json, which an earlier version
// wrote.
func earlierOptions() map[string]Options {
	nothing := func(*rand.Rand, *transform.Pixels) error { return nil }
	return map[string]Options{
		"operations": {BatchSize: 7, Shuffle: true, Seed: 3, BadSamples: Substitute,
			OpenSource: func(context.Context, string) (Source, error) { return nil, errors.New("not asked for") },
			Transform: Transform{Size: 16, RandomResizedCrop: true, FlipP: 0.25, ApplyEXIFOrientation: true,
				DType: tensor.BFloat16, Ops: []transform.Op{
					transform.RandomHorizontalFlip{P: 0.5}, &transform.RandomVerticalFlip{P: 0.25},
					transform.Pad{Padding: [4]int{3, 2, 1, 4}, Mode: transform.PadReflect,
						Fill: transform.Color{1, 2, 3}}, transform.RandomCrop{Size: 16}, transform.CenterCrop{Size: 16},
					transform.ColorJitter{Brightness: 0.4, Contrast: 0.4, Saturation: 0.4, Hue: 0.1},
					transform.RandomPhotometricDistort{P: 0.5}, transform.RandomChannelPermutation{},
					transform.GaussianNoise{Mean: 0.1, Sigma: 0.2}, transform.Grayscale{},
					transform.RandomGrayscale{P: 0.5}, transform.GaussianBlur{KernelSize: [2]int{5, 5}},
					transform.RandomErasing{Value: transform.Color{1, 2, 3}}, transform.RandomInvert{P: 0.5},
					transform.RandomPosterize{Bits: 3}, transform.RandomSolarize{Threshold: 128},
					transform.RandomAdjustSharpness{SharpnessFactor: 2}, transform.RandomAutocontrast{},
					transform.RandomEqualize{},
					transform.RandomApply{Ops: []transform.Op{transform.Func(nothing), &transform.Grayscale{}}, P: 0.5},
					transform.RandomChoice{Ops: []transform.Op{transform.RandAugment{NumOps: 3},
						transform.TrivialAugmentWide{},
						transform.AutoAugment{Policy: transform.SVHNPolicy,
							Interpolation: transform.Bilinear}}, P: []float64{1, 2, 3}},
					transform.RandomOrder{Ops: []transform.Op{transform.RandomRotation{Degrees: [2]float64{-3,
						3}, Center: &[2]float64{1, 2}}, transform.RandomAffine{Degrees: [2]float64{-9, 9}}}},
					transform.RandomPerspective{DistortionScale: 0.25}, transform.Func(nothing),
				}}},
		"mixed": {BatchSize: 8, BadSamples: Skip, Shuffle: true, Seed: 4,
			Transform: Transform{Size: 8, Resize: 8, Bytes: true,
				Mix: []transform.BatchOp{transform.MixUp{Alpha: 0.5}, &transform.CutMix{}}}},
		"default": {BatchSize: 8, Transform: Eval(32, 16), Balanced: true, Draws: 64, BadSamples: Skip},
		"train": {BatchSize: 9, Transform: Train(12),
			Weights: func(s Sample) float64 { return float64(1 + s.Index) }, BadSamples: Skip, Repeat: 2},
		"ranks": {BatchSize: 4, Transform: Train(12), Shuffle: true, Rank: 1, World: 3, PadLast: true,
			BadSamples: Skip},
	}
}

// TestStateOfEarlierVersionIsRestored: a state that an earlier version wrote is restored, and the
// following bytes equal that version's. The earlier version could also restore a state that is
// written now.
func TestStateOfEarlierVersionIsRestored(t *testing.T) {
	data, err := os.ReadFile("testdata/states.json")
	if err != nil {
		t.Fatal(err)
	}
	var earlier map[string]struct {
		State  json.RawMessage
		Digest string // digest of the batches that followed
	}
	if err := json.Unmarshal(data, &earlier); err != nil {
		t.Fatal(err)
	}
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 60, func(i int) bool { return i%13 == 5 }))
	for name, o := range earlierOptions() {
		t.Run(name, func(t *testing.T) {
			_, after := states(t, openFake(t, path, o), 2, 2)
			now, err := json.Marshal(after[2])
			if err != nil {
				t.Fatal(err)
			}
			var was bytes.Buffer
			if err := json.Compact(&was, earlier[name].State); err != nil {
				t.Fatal(err)
			}
			if was.String() != string(now) {
				t.Errorf("the state was\n%s\nand is\n%s", was.String(), now)
			}
			var state State
			if err := json.Unmarshal(earlier[name].State, &state); err != nil {
				t.Fatal(err)
			}
			l := openFake(t, path, o)
			if err := l.Restore(t.Context(), state); err != nil {
				t.Fatal(err)
			}
			rest, err := collect(t, l, 2, 2)
			if err != nil {
				t.Fatal(err)
			}
			if got := digest(rest); got != earlier[name].Digest {
				t.Errorf("the bytes after the state have digest %s, want %s", got, earlier[name].Digest)
			}
		})
	}
}

// TestRestoreOfAClosedLoaderReadsNothing: Restore of a closed loader does not read the archive.
func TestRestoreOfAClosedLoaderReadsNothing(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 20, nil)))
	o := Options{Transform: Eval(4, 4), BatchSize: 4}
	l := openFake(t, path, o)
	_, after := states(t, l, 0, 2)
	o.Classes = l.Classes()
	l = openFake(t, path, o) // without an index
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.Restore(t.Context(), after[0]); !errors.Is(err, ErrClosed) {
		t.Errorf("error %v, want the error %v", err, ErrClosed)
	}
	if err := l.Restore(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("error %v, want the error %v", err, ErrClosed)
	}
	if l.index.Load() != nil {
		t.Error("Restore of a closed loader has read the archive, want no index")
	}
}

// TestForgedOrderIsRefused: a state with an order that is impossible with the loader's options is
// refused. No such state makes an epoch fail in another way.
func TestForgedOrderIsRefused(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 20, nil))
	for name, o := range map[string]Options{
		"in order": {},
		"shuffled": {Shuffle: true},
		"weighted": {Weights: func(Sample) float64 { return 1 }, Draws: 50},
		"balanced": {Balanced: true},
	} {
		o.BatchSize, o.Transform = 4, Eval(4, 4)
		_, after := states(t, openFake(t, path, o), 0, 2)
		data, err := json.Marshal(after[1])
		if err != nil {
			t.Fatal(err)
		}
		accepted := 0
		for _, kind := range []order.Kind{order.Archive, order.Permuted, order.Buffered, order.Drawn} {
			was := fmt.Sprintf("%q:%q", "order", after[1].run.order)
			var forged State
			if err := json.Unmarshal([]byte(strings.Replace(string(data), was,
				fmt.Sprintf("%q:%q", "order", kind), 1)), &forged); err != nil {
				t.Fatal(err)
			}
			// A forged shuffle buffer needs these options.
			if kind == order.Buffered {
				forged.run.options["ShuffleBuffer"], forged.run.options["ShuffleBytes"] = "4096", fmt.Sprint(256<<20)
			}
			l := openFake(t, path, o)
			if err := l.Restore(t.Context(), forged); err != nil {
				if !strings.Contains(err.Error(), "order") {
					t.Errorf("%s as %s: error %v, want an error with %q", name, kind, err, "order")
				}
				continue
			}
			accepted++
			if _, err := collect(t, l, 0, 2); err != nil {
				t.Errorf("%s as %s: %v, want no error", name, kind, err)
			}
		}
		want := 1
		if o.Shuffle {
			want = 2 // a permutation and a shuffle buffer are both possible
		}
		if accepted != want {
			t.Errorf("%s: %d orders are accepted, want %d", name, accepted, want)
		}
	}
}
