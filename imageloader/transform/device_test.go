package transform

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"image"
	"image/jpeg"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// deviceClaim is a step, and whether the GPU runs it when the GPU decodes the images.
type deviceClaim struct {
	op  Op
	gpu bool
}

// deviceClaims has examples of every step, by type.
func deviceClaims() map[string][]deviceClaim {
	nothing := Func(func(*rand.Rand, *Pixels) error { return nil })
	gpu := func(op Op) []deviceClaim { return []deviceClaim{{op, true}} }
	host := func(op Op) []deviceClaim { return []deviceClaim{{op, false}} }
	tilt := [2]float64{-40, 40}
	return map[string][]deviceClaim{
		"AugMix": append(gpu(AugMix{}), gpu(AugMix{MixtureWidth: 5, ChainDepth: 4})...),
		"AutoAugment": append(gpu(AutoAugment{}),
			gpu(AutoAugment{Policy: SVHNPolicy, Interpolation: Bilinear})...),
		"CenterCrop":            append(gpu(CenterCrop{Size: 32}), host(CenterCrop{Size: 20})...),
		"ColorJitter":           gpu(ColorJitter{Brightness: 0.4, Contrast: 0.4, Saturation: 0.4, Hue: 0.1}),
		"Func":                  host(nothing),
		"GaussianBlur":          append(gpu(GaussianBlur{}), gpu(GaussianBlur{KernelSize: [2]int{5, 63}})...),
		"GaussianNoise":         host(GaussianNoise{}),
		"Grayscale":             gpu(Grayscale{}),
		"Pad":                   host(Pad{Padding: [4]int{1, 2, 3, 4}}),
		"RandAugment":           append(gpu(RandAugment{}), gpu(RandAugment{NumOps: 4, Interpolation: Bilinear})...),
		"RandomAdjustSharpness": gpu(RandomAdjustSharpness{SharpnessFactor: 2}),
		"RandomAffine": gpu(RandomAffine{Degrees: tilt, Scale: [2]float64{0.5, 2},
			Interpolation: Bilinear}),
		"RandomApply": append(gpu(RandomApply{Ops: []Op{Grayscale{}}}),
			host(RandomApply{Ops: []Op{Grayscale{}, GaussianNoise{}}})...),
		"RandomAutocontrast":       gpu(RandomAutocontrast{}),
		"RandomChannelPermutation": gpu(RandomChannelPermutation{}),
		"RandomChoice": append(gpu(RandomChoice{Ops: []Op{Grayscale{}}}),
			host(RandomChoice{Ops: []Op{GaussianNoise{}, nothing}})...),
		"RandomCrop": append(gpu(RandomCrop{Padding: [4]int{4, 4, 4, 4}, Mode: PadReflect}),
			host(RandomCrop{Size: 20})...),
		"RandomEqualize":       gpu(RandomEqualize{}),
		"RandomErasing":        append(gpu(RandomErasing{}), host(RandomErasing{Random: true})...),
		"RandomGrayscale":      gpu(RandomGrayscale{P: 0.5}),
		"RandomHorizontalFlip": gpu(RandomHorizontalFlip{}),
		"RandomInvert":         gpu(RandomInvert{}),
		"RandomOrder": append(gpu(RandomOrder{Ops: []Op{Grayscale{}}}),
			host(RandomOrder{Ops: []Op{Grayscale{}, nothing}})...),
		"RandomPerspective":        gpu(RandomPerspective{}),
		"RandomPhotometricDistort": gpu(RandomPhotometricDistort{}),
		"RandomPosterize":          gpu(RandomPosterize{Bits: 3}),
		"RandomRotation": append(gpu(RandomRotation{Degrees: tilt}),
			host(RandomRotation{Degrees: [2]float64{30, 40}, Expand: true})...),
		"RandomSolarize":     gpu(RandomSolarize{Threshold: 100}),
		"RandomVerticalFlip": gpu(RandomVerticalFlip{}),
		"TrivialAugmentWide": gpu(TrivialAugmentWide{}),
	}
}

// barePlan returns a plan of 32 x 32 pixels, with room for operations after it.
func barePlan(t *testing.T) []byte {
	t.Helper()
	d, err := imagecapi.NewDecoder(0)
	if err != nil {
		t.Skip(err)
	}
	defer imagecapi.FreeDecoder(d)
	picture := image.NewRGBA(image.Rect(0, 0, 200, 150))
	for i := range picture.Pix {
		picture.Pix[i] = byte(i * i / 7)
	}
	var file bytes.Buffer
	if err := jpeg.Encode(&file, picture, nil); err != nil {
		t.Fatal(err)
	}
	blob := make([]byte, 1<<16)
	n, proof, err := imagecapi.MakeEntries(d, file.Bytes(), 4, blob)
	if err != nil {
		t.Fatal(err)
	}
	g := &imagecapi.Geometry{CropWidth: 100, CropHeight: 80, ResizeWidth: 32, ResizeHeight: 32,
		WindowWidth: 32, WindowHeight: 32}
	memory := make([]uint64, 1<<14)
	plan := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(memory))), 8*len(memory))
	plan = plan[uintptr(unsafe.Pointer(&plan[0]))%16:] // memory of Go is aligned to 8 bytes
	if n, err = imagecapi.PlanSegments(d, file.Bytes(), g, blob[:n], &proof, plan); err != nil || n == 0 {
		t.Fatalf("a plan of %d bytes, %v, want no error, n not 0", n, err)
	}
	return plan
}

