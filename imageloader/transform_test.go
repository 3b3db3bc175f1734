package imageloader

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// TestInterpolationsEqualTorchvision: Eval with each interpolation gives the bytes of
// v2.Resize(24, interpolation, antialias=True) and v2.CenterCrop(20) for a PNG.
func TestInterpolationsEqualTorchvision(t *testing.T) {
	data, err := os.ReadFile("testdata/small.png")
	if err != nil {
		t.Fatal(err)
	}
	path := archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "c/small.png", Data: string(data)}))
	for interpolation, want := range map[transform.Interpolation]uint32{
		transform.DefaultInterpolation: 0x0af09b9d, transform.Bilinear: 0x0af09b9d,
		transform.Bicubic: 0x97c77a4a, transform.Nearest: 0x71159795,
	} {
		eval := Eval(24, 20)
		eval.Interpolation = interpolation
		l, err := Open(path, Options{Transform: eval, NoIndex: true})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		got, err := collect(t, l, 0, 1)
		if err != nil || crc32.ChecksumIEEE(got[0].images) != want {
			t.Errorf("interpolation %d: the pixels differ from torchvision's; %v", interpolation, err)
		}
	}
	if _, err := Open(path, Options{Transform: Transform{Interpolation: 4}}); err == nil ||
		!strings.Contains(err.Error(), "field Interpolation is 4") {
		t.Errorf("another interpolation: %v, want an error with %q", err, "field Interpolation is 4")
	}
}

// TestEvalEqualsTorchvision: Eval gives the bytes of v2.Resize(24, antialias=True) and
// v2.CenterCrop(20) for a PNG.
func TestEvalEqualsTorchvision(t *testing.T) {
	data, err := os.ReadFile("testdata/small.png")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/small-resize24-centre20.rgb")
	if err != nil {
		t.Fatal(err)
	}
	l, err := Open(archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "c/small.png", Data: string(data)})),
		Options{Transform: Eval(24, 20)})
	if err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, l, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[0].images, want) {
		t.Errorf("the pixels: %s; want torchvision's", archivetest.Difference(got[0].images, want))
	}
}

// everyOp returns a chain of all kinds of steps, with Funcs between them.
func everyOp() []transform.Op {
	return []transform.Op{
		transform.Pad{Padding: [4]int{3, 2, 1, 4}, Mode: transform.PadReflect}, transform.RandomCrop{Size: 16},
		transform.RandomVerticalFlip{},
		transform.ColorJitter{Brightness: 0.4, Contrast: 0.4, Saturation: 0.4, Hue: 0.1}, transform.RandomGrayscale{},
		transform.Func(func(rng *rand.Rand, m *transform.Pixels) error {
			m.Pix[rng.IntN(len(m.Pix))] ^= byte(rng.Uint32())
			return nil
		}),
		transform.RandomApply{Ops: []transform.Op{transform.GaussianBlur{KernelSize: [2]int{5, 5}}}},
		transform.RandomErasing{Value: transform.Color{1, 2, 3}},
		transform.RandomChoice{Ops: []transform.Op{transform.RandAugment{}, transform.TrivialAugmentWide{},
			transform.AutoAugment{Policy: transform.SVHNPolicy}}},
		transform.RandomAffine{Degrees: [2]float64{-9, 9}, Scale: [2]float64{0.9, 1.1},
			Interpolation: transform.Bilinear}, transform.RandomPerspective{},
		transform.Pad{Padding: [4]int{1, 1, 1, 1}}, transform.CenterCrop{Size: 16},
	}
}

