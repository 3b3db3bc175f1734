//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// seeding is locked while a goroutine sets a seed and draws its numbers, because ranks in one
// process share the generator.
var seeding sync.Mutex

// smallNet returns a network whose parameters fill several buckets of smallBuckets bytes.
func smallNet(seed uint64) (nn.Module, error) {
	seeding.Lock()
	defer seeding.Unlock()
	if err := torch.ManualSeed(seed); err != nil {
		return nil, err
	}
	net := nn.NewSequential(nn.NewLinear(6, 20, nn.LinearOptions{}), nn.NewTanh(),
		nn.NewLinear(20, 20, nn.LinearOptions{}), nn.NewTanh(),
		nn.NewLinear(20, 3, nn.LinearOptions{}))
	return net, nn.ToDType(net, torch.Float64)
}

const smallBuckets = 1000

// sample returns the inputs and targets of sample i.
func sample(i int) (x, y []float64) {
	for k := range 6 {
		x = append(x, math.Sin(float64(7*i+k)))
	}
	for k := range 3 {
		y = append(y, math.Cos(float64(3*i+k)))
	}
	return x, y
}

// batch returns the samples with the given numbers.
func batch(numbers []int) (x, y *torch.Tensor, err error) {
	var xs, ys []float64
	for _, i := range numbers {
		a, b := sample(i)
		xs, ys = append(xs, a...), append(ys, b...)
	}
	if x, err = torch.FromSlice(xs, int64(len(numbers)), 6); err != nil {
		return nil, nil, err
	}
	y, err = torch.FromSlice(ys, int64(len(numbers)), 3)
	return x, y, err
}

// dealt returns the numbers of a batch's samples that belong to rank r of n.
func dealt(first, size, r, n int) (mine []int) {
	for i := first; i < first+size; i++ {
		if i%n == r {
			mine = append(mine, i)
		}
	}
	return mine
}

// batchSizes has batches with fewer than 8 samples, and one with fewer than 3, for jobs of 8 and 3
// ranks.
var batchSizes = []int{16, 13, 16, 9, 5, 2}

// trainSmall trains on the samples of rank r of n in each batch. parallel is nil for one process.
func trainSmall(net nn.Module, parallel *DataParallel, r, n int) error {
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
	if err != nil {
		return err
	}
	defer opt.Close()
	at := 0
	for _, size := range batchSizes {
		mine := dealt(at, size, r, n)
		at += size
		turn := torch.NewScope("turn")
		var loss *torch.Tensor
		if len(mine) > 0 {
			x, y, err := batch(mine)
			if err != nil {
				return err
			}
			x, y = turn.Own(x), turn.Own(y)
			loss = net.Forward(x).MSELoss(y)
		}
		if parallel == nil {
			err = loss.Backward()
		} else {
			err = parallel.Backward(parallel.Weigh(loss, len(mine)))
		}
		if err == nil {
			err = opt.Step()
		}
		turn.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func weights(net nn.Module) ([]float64, error) {
	var all []float64
	for _, p := range nn.Parameters(net) {
		v, err := p.Float64s()
		if err != nil {
			return nil, err
		}
		all = append(all, v...)
	}
	return all, nil
}

func init() {
	workers["train"] = func(ctx context.Context) error {
		g, err := Init(ctx, patient)
		if err != nil {
			return err
		}
		defer g.Close()
		net, err := smallNet(uint64(g.Rank()) + 1) // only rank 0's seed has an effect
		if err != nil {
			return err
		}
		parallel, err := NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets})
		if err != nil {
			return err
		}
		defer parallel.Close()
		if err := trainSmall(net, parallel, g.Rank(), g.Size()); err != nil {
			return err
		}
		all, err := weights(net)
		if err != nil {
			return err
		}
		fmt.Println("weights", floats(all))
		return g.Close()
	}
}

// floats formats numbers without loss.
func floats(values []float64) string {
	var b strings.Builder
	for _, v := range values {
		b.WriteString(strconv.FormatFloat(v, 'x', -1, 64) + ",")
	}
	return b.String()
}

func parseFloats(t *testing.T, text string) (values []float64) {
	t.Helper()
	for field := range strings.SplitSeq(strings.TrimSuffix(text, ","), ",") {
		v, err := strconv.ParseFloat(field, 64)
		if err != nil {
			t.Fatal(err)
		}
		values = append(values, v)
	}
	return values
}

// difference returns the maximum difference between two lists of numbers.
func difference(a, b []float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	var d float64
	for i := range a {
		d = max(d, math.Abs(a[i]-b[i]))
		if math.IsNaN(a[i]) || math.IsNaN(b[i]) {
			return math.Inf(1)
		}
	}
	return d
}

