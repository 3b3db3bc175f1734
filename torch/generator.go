package torch

import (
	"runtime"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// Generator is a sequence of random numbers of its own, for operators that take one. Without it
// they draw from the device's default generator, which the whole process shares (see [ManualSeed]).
// Any number of goroutines may use one Generator; each operator then draws its numbers at once. A
// captured function may not use one of a GPU: each replay would repeat its numbers.
type Generator struct {
	made    origin.Origin
	cleanup runtime.Cleanup
	mu      sync.RWMutex // held for reading by calls, so that Close waits for them
	c       *capi.Generator
}

// NewGenerator returns a generator for operators on the device. A CPU operator draws the same
// numbers from it as PyTorch from torch.Generator().manual_seed(seed). The caller closes it.
func NewGenerator(device cuda.Device, seed uint64) (*Generator, error) {
	err := capi.Check()
	if err == nil && (device < cuda.CPU || device >= 0 && int(device) >= cuda.DeviceCount()) {
		err = noDevice(device)
	}
	var c *capi.Generator
	if err == nil {
		c, err = capi.NewGenerator(int32(device), seed)
	}
	if err != nil {
		return nil, opError("NewGenerator", nil, err)
	}
	g := &Generator{made: origin.New("generator"), c: c}
	g.cleanup = runtime.AddCleanup(g, unreachableGenerator.free, unreachableGenerator{g.made, c})
	return g, nil
}

// unreachableGenerator holds the generator of a Generator that the garbage collector has found.
type unreachableGenerator struct {
	made origin.Origin
	c    *capi.Generator
}

func (u unreachableGenerator) free() {
	capi.FreeGenerator(u.c)
	u.made.Leaked()
	u.made.Closed()
}

// Seed starts the sequence of the seed.
func (g *Generator) Seed(seed uint64) error {
	c, err := g.acquire()
	if err != nil {
		return opError("Generator.Seed", nil, err)
	}
	defer g.mu.RUnlock()
	return capi.SeedGenerator(c, seed)
}

// Close frees the generator, after the calls that use it. Closing again does nothing. The error is
// always nil.
func (g *Generator) Close() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.c != nil {
		g.cleanup.Stop()
		capi.FreeGenerator(g.c)
		g.made.Closed()
		g.c = nil
	}
	return nil
}

// acquire returns the C generator. A call of g.mu.RUnlock must follow unless acquire fails.
func (g *Generator) acquire() (*capi.Generator, error) {
	if g == nil {
		return nil, invalid("the generator is nil")
	}
	g.mu.RLock()
	if g.c == nil {
		g.mu.RUnlock()
		return nil, closedError("the generator was closed, or not made by NewGenerator")
	}
	return g.c, nil
}

// arg returns the argument of an operator; nil is the default generator. A call of release must
// follow unless arg fails.
func (g *Generator) arg() (capi.Arg, error) {
	if g == nil {
		return noneArg(), nil
	}
	c, err := g.acquire()
	if err != nil {
		return capi.Arg{}, err
	}
	return capi.GeneratorArg(c), nil
}

func (g *Generator) release() {
	if g != nil {
		g.mu.RUnlock()
	}
}
