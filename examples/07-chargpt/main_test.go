package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func small(t *testing.T) options {
	t.Helper()
	path := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(path, []byte(strings.Repeat("one two three four five six ", 40)), 0o644); err != nil {
		t.Fatal(err)
	}
	return options{text: path, device: "cpu", prompt: "one ", steps: 60, batch: 4, context: 24, width: 16,
		heads: 2, layers: 2, seed: 1}
}

func TestTheNetworkLearnsTheText(t *testing.T) {
	o := small(t)
	o.picture = filepath.Join(t.TempDir(), "gpt.svg")
	before := torch.LiveTensors()
	var out bytes.Buffer
	r, err := run(context.Background(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.losses) != 6 || !(r.losses[5] < 0.75*r.losses[0]) {
		t.Errorf("losses %v do not fall to three quarters", r.losses)
	}
	if len(r.samples) != 4 || !strings.HasPrefix(r.samples[0], "one ") ||
		!strings.Contains(out.String(), r.samples[0]) {
		t.Errorf("samples %q in %s, want 4, the first beginning with \"one \"", r.samples, &out)
	}
	if lines := strings.Count(out.String(), " bits a byte\n"); lines != 6 { // one for every ten steps
		t.Errorf("%d lines of progress in %s, want 6", lines, &out)
	}
	if picture, err := os.ReadFile(o.picture); err != nil || !bytes.Contains(picture, []byte(r.samples[0])) {
		t.Errorf("the picture has not the sample %q, %v", r.samples[0], err)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
	if again, err := run(context.Background(), o, &out); err != nil ||
		!slices.Equal(again.losses, r.losses) || !slices.Equal(again.samples, r.samples) {
		t.Errorf("the same seed learned something else: %v", err)
	}
}

// The most probable tokens with the cache equal the ones of full passes without a cache.
func TestGenerationEqualsWholePasses(t *testing.T) {
	net, err := newGPT(11, 16, 2, 2, 20)
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	nn.Train(net, false)
	prompt := []int64{3, 1, 4}
	got, err := net.generate(slices.Clone(prompt), 10, 0, cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("whole")
	defer scope.Close()
	want := prompt
	for range 10 {
		tokens, err := torch.FromInt64s(want, 1, int64(len(want)))
		if err != nil {
			t.Fatal(err)
		}
		next, err := net.Forward(scope.Own(tokens).NoGrad()).Index(0, -1).ArgMax(0, false).Int64()
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, next)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err := net.generate(prompt, 18, 0, cuda.CPU); err == nil {
		t.Error("generate more tokens than positions: got no error, want one")
	}
}

// Tokens are bytes. Their text is printed as UTF-8 and counted in bytes.
func TestBytesArePrintedAsText(t *testing.T) {
	source, err := newText([]byte("\u00e4 10 \u00b5s"), 3, 1, 1, 1)
	if err != nil || len(source.tokens) != 9 {
		t.Fatalf("%v, %v, want length 9, nil", source, err)
	}
	tokens, err := source.encode("1\u00e4 \u00b5")
	if err != nil || len(tokens) != 6 {
		t.Fatalf("%v, %v, want length 6, nil", tokens, err)
	}
	for n, want := range map[int]string{6: "1\u00e4 \u00b5", 5: "1\u00e4 \ufffd", 2: "1\ufffd"} {
		if got := readable(source.decode(tokens[:n])); got != want {
			t.Errorf("%d tokens are %q, want %q", n, got, want)
		}
	}
	if tokens, err := source.encode("\xc3"); err != nil || len(tokens) != 1 {
		t.Errorf("half a character is %v, %v, want length 1, nil", tokens, err)
	}
	if _, err := source.encode("\u00fc"); err == nil || !strings.Contains(err.Error(), "\"\u00fc\"") {
		t.Error(err)
	}
}

func TestMistakesSayWhatToDo(t *testing.T) {
	for want, change := range map[string]func(*options){
		"name a text":           func(o *options) { o.text += ".none" },
		"not in the text":       func(o *options) { o.prompt = "#" },
		"-device \"tpu\"":       func(o *options) { o.device = "tpu" },
		"a sample needs":        func(o *options) { o.context = 4000 },
		"-steps 0: want 1":      func(o *options) { o.steps = 0 },
		"-heads -1: want 1":     func(o *options) { o.heads = -1 },
		"has no such GPU":       func(o *options) { o.device = "cuda:99" },
		"after a prompt of 240": func(o *options) { o.prompt = strings.Repeat("one ", 60); o.steps = 1 },
	} {
		o := small(t)
		change(&o)
		if _, err := run(context.Background(), o, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}
