package imagecapi

import (
	"bytes"
	"errors"
	"image"
	"image/jpeg"
	"math"
	"testing"
)

func TestImageLibraryHasTheExpectedABIVersion(t *testing.T) {
	if err := Check(); err != nil {
		t.Fatal(err)
	}
}

func TestLengthsAreCheckedBeforeC(t *testing.T) {
	for name, err := range map[string]error{
		"Decode": Decode(nil, nil, &Geometry{WindowWidth: 10, WindowHeight: 10},
			make([]byte, 299), 30),
		"Decode, stride under a row": Decode(nil, nil, &Geometry{WindowWidth: 10, WindowHeight: 10},
			make([]byte, 300), 29),
		"Decode, no window": Decode(nil, nil, &Geometry{}, nil, 0),
		"Decode, overflow": Decode(nil, nil,
			&Geometry{WindowWidth: math.MaxInt32, WindowHeight: 2}, make([]byte, 100), math.MaxInt),
		"Resize, source": Resize(nil, make([]byte, 11), 2, 2, 6,
			&Geometry{WindowWidth: 1, WindowHeight: 1}, make([]byte, 3), 3),
		"Resize, width over int32": Resize(nil, make([]byte, 12), 1<<32+2, 2, 6,
			&Geometry{WindowWidth: 1, WindowHeight: 1}, make([]byte, 3), 3),
	} {
		t.Run(name, func(t *testing.T) {
			if !errors.Is(err, CodeInvalidArgument) {
				t.Errorf("got %v, want an invalid argument", err)
			}
		})
	}
}

func TestPlanSegmentsNeedsAProof(t *testing.T) {
	d, err := NewDecoder(0)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeDecoder(d)
	picture := image.NewRGBA(image.Rect(0, 0, 200, 150))
	for i := range picture.Pix {
		picture.Pix[i] = byte(i * i / 7)
	}
	var file bytes.Buffer
	if err := jpeg.Encode(&file, picture, nil); err != nil {
		t.Fatal(err)
	}
	blob := make([]byte, 1<<16)
	n, proof, err := MakeEntries(d, file.Bytes(), 4, blob)
	if err != nil || n == 0 {
		t.Fatalf("MakeEntries: %d bytes, %v", n, err)
	}
	blob = blob[:n]
	g := &Geometry{CropX: 10, CropY: 20, CropWidth: 100, CropHeight: 80, ResizeWidth: 50, ResizeHeight: 40,
		WindowWidth: 50, WindowHeight: 40}
	size, err := PlanSegments(d, file.Bytes(), g, blob, &proof, nil)
	if err != nil || size == 0 {
		t.Fatalf("a plan of %d bytes, %v", size, err)
	}
	if n, err := PlanSegments(d, file.Bytes(), g, blob, &proof, make([]byte, size)); n != size || err != nil {
		t.Errorf("the plan takes %d bytes (%v), and was said to take %d", n, err, size)
	}
	for _, unproven := range []uint64{0, proof ^ 1} {
		if n, err := PlanSegments(d, file.Bytes(), g, blob, &unproven, nil); n != 0 || err != nil {
			t.Errorf("with the token %d: a plan of %d bytes, %v, want 0, nil", unproven, n, err)
		}
	}
	g.CropX = 150
	if _, err := PlanSegments(d, file.Bytes(), g, blob, &proof, nil); !errors.Is(err, CodeInvalidArgument) {
		t.Errorf("a crop outside of the image: %v, want CodeInvalidArgument", err)
	}
}
