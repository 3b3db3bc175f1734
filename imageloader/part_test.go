//go:build linux

package imageloader

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// classesOf returns images in directories of the given sizes.
func classesOf(sizes map[string]int) (members []archivetest.Member) {
	for class, n := range sizes {
		for i := range n {
			name := fmt.Sprintf("%s/%02d.png", class, i)
			members = append(members, archivetest.Member{Name: name, Data: archivetest.Image(name)})
		}
	}
	slices.SortFunc(members, func(a, b archivetest.Member) int { return strings.Compare(a.Name, b.Name) })
	return members
}

// namesOf returns the samples of an epoch of a part, in the archive's order.
func namesOf(t *testing.T, path string, o Options) (names []string) {
	t.Helper()
	o.Transform, o.BatchSize = Eval(4, 4), 3
	l, err := open(t.Context(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatalf("%s, %+v: %v, want no error", path, o.Part, err)
	}
	batches, err := collect(t, l, 0, 2)
	if err != nil {
		t.Fatalf("%s, %+v: %v, want no error", path, o.Part, err)
	}
	for _, b := range batches {
		for _, s := range b.samples {
			names = append(names, s.Name)
		}
	}
	if got := l.Len(); got != len(names) {
		t.Errorf("%s, %+v: Len is %d, and an epoch has %d", path, o.Part, got, len(names))
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	return names
}

// The two parts of any source are disjoint and complete, with and without an index file. A class of
// two images has one image in each part.
func TestPartsOfAnySource(t *testing.T) {
	members := classesOf(map[string]int{"big": 60, "one": 1, "two": 2})
	data, dir := archivetest.Tar(t, members...), t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	var want []string
	for _, m := range members {
		want = append(want, m.Name)
	}
	first := map[bool][]string{}
	for _, path := range []string{put("a.tar", data), put("a.tgz", archivetest.Gzip(t, data)),
		put("a.tar.zst", archivetest.Zstd(t, data)), archivetest.Extract(t, members)} {
		for _, buffer := range []int64{1, 0} {
			var all []string
			for _, test := range []bool{true, false, true, false} {
				names := namesOf(t, path, Options{Part: Part{HeldOut: 0.2, Test: test, Seed: 1}, ShuffleBytes: buffer})
				if before := first[test]; before != nil && !slices.Equal(names, before) {
					t.Errorf("%s, test %v: got %q, want %q", path, test, names, before)
				}
				first[test] = names
				all = append(all, names...)
			}
			slices.Sort(all)
			if all = slices.Compact(all); !slices.Equal(all, want) {
				t.Errorf("%s: the parts have %q together, want %q", path, all, want)
			}
		}
	}
	count := func(names []string, class string) (n int) {
		for _, name := range names {
			if strings.HasPrefix(name, class+"/") {
				n++
			}
		}
		return n
	}
	for _, c := range []struct {
		class               string
		heldLeast, heldMost int
	}{{"big", 5, 20}, {"two", 1, 1}, {"one", 0, 0}} {
		held, kept := count(first[true], c.class), count(first[false], c.class)
		if held < c.heldLeast || held > c.heldMost || kept == 0 {
			t.Errorf("class %s: got %d held out and %d kept, want %d to %d held out, and others", c.class,
				held, kept, c.heldLeast, c.heldMost)
		}
	}
}

// The names are those whose number is below 0.25 in Python:
// (int.from_bytes(sha256(struct.pack("<Q", 7) + name).digest()[:8], "little") >> 11) / 2**53.
func TestPartIsAHashOfTheName(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, classesOf(map[string]int{"big": 20})...))
	got := namesOf(t, path, Options{NoIndex: true, Part: Part{HeldOut: 0.25, Test: true, Seed: 7}})
	if want := []string{"big/02.png", "big/08.png", "big/09.png", "big/10.png",
		"big/16.png"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAddedImagesLeavePartsAlone(t *testing.T) {
	held := func(n int, seed uint64) []string {
		path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, classesOf(map[string]int{"cat": n, "dog": n})...))
		return namesOf(t, path, Options{NoIndex: true, Part: Part{HeldOut: 0.3, Test: true, Seed: seed}})
	}
	few, many := held(30, 1), held(60, 1)
	if got := slices.DeleteFunc(slices.Clone(many),
		func(name string) bool { return name[4:6] >= "30" }); !slices.Equal(got, few) {
		t.Errorf("of the first images %q are held out after more were added, want %q", got, few)
	}
	if len(many) <= len(few) {
		t.Errorf("got %d held out of 120, and %d of 60: want more", len(many), len(few))
	}
	if other := held(30, 2); slices.Equal(other, few) {
		t.Errorf("got the same part %q with another seed", other)
	}
}

