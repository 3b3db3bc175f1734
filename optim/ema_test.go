package optim_test

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/resident"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// After 20 steps the averages of parameters and of a buffer equal
// torch.optim.swa_utils.AveragedModel's.
func TestEMAMatchesPyTorch(t *testing.T) {
	f, problems := openFile(t, "ema.safetensors"), openFile(t, "parity.safetensors")
	for dtype, bound := range map[string]float64{"float64": 1e-10, "float32": 1e-5} {
		t.Run(dtype, func(t *testing.T) {
			p := newProblem(t, problems, dtype)
			mean := p.params[0].NoGrad().ZerosLike()
			defer mean.Close()
			named := []torch.Named{{Name: "mean", Tensor: mean}}
			for i, w := range p.params {
				named = append(named, torch.Named{Name: fmt.Sprint(i), Tensor: w})
			}
			averages := map[string]*optim.EMA{}
			for name, o := range map[string]optim.EMAOptions{"0.9": {Decay: 0.9}, "0.999": {}, "1.0": {Decay: 1}} {
				ema, err := optim.NewEMA(named, o)
				if err != nil {
					t.Fatal(err)
				}
				defer ema.Close()
				averages[name] = ema
			}
			opt, err := optim.NewAdamW(p.params, optim.AdamWOptions{LR: 0.01})
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			for step := range paritySteps {
				if err := mean.LerpScalar_(p.params[0].NoGrad(), 0.25).Err(); err != nil {
					t.Fatal(err)
				}
				p.train(t, opt, step, step+1)
				for _, ema := range averages {
					if err := ema.Update(); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, n := range named {
				near(t, n.Name, values(t, n.Tensor), f.values(t, dtype+"/tensors/"+n.Name), bound)
			}
			for name, ema := range averages {
				for _, n := range ema.State() {
					near(t, name+" of "+n.Name, values(t, n.Tensor), f.values(t, dtype+"/"+name+"/"+n.Name), bound)
				}
			}
		})
	}
}

func TestEMA(t *testing.T) {
	w := leaf(t, 1, 2)
	n, err := torch.FromInt64s([]int64{5})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	d, err := torch.Full(cuda.CPU, torch.Float64, 8, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	before := settled(t)
	named := []torch.Named{{Name: "w", Tensor: w}, {Name: "n", Tensor: n}, {Name: "d", Tensor: d}}
	ema, err := optim.NewEMA(named, optim.EMAOptions{Decay: 0.75})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.NoGrad().MulScalar_(2).Err(); err != nil {
			t.Fatal(err)
		}
		if err := n.AddInt_(1).Err(); err != nil {
			t.Fatal(err)
		}
		if err := ema.Update(); err != nil {
			t.Fatal(err)
		}
	}
	average := []float32{1.9375, 3.875} // 0.75*(0.75*1 + 0.25*2) + 0.25*4
	state := ema.State()
	want(t, state[0].Tensor, average...)
	want(t, state[1].Tensor, 7) // copied
	want(t, state[2].Tensor, 8)
	if err := ema.Swap(); err != nil {
		t.Fatal(err)
	}
	want(t, w, average...)
	want(t, ema.State()[0].Tensor, 4, 8)
	if err := ema.Swap(); err != nil {
		t.Fatal(err)
	}
	want(t, w, 4, 8)
	if param, average := w.RequiresGrad(), ema.State()[0].Tensor.RequiresGrad(); !param || average {
		t.Errorf("after Swap RequiresGrad() of parameter, average = %v, %v, want true, false", param, average)
	}

	path := filepath.Join(t.TempDir(), "ema.safetensors")
	if err := checkpoint.Save(path, ema.State(), nil); err != nil {
		t.Fatal(err)
	}
	other, err := optim.NewEMA(named, optim.EMAOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.LoadState(ema.State()); err != nil {
		t.Fatal(err)
	}
	want(t, other.State()[0].Tensor, average...)
	if err := other.LoadState(ema.State()[:2]); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Error(err)
	}
	bad := ema.State()
	bad[0].Tensor = bad[2].Tensor
	if err := other.LoadState(bad); err == nil ||
		!strings.Contains(err.Error(), "w has shape [1], and should have [2]") {
		t.Error(err)
	}
	bad[0].Name = "v"
	if err := other.LoadState(bad); err == nil || !strings.Contains(err.Error(), "w is missing") {
		t.Error(err)
	}
	other.Close()
	ema.Close()
	if live := torch.LiveTensors(); live != before {
		t.Errorf("%d references left behind, want 0", live-before)
	}
	if err := ema.Update(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("Update after Close: %v, want torch.ErrClosed", err)
	}
}

func TestEMAOptionsOutOfRange(t *testing.T) {
	w := []torch.Named{{Name: "w", Tensor: leaf(t, 1)}}
	for _, decay := range []float64{-1, 1.5, math.NaN()} {
		if _, err := optim.NewEMA(w, optim.EMAOptions{Decay: decay}); !errors.Is(err,
			cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "Decay is") {
			t.Error(decay, err)
		}
	}
	if _, err := optim.NewEMA(nil, optim.EMAOptions{}); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Error(err)
	}
	if _, err := optim.NewEMA([]torch.Named{{Name: "gone"}}, optim.EMAOptions{}); err == nil ||
		!strings.Contains(err.Error(), "gone") {
		t.Error(err)
	}
}

func TestClipGradValue(t *testing.T) {
	w, still := leaf(t, 0, 0, 0, 0, 0), leaf(t, 1)
	g, err := torch.FromFloat32s([]float32{-2, -0.5, 0.1, 0.6, float32(math.NaN())})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := w.SetGrad(g); err != nil {
		t.Fatal(err)
	}
	if err := optim.ClipGradValue([]*torch.Tensor{w, still}, 0.5); err != nil {
		t.Fatal(err)
	}
	got := values(t, g)
	theirs := openFile(t, "parity.safetensors").values(t, "clip/value")
	near(t, "gradient", got[:4], theirs[:4], 0)
	if !math.IsNaN(got[4]) || !math.IsNaN(theirs[4]) {
		t.Errorf("NaN became %v, in PyTorch %v", got[4], theirs[4])
	}
	if err := optim.ClipGradValue([]*torch.Tensor{still}, 1); err != nil || still.Grad() != nil {
		t.Errorf("without gradients: %v, gradient %v, want nil, nil", err, still.Grad())
	}
	for _, v := range []float64{-1, math.NaN()} {
		if err := optim.ClipGradValue(nil, v); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Error(v, err)
		}
	}
	if err := optim.ClipGradValue([]*torch.Tensor{w, nil}, 1); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "parameter 1") {
		t.Error(err)
	}
}

