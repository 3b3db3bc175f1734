package serve_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// If the scope has ended, Batch returns the scope's error, wherever the images are decoded. It
// leaves no tensor behind, and the decoder serves later calls.
func TestBatchInAClosedScopeIsAnError(t *testing.T) {
	for _, device := range devices() {
		o := serve.Options{Device: device, Concurrent: 1, Decode: decode.Options{Transform: transform.Eval(40, 32)}}
		host, units := newDecoder(t, o), newUnitDecoder(t, o)
		jpegs := planned(t, units, photos(t))[:2]
		progressive, err := os.ReadFile("../cshim/test/data/progressive.jpg")
		if err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]struct {
			d      *serve.Decoder
			images [][]byte
		}{
			"the host decodes":          {host, jpegs},
			"the device decodes":        {units, jpegs},
			"the device decodes a part": {units, [][]byte{jpegs[0], progressive}},
		} {
			before := torch.LiveTensors()
			scope := torch.NewScope("ended request")
			scope.Close()
			x, err := c.d.Batch(t.Context(), scope, c.images...)
			if x != nil || !errors.Is(err, torch.ErrClosed) || !strings.HasPrefix(err.Error(), "serve: ") {
				t.Errorf("%s, %v: got %v, error %v, want no tensor and torch.ErrClosed", name, device, x, err)
			}
			if n := torch.LiveTensors(); n != before {
				t.Errorf("%s, %v: got %d open tensors, want the %d from before", name, device, n, before)
			}
			x, err = c.d.Batch(t.Context(), nil, c.images...)
			if err != nil {
				t.Fatalf("%s, %v: got error %v of a later call, want none", name, device, err)
			}
			x.Close()
		}
	}
}

// The zero value of Options.Device is the first GPU, or the CPU without GPUs.
func TestDefaultDeviceIsTheFirstGPUOrTheCPU(t *testing.T) {
	list := devices()
	if got, want := newDecoder(t, serve.Options{}).Device(), list[len(list)-1]; got != want {
		t.Errorf("got device %v, want %v", got, want)
	}
}