// aloneWeights returns the weights after one process has trained on whole batches.
func aloneWeights(t *testing.T) []float64 {
	t.Helper()
	net, err := smallNet(1)
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	if err := trainSmall(net, nil, 0, 1); err != nil {
		t.Fatal(err)
	}
	want, err := weights(net)
	if err != nil {
		t.Fatal(err)
	}
	return want
}

func TestProcessesTrainAsOne(t *testing.T) {
	want := aloneWeights(t)
	for _, n := range jobSizes(2, 3, 8) {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			all := launchJob(t, n, "train")
			requireSuccess(t, all)
			var first string
			for _, p := range all {
				_, text, found := strings.Cut(p.output.String(), "weights ")
				if text = strings.TrimSpace(text); !found {
					t.Fatalf("rank %d: %s", p.rank, p.output.String())
				}
				if first == "" {
					first = text
				}
				if text != first {
					t.Errorf("rank %d has the weights %s, want rank 0's, %s", p.rank, text, first)
				}
			}
			if d := difference(parseFloats(t, first), want); d > 1e-12 {
				t.Errorf("the weights differ by %g from one process's, want at most 1e-12", d)
			}
		})
	}
}

// onRanks runs the ranks of a job as goroutines, each with a separate network.
func onRanks(t *testing.T, n int, o DataParallelOptions,
	run func(g *Group, net nn.Module, d *DataParallel) error) []error {
	t.Helper()
	return inProcess(t, n, quick, func(g *Group) error {
		net, err := smallNet(1)
		if err != nil {
			return err
		}
		defer nn.Close(net)
		d, err := NewDataParallel(g, net, o)
		if err != nil {
			return err
		}
		defer d.Close()
		return run(g, net, d)
	})
}

// lossOf returns the loss for the samples with the given numbers.
func lossOf(net nn.Module, scope *torch.Scope, numbers ...int) (*torch.Tensor, error) {
	x, y, err := batch(numbers)
	if err != nil {
		return nil, err
	}
	x, y = scope.Own(x), scope.Own(y)
	return net.Forward(x).MSELoss(y), nil
}

func gradients(net nn.Module) (all []float64, err error) {
	for _, n := range nn.NamedParameters(net) {
		g := n.Tensor.Grad()
		if g == nil {
			return nil, fmt.Errorf("%s has no gradient", n.Name)
		}
		v, err := g.Float64s()
		g.Close()
		if err != nil {
			return nil, err
		}
		all = append(all, v...)
	}
	return all, nil
}

// aloneGradients returns the gradients of the mean over the samples.
func aloneGradients(t *testing.T, numbers ...int) []float64 {
	t.Helper()
	net, err := smallNet(1)
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	scope := torch.NewScope("alone")
	defer scope.Close()
	loss, err := lossOf(net, scope, numbers...)
	if err == nil {
		err = loss.Backward()
	}
	if err != nil {
		t.Fatal(err)
	}
	want, err := gradients(net)
	if err != nil {
		t.Fatal(err)
	}
	return want
}

func requireGradients(net nn.Module, want []float64, bound float64) error {
	got, err := gradients(net)
	if err != nil {
		return err
	}
	if d := difference(got, want); d > bound {
		return fmt.Errorf("the gradients differ by %g", d)
	}
	return nil
}

// From the second pass on, buckets are in the order of backward, and gradients keep their
// addresses.
func TestGradientsAreViewsOfBuckets(t *testing.T) {
	want := aloneGradients(t, 0, 1)
	for _, size := range []int64{0, 1, smallBuckets} {
		requireNone(t, onRanks(t, 2, DataParallelOptions{BucketBytes: size},
			func(g *Group, net nn.Module, d *DataParallel) error {
				var addresses []uintptr
				for pass := range 4 {
					scope := torch.NewScope("pass")
					loss, err := lossOf(net, scope, g.Rank())
					if err == nil {
						err = d.Backward(loss)
					}
					if err == nil {
						err = requireGradients(net, want, 1e-14)
					}
					if err != nil {
						return fmt.Errorf("pass %d: %w", pass, err)
					}
					for i, p := range nn.Parameters(net) {
						grad := p.Grad()
						at, err := grad.Pointer()
						grad.Close()
						if err != nil {
							return err
						}
						if pass == 1 {
							addresses = append(addresses, at)
						}
						if pass > 1 && at != addresses[i] {
							return fmt.Errorf("pass %d: a gradient has moved", pass)
						}
					}
					if err := torch.ClearGrads(nn.Parameters(net)...); err != nil {
						return err
					}
					scope.Close()
				}
				return nil
			}))
	}
}

