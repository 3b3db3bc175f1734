package imageloader

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestRanksGetEqualBatches: with any damage, all ranks get the same number of batches of the same
// sizes. Every good sample is delivered, and none twice except as padding. The order is the order
// of one rank, dealt to the ranks.
func TestRanksGetEqualBatches(t *testing.T) {
	const n, size = 103, 8
	for _, format := range []string{"tar", "tgz", "stream"} {
		for _, policy := range []BadSamplePolicy{Skip, Substitute} {
			for damage, isBad := range map[string]func(int) bool{"whole": nil,
				"damaged": func(i int) bool { return i%9 == 4 || i > 95 && i != 100 }} {
				data := archivetest.Images(t, n, isBad)
				shuffleBytes := int64(0)
				if format != "tar" {
					data = archivetest.Gzip(t, data)
				}
				if format == "stream" {
					shuffleBytes = 20_000
				}
				path := archivetest.WriteFile(t, "archive", data)
				for _, end := range []string{"short", "drop", "pad"} {
					for _, world := range []int{1, 2, 3, 7} {
						t.Run(fmt.Sprint(format, "/", policy, "/", damage, "/", end, "/", world), func(t *testing.T) {
							archivetest.Within(t)
							o := Options{BatchSize: size, Transform: Eval(4, 4), Shuffle: true, Seed: 3,
								ShuffleBytes: shuffleBytes, BadSamples: policy, DropLast: end == "drop",
								PadLast: end == "pad"}
							if format == "stream" { // with one rank there is no scan
								o.Classes = []string{"class0", "class1", "class2", "class3", "class4"}
							}
							single := openFake(t, path, o)
							all, err := collect(t, single, 1, 2)
							if err != nil {
								t.Fatal(err)
							}
							count := map[string]int{}
							var sizes []int
							var ranks [][]string
							for rank := range world {
								o.Rank, o.World = rank, world
								l := openFake(t, path, o)
								got, err := collect(t, l, 1, 2)
								if err != nil {
									t.Fatal(err)
								}
								var these []int
								for _, b := range got {
									these = append(these, len(b.samples))
								}
								if rank == 0 {
									sizes = these
								}
								fixed := world > 1 || end == "pad"
								if !slices.Equal(these, sizes) || fixed && len(these) != l.Batches() {
									t.Fatalf("rank %d has batches of %v, rank 0 of %v; Batches is %d", rank,
										these, sizes, l.Batches())
								}
								ranks = append(ranks, names(got))
								for _, name := range names(got) {
									count[name]++
								}
							}
							good := 0
							for i := range n {
								if isBad == nil || !isBad(i) {
									good++
								}
							}
							if end != "drop" && len(count) != good {
								t.Errorf("%d different samples of %d", len(count), good)
							}
							delivered := 0
							for _, s := range sizes {
								delivered += s * world
							}
							if isBad == nil {
								first := names(all)
								for i := range min(delivered, len(first), n) {
									if got := ranks[i%world][i/world]; got != first[i] {
										t.Fatalf("rank %d has %s in turn %d, dealing gives it %s", i%world,
											got, i/world, first[i])
									}
								}
								if again := delivered - len(count); again != max(0, delivered-n) {
									t.Errorf("%d rows, but %d samples come again, want %v",
										delivered, again, max(0, delivered-n))
								}
							}
							if end == "pad" && (delivered%(size*world) != 0 || delivered < n) ||
								end == "drop" && (delivered%size != 0 || delivered > n) {
								t.Errorf("%d samples in batches of %v", delivered, sizes)
							}
						})
					}
				}
			}
		}
	}
}

// TestTooManyRanksAreAnError: it is an error if there are too few samples for a batch on each rank,
// or if a rank has no good sample.
func TestTooManyRanksAreAnError(t *testing.T) {
	archivetest.Within(t)
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 10, func(i int) bool { return i%2 == 1 }))
	for _, o := range []Options{
		{BatchSize: 8, World: 2, DropLast: true},
		{BatchSize: 8, World: 2, Rank: 1, BadSamples: Skip}, // all of its samples are bad until the third round
	} {
		o.Transform = Eval(4, 4)
		l := openFake(t, path, o)
		if got, err := collect(t, l, 0, 2); err == nil || !strings.Contains(err.Error(), "no samples") {
			t.Errorf("%d samples, error %v, want an error with %q", len(names(got)), err, "no samples")
		}
	}
}

