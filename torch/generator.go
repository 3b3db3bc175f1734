package torch

import (
	"runtime"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// Generator is an independent sequence of random numbers, for operators with a generator argument.
// Without a Generator, operators draw from the device's default generator, which the whole process
// shares (see [ManualSeed]). Any number of goroutines may use one Generator. Each operator then
// draws all its numbers at once.
//
// A graph captures draws from any number of generators of its GPU. Each replay draws the numbers
// that follow. In a captured function, the methods that read or set a GPU's generator return
// cuda.ErrCapture. During a capture by another goroutine they wait for its end.
type Generator struct {
	made    origin.Origin
	device  cuda.Device
	cleanup runtime.Cleanup
	mu      sync.Mutex      // calls do not hold it, since they may wait for the end of a capture
	c       *capi.Generator // guarded by mu, as are the following fields; nil when it is freed
	calls   int             // number of running calls
	closed  bool            // the last call frees c
}

// NewGenerator returns a generator for operators on the device. A CPU operator draws the same
// numbers from it as PyTorch from torch.Generator().manual_seed(seed). The caller closes it.
func NewGenerator(device cuda.Device, seed uint64) (*Generator, error) {
	return newGenerator("NewGenerator", device,
		func() (*capi.Generator, error) { return capi.NewGenerator(int32(device), seed) })
}

// DefaultGenerator returns a handle to the device's default generator. Close closes the handle, not
// the generator.
func DefaultGenerator(device cuda.Device) (*Generator, error) {
	return newGenerator("DefaultGenerator", device,
		func() (*capi.Generator, error) { return capi.DefaultGenerator(int32(device)) })
}

func newGenerator(op string, device cuda.Device, get func() (*capi.Generator, error)) (*Generator, error) {
	err := capi.Check()
	if err == nil && (device < cuda.CPU || device >= 0 && int(device) >= cuda.DeviceCount()) {
		err = noDevice(device)
	}
	var c *capi.Generator
	if err == nil {
		c, err = get()
	}
	if err != nil {
		return nil, opError(op, nil, err)
	}
	g := &Generator{made: origin.New("generator"), device: device, c: c}
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

func (g *Generator) use(op string, fn func(*capi.Generator) error) error {
	c, err := g.acquire()
	if err == nil {
		defer g.release()
		err = fn(c)
	}
	if err != nil {
		return opError("Generator."+op, nil, err)
	}
	return nil
}

// Device returns the device of the operators that may draw from g.
func (g *Generator) Device() cuda.Device {
	if g == nil {
		return cuda.CPU
	}
	return g.device
}

// String returns a name for messages, such as "generator on cuda:0".
func (g *Generator) String() string {
	if g == nil {
		return "no generator"
	}
	return "generator on " + g.Device().String()
}

// Seed restarts g with the sequence of the seed.
func (g *Generator) Seed(seed uint64) error {
	return g.use("Seed", func(c *capi.Generator) error { return capi.SeedGenerator(c, seed) })
}

// InitialSeed returns the seed of the sequence.
func (g *Generator) InitialSeed() (seed uint64, err error) {
	err = g.use("InitialSeed", func(c *capi.Generator) (err error) {
		seed, err = capi.GeneratorSeed(c)
		return err
	})
	return seed, err
}

// Offset returns the position of a GPU's generator in the sequence of its seed: how many numbers
// each thread of a kernel has drawn. The CPU's generator has no offset: for it, Offset returns an
// error.
func (g *Generator) Offset() (offset uint64, err error) {
	err = g.use("Offset", func(c *capi.Generator) (err error) {
		offset, err = capi.GeneratorOffset(c)
		return err
	})
	return offset, err
}

// SetOffset sets the offset of a GPU's generator: 0, or another multiple of 4.
func (g *Generator) SetOffset(offset uint64) error {
	return g.use("SetOffset", func(c *capi.Generator) error { return capi.SetGeneratorOffset(c, offset) })
}

// State returns the seed and the position in its sequence, as uint8 on the CPU: the bytes of
// PyTorch's Generator.get_state. The caller closes the tensor, and may save it in a checkpoint.
func (g *Generator) State() (*Tensor, error) {
	var state *capi.Tensor
	err := g.use("State", func(c *capi.Generator) (err error) {
		state, err = capi.ReadGenerator(c)
		return err
	})
	if err != nil {
		return failed(err), err
	}
	return provenance{}.tensor(state), nil
}

// SetState restores a State. g then draws the numbers that followed the State. It copies state.
func (g *Generator) SetState(state *Tensor) error {
	return state.use("Generator.SetState", func(t *capi.Tensor) error {
		return g.use("SetState", func(c *capi.Generator) error { return capi.WriteGenerator(c, t) })
	})
}

// Close frees the generator; if calls are using it, the last of them frees it. Closing again does
// nothing. The error is always nil.
func (g *Generator) Close() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	if g.c != nil && !g.closed {
		g.cleanup.Stop()
		g.made.Closed()
		g.closed = true
	}
	g.free()
	return nil
}

// free unlocks mu, and frees the C generator if it is closed and no call uses it.
func (g *Generator) free() {
	c := g.c
	if !g.closed || g.calls > 0 || c == nil {
		g.mu.Unlock()
		return
	}
	g.c = nil
	g.mu.Unlock()
	capi.FreeGenerator(c)
}

// acquire returns the C generator. A call of release must follow unless acquire fails.
func (g *Generator) acquire() (*capi.Generator, error) {
	if g == nil {
		return nil, invalid("the generator is nil")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.c == nil || g.closed {
		return nil, closedError("the generator was closed, or not made by NewGenerator")
	}
	g.calls++
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
		g.mu.Lock()
		g.calls--
		g.free()
	}
}