func TestPartOfAFolder(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz",
		archivetest.Gzip(t, archivetest.Tar(t,
			classesOf(map[string]int{"train/cat": 2, "train/dog": 1, "training/cat": 1, "test/cat": 1,
				"test/hen": 1})...)))
	for folder, want := range map[string][]string{
		"train": {"train/cat/00.png", "train/cat/01.png", "train/dog/00.png"},
		"test/": {"test/cat/00.png", "test/hen/00.png"}, "train/dog": {"train/dog/00.png"},
	} {
		if got := namesOf(t, path, Options{Part: Part{Folder: folder}}); !slices.Equal(got, want) {
			t.Errorf("folder %s: got %q, want %q", folder, got, want)
		}
	}
	for _, c := range []struct {
		o    Options
		says string
	}{
		{Options{Part: Part{Folder: "val"}}, "no samples in " + path + ": Options.Part has none of its 6 samples"},
		{Options{Part: Part{HeldOut: 1}}, "Options.Part: field HeldOut is 1, not from 0 to below 1"},
		{Options{Part: Part{Seed: 1}}, "Test and Seed need HeldOut"},
	} {
		_, err := open(t.Context(), path, c.o, openFile, fakeCodec{})
		if err == nil || !strings.Contains(err.Error(), c.says) ||
			strings.Contains(c.says, "no samples") != errors.Is(err, ErrNoSamples) {
			t.Errorf("%+v: got the error %v, want %q", c.o.Part, err, c.says)
		}
	}
}

// The parts of images with boxes or masks are disjoint and complete, with and without an index
// file. Each sample has the boxes or the mask that it has in the whole archive. All samples are one
// class, so that a part has about its share.
func TestPartsOfPairs(t *testing.T) {
	boxes, masks := boxScenes(t, 40), scenes(t, 40)
	file := archivetest.WriteFile(t, "instances.json", []byte(cocoOf(t, boxes)))
	for name, c := range map[string]struct {
		members []archivetest.Member
		o       Options
	}{
		"files of boxes": {boxes, Options{Boxes: sceneBoxes}},
		"COCO":           {boxes, Options{Boxes: Boxes{File: file}}},
		"masks":          {masks, Options{Masks: sceneMasks}},
	} {
		o := c.o
		o.Transform, o.BatchSize = Eval(32, 32), 7
		path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, c.members...)))
		partners := func(p Part) map[string]string {
			o.Part = p
			l, err := Open(path, o)
			if err != nil {
				t.Fatalf("%s, %+v: %v, want no error", name, p, err)
			}
			defer l.Close()
			found := map[string]string{}
			for b, err := range l.Epoch(t.Context(), 0) {
				if err != nil {
					t.Fatalf("%s, %+v: %v, want no error", name, p, err)
				}
				for i, s := range b.Samples {
					if b.Boxes != nil {
						found[s.Name] = fmt.Sprint(b.Boxes[i])
					} else {
						found[s.Name] = fmt.Sprint(b.Masks[len(b.Masks)/b.N*i : len(b.Masks)/b.N*(i+1)])
					}
				}
			}
			if l.Len() != len(found) {
				t.Errorf("%s, %+v: Len is %d, and an epoch has %d samples", name, p, l.Len(), len(found))
			}
			return found
		}
		for range 2 { // the second time from the index file
			whole, joined := partners(Part{}), map[string]string{}
			for _, test := range []bool{false, true} {
				part := partners(Part{HeldOut: 0.25, Test: test, Seed: 3})
				if n := len(part); test && (n < 5 || n > 16) {
					t.Errorf("%s: %d of %d samples are held out, want about 10", name, n, len(whole))
				}
				for name, partner := range part {
					if _, twice := joined[name]; twice {
						t.Errorf("%s is in both parts, want one", name)
					}
					joined[name] = partner
				}
			}
			if len(whole) < 40 || !maps.Equal(joined, whole) {
				t.Errorf("%s: the parts have %d samples, or others than the %d of the archive", name, len(joined), len(whole))
			}
		}
	}
}

