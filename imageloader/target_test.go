package imageloader

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/tensor"
)

// targetOf returns the target of a sample of archivetest.Images: three numbers that depend on its
// name.
func targetOf(s Sample) [3]float32 {
	i := float32(s.Index)
	return [3]float32{i, -i / 3, float32(s.Name[len(s.Name)-5])}
}

// multiHot writes targetOf, but writes nothing for index 7.
func multiHot(s Sample, target []float32) error {
	if len(target) != 3 || slices.ContainsFunc(target, func(v float32) bool { return v != 0 }) {
		return errors.New("the target is not three zeros")
	}
	if v := targetOf(s); s.Index != 7 {
		copy(target, v[:])
	}
	return nil
}

func targetOptions() Options {
	return Options{BatchSize: 4, Transform: Transform{Size: 6, Resize: 8}, Shuffle: true, Target: multiHot,
		TargetWidth: 3}
}

// collectTargets returns the targets of an epoch by sample index, and checks their rows.
func collectTargets(t *testing.T, l *Loader, epoch int) (byIndex map[int][]float32) {
	t.Helper()
	byIndex = map[int][]float32{}
	for b, err := range l.Epoch(t.Context(), epoch) {
		if err != nil {
			t.Fatal(err)
		}
		if len(b.Soft) != 3*b.N || b.Masks != nil {
			t.Fatalf("%d numbers for %d samples, want len(b.Soft) = %v, b.Masks = nil",
				len(b.Soft), b.N, 3*b.N)
		}
		for i, s := range b.Samples {
			byIndex[s.Index] = slices.Clone(b.Soft[3*i : 3*i+3])
		}
	}
	return byIndex
}

// TestTargetsBelongToTheirSamples covers every order, number of workers and policy.
func TestTargetsBelongToTheirSamples(t *testing.T) {
	data := archivetest.Images(t, 30, func(i int) bool { return i%9 == 4 })
	paths := []string{archivetest.WriteFile(t, "a.tar", data),
		archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data))}
	for _, path := range paths {
		for _, workers := range []int{1, 4} {
			for _, policy := range []BadSamplePolicy{Skip, Substitute} {
				o := targetOptions()
				o.Workers, o.BadSamples = workers, policy
				o.ShuffleBytes = 1000
				got := collectTargets(t, openFake(t, path, o), 1)
				if len(got) != 27 {
					t.Errorf("%d samples, want 27", len(got))
				}
				for i, target := range got {
					want := targetOf(Sample{Name: "0000.png", Index: i})
					want[2] = target[2] // the last digit of the name
					if i == 7 {
						want = [3]float32{}
					}
					if !slices.Equal(target, want[:]) || i != 7 && int(target[2]-'0') != i%10 {
						t.Errorf("%s, %d workers, %v: sample %d has %v", path, workers, policy, i, target)
					}
				}
			}
		}
	}
}

// TestTargetErrorsAreBadSamples: an error of Target makes its sample a bad one.
func TestTargetErrorsAreBadSamples(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 12, nil))
	unknown := errors.New("not in the table")
	o := targetOptions()
	o.Target = func(s Sample, target []float32) error {
		if s.Index == 5 {
			target[0] = 1
			return unknown
		}
		return multiHot(s, target)
	}
	o.BadSamples = Skip
	l := openFake(t, path, o)
	if got := collectTargets(t, l, 0); len(got) != 11 || got[5] != nil {
		t.Errorf("%d samples, with the bad one %v, want len(got) = 11, got[5] = nil", len(got), got[5])
	}
	if s := l.Stats(); s.BadBy[Rejected] != 1 {
		t.Errorf("bad samples: %v, want 1", s.BadBy)
	}
	o.BadSamples = Fail
	var bad *SampleError
	_, err := collect(t, openFake(t, path, o), 0, 2)
	if !errors.As(err, &bad) || !errors.Is(err, unknown) || bad.Index != 5 || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v", err)
	}
}

