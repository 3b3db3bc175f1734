package imageloader

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/tensor"
)

// withLabelFiles returns a tar with an image for each label file, which is given as extension and
// content.
func withLabelFiles(t *testing.T, files ...string) string {
	t.Helper()
	var members []archivetest.Member
	for i, file := range files {
		extension, content, _ := strings.Cut(file, ":")
		key := fmt.Sprintf("s/%03d", i)
		members = append(members,
			archivetest.Member{Name: key + ".png", Data: archivetest.Image(fmt.Sprint("image ", i))},
			archivetest.Member{Name: key + "." + extension, Data: content})
	}
	return archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...)))
}

// hotLabels returns the classes of each sample, by its index.
func hotLabels(t *testing.T, l *Loader) (hot []string) {
	t.Helper()
	hot = make([]string, l.Len())
	classes := l.Classes()
	for b, err := range l.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range b.Samples {
			var list []string
			for class, v := range b.Soft[i*len(classes) : (i+1)*len(classes)] {
				if v != 0 && v != 1 || s.Label != 0 {
					t.Errorf("%s has %v of class %d, label %d", s.Name, v, class, s.Label)
				}
				if v == 1 {
					list = append(list, classes[class])
				}
			}
			hot[s.Index] = strings.Join(list, " ")
		}
	}
	return hot
}

func multiLabelOptions() Options {
	return Options{BatchSize: 2, Transform: Transform{Size: 6, Resize: 8}, Shuffle: true, WebDataset: true,
		MultiLabel: true}
}

// TestListsOfLabelsAreRead: lists are read from .cls and .json, by the scan and by the index file.
func TestListsOfLabelsAreRead(t *testing.T) {
	for name, c := range map[string]struct {
		files   []string
		given   []string
		classes string
		want    []string
	}{
		"names": {[]string{"cls:dog cat", `json:{"labels":["cow","cat"],"label":"x"}`, "cls:\n",
			`json:{"label":"cow"}`, "cls:cat,dog cat"}, nil,
			"cat cow dog", []string{"cat dog", "cat cow", "", "cow", "cat dog"}},
		"numbers": {[]string{"cls:3 1", `json:{"cls":[0,2]}`, `json:{"class":4}`, "json:{\"labels\":[]}"},
			nil, "0 1 2 3 4", []string{"1 3", "0 2", "4", ""}},
		"given": {[]string{"cls:b a", "cls:a"}, []string{"z", "b", "a"}, "z b a", []string{"b a", "a"}},
		"mixed": {[]string{`json:{"labels":[10,"9","a"]}`, "cls:9"}, nil, "10 9 a", []string{"10 9 a", "9"}},
	} {
		t.Run(name, func(t *testing.T) {
			path := withLabelFiles(t, c.files...)
			for round := range 2 {
				o := multiLabelOptions()
				o.IndexFile = path + ".index"
				o.Classes = c.given
				l := openFake(t, path, o)
				if got := strings.Join(l.Classes(), " "); got != c.classes {
					t.Errorf("round %d: classes %s, want %v", round, got, c.classes)
				}
				if got := hotLabels(t, l); !slices.Equal(got, c.want) {
					t.Errorf("round %d: %q, want %v", round, got, c.want)
				}
				want := tensor.Spec{Name: "labels", DType: tensor.Float32, Shape: []int64{int64(len(l.Classes()))}}
				if !reflect.DeepEqual(l.Fields()[1], want) {
					t.Errorf("field %v", l.Fields()[1])
				}
				l.Close()
			}
		})
	}
}

// TestWrongListsOfLabelsAreErrors: the errors name the image or the label file.
func TestWrongListsOfLabelsAreErrors(t *testing.T) {
	for name, c := range map[string]struct {
		file, says string
		given      []string
	}{
		"unknown":       {"cls:a q", `"s/001.png" is of class "q"`, []string{"a"}},
		"odd number":    {"cls:1 -7", "\"s/001.png\" has the label \"-7 1\"", nil},
		"a number":      {`json:{"labels":[1.5]}`, `"s/001.json": "labels" has something else`, nil},
		"an object":     {`json:{"labels":{"a":1}}`, "something else", nil},
		"null":          {`json:{"labels":[null]}`, "something else", nil},
		"an empty name": {`json:{"labels":[""]}`, "is empty or has a line break", nil},
		"a line break":  {`json:{"labels":["a\nb"]}`, "is empty or has a line break", nil},
		"a long list":   {"cls:" + strings.Repeat("12345 ", 1) + longLabels(), "over the limit", nil},
	} {
		t.Run(name, func(t *testing.T) {
			first := "cls:1"
			if c.given != nil {
				first = "cls:a"
			}
			path := withLabelFiles(t, first, c.file)
			o := multiLabelOptions()
			o.Classes, o.NoIndex = c.given, true
			if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), c.says) ||
				!strings.Contains(err.Error(), path) {
				t.Errorf("%v does not say %s, want an error with %q and %q", err, c.says, c.says, path)
			}
		})
	}
	o := multiLabelOptions()
	o.NoIndex = true
	if _, err := Open(withLabelFiles(t, "cls:", "cls:"), o); !errors.Is(err, ErrNoSamples) {
		t.Errorf("no labels at all: %v, want the error %v", err, ErrNoSamples)
	}
	for says, change := range map[string]func(o *Options){
		"for the labels of Options.WebDataset":       func(o *Options) { o.WebDataset = false },
		"excludes Options.Target":                    func(o *Options) { o.Balanced = true },
		"MultiLabel excludes Options.Target and Opt": func(o *Options) { o.Target, o.TargetWidth = multiHot, 3 },
	} {
		o := multiLabelOptions()
		change(&o)
		if _, err := Open(withLabelFiles(t, "cls:1"), o); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %s", err, says)
		}
	}
}

// longLabels returns a list of many different labels.
func longLabels() string {
	var list []string
	for i := range 20_000 {
		list = append(list, fmt.Sprint(i))
	}
	return strings.Join(list, " ")
}

// TestListsOfLabelsAreMixedAndResumed: MixUp mixes lists of labels, and states name the option.
func TestListsOfLabelsAreMixedAndResumed(t *testing.T) {
	path := withLabelFiles(t, "cls:a b", "cls:b", "cls:c", "cls:a")
	o := multiLabelOptions()
	o.Transform.Mix = []transform.BatchOp{transform.MixUp{}}
	var state State
	for b, err := range openFake(t, path, o).Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		state = b.State
		for i := range b.N {
			sum := float32(0)
			for _, v := range b.Soft[3*i : 3*i+3] {
				sum += v
			}
			if sum < 0.99 || sum > 2.01 {
				t.Errorf("the labels of row %d: %v, sum %v, want sum from 0.99 to 2.01",
					i, b.Soft[3*i:3*i+3], sum)
			}
		}
	}
	if err := openFake(t, path, o).Restore(t.Context(), state); err != nil {
		t.Error(err)
	}
	single := o
	single.MultiLabel = false
	if err := openFake(t, path, single).Restore(t.Context(), state); err == nil {
		t.Error("Restore of a MultiLabel state by a loader without MultiLabel = nil, want an error")
	}
}
