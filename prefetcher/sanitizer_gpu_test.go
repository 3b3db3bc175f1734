//go:build linux

package prefetcher

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
)

// The sanitizer finds a batch that is used on a stream without a call of Use, and one that is still
// used when its slot is filled again. It names the missing call of Use.
func TestSanitizerFindsBatchesOfOtherStreams(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, c := range []struct {
		name    string
		use     bool // tells the batch the stream
		wait    bool // the stream waits for the loop's stream, which the batch knows
		missing bool
	}{
		{"the stream is not told", false, false, true},
		{"the stream waits, and its work outlasts the turn", false, true, true},
		{"the stream is told", true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := cudatest.StartSanitizer(t)
			p := newFeed(t, &floatSource{rawSource: rawSource{batch: 4, samples: 64}}, Options{Device: 0, Depth: 2})
			side, err := cuda.NewOwnedStream(0, cuda.StreamOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for b, err := range p.Epoch(t.Context(), 0) {
				if err != nil {
					t.Fatal(err)
				}
				if c.use {
					err = b.Use(side.Stream)
				} else if c.wait {
					err = side.Wait(cuda.DefaultStream(0))
				}
				if err != nil {
					t.Fatal(err)
				}
				err = cuda.WithStream(side.Stream, func() error { return b.Images.MulScalar(2).Err() })
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := cuda.Device(0).Synchronize(); err != nil {
				t.Fatal(err)
			}
			closeFeed(t, p)
			side.Close()
			named := 0
			for _, f := range s.Findings() {
				if f.Kind.Note() {
					continue
				}
				if strings.HasPrefix(f.Missing, "batch.Use(") &&
					strings.HasSuffix(f.Where.File, "sanitizer_gpu_test.go") {
					named++
				}
				if !c.missing {
					t.Errorf("found in a correct program:\n%v", &f)
				}
			}
			if c.missing && named == 0 {
				t.Errorf("no finding names batch.Use: %v", s.Findings())
			}
		})
	}
}