// TestOpsAreDeterministic: an epoch with every kind of step has the same bytes at any number of
// workers, and other bytes with another seed or epoch.
func TestOpsAreDeterministic(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 60, func(i int) bool { return i%13 == 5 }))
	run := func(workers, epoch int, seed uint64, ops []transform.Op) string {
		l := openFake(t, path, Options{BatchSize: 7, Shuffle: true, Seed: seed, Workers: workers, BadSamples: Skip,
			Transform: Transform{Size: 16, RandomResizedCrop: true, FlipP: 0.5, Ops: ops}})
		batches, err := collect(t, l, epoch, 2)
		if err != nil {
			t.Fatal(err)
		}
		return digest(batches)
	}
	want := run(1, 0, 1, everyOp())
	for _, workers := range []int{2, 5, 16} {
		if got := run(workers, 0, 1, everyOp()); got != want {
			t.Errorf("digest with %d workers = %s, want %s", workers, got, want)
		}
	}
	for what, got := range map[string]string{"epoch": run(3, 1, 1, everyOp()),
		"seed": run(3, 0, 2, everyOp()), "steps": run(3, 0, 1, everyOp()[2:])} {
		if got == want {
			t.Errorf("digest with another %s = %s, want another one", what, got)
		}
	}
}

// TestOpsLeaveTheCropAlone: steps that change no pixel give the pixels of a loader without steps.
func TestOpsLeaveTheCropAlone(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 20, nil))
	var digests []string
	for _, ops := range [][]transform.Op{nil, {transform.RandomInvert{P: 1}, transform.RandomInvert{P: 1}},
		{transform.Func(func(rng *rand.Rand, m *transform.Pixels) error { rng.Uint64(); return nil })}} {
		l := openFake(t, path, Options{Transform: Transform{Size: 8, RandomResizedCrop: true, FlipP: 0.5, Ops: ops}})
		batches, err := collect(t, l, 0, 2)
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest(batches))
	}
	if digests[1] != digests[0] || digests[2] != digests[0] {
		t.Errorf("%v", digests)
	}
}

// TestFuncSeesThePixelsBetweenSteps: a custom step sees the sample's pixels between the other
// steps. A sample that it refuses is a bad sample.
func TestFuncSeesThePixelsBetweenSteps(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 12, nil))
	broken := errors.New("not today")
	fill := func(rng *rand.Rand, m *transform.Pixels) error {
		if m.Width != 8 || m.Height != 8 || m.Stride != 24 || len(m.Pix) != 8*8*3 {
			return fmt.Errorf("%d x %d, stride %d, %d bytes", m.Width, m.Height, m.Stride, len(m.Pix))
		}
		if m.Pix[0]%4 == 0 {
			return broken
		}
		for i := range m.Pix {
			m.Pix[i] = 10
		}
		return nil
	}
	inverted := Transform{Size: 8, Resize: 8, Ops: []transform.Op{transform.Func(fill), transform.RandomInvert{P: 1}}}
	l := openFake(t, path, Options{Transform: inverted, BadSamples: Skip})
	batches, err := collect(t, l, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	samples := 0
	for _, b := range batches {
		samples += len(b.labels)
		if i := slices.IndexFunc(b.images, func(v byte) bool { return v != 245 }); i >= 0 {
			t.Errorf("byte %d is %d, want 245", i, b.images[i])
		}
	}
	if s := l.Stats(); int(s.Bad)+samples != 12 || s.Bad == 0 || s.BadBy[Rejected] != s.Bad {
		t.Errorf("%d samples, %+v", samples, s)
	}
	_, err = collect(t, openFake(t, path, Options{Transform: inverted}), 0, 1)
	var bad *SampleError
	if !errors.As(err, &bad) || bad.Reason != Rejected || !errors.Is(err, broken) {
		t.Errorf("%v, want an error of type *SampleError, bad.Reason = %v, the error %v",
			err, Rejected, broken)
	}
}

// TestOpsChangeRealPixels: Invert inverts the pixels of TestEvalEqualsTorchvision.
func TestOpsChangeRealPixels(t *testing.T) {
	data, err := os.ReadFile("testdata/small.png")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/small-resize24-centre20.rgb")
	if err != nil {
		t.Fatal(err)
	}
	inverted := Eval(24, 20)
	inverted.Ops = []transform.Op{transform.RandomInvert{P: 1}}
	l, err := Open(archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "c/small.png", Data: string(data)})), Options{Transform: inverted})
	if err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, l, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	for i := range want {
		want[i] = 255 - want[i]
	}
	if !bytes.Equal(got[0].images, want) {
		t.Errorf("the inverted pixels: %s; want 255 less Eval's", archivetest.Difference(got[0].images, want))
	}
}