// Swap without memory exchanges nothing, and swapping back needs none.
func TestEMASwapWithoutMemory(t *testing.T) {
	const elements = 32 << 20 // 256 MiB of float64: more than any allocator holds back
	small, err := torch.Full(cuda.CPU, torch.Float32, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	large, err := torch.Full(cuda.CPU, torch.Float64, 1, elements)
	if err != nil {
		t.Fatal(err)
	}
	defer large.Close()
	ema, err := optim.NewEMA([]torch.Named{{Name: "small", Tensor: small}, {Name: "large", Tensor: large}},
		optim.EMAOptions{Decay: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	defer ema.Close()
	has := func(w, average float32) {
		t.Helper()
		for i, x := range []*torch.Tensor{small, large} {
			last := x.Narrow(0, x.Shape()[0]-1, 1).ToDType(torch.Float32)
			want(t, last, w)
			last.Close()
			last = ema.State()[i].Tensor.Narrow(0, x.Shape()[0]-1, 1).ToDType(torch.Float32)
			want(t, last, average)
			last.Close()
		}
	}
	for _, x := range []*torch.Tensor{small, large} {
		if err := x.AddScalar_(2).Err(); err != nil {
			t.Fatal(err)
		}
	}
	swapWithoutMemory := func() error {
		t.Helper()
		restore, err := resident.Limit(128 << 20)
		if err != nil {
			t.Fatal(err)
		}
		swapped := ema.Swap()
		if err := restore(); err != nil {
			t.Fatal(err)
		}
		return swapped
	}
	has(3, 1)
	err = swapWithoutMemory()
	if !errors.Is(err, cuda.ErrOutOfMemory) || !strings.Contains(err.Error(), "large") {
		t.Errorf("Swap without memory: %v, want cuda.ErrOutOfMemory with \"large\"", err)
	}
	has(3, 1)
	if err := ema.Swap(); err != nil {
		t.Fatal(err)
	}
	has(1, 3)
	err = swapWithoutMemory()
	if err != nil {
		t.Errorf("the way back without memory: %v, want no error", err)
	}
	has(3, 1)
}
