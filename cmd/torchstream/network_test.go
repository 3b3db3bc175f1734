//go:build linux && cgo

package main

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/transform"
)

func TestPackageInterpolation(t *testing.T) {
	for name, want := range map[string]transform.Interpolation{"": transform.Bilinear, "bilinear": transform.Bilinear,
		"bicubic": transform.Bicubic, "nearest": transform.Nearest, "lanczos": -1} {
		n := network{transform: transform.Eval(36, 32)}
		err := (&networkOptions{}).setImages(&n, map[string]string{"images": `{"resize": 36, "interpolation": "` + name + `"}`})
		switch {
		case want < 0:
			if err == nil || !strings.Contains(err.Error(), `the interpolation "lanczos"`) {
				t.Errorf("%q: got %v, want an error that names it", name, err)
			}
		case err != nil || n.transform.Interpolation != want:
			t.Errorf("%q: got %v, %v, want %v", name, n.transform.Interpolation, err, want)
		}
	}
}