// TestRepeatJoinsEpochs: round j of epoch e equals epoch e*Repeat+j without Repeat.
func TestRepeatJoinsEpochs(t *testing.T) {
	data := archivetest.Images(t, 50, nil)
	for name, c := range map[string]struct {
		data  []byte
		bytes int64
	}{"tar": {data, 0}, "tgz": {archivetest.Gzip(t, data), 0}, "stream": {archivetest.Gzip(t, data), 10_000}} {
		path := archivetest.WriteFile(t, "archive", c.data)
		o := Options{BatchSize: 10, Transform: Train(4), Shuffle: true, ShuffleBytes: c.bytes, Seed: 4}
		once := openFake(t, path, o)
		o.Repeat = 3
		thrice := openFake(t, path, o)
		got, err := collect(t, thrice, 2, 2)
		if err != nil || len(got) != 15 || thrice.Batches() != 15 || thrice.Len() != 50 {
			t.Fatalf("%s: %d batches, error %v, Batches %d, Len %d, want no error, len(got) = 15, "+
				"thrice.Batches() = 15, thrice.Len() = 50",
				name, len(got), err, thrice.Batches(), thrice.Len())
		}
		for round := range 3 {
			want, err := collect(t, once, 6+round, 2)
			if err != nil || digest(got[5*round:5*round+5]) != digest(want) {
				t.Errorf("%s: round %d is not epoch %d, error %v", name, round, 6+round, err)
			}
		}
	}
}

// TestDrawsFollowTheWeights: draws follow the weights, within five standard deviations. A sample of
// weight 0 is never drawn. A sample that is drawn twice has two crops. An epoch is a function of
// its seed and number.
func TestDrawsFollowTheWeights(t *testing.T) {
	const n, draws = 40, 20_000
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, n, nil))
	weight := func(s Sample) float64 { return float64(s.Index % 5) }
	o := Options{BatchSize: 100, Transform: Train(4), Weights: weight, Draws: draws, Seed: 5}
	l := openFake(t, path, o)
	got, err := collect(t, l, 3, 2)
	if err != nil || len(names(got)) != draws {
		t.Fatalf("%d samples, error %v, want no error, %v samples", len(names(got)), err, draws)
	}
	count := [n]int{}
	rows := map[string]bool{}
	for _, b := range got {
		for i, s := range b.samples {
			count[s.Index]++
			rows[string(b.images[i*48:(i+1)*48])] = true
		}
	}
	for i, c := range count {
		p := float64(i%5) / (n * 2)
		if math.Abs(float64(c)-p*draws) > 5*math.Sqrt(draws*p) {
			t.Errorf("sample %d came %d times, expected %.0f", i, c, p*draws)
		}
	}
	if len(rows) < draws*9/10 { // an image of 40 x 30 pixels has too few boxes for all rows to differ
		t.Errorf("%d different rows of %d, want at least %v", len(rows), draws, draws*9/10)
	}
	o.Workers = 7
	again, err := collect(t, openFake(t, path, o), 3, 3)
	other, _ := collect(t, l, 4, 2)
	if err != nil || digest(again) != digest(got) || digest(other) == digest(got) {
		t.Errorf("epochs are not a function of their number; error %v", err)
	}
	for name, weight := range map[string]func(Sample) float64{
		"negative": func(s Sample) float64 { return float64(s.Index) - 1 },
		"NaN":      func(Sample) float64 { return math.NaN() },
		"infinite": func(Sample) float64 { return math.Inf(1) }, "all zero": func(Sample) float64 { return 0 },
	} {
		o := o
		o.Weights = weight
		if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), "weight") {
			t.Errorf("%s: error %v, want an error with %q", name, err, "weight")
		}
	}
	o.ShuffleBytes = 100
	if _, err := Open(archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, n, nil))),
		o); err == nil || !strings.Contains(err.Error(), "random access") {
		t.Errorf("error %v, want an error with %q", err, "random access")
	}
}

// TestBalancedClassesComeEquallyOften: classes of 1, 10 and 100 samples are drawn equally often.
func TestBalancedClassesComeEquallyOften(t *testing.T) {
	var members []archivetest.Member
	for class, samples := range []int{1, 10, 100} {
		for i := range samples {
			members = append(members, archivetest.Member{Name: fmt.Sprintf("c%d/%d.png", class, i),
				Data: archivetest.Image(fmt.Sprint(class, i))})
		}
	}
	const draws = 9000
	l := openFake(t, archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...)),
		Options{BatchSize: 100, Transform: Eval(4, 4), Balanced: true, Draws: draws})
	got, err := collect(t, l, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	count := [3]int{}
	for _, b := range got {
		for _, label := range b.labels {
			count[label]++
		}
	}
	for class, c := range count {
		if math.Abs(float64(c)-draws/3) > 5*math.Sqrt(draws*2./9) {
			t.Errorf("class %d came %d times of %d", class, c, draws)
		}
	}
}