func TestNoSyncAccumulates(t *testing.T) {
	one, two := aloneGradients(t, 0, 1), aloneGradients(t, 2, 3)
	sum := make([]float64, len(one))
	for i := range sum {
		sum[i] = one[i] + two[i]
	}
	requireNone(t, onRanks(t, 2, DataParallelOptions{BucketBytes: smallBuckets},
		func(g *Group, net nn.Module, d *DataParallel) error {
			for range 3 {
				scope := torch.NewScope("pass")
				defer scope.Close()
				first, err := lossOf(net, scope, g.Rank())
				if err != nil {
					return err
				}
				second, err := lossOf(net, scope, 2+g.Rank())
				if err != nil {
					return err
				}
				if err := d.NoSync(func() error { return d.Backward(first) }); err != nil {
					return err
				}
				if err := requireGradients(net, sum, 1e-14); err == nil {
					return errors.New("NoSync has reduced the gradients")
				}
				if err := d.Backward(second); err != nil {
					return err
				}
				if err := requireGradients(net, sum, 1e-14); err != nil {
					return err
				}
				if err := torch.ClearGrads(nn.Parameters(net)...); err != nil {
					return err
				}
			}
			return nil
		}))
}

func TestReducedPrecision(t *testing.T) {
	want := aloneGradients(t, 0, 1)
	var largest float64
	for _, v := range want {
		largest = max(largest, math.Abs(v))
	}
	requireNone(t, onRanks(t, 2,
		DataParallelOptions{BucketBytes: smallBuckets, ReduceDType: torch.BFloat16},
		func(g *Group, net nn.Module, d *DataParallel) error {
			for range 3 {
				scope := torch.NewScope("pass")
				defer scope.Close()
				loss, err := lossOf(net, scope, g.Rank())
				if err == nil {
					err = d.Backward(loss)
				}
				if err == nil {
					err = requireGradients(net, want, largest/64) // bfloat16 has 8 bits of precision
				}
				if err == nil {
					err = torch.ClearGrads(nn.Parameters(net)...)
				}
				if err != nil {
					return err
				}
			}
			got, err := AllGatherObject(g, d.params[0].Grad() == nil)
			if err != nil || !got[0] {
				return fmt.Errorf("%v, %w", got, err)
			}
			return nil
		}))
}

// Hooks that the program registers after NewDataParallel change gradients before their reduction.
func TestHooksComeBeforeTheReduction(t *testing.T) {
	want := aloneGradients(t, 0, 1)
	var largest float64
	for i := range want {
		want[i] *= 2
		largest = max(largest, math.Abs(want[i]))
	}
	// In bfloat16 a bucket is a copy, so a later change of the gradient would not reach it.
	requireNone(t, onRanks(t, 2,
		DataParallelOptions{BucketBytes: smallBuckets, ReduceDType: torch.BFloat16},
		func(g *Group, net nn.Module, d *DataParallel) error {
			for _, p := range nn.Parameters(net) {
				double := func(p *torch.Tensor) error { return p.Grad().MulScalar_(2).Err() }
				if _, err := p.RegisterPostAccumulateGradHook(double); err != nil {
					return err
				}
			}
			scope := torch.NewScope("pass")
			defer scope.Close()
			loss, err := lossOf(net, scope, g.Rank())
			if err == nil {
				err = d.Backward(loss)
			}
			if err == nil {
				err = requireGradients(net, want, largest/64)
			}
			return err
		}))
}

// branch is a network with several heads. Each pass uses only the heads in use.
type branch struct {
	nn.Module
	heads [3]nn.Module
	use   []int
}

func (b *branch) Forward(x *torch.Tensor) *torch.Tensor {
	x = b.Module.Forward(x)
	y := x.MulScalar(0)
	for _, i := range b.use {
		y = y.Add(b.heads[i].Forward(x))
	}
	return y
}

func (b *branch) Parts() nn.Parts {
	p := nn.Parts{Modules: []nn.Child{{Name: "trunk", Module: b.Module}}}
	for i, h := range b.heads {
		p.Modules = append(p.Modules, nn.Child{Name: fmt.Sprintf("head%d", i), Module: h})
	}
	return p
}

