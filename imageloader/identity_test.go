package imageloader

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// globalBatches continues an epoch from the given states on world ranks. It reads count global
// batches; a global batch consists of one batch of every rank. It returns the sorted names of each
// global batch, and the states after the last one.
func globalBatches(t *testing.T, path string, o Options, world, global, count int,
	from []State) (batches [][]string, after []State) {
	t.Helper()
	for o.Rank = range world {
		o.World, o.BatchSize = world, global/world
		l := openFake(t, path, o)
		if from != nil {
			if err := l.Restore(t.Context(), from...); err != nil {
				t.Fatal(err)
			}
		}
		got, at := states(t, l, 1, 2)
		count = min(count, len(got))
		for i, b := range got[:count] {
			if o.Rank == 0 {
				batches = append(batches, nil)
			}
			batches[i] = append(batches[i], names([]copied{b})...)
		}
		if count > 0 {
			after = append(after, throughJSON(t, at[count-1]))
		}
	}
	for _, b := range batches {
		slices.Sort(b)
	}
	return batches, after
}

// If the total batch size of all ranks stays the same, their combined batches are the same, with
// any number of ranks in each part of the epoch.
func TestAnotherWorldKeepsTheGlobalBatches(t *testing.T) {
	const global, count = 12, 20
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, global*count, nil))
	o := Options{Transform: Train(4), Shuffle: true, Seed: 3}
	want, _ := globalBatches(t, path, o, 1, global, count, nil)
	if len(want) != count {
		t.Fatalf("%d batches, want %v", len(want), count)
	}
	for _, worlds := range [][]int{{3, 2, 3}, {1, 4, 6}, {6, 1, 12}, {2, 2, 2}} {
		t.Run(fmt.Sprint(worlds), func(t *testing.T) {
			var got [][]string
			var from []State
			for part, world := range worlds {
				n := 3 + part
				if part == len(worlds)-1 {
					n = count
				}
				var batches [][]string
				batches, from = globalBatches(t, path, o, world, global, n, from)
				got = append(got, batches...)
				if from[0].Batches() != len(got) {
					t.Errorf("a state says %d batches after %d", from[0].Batches(), len(got))
				}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got %v\nwant %v", got, want)
			}
			// The whole epoch is done, so nothing remains for any world.
			if rest, _ := globalBatches(t, path, o, 5, 5, count, from); len(rest) != 0 {
				t.Errorf("%d batches after the end, want 0", len(rest))
			}
		})
	}
}

// A state with another batch size is refused unless the number of ranks differs too. A state
// without a batch size is damaged.
func TestBatchSizeOfAnotherWorldIsChecked(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 60, nil))
	o := Options{Transform: Eval(4, 4), BatchSize: 4, World: 3}
	_, after := states(t, openFake(t, path, o), 0, 2)
	o.BatchSize = 6
	if err := openFake(t, path, o).Restore(t.Context(), after[1]); err == nil ||
		!strings.Contains(err.Error(), "Options.BatchSize is 6, and the state was made with 4") {
		t.Error(err)
	}
	o.World = 2
	if err := openFake(t, path, o).Restore(t.Context(), after[1]); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"0", "-1", "x", "99999999999", ""} {
		s := throughJSON(t, after[1])
		s.run.options["BatchSize"] = bad
		if err := openFake(t, path, o).Restore(t.Context(), s); err == nil ||
			!strings.Contains(err.Error(), "damaged") {
			t.Errorf("%q: %v, want an error with %q", bad, err, "damaged")
		}
	}
}

func TestIdentityNamesTheDifference(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 60, nil))
	base := Options{Transform: Train(4), BatchSize: 4, Shuffle: true, World: 2}
	first := openFake(t, path, base).Identity()
	if first.Path != path || first.Samples != 60 || first.Batches != 8 || first.World != 2 || first.Digest == "" {
		t.Errorf("%+v, want first.Path = %v, first.Samples = 60, first.Batches = 8, first.World = 2, "+
			"first.Digest not \"\"", first, path)
	}
	for name, c := range map[string]struct {
		path   string
		change func(*Options)
		want   string
	}{
		"equal": {path, func(o *Options) { o.Rank, o.Workers = 1, 7 }, ""},
		"copy": {archivetest.WriteFile(t, "b.tar", archivetest.Images(t, 60, nil)),
			func(o *Options) { o.Rank = 1 }, ""},
		"larger": {archivetest.WriteFile(t, "b.tar", archivetest.Images(t, 61, nil)), func(*Options) {},
			"an archive of "},
		"renamed": {archivetest.WriteFile(t, "b.tar", fakeArchiveRenamed(t, 60)), func(*Options) {},
			"other names, sizes or labels"},
		"seed":  {path, func(o *Options) { o.Seed = 9 }, "Options.Seed 0, and not 9"},
		"batch": {path, func(o *Options) { o.BatchSize = 5 }, "Options.BatchSize 4, and not 5"},
		"world": {path, func(o *Options) { o.World = 3 }, "Options.World 2, and not 3"},
		"classes": {path, func(o *Options) {
			o.Classes = []string{"class4", "class3", "class2", "class1",
				"class0"}
		}, "other classes"},
	} {
		o := base
		c.change(&o)
		got := first.Difference(openFake(t, c.path, o).Identity())
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q", name, got)
		}
	}
}