// TestPanicsOfCallbacksAreBadSamples: a panic of Target, or of a Func, makes its sample a bad one,
// in any goroutine.
func TestPanicsOfCallbacksAreBadSamples(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 12, nil))
	calls := 0
	for name, o := range map[string]Options{
		"Target": {Target: func(s Sample, _ []float32) error {
			if s.Index == 5 {
				panic("no such row")
			}
			return nil
		}, TargetWidth: 1},
		"Func": {Transform: Transform{Size: 8, Resize: 8,
			Ops: []transform.Op{transform.Func(func(*rand.Rand, *transform.Pixels) error {
				if calls++; calls%12 == 6 {
					panic("no such row")
				}
				return nil
			})}}, Workers: 1},
	} {
		o.BadSamples = Skip
		l := openFake(t, path, o)
		batches, err := collect(t, l, 0, 1)
		samples := 0
		for _, b := range batches {
			samples += len(b.labels)
		}
		if s := l.Stats(); err != nil || samples != 11 || s.BadBy[Rejected] != 1 {
			t.Errorf("%s: %d samples, %+v, %v, want no error, samples = 11, s.BadBy[Rejected] = 1",
				name, samples, s.BadBy, err)
		}
		o.BadSamples = Fail
		if _, err := collect(t, openFake(t, path, o), 0, 1); err == nil ||
			!strings.Contains(err.Error(), "panicked: no such row") {
			t.Errorf("%s: %v, want an error with %q", name, err, "panicked: no such row")
		}
	}
}

// TestTargetsAreMixed: MixUp and CutMix mix targets with the share of the pixels.
func TestTargetsAreMixed(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 12, nil))
	o := targetOptions()
	o.Transform.Mix = []transform.BatchOp{transform.MixUp{}}
	l := openFake(t, path, o)
	for b, err := range l.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		plain := make([][3]float32, b.N)
		for i, s := range b.Samples {
			if s.Index != 7 {
				plain[i] = targetOf(s)
			}
		}
		// The share, from the first number of a row that changes.
		share := math.NaN()
		for i := range plain {
			if own, before := float64(plain[i][0]), float64(plain[(i+b.N-1)%b.N][0]); own != before {
				share = (float64(b.Soft[3*i]) - before) / (own - before)
			}
		}
		if !(share >= 0 && share <= 1) {
			t.Fatalf("a share of %v", share)
		}
		for i := range plain {
			for k, v := range b.Soft[3*i : 3*i+3] {
				want := share*float64(plain[i][k]) + (1-share)*float64(plain[(i+b.N-1)%b.N][k])
				if math.Abs(float64(v)-want) > 1e-3 {
					t.Errorf("row %d has %v, want %v", i, v, want)
				}
			}
		}
	}
}

func TestTargetOptionsAreChecked(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 12, nil))
	for says, change := range map[string]func(o *Options){
		"TargetWidth is 3, and Options.Target is nil": func(o *Options) { o.Target = nil },
		"TargetWidth is 0":                            func(o *Options) { o.TargetWidth = 0 },
		"TargetWidth is -1":                           func(o *Options) { o.TargetWidth = -1 },
		"TargetWidth is 1048577":                      func(o *Options) { o.TargetWidth = maxTargetWidth + 1 },
		"Options.Target and Options.Masks exclude":    func(o *Options) { o.Masks = sceneMasks },
	} {
		o := targetOptions()
		change(&o)
		if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want an error with %q", err, says)
		}
	}
	l := openFake(t, path, targetOptions())
	want := tensor.Spec{Name: "labels", DType: tensor.Float32, Shape: []int64{3}}
	if f, u := l.Fields(), l.Outputs(); !reflect.DeepEqual(f[1], want) || !reflect.DeepEqual(u[1], want) {
		t.Errorf("fields %v, outputs %v, want f[1] = %v, u[1] = %v", f, u, want, want)
	}
}

// TestTargetsResume: a loader without a target refuses a state of a loader with one, and the rest
// of an epoch has the same targets.
func TestTargetsResume(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 14, nil))
	var all [][]float32
	var states []State
	for b, err := range openFake(t, path, targetOptions()).Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		all, states = append(all, slices.Clone(b.Soft)), append(states, b.State)
	}
	data, err := json.Marshal(states[0])
	if err != nil {
		t.Fatal(err)
	}
	var state State
	if err := json.Unmarshal(data, &state); err != nil {
		t.Fatal(err)
	}
	again := openFake(t, path, targetOptions())
	if err := again.Restore(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	var rest [][]float32
	for b, err := range again.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		rest = append(rest, slices.Clone(b.Soft))
	}
	if !slices.EqualFunc(rest, all[1:], slices.Equal) {
		t.Errorf("the resumed epoch has the targets\n%v, want\n%v", rest, all[1:])
	}
	plain := targetOptions()
	plain.Target, plain.TargetWidth = nil, 0
	if err := openFake(t, path, plain).Restore(t.Context(), state); err == nil ||
		!strings.Contains(err.Error(), "Options.Target") {
		t.Errorf("a loader without a target: %v, want an error with %q", err, "Options.Target")
	}
}
