package imagecapi

import (
	"errors"
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
		"Decode":                     Decode(nil, nil, &Geometry{WindowWidth: 10, WindowHeight: 10}, make([]byte, 299), 30),
		"Decode, stride under a row": Decode(nil, nil, &Geometry{WindowWidth: 10, WindowHeight: 10}, make([]byte, 300), 29),
		"Decode, no window":          Decode(nil, nil, &Geometry{}, nil, 0),
		"Decode, overflow":           Decode(nil, nil, &Geometry{WindowWidth: math.MaxInt32, WindowHeight: 2}, make([]byte, 100), math.MaxInt),
		"Resize, source":             Resize(nil, make([]byte, 11), 2, 2, 6, &Geometry{WindowWidth: 1, WindowHeight: 1}, make([]byte, 3), 3),
		"Resize, width over int32":   Resize(nil, make([]byte, 12), 1<<32+2, 2, 6, &Geometry{WindowWidth: 1, WindowHeight: 1}, make([]byte, 3), 3),
	} {
		t.Run(name, func(t *testing.T) {
			if !errors.Is(err, CodeInvalidArgument) {
				t.Errorf("got %v, want an invalid argument", err)
			}
		})
	}
}
