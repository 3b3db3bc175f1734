package train_test

import (
	"errors"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/resident"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

var flatSteps = flag.Int("flat-steps", 10_000, "steps of TestStepsKeepMemoryFlat on the CPU")

// usage holds a process's resource usage.
type usage struct {
	threads, tensors    int64
	caught              int64
	native              int64 // resident bytes outside the Go heap
	allocated, reserved int64 // on the GPU
}

// use reads the current usage. If collect is true, it runs Go's garbage collector first.
func use(t *testing.T, device cuda.Device, collect bool) usage {
	t.Helper()
	if collect {
		debug.FreeOSMemory()
	}
	var u usage
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	u.threads, u.native = int64(len(tasks)), native(t)
	u.tensors, u.caught = torch.LiveTensors(), torch.Caught()
	if device != cuda.CPU {
		if err := device.Synchronize(); err != nil {
			t.Fatal(err)
		}
		m, err := device.Memory()
		if err != nil {
			t.Fatal(err)
		}
		u.allocated, u.reserved = m.Allocated, m.Reserved
	}
	return u
}

// native returns the resident bytes of the process outside the Go heap. Subtracting the heap size
// that the Go runtime reports would be wrong: it includes pages that were never touched and so are
// not resident.
func native(t *testing.T) int64 {
	t.Helper()
	mappings, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	// Mappings near a Go object belong to Go's heap. Mappings made by C are far from it.
	const near = 64 << 30
	object := uint64(uintptr(unsafe.Pointer(new([16]byte))))
	var sum int64
	count := false
	for line := range strings.Lines(string(mappings)) {
		fields := strings.Fields(line)
		if fields[0] == "Rss:" && count {
			n, err := strconv.ParseInt(fields[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += n << 10
		} else if first, _, ok := strings.Cut(fields[0], "-"); ok {
			address, err := strconv.ParseUint(first, 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			count = address > object+near || address < object-near
		}
	}
	return sum
}

// Threads, tensors and memory stay constant over thousands of steps. The test runs without Go's
// garbage collector, to prove that freeing does not depend on it. It also runs with the collector,
// at random moments.
func TestStepsKeepMemoryFlat(t *testing.T) {
	for _, collector := range []string{"off", "at random"} {
		steps := *flatSteps
		if collector == "at random" {
			steps /= 4 // enough steps for hundreds of collections
		}
		t.Run("CPU, GC "+collector, func(t *testing.T) { keepFlat(t, cuda.CPU, false, collector == "off", steps) })
		t.Run("GPU, GC "+collector, func(t *testing.T) {
			cudatest.RequireGPUs(t, 1)
			keepFlat(t, cuda.Device(0), false, collector == "off", 10_000)
		})
		t.Run("GPU with a graph, GC "+collector, func(t *testing.T) {
			cudatest.RequireGPUs(t, 1)
			keepFlat(t, cuda.Device(0), true, collector == "off", 10_000)
		})
	}
}

// startThreads computes on as many OS threads as may be inside LibTorch at once, because the
// goroutine that runs the steps may move to another thread after a garbage collection. On the CPU,
// OpenMP keeps a team of threads for every computing thread. On a GPU, each thread has a cuBLAS
// handle. Creating one briefly takes workspace memory, which the allocator then keeps.
func startThreads(t *testing.T, device cuda.Device) {
	t.Helper()
	ones, err := torch.Ones(device, torch.Float32, 512, 512)
	if err != nil {
		t.Fatal(err)
	}
	defer ones.Close()
	errs := make([]error, 2*runtime.NumCPU()+8)
	var locked, done sync.WaitGroup
	locked.Add(len(errs))
	for i := range errs {
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			locked.Done()
			locked.Wait() // gives every goroutine a separate thread
			sum, product := ones.Add(ones), ones.MM(ones)
			errs[i] = errors.Join(sum.Err(), sum.Close(), product.Err(), product.Close())
		})
	}
	done.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func keepFlat(t *testing.T, device cuda.Device, graph, off bool, steps int) {
	if testing.Short() {
		steps = min(steps, 1000)
	}
	s := newSmall(t, device)
	startThreads(t, device)
	step, err := train.NewStepper(train.StepperOptions{Model: s.net, Optimizer: s.opt, ClipNorm: 1, Graph: graph})
	if err != nil {
		t.Fatal(err)
	}
	defer step.Close()
	// Garbage collections run during the steps, and stop before the test ends.
	collect, collected := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(collected)
		for range collect {
			runtime.GC()
		}
	}()
	defer func() { <-collected }()
	defer close(collect)
	if off {
		defer debug.SetGCPercent(debug.SetGCPercent(-1))
	}
	rng := rand.New(rand.NewPCG(1, 2))
	run := func(n int) {
		t.Helper()
		for range n {
			if !off && rng.IntN(20) == 0 {
				select {
				case collect <- struct{}{}:
				default: // running
				}
			}
			turn := torch.NewScope("step")
			_, _, err := step.Step(s.x.In(turn), s.y.In(turn))
			if err := errors.Join(err, turn.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
	run(steps / 5)
	before := use(t, device, !off)
	run(steps)
	after := use(t, device, !off)
	t.Logf("before %+v, after %d more steps %+v", before, steps, after)
	if after.tensors != before.tensors || after.caught != before.caught {
		t.Errorf("%d tensors live after the steps, %d before, and the collector freed %d", after.tensors,
			before.tensors, after.caught-before.caught)
	}
	// Go starts a thread when another thread blocks in a call, so a few may be missing from the
	// first count.
	if after.threads > before.threads+8 {
		t.Errorf("%d threads after the steps, %d before, want at most %v",
			after.threads, before.threads, before.threads+8)
	}
	if grown := after.native - before.native; grown > 8<<20 {
		t.Errorf("the process has %d KiB more that are not Go's, want at most %d", grown>>10, 8<<10)
	}
	if after.allocated != before.allocated || after.reserved > before.reserved {
		t.Errorf("device memory: %d bytes allocated and %d reserved, %d and %d before", after.allocated,
			after.reserved, before.allocated, before.reserved)
	}
}

// exhausted is an optimizer that can make memory run out before its step.
type exhausted struct {
	optim.Optimizer
	step func() // called before the optimizer's step
}

func (e *exhausted) Step() error {
	if e.step != nil {
		e.step()
	}
	return e.Optimizer.Step()
}

// If memory runs out in the forward pass, the backward pass or the optimizer's step, the error is
// ErrOutOfMemory. The step changes no parameter and leaves no gradient and no memory. Training
// continues with a smaller batch, and its parameters equal the parameters of a run without the
// failure.
func TestOutOfMemoryInAStep(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	device := cuda.Device(0)
	for _, phase := range []string{"forward", "backward", "step"} {
		t.Run(phase, func(t *testing.T) {
			want := outOfMemory(t, device, "")
			got := outOfMemory(t, device, phase)
			for i := range want {
				if math.Abs(got[i]-want[i]) > 1e-5*math.Abs(want[i]) {
					t.Errorf("the sum of parameter %d is %v, and without a failure %v", i, got[i], want[i])
				}
			}
		})
	}
}

// outOfMemory makes a step on a large batch in which memory runs out in the given phase ("" for
// none), and then three steps on a small batch. It returns the sum of each parameter.
func outOfMemory(t *testing.T, device cuda.Device, phase string) []float64 {
	t.Helper()
	const width, large, few = 1024, 16384, 8 // a parameter of 4 MiB, activations of 64 MiB
	if err := torch.ManualSeed(3); err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("test")
	defer scope.Close()
	net := nn.NewSequential(nn.NewLinear(width, width, nn.LinearOptions{}), nn.NewReLU(),
		nn.NewLinear(width, width, nn.LinearOptions{}))
	defer nn.Close(net)
	if err := nn.To(net, device); err != nil {
		t.Fatal(err)
	}
	opt, err := optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{LR: 0.01})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	restore, filled := func() {}, torch.NewScope("filled")
	defer filled.Close()
	// This also fills the allocator's unused reserve.
	exhaust := func() {
		restore = cudatest.OutOfMemory(t, device)
		for size := int64(64 << 20); size >= 1<<20; size /= 2 {
			for {
				x, err := torch.Empty(device, torch.Uint8, size)
				if err != nil {
					break
				}
				filled.Own(x)
			}
		}
	}
	o := &exhausted{Optimizer: opt}
	armed := false
	step, err := train.NewStepper(train.StepperOptions{Model: net, Optimizer: o,
		Loss: func(output *torch.Tensor, _ []*torch.Tensor) *torch.Tensor {
			loss := output.Square().Mean()
			if armed && phase == "backward" {
				exhaust()
			}
			return loss
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer step.Close()
	batch := func(n int64) *torch.Tensor {
		x, err := torch.Ones(device, torch.Float32, n, width)
		if err != nil {
			t.Fatal(err)
		}
		return scope.Own(x)
	}
	small := batch(few)
	if phase != "" {
		x := batch(large)
		before := use(t, device, false)
		switch armed = true; phase {
		case "forward":
			exhaust()
		case "step":
			o.step = exhaust
		}
		turn := torch.NewScope("step")
		_, _, err := step.Step(x.In(turn))
		if !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("%s: %v, want ErrOutOfMemory", phase, err)
		}
		turn.Close()
		restore()
		filled.Close()
		armed, o.step = false, nil
		if after := use(t, device, false); after.tensors != before.tensors || after.allocated > before.allocated {
			t.Errorf("the failed step left tensors or memory: %+v, before %+v", after, before)
		}
		for i, p := range nn.Parameters(net) {
			if g := p.Grad(); g != nil {
				t.Errorf("the failed step left a gradient of parameter %d, g %v, want nil", i, g)
				g.Close()
			}
		}
	}
	for range 3 {
		turn := torch.NewScope("step")
		_, _, err := step.Step(small.In(turn))
		if err := errors.Join(err, turn.Close()); err != nil {
			t.Fatal(err)
		}
	}
	return sums(t, net)
}

// sums returns the sum of each parameter.
func sums(t *testing.T, net nn.Module) (all []float64) {
	t.Helper()
	scope := torch.NewScope("sums")
	defer scope.Close()
	for _, p := range nn.Parameters(net) {
		sum, err := p.NoGrad().In(scope).Sum().Float64()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, sum)
	}
	return all
}

// rescaled multiplies its input by a parameter and applies a linear layer. If huge is set, the
// parameter's gradient needs more memory than any machine has, 256 TiB. That gradient is computed
// after the gradients of the layer.
type rescaled struct {
	scale *torch.Tensor
	layer *nn.Linear
	huge  bool
}

func (s *rescaled) Forward(x *torch.Tensor) *torch.Tensor {
	scale := s.scale
	if s.huge {
		expanded := s.scale.Expand(1 << 46)
		defer expanded.Close() // it is not in a scope
		scale = expanded.Narrow(0, 0, 1)
		defer scale.Close()
	}
	return s.layer.Forward(x.Mul(scale))
}

func (s *rescaled) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "scale", Tensor: s.scale}},
		Modules: []nn.Child{{Name: "layer", Module: s.layer}}}
}

// TestOutOfMemoryOnTheCPU is TestOutOfMemoryInAStep on the CPU. The passes request more memory than
// any machine has.
func TestOutOfMemoryOnTheCPU(t *testing.T) {
	for _, phase := range []string{"forward", "backward", "step"} {
		t.Run(phase, func(t *testing.T) {
			s := newSmall(t, cuda.CPU)
			net := &rescaled{scale: nn.NewParameter(nn.Constant(1), 1), layer: nn.NewLinear(6, 4, nn.LinearOptions{})}
			defer nn.Close(net)
			// In the phase "step", this parameter gets a gradient after the other parameters. The
			// optimizer's state for it then needs more memory than there is.
			const elements, room = 1 << 26, 128 << 20
			vast, err := torch.Zeros(cuda.CPU, torch.Float32, elements)
			if err != nil {
				t.Fatal(err)
			}
			defer vast.Close()
			slope := kept(t, vast.Clone())
			defer slope.Close()
			if err := vast.SetRequiresGrad(true); err != nil {
				t.Fatal(err)
			}
			opt, err := optim.NewAdamW(append(nn.Parameters(net), vast), optim.AdamWOptions{LR: 0.1})
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			o := &exhausted{Optimizer: opt}
			armed := false
			step, err := train.NewStepper(train.StepperOptions{Model: net, Optimizer: o,
				Loss: func(output *torch.Tensor, targets []*torch.Tensor) *torch.Tensor {
					if armed && phase == "forward" {
						return output.Sum().Expand(1 << 46).Clone().Sum()
					}
					return output.CrossEntropy(targets[0])
				}})
			if err != nil {
				t.Fatal(err)
			}
			defer step.Close()
			losses := s.losses(t, step, 2)
			weights := sums(t, net)
			live := torch.LiveTensors()
			armed, net.huge = true, phase == "backward"
			restore := func() error { return nil }
			if phase == "step" {
				o.step = func() {
					if err := vast.SetGrad(slope); err != nil {
						t.Error(err)
					}
					var err error
					if restore, err = resident.Limit(room); err != nil {
						t.Fatal(err)
					}
				}
			}
			turn := torch.NewScope("step")
			_, _, err = step.Step(s.x.In(turn), s.y.In(turn))
			if err := restore(); err != nil {
				t.Fatal(err)
			}
			if !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Errorf("%v, want ErrOutOfMemory", err)
			}
			turn.Close()
			if now := torch.LiveTensors(); now > live {
				t.Errorf("the failed step left %d tensors, want 0", now-live)
			}
			for _, p := range append(nn.NamedParameters(net), torch.Named{Name: "vast", Tensor: vast}) {
				if g := p.Tensor.Grad(); g != nil {
					t.Errorf("the failed step left a gradient of %s, g %v, want nil", p.Name, g)
					g.Close()
				}
			}
			if now := sums(t, net); !slices.Equal(now, weights) {
				t.Errorf("the failed step changed parameters: their sums are %v, before %v", now, weights)
			}
			armed, net.huge, o.step = false, false, nil
			if more := s.losses(t, step, 1); !(more[0] < losses[1]) {
				t.Errorf("losses %v, after the failure %v", losses, more)
			}
		})
	}
}
