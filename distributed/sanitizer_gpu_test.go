//go:build linux

package distributed

import (
	"errors"
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func init() { workers["sanitizer on GPUs"] = onOwnGPU(sanitizerOnGPUs) }

// The stream sanitizer sees the reduction of gradients. It reports a stream that reads gradients
// without waiting for the reduction.
func TestGPUSanitizerSeesTheReduction(t *testing.T) { onGPUs(t, "sanitizer on GPUs") }

func sanitizerOnGPUs(g *Group) error {
	if cuda.RunningSanitizer() != nil {
		return nil // with TORCHSTREAM_SANITIZE, a sanitizer runs that treats findings as errors
	}
	d := g.Device()
	net, err := smallNetOn(d, 1)
	if err != nil {
		return err
	}
	defer nn.Close(net)
	parallel, err := NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets})
	if err != nil {
		return err
	}
	defer parallel.Close()
	side, err := cuda.NewOwnedStream(d, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer side.Close()
	read := func() (err error) {
		for _, p := range nn.Parameters(net) {
			grad := p.Grad()
			sum := grad.Sum()
			err = errors.Join(err, sum.Err(), sum.Close(), grad.Close())
		}
		return err
	}
	// pass returns the sanitizer's findings in a pass whose gradients are read on the side stream.
	pass := func(wait bool) (found []cuda.Finding, err error) {
		if err := d.Synchronize(); err != nil {
			return nil, err
		}
		s, err := cuda.StartSanitizer(cuda.SanitizerOptions{})
		if err != nil {
			return nil, err
		}
		defer s.Stop()
		scope := torch.NewScope("pass")
		defer scope.Close()
		loss, err := lossOn(d, net, scope, g.Rank())
		if err == nil {
			err = parallel.Backward(loss)
		}
		if wait {
			err = errors.Join(err, side.Wait(cuda.DefaultStream(d)))
		}
		err = errors.Join(err, cuda.WithStream(side.Stream, read), d.Synchronize(),
			torch.ClearGrads(nn.Parameters(net)...))
		for _, f := range s.Findings() {
			if !f.Kind.Note() {
				found = append(found, f)
			}
		}
		return found, err
	}
	for range 3 { // the buckets are rearranged after the first pass
		found, err := pass(true)
		if err != nil {
			return err
		}
		if len(found) > 0 {
			return fmt.Errorf("found in a correct pass:\n%v", &found[0])
		}
		if found, err = pass(false); err != nil {
			return err
		}
		races := 0
		for i := range found {
			if found[i].Kind == cuda.FindingRace && found[i].First.Write {
				races++
			}
		}
		if races == 0 {
			return errors.New("gradients are read while they are reduced, and nothing is found")
		}
	}
	return nil
}