// TestGPURunsWhatDocsClaim: for each draw of a step, planning leaves all operations to the
// device, or none, as the claims say. The step's comment and its row in docs/imageloader.md must
// agree.
func TestGPURunsWhatDocsClaim(t *testing.T) {
	claims := deviceClaims()
	if steps := stepComments(t); len(claims) != len(steps) {
		t.Fatalf("claims of %v, and steps %v, want %v",
			slices.Sorted(maps.Keys(claims)), slices.Sorted(maps.Keys(steps)), len(steps))
	} else {
		for name, comment := range steps {
			checkClaim(t, name+"'s comment", comment, claims[name], "The step also runs on a GPU that decodes",
				"decoded on the host")
		}
	}
	for name, row := range docRows(t) {
		checkClaim(t, name+"'s row", row, claims[name], "GPU", "host")
	}
	pristine := barePlan(t)
	plan := barePlan(t)
	for name, examples := range claims {
		for _, c := range examples {
			if got := onDevice([]Op{c.op}, 32); got != c.gpu {
				t.Errorf("%s: a GPU runs every draw of %+v: %v, want %v", name, c.op, got, c.gpu)
			}
			drawn := 0
			for seed := range uint64(300) {
				copy(plan, pristine)
				gpu, some := plannedOps(t, c.op, seed, plan)
				if some {
					drawn++
				}
				if some && gpu != c.gpu {
					t.Errorf("%s, draw %d of %+v: a GPU runs it: %v", name, seed, c.op, gpu)
					break
				}
			}
			if drawn < 50 {
				t.Errorf("%s: %d of 300 draws do something, want at least 50", name, drawn)
			}
		}
	}
}

// plannedOps reports whether a GPU runs the operations that a step draws, and whether it draws any.
func plannedOps(t *testing.T, op Op, seed uint64, plan []byte) (gpu, some bool) {
	t.Helper()
	a := &Augmenter{t: &Transform{Size: 32, Ops: []Op{op}}}
	a.Draw(rand.New(rand.NewPCG(seed, 5)))
	some = len(a.program.ops)+len(a.program.calls) > 0
	if a.program.width != 32 || a.program.height != 32 {
		a.t.Ops = append(a.t.Ops, CenterCrop{Size: 32}) // planning refuses steps that change the size
		a.Draw(rand.New(rand.NewPCG(seed, 5)))
	}
	ops, ok := a.Operations()
	if !ok {
		return false, some
	}
	n, err := imagecapi.PlanAugment(plan, ops)
	if err != nil {
		t.Fatalf("%+v: %v, want no error", op, err)
	}
	return n > 0, some
}

func checkClaim(t *testing.T, what, text string, claims []deviceClaim, gpu, host string) {
	t.Helper()
	for _, c := range []struct {
		words string
		gpu   bool
	}{{gpu, true}, {host, false}} {
		want := slices.ContainsFunc(claims, func(claim deviceClaim) bool { return claim.gpu == c.gpu })
		if strings.Contains(text, c.words) != want {
			t.Errorf("%s has the words %q: %v, want %v", what, c.words, !want, want)
		}
	}
}

// stepComments returns the comments of the types that have a method draw.
func stepComments(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Skip("the sources are not here")
	}
	comments, steps := map[string]string{}, map[string]string{}
	fset := token.NewFileSet()
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if typ, ok := spec.(*ast.TypeSpec); ok {
						comments[typ.Name.Name] = strings.Join(strings.Fields(d.Doc.Text()), " ")
					}
				}
			case *ast.FuncDecl:
				if d.Recv != nil && d.Name.Name == "draw" {
					steps[d.Recv.List[0].Type.(*ast.Ident).Name] = ""
				}
			}
		}
	}
	for name := range steps {
		steps[name] = comments[name]
	}
	return steps
}

// docRows returns the second cell of the table of steps in docs/imageloader.md, by the names in the
// first cell. It has every step.
func docRows(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/imageloader.md")
	if os.IsNotExist(err) {
		t.Skip("the sources are not here")
	}
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "<!-- steps -->\n")
	if !found {
		t.Fatal("docs/imageloader.md has no <!-- steps -->, want a table after it")
	}
	rows := map[string]string{}
	for i, line := range strings.Split(table, "\n") {
		if !strings.HasPrefix(line, "|") {
			break
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if i < 2 || len(cells) != 2 {
			continue
		}
		for name := range strings.SplitSeq(cells[0], ",") {
			rows[strings.TrimSpace(name)] = cells[1]
		}
	}
	for name := range deviceClaims() {
		if rows[name] == "" {
			t.Errorf("the table of docs/imageloader.md has no %s", name)
		}
	}
	return rows
}