func TestUnusedParameters(t *testing.T) {
	run := func(o DataParallelOptions) []error {
		return inProcess(t, 2, quick, func(g *Group) error {
			trunk, err := smallNet(1)
			if err != nil {
				return err
			}
			net := &branch{Module: trunk}
			for i := range net.heads {
				net.heads[i] = nn.NewLinear(3, 3, nn.LinearOptions{})
				if err := nn.ToDType(net.heads[i], torch.Float64); err != nil {
					return err
				}
			}
			defer nn.Close(net)
			d, err := NewDataParallel(g, net, o)
			if err != nil {
				return err
			}
			defer d.Close()
			for pass := range 3 {
				scope := torch.NewScope("pass")
				defer scope.Close()
				net.use = []int{0, 1}[:1+g.Rank()] // head1 only on rank 1, head2 nowhere
				loss, err := lossOf(net, scope, g.Rank())
				if err != nil {
					return err
				}
				if err := d.Backward(loss); err != nil {
					return err
				}
				for i, used := range []bool{true, true, false} {
					grad := nn.Parameters(net.heads[i])[0].Grad()
					if (grad != nil) != used {
						return fmt.Errorf("pass %d: head%d has a gradient: %v", pass, i, grad != nil)
					}
					if grad == nil {
						continue
					}
					all, err := AllGatherObject(g, grad.Shape())
					if err != nil || !slices.Equal(all[0], all[1]) {
						return fmt.Errorf("%v, %w", all, err)
					}
				}
				if err := torch.ClearGrads(nn.Parameters(net)...); err != nil {
					return err
				}
			}
			return nil
		})
	}
	requireNone(t, run(DataParallelOptions{BucketBytes: smallBuckets, FindUnused: true}))
	errs := run(DataParallelOptions{BucketBytes: smallBuckets})
	if want := "head1.weight, head1.bias, head2.weight, head2.bias on rank 0"; errs[0] == nil ||
		!strings.Contains(errs[0].Error(), want) {
		t.Errorf("rank 0: %v, want an error with %q", errs[0], want)
	}
	if errs[1] == nil || !strings.Contains(errs[1].Error(), "no gradient for head2.weight, head2.bias on rank 1") {
		t.Errorf("rank 1: %v, want an error with %q",
			errs[1], "no gradient for head2.weight, head2.bias on rank 1")
	}
}

// A gradient that overflows on one rank is infinite on all ranks, so all ranks skip the step.
func TestScalerAndClippingAgree(t *testing.T) {
	sgd := func(params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(params, optim.SGDOptions{LR: 0.1})
	}
	t.Run("whole state", func(t *testing.T) {
		scalerAndClippingAgree(t,
			func(_ *Group, params []*torch.Tensor) (optim.Optimizer, error) { return sgd(params) })
	})
	t.Run("divided state", func(t *testing.T) {
		scalerAndClippingAgree(t, func(g *Group, params []*torch.Tensor) (optim.Optimizer, error) {
			return NewZeroRedundancyOptimizer(g, params, sgd)
		})
	})
}

func scalerAndClippingAgree(t *testing.T, build func(*Group, []*torch.Tensor) (optim.Optimizer, error)) {
	requireNone(t, onRanks(t, 2, DataParallelOptions{BucketBytes: smallBuckets},
		func(g *Group, net nn.Module, d *DataParallel) error {
			scaler, err := optim.NewGradScaler(cuda.CPU, optim.GradScalerOptions{InitScale: 1024})
			if err != nil {
				return err
			}
			defer scaler.Close()
			opt, err := build(g, nn.Parameters(net))
			if err != nil {
				return err
			}
			defer opt.Close()
			for pass := range 4 {
				scope := torch.NewScope("pass")
				defer scope.Close()
				loss, err := lossOf(net, scope, g.Rank())
				if err != nil {
					return err
				}
				if pass == 1 && g.Rank() == 1 {
					loss = loss.MulScalar(1e308) // overflows with the scale
				}
				before, err := weights(net)
				if err != nil {
					return err
				}
				if err := d.Around(func() error { return scaler.Backward(loss) }); err != nil {
					return err
				}
				if err := scaler.Unscale(opt); err != nil {
					return err
				}
				norm, err := optim.ClipGradNorm(nn.Parameters(net), 0.01, optim.ClipOptions{})
				if err != nil {
					return err
				}
				n, err := norm.Float64()
				norm.Close()
				if err != nil {
					return err
				}
				if err := errors.Join(scaler.Step(opt), scaler.Update()); err != nil {
					return err
				}
				after, err := weights(net)
				if err != nil {
					return err
				}
				if skipped := slices.Equal(before, after); skipped != (pass == 1) {
					return fmt.Errorf("pass %d: skipped: %v", pass, skipped)
				}
				scale, err := scaler.Scale()
				if err != nil {
					return err
				}
				all, err := AllGatherObject(g, []string{floats(after), floats([]float64{scale}), floats([]float64{n})})
				if err != nil {
					return err
				}
				if !slices.Equal(all[0], all[1]) {
					return fmt.Errorf("pass %d: the ranks differ", pass)
				}
			}
			return nil
		}))
}

func TestModelsThatDifferAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		net  func(rank int) nn.Module
		o    func(rank int) DataParallelOptions
		says string
	}{
		"a shape": {func(rank int) nn.Module { return nn.NewLinear(3, 2+rank, nn.LinearOptions{}) }, nil,
			"rank 0 has weight float32[2 3] of strides [3 1], trained: true, and weight float32[3 3] of " +
				"strides [3 1], trained: true on rank 1"},
		"a bias": {func(rank int) nn.Module {
			return nn.NewLinear(3, 2,
				nn.LinearOptions{NoBias: rank == 1})
		}, nil, "and no more parameters on rank 1"},
		"options": {func(int) nn.Module { return nn.NewLinear(3, 2, nn.LinearOptions{}) },
			func(rank int) DataParallelOptions { return DataParallelOptions{FindUnused: rank == 1} },
			"FindUnused:true"},
		"nothing to train": {func(int) nn.Module { return nn.NewTanh() }, nil, "no parameter to train"},
	} {
		t.Run(name, func(t *testing.T) {
			for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
				var o DataParallelOptions
				if c.o != nil {
					o = c.o(g.Rank())
				}
				_, err := NewDataParallel(g, c.net(g.Rank()), o)
				return err
			}) {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("rank %d: %v, want %q", rank, err, c.says)
				}
			}
		})
	}
}

// If a backward pass fails on one rank, the job ends, and the errors of the others name the rank.
func TestBackwardThatFailsEndsTheJob(t *testing.T) {
	errs := onRanks(t, 2, DataParallelOptions{BucketBytes: smallBuckets},
		func(g *Group, net nn.Module, d *DataParallel) error {
			scope := torch.NewScope("pass")
			defer scope.Close()
			loss, err := lossOf(net, scope, g.Rank())
			if err != nil {
				return err
			}
			if g.Rank() == 1 {
				return d.Around(func() error { return errors.New("a mishap") })
			}
			return d.Backward(loss)
		})
	for rank, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "a mishap") {
			t.Errorf("rank %d: %v, want an error with %q", rank, err, "a mishap")
		}
	}
	if !errors.Is(errs[0], ErrLeft) {
		t.Error(errs[0])
	}
}

// A panic in a backward pass ends the job on the other ranks, even if the program recovers from it.
func TestBackwardThatPanicsEndsTheJob(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan struct{})
	errs := onRanks(t, 2, DataParallelOptions{BucketBytes: smallBuckets},
		func(g *Group, net nn.Module, d *DataParallel) error {
			scope := torch.NewScope("pass")
			defer scope.Close()
			loss, err := lossOf(net, scope, g.Rank())
			if err != nil {
				return err
			}
			if g.Rank() == 0 {
				defer close(ended)
				close(begun)
				return d.Backward(loss)
			}
			select { // wait until rank 0 has left NewDataParallel: the panic would make that call fail too
			case <-begun:
			case <-g.job.member.Failed():
				return g.Err()
			}
			func() {
				defer func() { recover() }()
				d.Around(func() error { panic("a mishap") })
				t.Error("Around has returned, want it to pass on the panic")
			}()
			<-ended // stay in the group: a rank that leaves would also end the job
			return d.Backward(loss)
		})
	for rank, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "ended in a panic") {
			t.Errorf("rank %d: %v, want an error with %q", rank, err, "ended in a panic")
		}
	}
	if !errors.Is(errs[0], ErrLeft) {
		t.Error(errs[0])
	}
}

func TestBuckets(t *testing.T) {
	order := []int64{5, 4, 3, 2, 1, 0}
	sizes := []int64{10, 10, 10, 10, 10, 10}
	arranged, ends := buckets(order, sizes, []string{"a", "b", "a", "a", "b", "a"}, 10, 20)
	if !slices.Equal(arranged, []int64{5, 4, 1, 3, 2, 0}) && !slices.Equal(arranged, []int64{5, 3, 2, 4, 1, 0}) {
		t.Error(arranged, ends)
	}
	if ends[0] != 1 || ends[len(ends)-1] != 6 {
		t.Error(ends)
	}
	for b, begin := 0, int64(0); b < len(ends); b++ {
		for _, i := range arranged[begin:ends[b]] {
			if first := arranged[begin]; "abaaba"[i] != "abaaba"[first] {
				t.Errorf("bucket %d has two dtypes", b)
			}
		}
		begin = ends[b]
	}
}
