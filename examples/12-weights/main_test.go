package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) { os.Exit(cudatest.Main(m)) }

func small(t *testing.T) options {
	t.Helper()
	return options{
		device: "cpu", weights: filepath.Join(t.TempDir(), "small.safetensors.index.json"), slots: 2,
		layers: 8, width: 32, heads: 2, vocabulary: 50, context: 16, batch: 2, prompt: 5, tokens: 4, seed: 1,
	}
}

// write makes a model and its file. The weights are larger than initial ones, so that the tokens
// depend on every block.
func write(t *testing.T, o options) *models.GPT2 {
	t.Helper()
	if err := torch.ManualSeed(o.seed); err != nil {
		t.Fatal(err)
	}
	net, err := models.NewGPT2(o.model(o.layers))
	if err != nil {
		t.Fatal(err)
	}
	nn.Train(net, false)
	if err := nn.Freeze(net); err != nil {
		t.Fatal(err)
	}
	for _, p := range nn.Parameters(net) {
		if len(p.Shape()) == 2 {
			p.MulScalar_(5)
		}
	}
	if err := checkpoint.SaveSharded(o.weights, nn.State(net.Transformer()), nil, 100_000); err != nil {
		t.Fatal(err)
	}
	return net
}

// equalsWhole compares the logits of every pass, and the tokens, with a model that is loaded as a
// whole. It returns the model that kept only a few blocks in memory.
func equalsWhole(t *testing.T, o options, device cuda.Device, late func()) *model {
	t.Helper()
	whole := write(t, o)
	defer nn.Close(whole)
	if err := nn.To(whole, device); err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("test")
	defer scope.Close()
	host, err := torch.FromInt64s([]int64{3, 1, 4, 1, 5, 9, 2, 6}, 2, 4)
	if err != nil {
		t.Fatal(err)
	}
	prompt := scope.Own(host).To(device)
	m, err := open(o, device)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	})
	if err := m.start(o); err != nil {
		t.Fatal(err)
	}
	want, passes := prompt, 0
	got, err := m.generate(t.Context(), prompt, o.tokens, func(pass int, logits *torch.Tensor) error {
		expected := whole.Forward(want)
		if same, err := logits.Equal(expected); err != nil || !same {
			t.Errorf("pass %d computed other logits than the whole model: %v", pass, err)
		}
		want = torch.Cat([]*torch.Tensor{want, expected.Index(torch.All, -1).ArgMax(1, true)}, 1)
		passes++
		late()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	if same, err := got.Equal(want); err != nil || !same || passes != o.tokens {
		t.Errorf("%d passes of %d, other tokens than the whole model's: %v", passes, o.tokens, err)
	}
	return m
}

// blocksInMemory returns the number of memory locations that a block's parameters have had.
func blocksInMemory(t *testing.T, m *model) int {
	t.Helper()
	if len(m.slots)%len(m.state) != 0 {
		t.Fatalf("%d addresses of %d parameters", len(m.slots), len(m.state))
	}
	return len(m.slots) / len(m.state)
}

func TestLogitsAreThoseOfTheWholeModel(t *testing.T) {
	o := small(t)
	m := equalsWhole(t, o, cuda.CPU, func() {})
	// On the CPU the blocks compute in the slots that the source fills: two, plus three ahead.
	if n := blocksInMemory(t, m); n > 5 || n < 2 {
		t.Errorf("%d blocks of %d were in memory, want from 2 to 5", n, o.layers)
	}
}

func TestLogitsAreThoseOfTheWholeModelOnAGPU(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	o := small(t)
	// The next blocks are copied long before the previous blocks compute.
	m := equalsWhole(t, o, device, func() { cudatest.Delay(t, cuda.DefaultStream(device), 20*time.Millisecond) })
	if n := blocksInMemory(t, m); n != o.slots {
		t.Errorf("%d blocks were on the GPU, and -slots is %d", n, o.slots)
	}
}

func TestAModelLargerThanTheGPU(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	o := small(t)
	o.device, o.width, o.heads, o.layers = "cuda", 512, 8, 32 // 12 MiB per block, 384 MiB in total
	if err := cuda.EmptyCache(); err != nil {
		t.Fatal(err)
	}
	before, err := device.Memory()
	if err != nil {
		t.Fatal(err)
	}
	o.memory = gibibytes(before.Reserved) + 0.25
	var out bytes.Buffer
	r, err := run(t.Context(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	if !r.refused || !strings.Contains(out.String(), "out of memory") {
		t.Errorf("the whole model fits:\n%s", &out)
	}
	if r.resident >= r.whole/8 || r.peak-before.Allocated >= r.whole/2 {
		t.Errorf("%d bytes of parameters at a time and %d at the peak, of %d,"+
			" want less than %v, less than %v",
			r.resident, r.peak-before.Allocated, r.whole, r.whole/8, r.whole/2)
	}
	if limit, err := device.MemoryLimit(); err != nil || limit != 1 {
		t.Errorf("the limit of memory is left at %v, %v, want 1, nil", limit, err)
	}
}

func TestRunWritesTheWeightsOnce(t *testing.T) {
	o := small(t)
	before := torch.LiveTensors()
	var out bytes.Buffer
	r, err := run(t.Context(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.tokens) != 2*9 || r.resident >= r.whole || r.pass <= 0 {
		t.Errorf("got %+v", r)
	}
	for _, want := range []string{"writing random weights", "on cpu", "a pass over all blocks", "waited"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, &out)
		}
	}
	if want := fmt.Sprint(r.tokens[9-o.tokens : 9]); !strings.Contains(out.String(), want[1:len(want)-1]) {
		t.Errorf("got\n%s\nwant the first sequence's tokens %s in it", &out, want)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
	out.Reset()
	again, err := run(t.Context(), o, &out)
	if err != nil || !slices.Equal(again.tokens, r.tokens) || strings.Contains(out.String(), "writing") {
		t.Errorf("the second run: %v\n%s", err, &out)
	}
}

// Leaving the loop, or the end of its context, frees the loop's tensors.
func TestGenerationEndsWithItsContext(t *testing.T) {
	o := small(t)
	nn.Close(write(t, o))
	before := torch.LiveTensors()
	m, err := open(o, cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.start(o); err != nil {
		t.Fatal(err)
	}
	prompt, err := torch.FromInt64s([]int64{1, 2}, 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	left := errors.New("left")
	ctx, cancel := context.WithCancelCause(t.Context())
	for _, c := range []struct {
		name string
		seen func(int, *torch.Tensor) error
	}{
		{"an error of the loop", func(int, *torch.Tensor) error { return left }},
		{"the end of ctx", func(int, *torch.Tensor) error { cancel(left); return nil }},
	} {
		if _, err := m.generate(ctx, prompt, 3, c.seen); !errors.Is(err, left) {
			t.Errorf("%s: %v, want %v", c.name, err, left)
		}
	}
	if err := errors.Join(prompt.Close(), m.close()); err != nil {
		t.Fatal(err)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
}

func TestMistakesSayWhatToDo(t *testing.T) {
	written := small(t)
	nn.Close(write(t, written))
	damaged := filepath.Join(t.TempDir(), "damaged.safetensors")
	if err := os.WriteFile(damaged, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	before := torch.LiveTensors()
	for want, change := range map[string]func(*options){
		`small.safetensors.index.json: there is no tensor "h.8.ln_1.weight"`: func(
			o *options) {
			o.layers = 9
		},
		"small.safetensors.index.json: tensor h.0.ln_1.weight is float32[32], and the model has": func(
			o *options) {
			o.width = 64
		},
		"small.safetensors.index.json: tensor wpe.weight is float32[16 32], and the model has": func(
			o *options) {
			o.context = 20
		},
		"damaged.safetensors: not a safetensors file, nor .pt or .pth": func(
			o *options) {
			o.weights = damaged
		},
		"-vocabulary 0":     func(o *options) { o.vocabulary = 0 },
		"-layers 0":         func(o *options) { o.layers = 0 },
		"the first pass is": func(o *options) { o.tokens = 1 },
		"raise -context":    func(o *options) { o.prompt = 14 },
		"-memory limits":    func(o *options) { o.memory = 1 },
		"-device \"tpu\"":   func(o *options) { o.device = "tpu" },
		"multiple of Heads": func(o *options) { o.heads = 3 },
		"Options.Depth":     func(o *options) { o.slots = -1 },
	} {
		o := written
		change(&o)
		if _, err := run(t.Context(), o, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
}