// A loader of another part refuses the state.
func TestStateNamesAnotherPart(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, classesOf(map[string]int{"cat": 20})...))
	identity := func(p Part) Identity {
		return openFake(t, path, Options{Transform: Eval(4, 4), Part: p}).Identity()
	}
	all, part := identity(Part{}), identity(Part{HeldOut: 0.2})
	if _, named := all.Options["Part"]; named {
		t.Errorf("got %q for all samples, want no entry, as in states of earlier versions", all.Options["Part"])
	}
	if part.Difference(all) == "" || part.Difference(identity(Part{HeldOut: 0.2, Seed: 3})) == "" {
		t.Error("got no difference between parts")
	}
}

// grouped returns an archive of images and a list with their classes and groups. The number of
// images of a class in a group differs.
func grouped(t *testing.T, groups int) (path, list string, group map[string]string) {
	t.Helper()
	var members []archivetest.Member
	text, group := "id,label,patient\n", map[string]string{}
	for g := range groups {
		for i := range 1 + g*7%5 {
			name := fmt.Sprintf("images/%03d-%d.png", g, i)
			class := []string{"a", "b", "c"}[(g+i*i)%3]
			if g%9 == 0 {
				class = "rare"
			}
			members = append(members, archivetest.Member{Name: name, Data: archivetest.Image(name)})
			text += fmt.Sprintf("%03d-%d,%s,p%d\n", g, i, class, g)
			group[name] = fmt.Sprintf("p%d %s", g, class)
		}
	}
	return archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...)), writeList(t, text), group
}

// No group is in both parts, the parts are complete, and the share of each class is near the wanted
// one.
func TestPartsKeepGroupsTogether(t *testing.T) {
	path, list, group := grouped(t, 90)
	for seed := range uint64(3) {
		counts, sides := map[string][2]int{}, map[string]map[bool]bool{}
		for _, test := range []bool{true, false} {
			o := Options{List: list, ListFormat: ListFormat{GroupColumn: "patient"}, Part: Part{HeldOut: 0.2, Test: test, Seed: seed}}
			names := namesOf(t, path, o)
			if again := namesOf(t, path, o); !slices.Equal(again, names) {
				t.Errorf("got %q and then %q for the same part", names, again)
			}
			for _, name := range names {
				patient, class, _ := strings.Cut(group[name], " ")
				c := counts[class]
				c[0]++
				if test {
					c[1]++
				}
				counts[class] = c
				if sides[patient] == nil {
					sides[patient] = map[bool]bool{}
				}
				sides[patient][test] = true
			}
		}
		total := 0
		for class, c := range counts {
			total += c[0]
			if share := float64(c[1]) / float64(c[0]); share < 0.15 || share > 0.25 {
				t.Errorf("seed %d, class %s: got %d of %d held out, want about 0.2", seed, class, c[1], c[0])
			}
		}
		if total != len(group) {
			t.Errorf("seed %d: got %d images in both parts, want %d", seed, total, len(group))
		}
		for patient, of := range sides {
			if len(of) != 1 {
				t.Errorf("seed %d: got images of %s in both parts, want them in one", seed, patient)
			}
		}
	}
	held := func(seed uint64) []string {
		return namesOf(t, path, Options{List: list, ListFormat: ListFormat{GroupColumn: "3"}, NoIndex: true,
			Part: Part{HeldOut: 0.2, Test: true, Seed: seed}})
	}
	if slices.Equal(held(1), held(2)) {
		t.Error("got the same groups with another seed")
	}
}

// If a class has two groups, each part gets one of them, whatever their sizes.
func TestClassOfTwoGroupsIsInBothParts(t *testing.T) {
	var members []archivetest.Member
	text := "id,label,g\n"
	for i, group := range strings.Split("AAAAAAAAAB CCCCD EF", "") {
		if group == " " {
			continue
		}
		name := fmt.Sprintf("%02d.png", i)
		members = append(members, archivetest.Member{Name: name, Data: archivetest.Image(name)})
		text += fmt.Sprintf("%02d,%s,%s\n", i, map[bool]string{true: "x", false: "y"}[group < "C"], group)
	}
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	for _, test := range []bool{true, false} {
		l := openFake(t, path, Options{Transform: Eval(4, 4), List: writeList(t, text), ListFormat: ListFormat{GroupColumn: "g"},
			Part: Part{HeldOut: 0.1, Test: test}})
		seen := map[int]bool{}
		for b, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range b.Samples {
				seen[s.Label] = true
			}
		}
		if len(seen) != 2 {
			t.Errorf("test %v: got %d classes, want 2", test, len(seen))
		}
	}
	o := Options{List: writeList(t, text), ListFormat: ListFormat{GroupColumn: "g"}}
	if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), "GroupColumn is for Options.Part.HeldOut") {
		t.Errorf("got the error %v, want one about Part.HeldOut", err)
	}
}
