package transform

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestBoxStepsEqualTorchvision compares the moves of boxes with torchvision's
// (internal/box/testdata/make_boxes.py).
func TestBoxStepsEqualTorchvision(t *testing.T) {
	data, err := os.ReadFile("testdata/boxes.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden map[string][2][]Box
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	pad := func(p *program, left, top, right, bottom int) {
		p.crop(-left, -top, p.width+left+right, p.height+top+bottom, PadConstant, Color{})
	}
	warp := func(p *program, to [4][2]int) {
		c, ok := perspective(32, 32, to)
		if !ok {
			t.Fatal("no perspective")
		}
		p.add(imagecapi.AugmentPerspective, fill(int32(Bilinear), nil), c[:]...)
	}
	turn := func(degrees float64, centre *[2]float64) func(p *program) {
		return func(p *program) { p.rotate(degrees, centre, false, Nearest, nil) }
	}
	steps := map[string]func(p *program){
		"horizontal flip":         func(p *program) { RandomHorizontalFlip{P: 1}.draw(rand.New(rand.NewPCG(1, 1)), p) },
		"vertical flip":           func(p *program) { RandomVerticalFlip{P: 1}.draw(rand.New(rand.NewPCG(1, 1)), p) },
		"rotation":                turn(33.5, nil),
		"rotation around a point": turn(-20, &[2]float64{4, 9}),
		"quarter turn":            turn(90, nil),
		"half turn":               turn(180, nil),
		"three quarters":          turn(270, nil),
		"affine": func(p *program) {
			p.affine(affine{angle: -20, translate: [2]float64{3, -5}, scale: 1.25, shear: [2]float64{5, -7}}, Nearest, nil)
		},
		"shear and crop": func(p *program) {
			p.affine(affine{scale: 0.5, shear: [2]float64{40, 0}}, Nearest, nil)
			pad(p, 9, 1, 2, 3)
			CenterCrop{Size: 32}.draw(nil, p)
		},
		"pad": func(p *program) { pad(p, 3, 5, 7, 1); CenterCrop{Size: 32}.draw(nil, p) },
		"crop and back": func(p *program) {
			p.crop(6, 4, 24, 20, PadConstant, Color{})
			pad(p, 4, 6, 4, 6)
		},
		"perspective":        func(p *program) { warp(p, [4][2]int{{3, 2}, {28, 5}, {25, 30}, {1, 27}}) },
		"strong perspective": func(p *program) { warp(p, [4][2]int{{12, 11}, {20, 3}, {29, 21}, {2, 25}}) },
		"two turns":          func(p *program) { turn(10, nil)(p); turn(10, nil)(p) },
	}
	if len(steps) != len(golden) {
		t.Errorf("%d steps are compared, torchvision has %d", len(steps), len(golden))
	}
	for name, step := range steps {
		a := Augmenter{t: &Transform{Size: 32}}
		a.program.reset(a.t)
		step(&a.program)
		in, want := golden[name][0], golden[name][1]
		if len(in) == 0 || len(in) != len(want) {
			t.Fatalf("%s: %d boxes and %d results", name, len(in), len(want))
		}
		for i, b := range in {
			b.Clamp(32, 32)
			a.MoveBox(&b)
			for k := range b {
				if !(math.Abs(b[k]-want[i][k]) <= 1e-4) { // torchvision computes in float32
					t.Errorf("%s of %v: got %v, want %v", name, in[i], b, want[i])
					break
				}
			}
		}
	}
}

// TestStepsWithoutBoxesAreRefused: steps that no boxes can follow are refused by name.
func TestStepsWithoutBoxesAreRefused(t *testing.T) {
	padding := [4]int{2, 2, 2, 2}
	for says, change := range map[string]func(*Transform){
		"field Mix": func(t *Transform) { t.Mix = []BatchOp{MixUp{}} },
		"field Ops[0] (transform.AugMix) adds up": func(t *Transform) { t.Ops = []Op{AugMix{}} },
		"field Ops[0] (transform.RandomApply) repeats pixels": func(t *Transform) {
			t.Ops = []Op{RandomApply{Ops: []Op{&RandomCrop{Padding: padding, Mode: PadReflect}}}}
		},
		"field Ops[1] (transform.Pad) repeats pixels": func(t *Transform) {
			t.Ops = []Op{RandomInvert{}, Pad{Padding: padding, Mode: PadEdge}, CenterCrop{Size: 32}}
		},
		"": func(t *Transform) {
			t.Ops = []Op{Pad{Padding: padding}, CenterCrop{Size: 32}, RandAugment{}, RandomErasing{}}
		},
	} {
		tr := Transform{Size: 32}
		change(&tr)
		c, err := Compile(tr)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.ForBoxes(); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("got error %v, want one with %q", err, says)
		}
	}
}
