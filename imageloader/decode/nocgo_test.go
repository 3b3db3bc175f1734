//go:build !linux || !cgo

package decode_test

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/decode"
)

func TestDecoderWithoutCSaysWhatIsMissing(t *testing.T) {
	d, err := decode.New(decode.Options{})
	if d != nil {
		t.Errorf("got decoder %v, want none", d)
	}
	if want := "built for " + runtime.GOOS + "/" + runtime.GOARCH; !errors.Is(err, decode.ErrNoLibrary) ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want decode.ErrNoLibrary with %q", err, want)
	}
}
